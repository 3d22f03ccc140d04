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
    """Runs the one-model worker's draft passes, one per item. The last writes the proposals to the
    slots."""
    assert isinstance(worker, Eagle3OneModelWorker)
    step = inputs.step
    if step.draft_len == 0:
        worker.skip_passes(inputs)
        state.next_tokens[:, 1:].index_fill_(0, step.slot_ids, -1)
        yield
        return
    chain = worker.first_pass(inputs)
    for _ in range(1, step.draft_len):
        yield
        chain = worker.next_pass(chain)
    state.next_tokens[step.slot_ids, 1:] = chain.draft_tokens(worker.max_draft_len)
    worker.save_chances(step.slot_ids, state.chances)
    yield
