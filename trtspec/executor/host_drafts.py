"""Mode USER_PROVIDED: drafts from a user's `Drafter`, on the host, once the tokens are read."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import islice
from typing import Any

from ..config import Drafter
from ..errors import DrafterError, described, errors_of_callers
from .book import RequestBook
from .request import Request


def draft_on_host(
    drafter: Drafter, requests: Sequence[Request], vocab_size: int, book: RequestBook
) -> dict[int, list[int]]:
    """Returns proposals by slot, of the requests that go on. If the drafter raises, the request
    that it was asked for fails."""
    drafts: dict[int, list[int]] = {}
    for request in requests:
        if request.is_finished or request.num_drafts == 0:  # or cancelled by a drafter
            continue
        try:
            proposal = ask_drafter(drafter, request, request.num_drafts, vocab_size)
        except DrafterError as error:
            book.fail(request, str(error))
            continue
        if not request.is_finished:
            drafts[request.slot] = proposal
    return drafts


def ask_drafter(
    drafter: Drafter, request: Request, max_draft_len: int, vocab_size: int
) -> list[int]:
    """Returns the drafter's proposal, at most K tokens.

    Raises:
        DrafterError: it raised, or returned something other than at most K ids in the vocabulary.
    """
    name = type(drafter).__name__
    try:
        proposal: Any = drafter.draft(request.request_id, request.token_ids, max_draft_len)
    except errors_of_callers() as error:
        raise DrafterError(f"{name}.draft raised {described(error)}") from error
    try:
        tokens = [operator.index(token) for token in islice(proposal, max_draft_len + 1)]
    except TypeError as error:
        raise DrafterError(
            f"{name}.draft returned {proposal!r} ({error}): it must return a flat sequence of "
            "token ids."
        ) from error
    except errors_of_callers() as error:  # also while it is iterated
        raise DrafterError(f"{name}.draft raised {described(error)}") from error
    if len(tokens) > max_draft_len:
        raise DrafterError(f"{name}.draft returned more than max_draft_len={max_draft_len} tokens.")
    outside = [token for token in tokens if not 0 <= token < vocab_size]
    if outside:
        raise DrafterError(
            f"{name}.draft returned token id {outside[0]}; ids must be in 0 … {vocab_size - 1}. "
            "Return fewer tokens for 'no draft here'."
        )
    return tokens
