"""Copies of a step's results to the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trtspec.executor import pinned
from trtspec.executor.host_drafts import draft_on_host
from trtspec.executor.pinned import Piece, PinnedBuffers
from trtspec.executor.results import LaunchedStep, _num_drafts
from trtspec.ops.tokens.greedy import Accepted

DEVICE = torch.device("cpu")


def _accepted(batch: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    accepted = Accepted.empty(batch, width, DEVICE)
    accepted.tokens.copy_(torch.arange(batch * width).view(batch, width))
    accepted.lens.copy_(torch.arange(100, 100 + batch))
    accepted.num_accepted_drafts.fill_(-7)
    accepted.bad_requests.copy_(torch.arange(batch) % 3 == 1)
    return accepted.tokens, accepted.lens, accepted.bad_requests


@pytest.mark.parametrize(("batch", "width", "count"), [(1, 1, 1), (5, 4, 5), (7, 9, 3)])
def test_parts_of_one_piece_are_copied_at_once(batch: int, width: int, count: int) -> None:
    given = [part[:count] for part in _accepted(batch, width)]
    expected = [part.tolist() for part in given]
    piece = Piece.of(*given)
    assert piece is not None
    copy = torch.full((2 * len(piece.memory),), 0xEE, dtype=torch.uint8)  # a larger buffer
    copy[: len(piece.memory)] = piece.memory
    for part in given:
        part.zero_()  # the next step's results
    found = piece.arrays(copy.numpy())
    assert [part.tolist() for part in found] == expected
    assert [part.dtype.name for part in found] == ["int32", "int32", "bool"]


def test_others_are_no_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Piece.of(torch.arange(3), torch.arange(4), torch.ones(2, dtype=torch.bool)) is None
    assert Piece.of(*_accepted(5, 4)) is not None
    monkeypatch.setattr(pinned, "MAX_PIECE_BYTES", 20)  # a few parts of something large
    assert Piece.of(*_accepted(5, 4)) is None


@pytest.mark.gpu
def test_a_buffer_is_not_used_while_a_copy_is_on_its_way() -> None:
    buffers = PinnedBuffers()
    source = torch.ones(4 << 20, dtype=torch.uint8, device="cuda")
    first = buffers.take(1 << 20)
    torch.cuda._sleep(200_000_000)  # cycles, some 0.1 s
    first.tensor.copy_(source[: 1 << 20], non_blocking=True)
    first.event.record()
    buffers.give(first)
    second = buffers.take(1 << 20)
    assert second is not first
    torch.cuda.synchronize()
    assert buffers.take(1000) is first, "a smaller copy fits"
    buffers.give(first)
    assert len(buffers.take(2 << 20).memory) >= 2 << 20, "a larger one does not"


def test_a_step_is_launched_to_its_end_once() -> None:
    """What a graph left is overwritten by the next one: a second copy would be of other results."""
    copies: list[Any] = []

    def launch_rest() -> Any:
        copies.append(object())
        return copies[-1]

    fields: dict[str, Any] = {name: None for name in LaunchedStep.__match_args__}
    for name in ("waited", "_results"):
        del fields[name]
    launched = LaunchedStep(**fields | {"launch_rest": launch_rest})
    launched.finish_launch()
    launched.finish_launch()
    assert launched.results is copies[0] and launched.results is copies[0]
    assert len(copies) == 1 and launched.launch_rest is None


def test_a_python_drafter_is_asked_of_requests_that_go_on() -> None:
    """One has ended, one may not draft, and the drafter ends another two while it is asked."""
    requests: list[Any] = [
        SimpleNamespace(request_id=i, is_finished=i == 1, num_drafts=2 * (i != 2), token_ids=[i],
                        slot=10 + i)
        for i in range(6)
    ]  # fmt: skip
    asked: list[tuple[int, list[int], int]] = []

    class Ending:
        def draft(self, request_id: int, token_ids: Any, max_draft_len: int) -> list[int]:
            asked.append((request_id, token_ids, max_draft_len))
            if request_id == 3:
                requests[3].is_finished = requests[4].is_finished = True
            return [7, 8]

    book: Any = None  # nothing fails
    drafts = draft_on_host(Ending(), requests, 9, book)
    assert asked == [(0, [0], 2), (3, [3], 2), (5, [5], 2)]
    assert drafts == {10: [7, 8], 15: [7, 8]}


def test_a_record_has_the_drafts_that_were_there_and_were_verified() -> None:
    """Of a context and three generations. There may be room to verify more than there are."""
    launched: Any = SimpleNamespace(
        batch=SimpleNamespace(contexts=[None]),
        num_asked=[4, 4, 4, 4],
        num_proposed=torch.tensor([3, 1, 0]),
        results=SimpleNamespace(num_verified=torch.tensor([2, 2, 1])),
    )
    assert _num_drafts(launched) == ([4, 2, 2, 1], [None, 2, 1, 0])
    launched.results.num_verified = None  # all are
    assert _num_drafts(launched) == ([4, 4, 4, 4], [None, 3, 1, 0])
    launched.num_proposed = None
    assert _num_drafts(launched) == ([4, 4, 4, 4], [None] * 4)
