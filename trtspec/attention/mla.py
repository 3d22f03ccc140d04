"""Latent attention in Triton: all query heads read one key per token, whose beginning is the value.

A key is loaded once and used twice, for the score and as the value. A tile is BLOCK_M pairs of a
query row and a head, which all see the same keys; a request of R rows and H heads has
ceil(R * H / BLOCK_M) tiles. Generations are split over their keys as in `triton_paged.py`
(`triton_parts.py`; tiles stand in the place of KV heads), contexts are not.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import ConfigError
from ..metadata.attention import AttentionMetadata
from ..ops.launch.triton import after_previous, dependent_launch
from .split_kv import (
    JOIN_PROGRAMS,
    LOG2_E,
    MULTIPROCESSORS,
    blocks_of,
    context_tiles,
    prefetch,
    share_out,
)

MAX_TILE = 64  # pairs of a query row and a head


def latent_attention(
    q: Tensor, meta: AttentionMetadata, kv_group: int, layer: int, window: int | None, scale: float
) -> Tensor:
    """`AttentionBackend.attend` where values are the first numbers of keys: q [T, H, D] ->
    [T, H, L].

    Raises:
        ConfigError: a window.
    """
    if window is not None:
        raise ConfigError(
            f"Latent attention with a window of {window} has no Triton kernel: use "
            "attn_backend='torch'."
        )
    group, tables = meta.kv_groups[kv_group], meta.block_tables[kv_group]
    k_slots, v_slots = group.layer_slots[layer]
    rows = meta.num_context_tokens
    # Padded contexts: rows of no tile are nobody's, but had better stay finite.
    new = q.new_empty if meta.last_context_rows is None else q.new_zeros
    out = new(q.shape[0], q.shape[1], v_slots.shape[2])
    if rows:
        size = max(1, _block_m(q, MAX_TILE) // q.shape[1])
        latent_context_attention(
            q, k_slots, tables, meta.position_ids, context_tiles(meta, size), size, group.page_size,
            scale, out,
        )  # fmt: skip
    if meta.num_generations:
        latent_paged_attention(
            q[rows:], k_slots, tables[meta.num_contexts :], meta.position_ids[rows:],
            meta.rows_per_generation, group.page_size, scale, out[rows:],
        )  # fmt: skip
    return out


def latent_paged_attention(
    q: Tensor, k_slots: Tensor, block_tables: Tensor, position_ids: Tensor, rows: int,
    page_size: int, scale: float, out: Tensor,
) -> None:  # fmt: skip
    """Attention of generation rows, into out [G * rows, H, L].

    Args:
        q: [G * rows, H, L + R].
        k_slots: [slots, 1, L + R]; a key's first L numbers are its value.
        block_tables, position_ids: as in `triton_paged.paged_attention`.
    """
    (num_seqs, table_width), heads = block_tables.shape, q.shape[1]
    shape = _shape(q, out, rows * heads)
    block_m, block_n, latent = shape["BLOCK_M"], shape["BLOCK_N"], shape["BLOCK_L"]
    tiles = triton.cdiv(rows * heads, block_m)
    pairs, programs = num_seqs * tiles, _programs(block_m)
    most_parts = min(pairs + programs, pairs * triton.cdiv(table_width * page_size, block_n))
    partial = torch.empty((most_parts, block_m, latent), dtype=torch.float32, device=q.device)
    stats = torch.empty((most_parts, block_m, 2), dtype=torch.float32, device=q.device)
    cut = {
        "rows": rows, "heads": heads, "tiles": tiles, "page_size": page_size, "PROGRAMS": programs,
        "SEQS": triton.next_power_of_2(num_seqs),
    }  # fmt: skip
    _partial_kernel[(most_parts,)](
        q, k_slots, block_tables, position_ids, partial, stats, out, scale * LOG2_E,
        q.stride(0), q.stride(1), k_slots.stride(0), block_tables.stride(0), table_width,
        out.stride(0), out.stride(1), num_seqs, **cut, **shape, **dependent_launch(q),
        PREFETCH=pairs < MULTIPROCESSORS,  # with more, DRAM is busy and asking early costs
    )  # fmt: skip
    tile, columns = min(block_m, triton.next_power_of_2(rows * heads)), min(128, latent)
    work = triton.cdiv(pairs * tile * (latent // columns), JOIN_PROGRAMS)
    join_rows = min(tile, triton.next_power_of_2(work), 8)
    join_parts = min(triton.next_power_of_2(programs // pairs + 1), 64 // join_rows)
    _join_kernel[(pairs, tile // join_rows, latent // columns)](
        partial, stats, position_ids, out, table_width, out.stride(0), out.stride(1), num_seqs,
        **cut, latent=shape["latent"], BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_L=latent,
        ROWS=join_rows, PARTS=join_parts, COLUMNS=columns, num_warps=4, **dependent_launch(q),
    )  # fmt: skip


def latent_context_attention(
    q: Tensor, k_slots: Tensor, block_tables: Tensor, position_ids: Tensor, tiles: Tensor,
    tile_rows: int, page_size: int, scale: float, out: Tensor,
) -> None:  # fmt: skip
    """Attention of contexts' rows, into out [T, H, L]; rows of no tile are left alone.

    Args:
        tiles: [N, 3] int32, of at most `tile_rows` rows each, as in `context_attention`.
    """
    heads, table_width = q.shape[1], block_tables.shape[1]
    shape = _shape(q, out, tile_rows * heads)
    groups = triton.cdiv(tile_rows * heads, shape["BLOCK_M"])
    _context_kernel[(groups * len(tiles),)](
        q, k_slots, block_tables, position_ids, tiles, out, scale * LOG2_E,
        q.stride(0), q.stride(1), k_slots.stride(0), block_tables.stride(0), table_width,
        out.stride(0), out.stride(1), heads=heads, groups=groups, page_size=page_size, **shape,
        **dependent_launch(q),
    )  # fmt: skip


def _block_m(q: Tensor, pairs: int) -> int:
    # Products in fp32 use more registers; other GPUs have less shared memory.
    most = MAX_TILE if q.dtype != torch.float32 and _is_hopper(q.device) else 16
    return min(most, max(16, triton.next_power_of_2(pairs)))


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def _shape(q: Tensor, out: Tensor, pairs: int) -> dict[str, Any]:
    """Sizes of a tile and how it is compiled."""
    latent, block_m = out.shape[2], _block_m(q, pairs)
    turning = q.shape[2] - latent
    return {
        "latent": latent, "turning": turning, "BLOCK_M": block_m,
        "BLOCK_N": 16 if q.dtype == torch.float32 else 64 if _is_hopper(q.device) else 32,
        "BLOCK_L": max(16, triton.next_power_of_2(latent)),
        "BLOCK_R": max(16, triton.next_power_of_2(turning)),
        "num_warps": 8 if block_m == 64 else 4, "num_stages": 2,
    }  # fmt: skip


def _programs(block_m: int) -> int:
    """That an H100 or H200 runs at once: a multiprocessor's shared memory holds one large tile with
    its keys, or two small ones."""
    return MULTIPROCESSORS if block_m == 64 else 2 * MULTIPROCESSORS


@triton.jit
def _queries(q_ptr, row, head, is_pair, q_row, q_head, size: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    place = q_ptr + row[:, None].to(tl.int64) * q_row + head[:, None] * q_head + d[None, :]
    return tl.load(place, mask=is_pair[:, None] & (d[None, :] < size), other=0.0)


@triton.jit
def _sums(
    q, q_turned, positions, start, end, k_ptr, k_row, table_ptr, table_width, scale,
    latent: tl.constexpr, turning: tl.constexpr, page_size: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Softmax sums of pairs, in base 2, over the keys at positions start … end - 1: the largest
    score, the sum of weights, the sum of weighted values."""
    d, r = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    for begin in range(start, end, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        page = n // page_size
        block = tl.load(table_ptr + page, mask=(n < end) & (page < table_width), other=0)
        key = k_ptr + (block.to(tl.int64) * page_size + n % page_size)[:, None] * k_row
        is_key = n[:, None] < end
        c = tl.load(key + d[None, :], mask=is_key & (d[None, :] < latent), other=0.0)
        k = tl.load(key + latent + r[None, :], mask=is_key & (r[None, :] < turning), other=0.0)
        scores = tl.dot(q, tl.trans(c), input_precision="ieee")
        scores = tl.dot(q_turned, tl.trans(k), scores, input_precision="ieee") * scale
        seen = (n[None, :] <= positions[:, None]) & (n[None, :] < end)
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet has no best: keep its weights at zero, not NaN.
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - base[:, None])
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(weights, 1)
        acc = tl.dot(weights.to(c.dtype), c, acc * keep[:, None], input_precision="ieee")
        best = new_best
    return best, total, acc


@triton.jit(do_not_specialize=["table_row", "table_width"])  # they change as texts come and go
def _context_kernel(
    q_ptr, k_ptr, table_ptr, position_ptr, tile_ptr, out_ptr, scale,
    q_row, q_head, k_row, table_row, table_width, out_row, out_head,
    heads: tl.constexpr, groups: tl.constexpr, page_size: tl.constexpr, latent: tl.constexpr,
    turning: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_M pairs of a context's tile, which has `groups` of so many."""
    after_previous(PDL)
    tile = tile_ptr + tl.program_id(0) // groups * 3
    seq, first_row, rows = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    pair = tl.program_id(0) % groups * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head, is_pair = first_row + pair // heads, pair % heads, pair < rows * heads
    positions = tl.load(position_ptr + row, mask=is_pair, other=0).to(tl.int32)
    q = _queries(q_ptr, row, head, is_pair, q_row, q_head, latent, BLOCK_L)
    q_turned = _queries(q_ptr + latent, row, head, is_pair, q_row, q_head, turning, BLOCK_R)
    last = tl.max(tl.where(is_pair, positions, -1), 0)
    _best, total, acc = _sums(
        q, q_turned, positions, last * 0, last + 1, k_ptr, k_row, table_ptr + seq * table_row,
        table_width, scale, latent=latent, turning=turning, page_size=page_size,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_L=BLOCK_L, BLOCK_R=BLOCK_R,
    )  # fmt: skip
    _store(acc / tl.where(is_pair, total, 1.0)[:, None], out_ptr, row, head, is_pair, out_row,
           out_head, latent, BLOCK_L)  # fmt: skip


@triton.jit
def _store(
    value, out_ptr, row, head, is_pair, out_row, out_head, size, BLOCK: tl.constexpr
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    place = out_ptr + row[:, None].to(tl.int64) * out_row + head[:, None] * out_head + d[None, :]
    inside = is_pair[:, None] & (d[None, :] < size)
    tl.store(place, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["table_row", "table_width", "num_seqs"])
def _partial_kernel(
    q_ptr, k_ptr, table_ptr, position_ptr, partial_ptr, stats_ptr, out_ptr, scale,
    q_row, q_head, k_row, table_row, table_width, out_row, out_head, num_seqs,
    rows: tl.constexpr, heads: tl.constexpr, tiles: tl.constexpr, page_size: tl.constexpr,
    PROGRAMS: tl.constexpr, SEQS: tl.constexpr, latent: tl.constexpr, turning: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one request, for one of its tiles: the tile's softmax sums in base 2,
    or its attention where it is the only part. Tiles that read the same part stand side by side,
    so that all but the first find it in L2."""
    tile, number = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    starts, full, rest, part = share_out(
        position_ptr, num_seqs, table_width, rows=rows, kv_heads=tiles, page_size=page_size,
        window=-1, PROGRAMS=PROGRAMS, SEQS=SEQS, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    num_full = tl.sum(full, 0)
    is_rest = number >= num_full
    own = tl.where(is_rest, rest, full)
    number -= tl.where(is_rest, num_full, 0)
    seq = tl.sum((tl.cumsum(own, 0) <= number).to(tl.int32), 0)
    s = tl.arange(0, SEQS)
    position = tl.sum(tl.where(s == seq, starts, 0), 0)
    _first, blocks = blocks_of(position, table_width, rows, page_size, -1, BLOCK_N)
    index = tl.where(is_rest, blocks // part, number - tl.sum(tl.where(s < seq, full, 0), 0))
    start = index * part * BLOCK_N
    end = tl.minimum(start + part * BLOCK_N, position + rows)
    if PDL and PREFETCH:  # noqa: SIM102 - the outer one is for the compiler
        if seq < num_seqs:
            prefetch(
                start, end, k_ptr, k_ptr, k_row, k_row, table_ptr + seq * table_row, table_width,
                page_size=page_size, dim=latent + turning, BLOCK_N=BLOCK_N,
            )  # fmt: skip
    after_previous(PDL)  # which wrote q and the pass's own keys; positions and tables are older
    if seq >= num_seqs:
        return

    m = tl.arange(0, BLOCK_M)
    pair = tile * BLOCK_M + m
    row, head, is_pair = seq * rows + pair // heads, pair % heads, pair < rows * heads
    positions = tl.load(position_ptr + row, mask=is_pair, other=0).to(tl.int32)
    q = _queries(q_ptr, row, head, is_pair, q_row, q_head, latent, BLOCK_L)
    q_turned = _queries(q_ptr + latent, row, head, is_pair, q_row, q_head, turning, BLOCK_R)
    best, total, acc = _sums(
        q, q_turned, positions, start, end, k_ptr, k_row, table_ptr + seq * table_row, table_width,
        scale, latent=latent, turning=turning, page_size=page_size,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_L=BLOCK_L, BLOCK_R=BLOCK_R,
    )  # fmt: skip
    if blocks <= part:
        _store(acc / tl.where(total > 0, total, 1.0)[:, None], out_ptr, row, head, is_pair, out_row,
               out_head, latent, BLOCK_L)  # fmt: skip
    else:
        before = tl.sum(tl.where(s < seq, full + rest, 0), 0)
        place = ((before + index) * tiles + tile) * BLOCK_M + m
        d = tl.arange(0, BLOCK_L)
        tl.store(partial_ptr + place[:, None] * BLOCK_L + d[None, :], acc)
        tl.store(stats_ptr + place * 2, best)
        tl.store(stats_ptr + place * 2 + 1, total)


@triton.jit(do_not_specialize=["table_width", "num_seqs"])
def _join_kernel(
    partial_ptr, stats_ptr, position_ptr, out_ptr, table_width, out_row, out_head, num_seqs,
    rows: tl.constexpr, heads: tl.constexpr, tiles: tl.constexpr, page_size: tl.constexpr,
    PROGRAMS: tl.constexpr, SEQS: tl.constexpr, latent: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """COLUMNS numbers of ROWS pairs of one tile, put together from several parts, PARTS of them at
    once."""
    seq, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    _starts, full, rest, _part = share_out(
        position_ptr, num_seqs, table_width, rows=rows, kv_heads=tiles, page_size=page_size,
        window=-1, PROGRAMS=PROGRAMS, SEQS=SEQS, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    s = tl.arange(0, SEQS)
    count = tl.sum(tl.where(s == seq, full + rest, 0), 0)
    before = tl.sum(tl.where(s < seq, full + rest, 0), 0)
    after_previous(PDL)
    if count == 1:
        return
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS
    d = column + tl.arange(0, COLUMNS)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, count, PARTS):
        parts = begin + tl.arange(0, PARTS)
        place = ((before + parts) * tiles + tile)[:, None] * BLOCK_M + m[None, :]
        is_part = (parts < count)[:, None] & (m < BLOCK_M)[None, :]
        bests = tl.load(stats_ptr + place * 2, mask=is_part, other=float("-inf"))
        totals = tl.load(stats_ptr + place * 2 + 1, mask=is_part, other=0.0)
        values = tl.load(
            partial_ptr + place[:, :, None] * BLOCK_L + d[None, None, :],
            mask=is_part[:, :, None], other=0.0,
        )  # fmt: skip
        new_best = tl.maximum(best, tl.max(bests, 0))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(bests - base[None, :])
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(totals * weights, 0)
        acc = acc * keep[:, None] + tl.sum(values * weights[:, :, None], 0)
        best = new_best
    pair = tile * BLOCK_M + m
    row, head, is_pair = seq * rows + pair // heads, pair % heads, pair < rows * heads
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    _store(acc, out_ptr + column, row, head, is_pair, out_row, out_head, latent - column, COLUMNS)
