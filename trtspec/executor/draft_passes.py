"""Drafters outside the step: a model's passes one by one, and a user's `Drafter` on the host."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import islice
from typing import Any

from ..config import Drafter
from ..errors import DrafterError
from ..state.slots import SlotState
from ..workers.base import SpecWorkerBase
from ..workers.eagle3 import Eagle3OneModelWorker
from ..workers.protocols import DraftInputs
from .request import Request


def draft_in_passes(
    worker: SpecWorkerBase, inputs: DraftInputs, state: SlotState
) -> Iterator[None]:
    """Modes EAGLE3 and MTP_EAGLE: the same passes as the one-model worker's, each launched from
    here after the step. One pass for each item; the last leaves the proposals in the slots."""
    assert isinstance(worker, Eagle3OneModelWorker)
    step, count = inputs.step, worker.num_passes(inputs)
    chain = worker.first_pass(inputs)
    for _ in range(1, count):
        yield
        chain = worker.next_pass(chain)
    drafts = chain.draft_tokens(worker.max_draft_len)
    if step.draft_len < worker.max_draft_len:
        drafts[:, step.draft_len :] = -1
    state.next_tokens[step.slot_ids, 1:] = drafts
    yield


def ask_drafter(
    drafter: Drafter, request: Request, max_draft_len: int, vocab_size: int
) -> list[int]:
    """The drafter's proposal padded with -1 to K.

    Raises:
        DrafterError: it raised, or returned something other than at most K ids in the vocabulary.
    """
    name = type(drafter).__name__
    proposal: Any = None
    try:
        proposal = drafter.draft(request.request_id, request.token_ids, max_draft_len)
        tokens = [operator.index(token) for token in islice(proposal, max_draft_len + 1)]
    except TypeError as error:
        raise DrafterError(
            f"{name}.draft returned {proposal!r} ({error}): it must return a flat sequence of "
            "token ids."
        ) from error
    except Exception as error:  # the user's code may raise anything, also while it is iterated
        raise DrafterError(f"{name}.draft raised {type(error).__name__}: {error}") from error
    if len(tokens) > max_draft_len:
        raise DrafterError(f"{name}.draft returned more than max_draft_len={max_draft_len} tokens.")
    outside = [token for token in tokens if not 0 <= token < vocab_size]
    if outside:
        raise DrafterError(
            f"{name}.draft returned token id {outside[0]}; ids must be in 0 … {vocab_size - 1}. "
            "Return fewer tokens for 'no draft here'."
        )
    return tokens + [-1] * (max_draft_len - len(tokens))
