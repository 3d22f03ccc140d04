"""Latent attention in Triton: all query heads read one key per token, whose beginning is the value.

A key is loaded once and used twice, for the score and as the value. A tile is BLOCK_M pairs of a
query row and a head, which all see the same keys. A request of R rows and H heads has
ceil(R * H / BLOCK_M) tiles. Generations are split over their keys (`split_kv.py`), where each tile
is a group of its own; contexts are not.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import native
from ..errors import ConfigError
from ..metadata.attention import AttentionMetadata
from ..ops.launch.machine import MULTIPROCESSORS
from ..ops.launch.triton import after_previous, dependent_launch
from ..ops.layer.kv_codes import as_bytes
from ..ops.layer.triton_fp8 import is_quick
from ..ops.layer.triton_kv_codes import decoded, starts_with_nan
from .base import CachedLayer
from .split_kv import (
    JOIN_PROGRAMS,
    LOG2_E,
    Cut,
    JoinSizes,
    Keys,
    Layer,
    Parts,
    Queries,
    Tables,
    find_part,
    join,
    load_heads,
    no_sums,
    pairs_of,
    prefetch,
    store_heads,
    store_part,
)
from .tiles import context_tiles

MAX_TILE = 64  # pairs of a query row and a head


def latent_attention(q: Tensor, meta: AttentionMetadata, cached: CachedLayer) -> Tensor:
    """Attends where values are the first numbers of keys: q [T, H, L + R] -> [T, H, L].

    Raises:
        ConfigError: a window.
    """
    if cached.window is not None:
        raise ConfigError(
            f"Latent attention with a window of {cached.window} has no Triton kernel: use "
            "attn_backend='torch'."
        )
    tables = Tables(blocks=meta.block_tables[cached.kv_group], positions=meta.position_ids)
    rows = meta.num_context_tokens
    # Padding rows belong to no tile: zeros, so that they stay finite.
    new = q.new_empty if meta.last_context_rows is None else q.new_zeros
    out = new(q.shape[0], q.shape[1], cached.v_slots.shape[2])
    if rows:
        size = max(1, _block_m(q, MAX_TILE) // q.shape[1])
        latent_context_attention(q, cached, tables, context_tiles(meta, size), size, out)
    if meta.num_generations:
        of_generations = Tables(
            blocks=tables.blocks[meta.num_contexts :],
            positions=tables.positions[rows:],
            starts=None if meta.packed is None else meta.packed.starts,
        )
        count = meta.rows_per_generation
        latent_paged_attention(q[rows:], cached, of_generations, count, out[rows:])
    return out


def latent_paged_attention(
    q: Tensor, cached: CachedLayer, tables: Tables, rows: int, out: Tensor
) -> None:
    """Writes the attention of generation rows into out [G * rows, H, L].

    Args:
        q: [G * rows, H, L + R].
        tables, rows: as of `triton_generations.paged_attention`.
    """
    (num_seqs, table_width), layer = tables.blocks.shape, _layer(q, cached, out)
    blocks = _blocks(q, layer, rows)
    tiles = triton.cdiv(rows * layer.per_kv, blocks.BLOCK_M)
    pairs, programs = num_seqs * tiles, _programs(blocks.BLOCK_M)
    cut = Cut(
        rows=rows,
        tiles=tiles,
        PROGRAMS=programs,
        SEQS=triton.next_power_of_2(num_seqs),
        BLOCK_M=blocks.BLOCK_M,
        BLOCK_N=blocks.BLOCK_N,
        BLOCK_D=blocks.BLOCK_D,
        BLOCK_R=blocks.BLOCK_R,
        PREFETCH=pairs < MULTIPROCESSORS,  # with more, DRAM is busy and asking early costs
    )
    most_parts = cut.most_parts(num_seqs, layer, table_width)
    parts = Parts.empty(cut.most_joined(most_parts), cut.BLOCK_M, cut.BLOCK_D, q.device)
    queries = _queries(q, cached, out)
    _partial_kernel[(most_parts,)](
        queries,
        _keys(cached),
        tables,
        tables.blocks.stride(0),
        table_width,
        num_seqs,
        parts,
        layer=layer,
        cut=cut,
        num_warps=_num_warps(blocks.BLOCK_M),
        num_stages=2,
        **dependent_launch(q),
    )
    tile = min(cut.BLOCK_M, triton.next_power_of_2(rows * layer.per_kv))
    columns = min(128, cut.BLOCK_D)
    work = triton.cdiv(pairs * tile * (cut.BLOCK_D // columns), JOIN_PROGRAMS)
    join_rows = min(tile, triton.next_power_of_2(work), 8)
    join_parts = min(triton.next_power_of_2(programs // pairs + 1), 64 // join_rows)
    sizes = JoinSizes(ROWS=join_rows, PARTS=join_parts, COLUMNS=columns)
    join(parts, queries, tables, layer, cut, sizes)


def latent_context_attention(
    q: Tensor, cached: CachedLayer, tables: Tables, tiles: Tensor, tile_rows: int, out: Tensor
) -> None:
    """Writes the attention of contexts' rows into out [T, H, L]; rows of no tile are left alone.

    Args:
        q: [T, H, L + R].
        tables, tiles, tile_rows: as of `triton_contexts.context_attention`.
    """
    layer = _layer(q, cached, out)
    blocks = _blocks(q, layer, tile_rows)
    groups = triton.cdiv(tile_rows * layer.per_kv, blocks.BLOCK_M)
    _context_kernel[(groups * len(tiles),)](
        _queries(q, cached, out),
        _keys(cached),
        tables,
        tiles,
        tables.blocks.stride(0),
        tables.blocks.shape[1],
        layer=layer,
        blocks=blocks,
        GROUPS=groups,
        num_warps=_num_warps(blocks.BLOCK_M),
        num_stages=2,
        **dependent_launch(q),
    )


class LatentKeys(NamedTuple):
    """A layer's keys [slots, 1, L + R]; the row is a stride."""

    k: Tensor
    k_row: int
    k_scale: Tensor | None  # [1], where k is codes in FP8; None is floats


def _keys(cached: CachedLayer) -> LatentKeys:
    return LatentKeys(
        k=as_bytes(cached.k_slots), k_row=cached.k_slots.stride(0), k_scale=cached.k_scales
    )


def _queries(q: Tensor, cached: CachedLayer, out: Tensor) -> Queries:
    scale = q.shape[2] ** -0.5 if cached.scale is None else cached.scale
    return Queries.of(q, out, scale * LOG2_E)


def _layer(q: Tensor, cached: CachedLayer, out: Tensor) -> Layer:
    return Layer(
        kv_heads=1,
        per_kv=q.shape[1],
        dim=out.shape[2],
        page_size=cached.page_size,
        rotated=q.shape[2] - out.shape[2],
        CODES=cached.k_scales is not None,
        QUICK=is_quick(cached.k_slots, q.dtype),
    )


class LatentBlocks(NamedTuple):
    """What a program works on at once."""

    BLOCK_M: int  # pairs of a row and a head
    BLOCK_N: int  # keys
    BLOCK_D: int  # at least L, a power of two
    BLOCK_R: int  # at least R, a power of two


def _blocks(q: Tensor, layer: Layer, rows: int) -> LatentBlocks:
    """Returns the blocks for `rows` rows that see the same keys."""
    block_m = _block_m(q, rows * layer.per_kv)
    block_n = 16 if q.dtype == torch.float32 else 64 if _has_room(q.device) else 32
    if layer.CODES and block_m < MAX_TILE:  # or too much would spill
        block_n = min(block_n, 32)
    return LatentBlocks(
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=max(16, triton.next_power_of_2(layer.dim)),
        BLOCK_R=max(16, triton.next_power_of_2(layer.rotated)),
    )


def _block_m(q: Tensor, pairs: int) -> int:
    # Products in fp32 use more registers; other GPUs have less shared memory.
    most = MAX_TILE if q.dtype != torch.float32 and _has_room(q.device) else 16
    return min(most, max(16, triton.next_power_of_2(pairs)))


def _has_room(device: torch.device) -> bool:
    """Whether the device has Hopper's shared memory, or is a CPU that interprets kernels."""
    return device.type != "cuda" or native.is_hopper(device)


def _num_warps(block_m: int) -> int:
    return 8 if block_m == 64 else 4


def _programs(block_m: int) -> int:
    """Returns how many programs an H100 or H200 runs at once.

    A multiprocessor's shared memory holds one large tile with its keys, or two small ones.
    """
    return MULTIPROCESSORS if block_m == 64 else 2 * MULTIPROCESSORS


@triton.jit
def _load_queries(queries, row, head, is_pair, layer: tl.constexpr, blocks: tl.constexpr):
    """Loads what is multiplied with keys' latents, and what with their rotated numbers."""
    d, r = tl.arange(0, blocks.BLOCK_D), tl.arange(0, blocks.BLOCK_R)
    row = row.to(tl.int64)
    q = load_heads(queries, row, head, d, is_pair[:, None] & (d[None, :] < layer.dim))
    inside = is_pair[:, None] & (r[None, :] < layer.rotated)
    return q, load_heads(queries, row, head, layer.dim + r, inside)


@triton.jit
def _scales(queries, cache):
    """Returns what products of a query and a key are multiplied by, and what values are."""
    scale, of_values = queries.scale, 1.0
    if cache.k_scale is not None:
        of_values = tl.load(cache.k_scale)
        scale = scale * of_values
    return scale, of_values


@triton.jit
def _sums(
    q,
    q_rotated,
    positions,
    start,
    end,
    keys,
    scale,
    layer: tl.constexpr,
    blocks: tl.constexpr,
):
    """Returns softmax sums of pairs over the keys at positions start … end - 1, in base 2.

    They are the largest score, the sum of weights, the sum of weighted values.

    Args:
        blocks: a `Cut` or `LatentBlocks`.
    """
    d, r = tl.arange(0, blocks.BLOCK_D), tl.arange(0, blocks.BLOCK_R)
    best, total, acc = no_sums(blocks.BLOCK_M, blocks.BLOCK_D)
    for begin in range(start, end, blocks.BLOCK_N):
        n = begin + tl.arange(0, blocks.BLOCK_N)
        page = n // layer.page_size
        block = tl.load(keys.blocks + page, mask=(n < end) & (page < keys.table_width), other=0)
        slot = block.to(tl.int64) * layer.page_size + n % layer.page_size
        key = keys.k + slot[:, None] * keys.k_row
        is_key = n[:, None] < end
        c = tl.load(key + d[None, :], mask=is_key & (d[None, :] < layer.dim), other=0)
        inside = is_key & (r[None, :] < layer.rotated)
        k = tl.load(key + layer.dim + r[None, :], mask=inside, other=0)
        if layer.CODES:
            c, k = decoded(c, q.dtype, layer.QUICK), decoded(k, q.dtype, layer.QUICK)
        scores = tl.dot(q, tl.trans(c), input_precision="ieee")
        scores = tl.dot(q_rotated, tl.trans(k), scores, input_precision="ieee") * scale
        if layer.CODES:
            is_nan = starts_with_nan(keys.k + slot * keys.k_row, n < end)
            scores = tl.where(is_nan[None, :], float("nan"), scores)
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


@triton.jit(do_not_specialize=["table_row", "table_width"])  # they change as requests come and go
def _context_kernel(
    queries,
    cache,
    tables,
    tiles,
    table_row,
    table_width,
    layer: tl.constexpr,
    blocks: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_M pairs of a context's tile, which has GROUPS such groups."""
    after_previous(PDL)
    tile = tiles + tl.program_id(0) // GROUPS * 3
    seq, first_row, rows = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    pair = tl.program_id(0) % GROUPS * blocks.BLOCK_M + tl.arange(0, blocks.BLOCK_M)
    row, head, is_pair = (
        first_row + pair // layer.per_kv,
        pair % layer.per_kv,
        pair < rows * layer.per_kv,
    )
    positions = tl.load(tables.positions + row, mask=is_pair, other=0).to(tl.int32)
    q, q_rotated = _load_queries(queries, row, head, is_pair, layer, blocks)
    keys = Keys(
        cache.k, cache.k, cache.k_row, cache.k_row, tables.blocks + seq * table_row, table_width
    )
    last = tl.max(tl.where(is_pair, positions, -1), 0)
    scale, of_values = _scales(queries, cache)
    _best, total, acc = _sums(
        q, q_rotated, positions, last * 0, last + 1, keys, scale, layer, blocks
    )
    acc *= of_values
    acc = acc / tl.where(is_pair, total, 1.0)[:, None]
    d = tl.arange(0, blocks.BLOCK_D)
    inside = is_pair[:, None] & (d[None, :] < layer.dim)
    store_heads(queries, row.to(tl.int64), head, d, acc, inside)


@triton.jit(do_not_specialize=["table_row", "table_width", "num_seqs"])
def _partial_kernel(
    queries,
    cache,
    tables,
    table_row,
    table_width,
    num_seqs,
    parts,
    layer: tl.constexpr,
    cut: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of the keys of one request, for one of its tiles.

    It yields the tile's softmax sums in base 2, or its attention where it is the only part. Tiles
    that read the same part stand side by side, so that all but the first find it in L2.
    """
    tile, number = tl.program_id(0) % cut.tiles, tl.program_id(0) // cut.tiles
    part = find_part(number, tables, num_seqs, table_width, layer, cut)
    blocks = tables.blocks + part.seq * table_row
    keys = Keys(cache.k, cache.k, cache.k_row, cache.k_row, blocks, table_width)
    if PDL and cut.PREFETCH:  # noqa: SIM102 - the outer one is for the compiler
        if part.seq < num_seqs:
            size: tl.constexpr = layer.dim + layer.rotated
            prefetch(part.start, part.end, keys, layer.page_size, size, cut.BLOCK_N)
    after_previous(PDL)  # which wrote q and the pass's own keys; positions and tables are older
    if part.seq >= num_seqs:
        return

    m, d = tl.arange(0, cut.BLOCK_M), tl.arange(0, cut.BLOCK_D)
    row, head, is_pair = pairs_of(part.seq, tile, m, tables.starts, layer, cut)
    positions = tl.load(tables.positions + row, mask=is_pair, other=0).to(tl.int32)
    q, q_rotated = _load_queries(queries, row, head, is_pair, layer, cut)
    scale, of_values = _scales(queries, cache)
    best, total, acc = _sums(q, q_rotated, positions, part.start, part.end, keys, scale, layer, cut)
    acc *= of_values
    if part.is_whole:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        inside = is_pair[:, None] & (d[None, :] < layer.dim)
        store_heads(queries, row.to(tl.int64), head, d, acc, inside)
    else:
        store_part(parts, part, tile, m, best, total, acc, layer, cut)
