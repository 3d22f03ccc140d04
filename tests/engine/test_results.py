"""Copies of a step's results to the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trtspec.executor import results
from trtspec.executor.results import StepReader
from trtspec.ops.tokens.greedy import Accepted

DEVICE = torch.device("cpu")


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What was copied."""
    seen: list[Tensor] = []

    def copy(self: StepReader, tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(StepReader, "_to_host", copy)
    return seen


def _accepted(batch: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    accepted = Accepted.empty(batch, width, DEVICE)
    accepted.tokens.copy_(torch.arange(batch * width).view(batch, width))
    accepted.lens.copy_(torch.arange(100, 100 + batch))
    accepted.num_accepted_drafts.fill_(-7)
    accepted.bad_requests.copy_(torch.arange(batch) % 3 == 1)
    return accepted.tokens, accepted.lens, accepted.bad_requests


@pytest.mark.parametrize(("batch", "width", "count"), [(1, 1, 1), (5, 4, 5), (7, 9, 3)])
def test_parts_of_one_piece_are_copied_at_once(
    copied: list[Tensor], batch: int, width: int, count: int
) -> None:
    given = [part[:count] for part in _accepted(batch, width)]
    expected = [part.clone() for part in given]
    found = StepReader(DEVICE)._all_to_host(*given)
    assert len(copied) == 1
    for part in given:
        part.zero_()  # the next step's results
    for ours, part in zip(found, expected, strict=True):
        assert ours.dtype == part.dtype and torch.equal(ours, part)


def test_others_are_copied_one_by_one(
    copied: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = torch.arange(3), torch.arange(4), torch.ones(2, dtype=torch.bool)
    found = StepReader(DEVICE)._all_to_host(*given)
    assert all(torch.equal(*pair) for pair in zip(found, given, strict=True))
    assert len(copied) == 3
    monkeypatch.setattr(results, "MAX_PIECE_BYTES", 20)  # a few parts of something large
    StepReader(DEVICE)._all_to_host(*_accepted(5, 4))
    assert len(copied) == 6
