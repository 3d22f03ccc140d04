"""The kernel of csrc for attention of prompts against float64, for all that it serves."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from matrix import spread
from torch import Tensor

from trtspec import native
from trtspec.attention import csrc_prompts, triton_contexts
from trtspec.attention.base import CachedLayer
from trtspec.attention.online_softmax import kernel_arguments
from trtspec.attention.split_kv import Tables
from trtspec.attention.tiles import tiles_on_device
from trtspec.ops.layer.rope import CacheWrite, Rope, rope_and_write

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
HAS_KERNELS = IS_HOPPER and native.kernels(torch.empty(1, device="cuda"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_KERNELS, reason="needs the kernels of csrc on Hopper"),
]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
Spans = list[tuple[int, int]]
"""Of each prompt: tokens read earlier, rows of this pass."""


class Case(NamedTuple):
    q: Tensor
    cached: CachedLayer
    tables: Tables
    tiles: Tensor
    spans: Spans


def make(
    spans: Spans,
    heads: tuple[int, int] = (8, 2),
    dim: int = 128,
    page_size: int = 32,
    window: int | None = None,
    has_sinks: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    room: int = 0,
) -> Case:
    """Prompts in pages dealt out at random; what lies behind their last keys is NaN.

    Args:
        heads: of queries, of keys.
        room: pages that block tables have room for, at least.
    """
    torch.manual_seed(sum(map(sum, spans)))
    (q_heads, kv_heads), lengths = heads, [start + rows for start, rows in spans]
    pages = [-(-length // page_size) for length in lengths]
    order = list(range(sum(pages) + 3))
    random.Random(1).shuffle(order)
    table = torch.zeros((len(spans), max(*pages, room)), dtype=torch.int32)
    is_key = torch.zeros((sum(pages) + 3) * page_size, dtype=torch.bool)
    for row, (count, length) in enumerate(zip(pages, lengths, strict=True)):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        n = torch.arange(length)
        is_key[table[row][n // page_size].long() * page_size + n % page_size] = True
    # Another layer lies between: heads are dense, rows are not.
    slots = torch.randn(2, len(is_key), 2 * kv_heads, dim)
    slots[:, ~is_key] = float("nan")
    k, v = slots.to("cuda", dtype)[:, :, :kv_heads]
    sinks = torch.randn(q_heads).to("cuda", dtype) if has_sinks else None
    cached = CachedLayer(k_slots=k, v_slots=v, page_size=page_size, window=window, sinks=sinks)
    positions = torch.cat([torch.arange(start, start + rows) for start, rows in spans])
    # As the products leave them: keys and values lie behind each row's queries.
    q = torch.randn(len(positions), q_heads + 2 * kv_heads, dim).to("cuda", dtype)[:, :q_heads]
    size, tiles, first = 128 // (q_heads // kv_heads), [(0, 0, 0)], 0
    for i, (_, rows) in enumerate(spans):
        tiles += [(i, first + j, min(size, rows - j)) for j in range(0, rows, size)]
        first += rows
    tiles.reverse()
    of_tiles = torch.tensor(tiles, dtype=torch.int32, device="cuda")
    return Case(q, cached, Tables(table.cuda(), positions.cuda()), of_tiles, spans)


def reference(case: Case) -> Tensor:
    q, cached, tables, _, spans = case
    out = torch.empty(q.shape, dtype=torch.float64, device="cuda")
    first = 0
    for i, (start, rows) in enumerate(spans):
        n = torch.arange(start + rows, device="cuda")
        at = tables.blocks[i][n // cached.page_size].long() * cached.page_size
        at += n % cached.page_size
        k, v = (
            x[at].double().repeat_interleave(q.shape[1] // cached.kv_heads, 1)
            for x in (cached.k_slots, cached.v_slots)
        )
        of = slice(first, first + rows)
        scores = torch.einsum("rhd,nhd->rhn", q[of].double(), k) * q.shape[2] ** -0.5
        position = tables.positions[of, None]
        is_seen = n <= position
        if cached.window is not None:
            is_seen &= n > position - cached.window
        scores = scores.masked_fill(~is_seen[:, None], float("-inf"))
        if cached.sinks is not None:
            sinks = cached.sinks.double()[None, :, None].expand(rows, -1, 1)
            scores = torch.cat([scores, sinks], -1)
        out[of] = torch.einsum("rhn,nhd->rhd", scores.softmax(-1)[..., : len(n)], v)
        first += rows
    return out


def attend(case: Case) -> Tensor:
    """By the kernel, or the test fails."""
    q, cached, tables, tiles, _ = case
    out = torch.full_like(q, 7.0, memory_format=torch.contiguous_format)
    layer, queries = kernel_arguments(q, cached, out)
    assert csrc_prompts.module_for(queries, cached, layer) is not None
    triton_contexts.context_attention(q, cached, tables, tiles, 128 // layer.per_kv, out)
    return out


def check(case: Case) -> None:
    out = attend(case)
    assert torch.equal(out, attend(case)), "the same bits every time"
    error = (out.double() - reference(case)).abs().max()
    assert error < TOLERANCE[case.q.dtype]


SPANS: list[Spans] = [
    [(0, 77)],
    [(0, n) for n in (1, 5, 31, 32, 33, 127, 128, 129, 300)],
    [(600, 100), (512, 1), (97, 33), (0, 40)],
    [(0, 1100), (1000, 128)],
]


@spread(
    spans=SPANS, heads=[(1, 1), (8, 2), (9, 3), (16, 1), (12, 2)], dim=[64, 128],
    page_size=[8, 16, 32, 128, 256], window=[None, 5, 200], has_sinks=[False, True],
    dtype=[torch.bfloat16, torch.float16],
)  # fmt: skip
def test_equals_float64(
    spans: Spans, heads: tuple[int, int], dim: int, page_size: int, window: int | None,
    has_sinks: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    check(make(spans, heads, dim, page_size, window, has_sinks, dtype))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [None, 700])
def test_more_items_than_thread_blocks(dim: int, window: int | None) -> None:
    check(make([(0, 1500), (700, 900), (0, 64)], (32, 8), dim, window=window))


@pytest.mark.parametrize("heads", [(8, 2), (9, 3), (6, 1)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (2500, True)])
def test_few_rows_behind_a_long_prefix_have_their_keys_cut(
    heads: tuple[int, int], dim: int, window: int | None, has_sinks: bool
) -> None:
    spans = [(4000, 40), (0, 90), (2100, 3)]
    case = make(spans, heads, dim, window=window, has_sinks=has_sinks)
    groups, keys = len(case.tiles) * heads[1], case.tables.blocks.shape[1] * 32
    assert csrc_prompts.most_parts(groups, keys) > 4
    check(case)


@pytest.mark.parametrize("prefix", [0, 3000])
def test_tiles_of_a_captured_pass(prefix: int) -> None:
    """Most are without rows, and stand first: more of them than thread blocks."""
    case = make([(prefix, 200), (0, 33)])
    last_rows = torch.tensor([199, 232, 232, 232], device="cuda")
    tiles = tiles_on_device(last_rows, 8192, 32)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    assert int((tiles[:, 2] == 0).sum()) > processors and int(tiles[0, 2]) == 0
    padded = torch.cat([case.tables.blocks, case.tables.blocks[-1:], case.tables.blocks[-1:]])
    case = case._replace(tiles=tiles, tables=case.tables._replace(blocks=padded))
    check(case)


def test_a_table_with_room_for_long_texts_changes_no_bit() -> None:
    spans = [(0, 300), (0, 20)]
    short, long = make(spans), make(spans, room=1000)
    assert csrc_prompts.most_parts(len(long.tiles) * 2, 32_000) > 1
    assert torch.equal(attend(short), attend(long))


@pytest.mark.parametrize("dim", [64, 128])
def test_nan_reaches_the_rows_that_see_it_and_no_other_request(dim: int) -> None:
    case = make([(0, 300), (0, 300), (0, 20)], dim=dim)
    page = int(case.tables.blocks[1, 4])
    case.cached.k_slots[page * 32 + 3, 0] = float("nan")
    out = attend(case)
    assert out[300 + 131 : 600, :4].isnan().all()
    assert not out[300 : 300 + 131].isnan().any() and not out[300:600, 4:].isnan().any()
    assert not out[:300].isnan().any() and not out[600:].isnan().any()


def test_a_graph_reads_what_the_kernel_before_it_wrote() -> None:
    """Triton's kernel of the cache write starts its successor early."""
    case = make([(0, 500), (40, 300)], (8, 2))
    pages, of = case.tables.blocks.long(), torch.arange(800, device="cuda") >= 500
    position = case.tables.positions
    slots = pages[of.long(), position // 32] * 32 + position % 32
    rope = Rope(torch.cat([torch.ones(600, 64), torch.zeros(600, 64)], -1).cuda(), position)
    to = CacheWrite(case.cached.k_slots, case.cached.v_slots, slots, scratch_slot=0)
    qkv = torch.zeros(800, 12, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(800, 8, 128, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        q = rope_and_write(qkv, rope, 8, to)
        triton_contexts.context_attention(q, case.cached, case.tables, case.tiles, 32, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            step()
    for seed in range(3):
        torch.manual_seed(seed)
        qkv.copy_(torch.randn(qkv.shape))
        out.zero_()
        graph.replay()
        error = (out.double() - reference(case._replace(q=qkv[:, :8]))).abs().max()
        assert error < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("change", ["softcap", "float32", "page_size", "dim", "sinks"])
def test_the_rest_is_left_to_triton(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make([(0, 90)], dim=96 if change == "dim" else 128)
    q, cached = case.q, case.cached
    if change == "softcap":
        cached = cached._replace(softcap=30.0)
    elif change == "sinks":
        cached = cached._replace(sinks=torch.zeros(8, device="cuda"))
    elif change == "float32":
        k, v = (x.float() for x in (cached.k_slots, cached.v_slots))
        q, cached = q.float(), cached._replace(k_slots=k, v_slots=v)
    elif change == "page_size":
        cached = cached._replace(page_size=24)
    monkeypatch.setattr(csrc_prompts, "attend", None)
    rows = triton_contexts.tile_size(q, cached)
    first = torch.tensor([[0, 0, rows]], dtype=torch.int32, device="cuda")
    triton_contexts.context_attention(q, cached, case.tables, first, rows, torch.empty_like(q))
