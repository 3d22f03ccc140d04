"""The attention kernel of csrc against float64, for all that it serves."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from matrix import spread
from torch import Tensor

from trtspec import native
from trtspec.attention import paged, shares
from trtspec.attention.base import CachedLayer
from trtspec.attention.split_kv import Tables

HAS_KERNELS = torch.cuda.is_available() and native.kernels(torch.empty(1, device="cuda"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_KERNELS, reason="needs the kernels of csrc (Hopper, nvcc)"),
]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Case(NamedTuple):
    q: Tensor
    cached: CachedLayer
    tables: Tables
    rows: int


def make(
    lengths: list[int],
    rows: int,
    kv_heads: int = 2,
    per_kv: int = 4,
    page_size: int = 32,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    at_last: bool = False,
) -> Case:
    """Requests of those lengths (their rows included), in pages dealt out at random."""
    torch.manual_seed(sum(lengths) + rows)
    pages = [-(-length // page_size) for length in lengths]
    order = list(range(sum(pages) + 3))
    random.Random(1).shuffle(order)
    table = torch.zeros((len(lengths), max(pages)), dtype=torch.int32)
    for row, count in enumerate(pages):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    # Another layer lies between: heads are dense, rows are not.
    slots = torch.randn(2, (sum(pages) + 3) * page_size, 2 * kv_heads, 128).to("cuda", dtype)
    starts = [length - (1 if at_last else rows) for length in lengths]
    steps = torch.zeros(rows) if at_last else torch.arange(rows)
    positions = (torch.tensor(starts)[:, None] + steps[None, :]).long().flatten()
    q = torch.randn(len(lengths) * rows, kv_heads * per_kv, 128).to("cuda", dtype)
    k, v = (x[:, :kv_heads] for x in slots)
    cached = CachedLayer(k_slots=k, v_slots=v, page_size=page_size, window=window)
    return Case(q, cached, Tables(table.cuda(), positions.cuda()), rows)


def reference(case: Case) -> Tensor:
    q, cached, tables, rows = case
    per_kv = q.shape[1] // cached.kv_heads
    out = torch.empty(q.shape, dtype=torch.float64)
    slots = [x.cpu().double() for x in (cached.k_slots, cached.v_slots)]
    for i, position in enumerate(tables.positions.tolist()):
        first = 0 if cached.window is None else max(position - cached.window + 1, 0)
        n = torch.arange(first, position + 1)
        pages = tables.blocks[i // rows].cpu()[n // cached.page_size].long()
        at = pages * cached.page_size + n % cached.page_size
        k, v = (x[at].repeat_interleave(per_kv, 1) for x in slots)
        scores = torch.einsum("hd,nhd->hn", q[i].cpu().double(), k) * q.shape[2] ** -0.5
        out[i] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
    return out


def attend(case: Case) -> Tensor:
    """By the kernel, however few the keys."""
    q, cached, tables, rows = case
    out = torch.empty_like(q)
    layer, queries = paged._arguments(q, cached, out)
    module = native.kernels(q)
    shares.attend(module, queries, cached.k_slots, cached.v_slots, tables, layer, rows)
    return out


def check(case: Case) -> None:
    out = attend(case)
    assert torch.equal(out, attend(case)), "the same bits every time"
    error = (out.cpu().double() - reference(case)).abs().max()
    assert error < TOLERANCE[case.q.dtype]


def lengths(count: int, longest: int) -> list[int]:
    rng = random.Random(count)
    return [rng.randint(24, longest) for _ in range(count)]


@spread(
    heads=[(1, 1), (2, 4), (3, 3), (8, 2)], rows=[1, 2, 4, 8], count=[1, 3, 33, 70],
    page_size=[16, 32, 128], window=[None, 5, 200], dtype=[torch.bfloat16, torch.float16],
)  # fmt: skip
def test_equals_float64(
    heads: tuple[int, int], rows: int, count: int, page_size: int, window: int | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    check(make(lengths(count, 700), rows, *heads, page_size, window, dtype))


@pytest.mark.parametrize("length", [16, 17, 63, 64, 65, 128, 1000, 40_000])
@pytest.mark.parametrize("rows", [1, 4])
def test_every_length(length: int, rows: int) -> None:
    check(make([length], rows))
    check(make([length, 16, length], rows, per_kv=3))


def test_one_long_request_beside_many_short_ones() -> None:
    check(make([9000, *[40] * 40], 4))


def test_shares_of_more_than_32_blocks() -> None:
    check(make([8000] * 17, 2, kv_heads=8, page_size=16))


def test_rows_that_are_all_at_the_last_position() -> None:
    check(make(lengths(5, 300), 8, at_last=True))


def test_nan_reaches_the_rows_that_see_it_and_no_other_request() -> None:
    case = make([300, 300, 300], 1)
    page = int(case.tables.blocks[1, 4])
    case.cached.k_slots[page * 32 + 3, 0] = float("nan")
    out = attend(case)
    assert out[1, :4].isnan().all()
    assert not out[1, 4:].isnan().any() and not out[[0, 2]].isnan().any()


def test_what_lies_behind_the_last_key_does_not_matter() -> None:
    case = make([300, 290], 4)
    expected = attend(case)
    for row, length in enumerate([300, 290]):
        page, offset = int(case.tables.blocks[row, length // 32]), length % 32
        for x in (case.cached.k_slots, case.cached.v_slots):
            x[page * 32 + offset : page * 32 + 32] = float("nan")
    assert torch.equal(attend(case), expected)


def test_a_graph_reads_what_the_kernel_before_it_wrote() -> None:
    """Replayed for growing texts, whose newest keys are written just before."""
    case = make([500] * 20, 4)
    new = torch.randn(2, 80, 2, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.zeros(80, dtype=torch.int64, device="cuda")
    pages = case.tables.blocks.long().repeat_interleave(4, 0)

    def step() -> Tensor:
        positions = case.tables.positions
        slots.copy_(pages.gather(1, positions[:, None] // 32)[:, 0] * 32 + positions % 32)
        case.cached.k_slots.index_copy_(0, slots, new[0])
        case.cached.v_slots.index_copy_(0, slots, new[1])
        return attend(case)

    case.tables.positions.sub_(300)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(30):
        new.normal_()
        graph.replay()
        assert (out.cpu().double() - reference(case)).abs().max() < TOLERANCE[torch.bfloat16]
        case.tables.positions.add_(3)


@pytest.mark.parametrize(("rows", "requests"), [(1, 32), (4, 64)])
def test_it_is_used_where_it_pays(
    rows: int, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, calls = make(lengths(requests, 100), rows), []
    expected = attend(case)
    real = shares.attend
    monkeypatch.setattr(shares, "attend", lambda *args: (calls.append(1), real(*args)))
    assert torch.equal(paged.paged_attention(*case), expected)
    for count, of_each in ((requests - 1, rows), (64, 5), (256, 2)):
        paged.paged_attention(*make(lengths(count, 100), of_each))
    assert len(calls) == 1


@pytest.mark.parametrize("change", ["softcap", "sinks", "firsts", "float32", "page_size"])
def test_the_rest_is_left_to_triton(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, cached, tables, rows = make(lengths(40, 100), 1, page_size=32)
    monkeypatch.setattr(shares, "attend", None)
    if change == "softcap":
        cached = cached._replace(softcap=30.0)
    elif change == "sinks":
        cached = cached._replace(sinks=torch.zeros(8, device="cuda"))
    elif change == "firsts":
        tables = tables._replace(firsts=torch.zeros_like(tables.positions))
    elif change == "float32":
        q = q.float()
        cached = cached._replace(k_slots=cached.k_slots.float(), v_slots=cached.v_slots.float())
    else:
        cached = cached._replace(page_size=8)
        tables = tables._replace(blocks=tables.blocks.repeat_interleave(4, 1))
    out = paged.paged_attention(q, cached, tables, rows)
    assert out.isfinite().all()
