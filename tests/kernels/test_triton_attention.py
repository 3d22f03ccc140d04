"""The Triton kernel against its twin: on a GPU as compiled, elsewhere in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from matrix import full, spread
from paged_pass import attend, make_pass, write_and_attend

from trtspec.attention.base import CachedLayer
from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.metadata.attention import (
    NULL_BLOCK,
    KVGroup,
)
from trtspec.ops.step.slots import slot_mapping

pytest.importorskip("triton", reason="needs triton")

from trtspec.attention import triton_contexts, triton_generations
from trtspec.attention.split_kv import Parts, Tables
from trtspec.attention.triton_backend import TritonAttention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WHOLE = DEVICE == "cuda" or full()  # the interpreter is slow
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # all that the interpreter takes
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
GRID = [
    # rows, q heads, kv heads, dim, page, lengths, window
    *product([1, 4], [(6, 2)], [16], [4, 32], [[1, 7, 130]], [None]),
    (8, (4, 4), 64, 32, [70, 5], None),
    (3, (9, 3), 64, 16, [200], 17),
    (1, (8, 1), 128, 64, [65, 64, 63], 64),
    (2, (2, 1), 256, 32, [33], None),
    (1, (6, 2), 48, 8, [9, 100], 5),
    (3, (2, 1), 512, 32, [70], 30),
    (2, (6, 2), 8, 8, [9, 100], None),
    # more rows than one tile holds
    (65, (8, 1), 64, 16, [20, 3], 30) if WHOLE else (33, (8, 1), 64, 16, [20, 3], 30),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "heads", "dim", "page", "lengths", "window"), GRID)
def test_equals_torch(
    rows: int, heads: tuple[int, int], dim: int, page: int, lengths: list[int], window: int | None
) -> None:
    q_heads, kv_heads = heads
    meta = make_pass(lengths, rows, kv_heads, dim, page, max_seq_len=4096)
    generator = torch.Generator().manual_seed(1)
    count = len(lengths) * rows
    q, k, v = (
        torch.randn(count, h, dim, generator=generator).to(DEVICE)
        for h in (q_heads, kv_heads, kv_heads)
    )
    outs = []
    for backend in (TorchAttention(), TritonAttention()):
        outs.append(write_and_attend(backend, q, k, v, meta, window=window))
    torch.testing.assert_close(outs[1], outs[0], atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@spread(**{
    "programs,join_programs": [(1, 1), (5, 6), (24, 1000), (1000, 9)], "window": [None, 40],
    "has_sinks": [False, True],
})  # fmt: skip
def test_any_cut_of_ragged_texts_is_the_same(
    monkeypatch: pytest.MonkeyPatch, programs: int, join_programs: int, window: int | None,
    has_sinks: bool,
) -> None:  # fmt: skip
    """Requests of one part, of full parts alone, and of full parts and a rest; joined in one turn
    and in several."""
    monkeypatch.setattr(triton_generations, "_cut", lambda *_: (16, programs))
    monkeypatch.setattr(triton_generations, "JOIN_PROGRAMS", join_programs)
    rows, lengths = 3, [1, 350, 29, 13, 160] if WHOLE else [1, 190, 29, 13, 96]
    meta = make_pass(lengths, rows, 2, 16, 8, max_seq_len=4096)
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(len(lengths) * rows, 6, 16, generator=generator).to(DEVICE)
    sinks = _sinks(6) if has_sinks else None
    ours, twin = (
        attend(backend, q, meta, window=window, sinks=sinks)
        for backend in (TritonAttention(), TorchAttention())
    )
    torch.testing.assert_close(ours, twin, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("whole", "length", "room"), [(0, 80, 44), (5, 130, 48)])
def test_sums_have_room_for_the_parts_that_are_joined_alone(
    monkeypatch: pytest.MonkeyPatch, whole: int, length: int, room: int
) -> None:
    """Of 10 requests, two parts each, the last nearly empty; beside others of one part."""
    monkeypatch.setattr(triton_generations, "_cut", lambda *_: (16, 24))
    empty, made = Parts.empty, list[Parts]()

    def with_a_guard(count: int, *sizes: Any) -> Parts:
        made.append(Parts(*(x.fill_(7.0) for x in empty(count + 4, *sizes))))
        return Parts(*(x[:count] for x in made[-1]))

    monkeypatch.setattr(Parts, "empty", with_a_guard)
    lengths = [3] * whole + [length] * 10
    meta = make_pass(lengths, 1, 2, 16, 8, max_seq_len=4096)
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(len(lengths), 6, 16, generator=generator).to(DEVICE)
    ours, twin = (attend(backend, q, meta) for backend in (TritonAttention(), TorchAttention()))
    torch.testing.assert_close(ours, twin, atol=2e-5, rtol=1e-4)
    (parts,) = made
    assert len(parts.acc) == room + 4  # at most twice the programs, however many requests
    assert all(bool((x[room:] == 7).all()) for x in parts)
    written = (parts.stats != 7).flatten(1).all(1)
    assert int(written.sum()) == 40


@pytest.mark.parametrize("dim", [16, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("per_kv", [1, 3, 8, 16])
def test_a_tile_of_most_rows_fits_its_program(dim: int, per_kv: int) -> None:
    """Rows, heads and their numbers are each padded to a power of two."""
    meta = make_pass([5], 1, 2, dim, 8, max_seq_len=64)
    cached = CachedLayer.of(meta, 0, 0, None)
    rows = triton_generations.most_rows(torch.empty(1, 2 * per_kv, dim), cached)
    numbers = [1 << (rows * per_kv - 1).bit_length(), 1 << (dim - 1).bit_length()]
    assert rows and numbers[0] * numbers[1] <= 128 * 128


def _sinks(heads: int) -> torch.Tensor:
    """Sinks below and above a row's scores."""
    return torch.linspace(-3, 9, heads).to(DEVICE)


@pytest.mark.slow
@spread(**{
    "rows,heads,dim": [(5, (6, 2), 16), (33, (8, 1), 64), (1, (4, 4), 32)],
    "programs": [1, 24], "has_sinks": [False, True],
})  # fmt: skip
def test_rows_that_see_both_ways_with_windows_of_their_own(
    monkeypatch: pytest.MonkeyPatch, rows: int, heads: tuple[int, int], dim: int, programs: int,
    has_sinks: bool,
) -> None:  # fmt: skip
    """Against every row's own keys; some rows are past the maximum length."""
    monkeypatch.setattr(triton_generations, "_cut", lambda *_: (16, programs))
    window, lengths, page = 40, [3, 90, 199 - rows // 2], 8
    q_heads, kv_heads = heads
    meta = make_pass(lengths, rows, kv_heads, dim, page, max_seq_len=200)
    positions = meta.position_ids
    both_ways = meta.seen_both_ways(windows_by_row=True)
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(len(lengths) * rows, q_heads, dim, generator=generator).to(DEVICE)
    sinks = _sinks(q_heads) if has_sinks else None
    ours, twin = (
        attend(backend, q, both_ways, window=window, sinks=sinks)
        for backend in (TritonAttention(), TorchAttention())
    )
    assert torch.isfinite(ours).all()
    k_slots, v_slots = (slots.double() for slots in meta.kv_groups[0].layer_slots[0])
    compared = 0
    for row in range(0, len(q), 1 if rows < 9 else 7):
        own, last = int(positions[row]), int(both_ways.position_ids[row])
        if own == 0:
            continue
        seen = torch.arange(max(0, own - window + 1), last + 1, device=DEVICE)
        blocks = meta.block_tables[0][row // rows, seen // page].to(torch.int64)
        slots, per_kv = blocks * page + seen % page, q_heads // kv_heads
        for head in range(q_heads):
            scores = k_slots[slots, head // per_kv] @ q[row, head].double() * dim**-0.5
            total = scores.exp().sum() + (sinks[head].double().exp() if sinks is not None else 0)
            expected = scores.exp() / total @ v_slots[slots, head // per_kv]
            for out in (ours, twin):
                torch.testing.assert_close(out[row, head].double(), expected, atol=2e-5, rtol=1e-4)
            compared += 1
    assert compared >= 3 * q_heads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "dim", "page", "window", "has_sinks"),
    [
        ((6, 2), 16, 4, None, True),
        ((9, 3), 64, 16, 40, False),
        ((4, 4), 48, 8, 7, True),
        ((8, 1), 256, 32, None, False),
        ((2, 1), 512, 32, 40, False),
    ],
)
def test_contexts(
    heads: tuple[int, int], dim: int, page: int, window: int | None, has_sinks: bool
) -> None:
    """Whole prompts and later chunks, of one tile and of several, beside generations."""
    starts, counts = [0, 0, 61, 130], [1, 90, 5, 100] if WHOLE else [1, 33, 5, 38]
    lengths, rows = [9, 70], 2
    q_heads, kv_heads = heads
    spans = [*zip(starts, counts, strict=True), *((n, rows) for n in lengths)]
    texts = make_pass([s + n for s, n in spans], 1, kv_heads, dim, page, max_seq_len=4096)
    positions = torch.cat([torch.arange(s, s + n) for s, n in spans]).to(DEVICE)
    meta = replace(
        texts, context_lens=tuple(counts), context_starts=tuple(starts),
        num_generations=len(lengths), rows_per_generation=rows, position_ids=positions,
        max_kv_len=max(s + n for s, n in spans), derived={},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(len(positions), q_heads, dim, generator=generator).to(DEVICE)
    sinks = _sinks(q_heads) if has_sinks else None
    ours, twin = (
        attend(backend, q, meta, window=window, sinks=sinks)
        for backend in (TritonAttention(), TorchAttention())
    )
    assert any(key[0] == "context tiles" for key in meta.derived), "torch's operations ran"
    torch.testing.assert_close(ours, twin, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("heads", "dim", "window"), [((4, 2), 64, None), ((6, 2), 16, 40)])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_short_rest_of_a_prompt_in_a_captured_pass(
    heads: tuple[int, int], dim: int, window: int | None, count: int
) -> None:
    """One context of up to 8 rows behind a long prefix; the other rows are at position 0."""
    rows, start, (q_heads, kv_heads) = 8, 300, heads
    meta = make_pass([start + count], 1, kv_heads, dim, 16, max_seq_len=4096)
    positions = torch.zeros(rows, dtype=torch.int64)
    positions[:count] = torch.arange(start, start + count)
    meta = replace(
        meta, context_lens=(rows,), context_starts=(0,), num_generations=0,
        position_ids=positions.to(DEVICE), max_kv_len=4096,
        last_context_rows=torch.tensor([count - 1], device=DEVICE), derived={},
    )  # fmt: skip
    known = replace(
        meta, context_lens=(count,), context_starts=(start,), last_context_rows=None,
        position_ids=meta.position_ids[:count], max_kv_len=start + count, derived={},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(rows, q_heads, dim, generator=generator).to(DEVICE)
    ours = attend(TritonAttention(), q, meta, window=window)
    twin = attend(TorchAttention(), q[:count], known, window=window)
    assert not any(key[0] == "context tiles" for key in meta.derived), "it was cut into tiles"
    torch.testing.assert_close(ours[:count], twin, atol=2e-5, rtol=1e-4)
    assert ours.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize(("heads", "dim", "window", "softcap", "has_room", "parts"), [
    ((4, 2), 64, None, None, True, 1), ((4, 2), 64, None, None, True, 16),
    ((3, 1), 64, 250, 2.0, True, 3), ((4, 1), 128, None, None, True, 2),
    ((4, 1), 128, 300, None, True, 1), ((4, 1), 128, 150, None, False, 3),
    ((2, 1), 96, 40, None, True, 2), ((2, 1), 256, 130, 2.0, True, 1),
    ((2, 1), 256, None, None, False, 16), ((2, 1), 512, None, 2.0, True, 1),
])  # fmt: skip
def test_blocks_that_every_row_sees(
    heads: tuple[int, int], dim: int, window: int | None, softcap: float | None, has_room: bool,
    parts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Long texts, beginnings and later chunks, against fp32; a tile of no rows writes nowhere.

    `parts` is what a tile's keys are cut into.
    """
    monkeypatch.setattr(triton_contexts, "_has_room", lambda _: has_room)
    monkeypatch.setattr(triton_contexts, "_context_parts", lambda _: parts)
    page, spans = 16, [(0, 70), (390, 37), (63, 2), (62, 3), (126, 3), (128, 1)]
    q_heads, kv_heads = heads
    texts = make_pass([s + n for s, n in spans], 1, kv_heads, dim, page, max_seq_len=4096)
    group = _of_dtype(texts.kv_groups[0], dtype)
    positions = torch.cat([torch.arange(s, s + n) for s, n in spans]).to(DEVICE)
    generator = torch.Generator().manual_seed(6)
    rows = len(positions) + 1  # the last is of no text
    q = torch.randn(rows, q_heads, dim, generator=generator).to(dtype).to(DEVICE)
    k_slots, v_slots = group.layer_slots[0]
    sinks = _sinks(q_heads).to(dtype) if parts in (1, 3) else None
    cached = CachedLayer(k_slots, v_slots, page, window=window, softcap=softcap, sinks=sinks)
    size, start = triton_contexts.tile_size(q, cached), 0
    tiles: list[tuple[int, int, int]] = [(2, rows - 1, 0)]
    for i, (_, count) in enumerate(spans):
        tiles += [(i, start + j, min(size, count - j)) for j in range(0, count, size)]
        start += count
    out = torch.full_like(q, torch.nan)
    tables = Tables(texts.block_tables[0], torch.cat([positions, positions[:1]]))
    tile_table = torch.tensor(tiles, dtype=torch.int32, device=DEVICE)
    triton_contexts.context_attention(q, cached, tables, tile_table, size, out)
    assert out[-1].isnan().all()
    meta = replace(
        texts, context_lens=tuple(n for _, n in spans), num_generations=0, rows_per_generation=1,
        context_starts=tuple(s for s, _ in spans), position_ids=positions, derived={},
        kv_groups=(_of_dtype(group, torch.float32),),
    )  # fmt: skip
    twin = attend(
        TorchAttention(), q[:-1].float(), meta, window=window, softcap=softcap, sinks=sinks
    )
    near = 2e-5 if dtype == torch.float32 else 1e-2  # weights of values are rounded
    torch.testing.assert_close(out[:-1].float(), twin, atol=near, rtol=near)


def _of_dtype(group: KVGroup, dtype: torch.dtype) -> KVGroup:
    return KVGroup(group.k_cache.to(dtype), group.v_cache.to(dtype))


@pytest.mark.slow
@spread(**{"softcap,scale": [(2.0, None), (0.5, 1.0), (50.0, 0.1)], "window": [None, 40]})
def test_capped_scores(softcap: float, scale: float | None, window: int | None) -> None:
    """Of contexts and of generations beside them."""
    starts, counts, lengths, rows = [0, 130], [90, 100], [9, 200], 2
    spans = [*zip(starts, counts, strict=True), *((n, rows) for n in lengths)]
    texts = make_pass([s + n for s, n in spans], 1, 2, 16, 8, max_seq_len=4096)
    positions = torch.cat([torch.arange(s, s + n) for s, n in spans]).to(DEVICE)
    meta = replace(
        texts, context_lens=tuple(counts), context_starts=tuple(starts),
        num_generations=len(lengths), rows_per_generation=rows, position_ids=positions,
        max_kv_len=max(s + n for s, n in spans), derived={},
    )  # fmt: skip
    q = 3 * torch.randn(len(positions), 6, 16, generator=torch.Generator().manual_seed(5))
    options: Any = {"window": window, "scale": scale}
    ours, twin, plain = (
        attend(backend, q.to(DEVICE), meta, **options, softcap=cap)
        for backend, cap in (
            (TritonAttention(), softcap), (TorchAttention(), softcap),
            (TorchAttention(), None),
        )
    )  # fmt: skip
    torch.testing.assert_close(ours, twin, atol=1e-4, rtol=1e-4)
    assert (twin - plain).abs().max() > 1e-2


def test_rows_past_the_maximum_length_are_inert() -> None:
    meta = make_pass([30, 5], 4, 2, 16, 8, max_seq_len=32)
    assert meta.position_ids.tolist()[:4] == [30, 31, 0, 0]
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(8, h, 16, generator=generator).to(DEVICE) for h in (4, 2, 2))
    ours, twin = (
        write_and_attend(backend, q, k, v, meta)
        for backend in (TritonAttention(), TorchAttention())
    )
    torch.testing.assert_close(ours, twin, atol=2e-5, rtol=1e-4)
    assert torch.isfinite(ours).all()


def test_slots_of_positions_without_a_block_are_nowhere() -> None:
    table = torch.tensor([[5, 0]], dtype=torch.int32)
    positions = torch.tensor([[3, 4]])
    assert slot_mapping(table, positions, positions >= 0, 4).tolist() == [[23, -1]]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("is_context", [False, True])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_blocks_behind_the_window_are_not_missed(
    rows: int, is_context: bool, dtype: torch.dtype
) -> None:
    """They were given back: the table has the null block there, and others write to them."""
    lengths, page, window, kv_heads, dim = [200, 9, 77], 8, 21, 2, 16
    meta = make_pass(lengths, rows, kv_heads, dim, page, max_seq_len=4096)
    if is_context:
        meta = replace(
            meta, context_lens=(rows,) * 3, context_starts=tuple(lengths), num_generations=0,
            derived={},
        )  # fmt: skip
    generator = torch.Generator().manual_seed(6)
    q = torch.randn(len(lengths) * rows, 6, dim, generator=generator).to(dtype).to(DEVICE)
    meta = replace(meta, kv_groups=(_of_dtype(meta.kv_groups[0], dtype),))
    near = 2e-5 if dtype == torch.float32 else 1e-2
    whole = attend(TorchAttention(), q, meta, window=window)
    table, group = meta.block_tables[0].clone(), meta.kv_groups[0]
    for i, length in enumerate(lengths):
        behind = max(0, length - window + 1) // page
        group.k_cache[:, table[i, :behind]] = torch.nan
        group.v_cache[:, table[i, :behind]] = torch.nan
        table[i, :behind] = NULL_BLOCK
    group.k_cache[:, NULL_BLOCK] = group.v_cache[:, NULL_BLOCK] = 0
    for backend in (TorchAttention(), TritonAttention()):
        freed = replace(meta, block_tables=(table,), derived={})
        torch.testing.assert_close(
            attend(backend, q, freed, window=window), whole, atol=near, rtol=near
        )
