"""Modes EAGLE3 and MTP_EAGLE: a model's draft passes, launched one by one after the step."""

from __future__ import annotations

from collections.abc import Iterator

from ..state.slots import SlotState
from ..workers.base import SpecWorkerBase
from ..workers.eagle3 import Eagle3OneModelWorker
from ..workers.protocols import DraftInputs


def draft_in_passes(
    worker: SpecWorkerBase, inputs: DraftInputs, state: SlotState
) -> Iterator[None]:
    """The same passes as the one-model worker's, one for each item. The last leaves the proposals
    in the slots."""
    assert isinstance(worker, Eagle3OneModelWorker)
    spec, count = inputs.spec_metadata, worker.num_passes(inputs)
    assert spec.slot_ids is not None
    chain = worker.first_pass(inputs)
    for _ in range(1, count):
        yield
        chain = worker.next_pass(chain)
    drafts = chain.draft_tokens(worker.max_draft_len)
    if spec.runtime_draft_len is not None:
        drafts[:, spec.runtime_draft_len :] = -1
    state.next_tokens[spec.slot_ids, 1:] = drafts
    yield
