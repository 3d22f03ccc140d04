"""What an admission writes to a slot."""

from __future__ import annotations

import pytest
import torch

from trtspec.metadata.sampling import RequestSampling, SlotSampling
from trtspec.state.slots import SlotState

SEQUENCE = [
    RequestSampling(seed=7),
    RequestSampling(0.5, 40, 0.9, 7),
    RequestSampling(0.5, 40, 0.9, 8),
    RequestSampling(seed=8),
]


def _held(state: SlotState, slot: int) -> list[float]:
    return [round(float(column[slot]), 6) for column in state.sampling]


def test_a_slot_holds_its_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what differs is written."""
    state, writes = SlotState.allocate(2, 3, torch.device("cpu"), has_rope_deltas=True), []
    fill = torch.Tensor.fill_
    monkeypatch.setattr(torch.Tensor, "fill_", lambda x, v: (writes.append(v), fill(x, v))[1])
    for delta, sampling in enumerate(SEQUENCE):
        for slot in (0, 1):
            writes.clear()
            state.admit(slot, sampling, delta)
            assert _held(state, slot) == [float(value) for value in sampling]
            assert state.rope_deltas is not None and int(state.rope_deltas[slot]) == delta
            assert len(writes) == [5, 4, 2, 4][delta]
    assert _held(state, 2) == [float(value) for value in RequestSampling()]


def test_what_an_interrupt_left_half_written_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = SlotState.allocate(1, 3, torch.device("cpu"))
    state.admit(0, SEQUENCE[0])

    def interrupted(self: SlotSampling, *_: object) -> None:
        self.temperatures[0] = 0.5
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SlotSampling, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            state.admit(0, SEQUENCE[1])
    state.admit(0, SEQUENCE[0])
    assert _held(state, 0) == [0.0, 0.0, 1.0, 7.0]
