"""Attention of contexts' rows over the paged cache, in tiles of rows ("flash attention").

One launch serves the contexts of all requests in a pass. The host says which rows a tile has
(`tiles.py`). Where the tiles are too few for the GPU, as behind a long prefix that was found in the
cache, their keys are cut too. On Hopper a kernel of `csrc/` serves heads of 64 and 128
(`csrc_prompts.py`).
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.launch.machine import MULTIPROCESSORS
from ..ops.launch.triton import after_previous, dependent_launch
from . import csrc_prompts
from .base import CachedLayer
from .online_softmax import (
    MAX_TILE,
    Cache,
    add_keys,
    as_values,
    kernel_arguments,
    keys_of,
    padded_dim,
    score_scale,
)
from .split_kv import BLOCK_N, Layer, Parts, Tables, load_heads, no_sums, store_heads, with_sinks

CONTEXT_TILE = 128  # query rows of a context's tile, times the heads that share keys
MAX_CONTEXT_PARTS = 16  # of a tile's keys
JOIN_ROWS = 16  # pairs of a row and a head that a program joins the parts of


def context_attention(
    q: Tensor, cached: CachedLayer, tables: Tables, tiles: Tensor, tile_rows: int, out: Tensor
) -> None:
    """Writes the attention of contexts' rows over a paged cache into `out`.

    Args:
        q, out: [T, Hq, D]; rows of no tile are left alone.
        tables: blocks [B, M] int32 and positions [T] int64, which never fall in a tile.
        tiles: [N, 3] int32, as of `context_tiles`, of at most `tile_rows` rows each.
    """
    layer, queries = kernel_arguments(q, cached, out)
    module = csrc_prompts.module_for(queries, cached, layer)
    if module is not None:
        blocks, num_parts = _csrc_blocks(layer, len(tiles), tables)
        parts = _parts_of(blocks, num_parts, layer, tiles)
        sizes = csrc_prompts.Sizes(tile_rows, num_parts, blocks.LEAST)
        csrc_prompts.attend(module, queries, cached, tables, tiles, layer, sizes, parts)
    else:
        blocks, num_parts = _triton_blocks(q, layer, len(tiles), tile_rows)
        parts = _parts_of(blocks, num_parts, layer, tiles)
        _context_kernel[(len(tiles), layer.kv_heads, num_parts)](
            queries,
            Cache.of(cached),
            tables,
            tiles,
            parts,
            tables.blocks.stride(0),
            tables.blocks.shape[1],
            num_parts,
            layer=layer,
            blocks=blocks,
            num_warps=_num_warps(q, blocks),
            num_stages=2,
            **dependent_launch(q),
        )
    if blocks.IS_CUT:
        _join_context_kernel[(len(tiles), layer.kv_heads, blocks.BLOCK_M // JOIN_ROWS)](
            queries,
            tables,
            tiles,
            parts,
            num_parts,
            layer=layer,
            blocks=blocks,
            ROWS=JOIN_ROWS,
            num_warps=4,
            **dependent_launch(q),
        )


def tile_size(q: Tensor, cached: CachedLayer) -> int:
    """Returns the rows of a context's tile; 0 if the heads that share keys are more than fit."""
    block_d = padded_dim(q.shape[2])
    most = min(CONTEXT_TILE, MAX_TILE // block_d)
    if q.dtype == torch.float32:  # such products keep whole rows in registers
        most = min(64, 4096 // block_d)
    return most // (q.shape[1] // cached.kv_heads)


class ContextBlocks(NamedTuple):
    """How a tile of a context is worked on. (A kernel is compiled for each value: how many parts
    there are is none of them.)"""

    SPLIT: bool  # keys that all rows see are looked at without a mask, in a loop of their own
    IS_CUT: bool  # a tile's keys are in several parts
    LEAST: int  # blocks of keys of a part, at least
    BLOCK_M: int  # pairs of a row and a head
    BLOCK_N: int  # keys
    BLOCK_D: int


def _triton_blocks(
    q: Tensor, layer: Layer, tiles: int, tile_rows: int
) -> tuple[ContextBlocks, int]:
    """Returns how Triton's kernel works on tiles, by measurement, and a tile's parts at most."""
    num_parts = _context_parts(tiles * layer.kv_heads)
    block_d = padded_dim(layer.dim)
    block_n = BLOCK_N // max(block_d // 128, 1)
    if q.dtype == torch.float32:  # several loops would spill
        block_n = max(block_n // 2, 16)
    elif block_d == 128 and _has_room(q.device):
        block_n = 2 * BLOCK_N
    blocks = ContextBlocks(
        SPLIT=q.dtype != torch.float32,
        IS_CUT=num_parts > 1,
        LEAST=1,
        BLOCK_M=max(16, triton.next_power_of_2(tile_rows * layer.per_kv)),
        BLOCK_N=block_n,
        BLOCK_D=block_d,
    )
    return blocks, num_parts


def _num_warps(q: Tensor, blocks: ContextBlocks) -> int:
    if q.dtype == torch.float32:
        return 8 if blocks.BLOCK_D <= 128 else 4
    if blocks.BLOCK_D > 64 and _has_room(q.device):
        return 8 if blocks.BLOCK_D == 128 else 4
    return 8 if blocks.BLOCK_M * blocks.BLOCK_D > 128 * 64 else 4


def _csrc_blocks(layer: Layer, tiles: int, tables: Tables) -> tuple[ContextBlocks, int]:
    """Returns how the kernel of csrc works on tiles, and a tile's parts at most."""
    num_parts = csrc_prompts.most_parts(
        tiles * layer.kv_heads, tables.blocks.shape[1] * layer.page_size
    )
    blocks = ContextBlocks(
        SPLIT=False,
        IS_CUT=num_parts > 1,
        LEAST=csrc_prompts.PART_TILES,
        BLOCK_M=csrc_prompts.TILE_PAIRS,
        BLOCK_N=csrc_prompts.TILE_KEYS,
        BLOCK_D=layer.dim,
    )
    return blocks, num_parts


def _parts_of(blocks: ContextBlocks, num_parts: int, layer: Layer, tiles: Tensor) -> Parts:
    """Returns room for the sums of parts, if there are several."""
    count = len(tiles) * layer.kv_heads * num_parts if blocks.IS_CUT else 0
    return Parts.empty(count, blocks.BLOCK_M, blocks.BLOCK_D, tiles.device)


def _context_parts(groups: int) -> int:
    """Returns into how many parts Triton's kernel cuts the keys of tiles.

    Args:
        groups: tiles, times KV heads.
    """
    if groups >= MULTIPROCESSORS:
        return 1
    return min(triton.cdiv(4 * MULTIPROCESSORS, groups), MAX_CONTEXT_PARTS)


@cache
def _has_room(device: torch.device) -> bool:
    """Whether a program may have the shared memory of a Hopper GPU or of data centre Blackwell.

    On other GPUs the tiles that are best there would spill.
    """
    if device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.major >= 9 and properties.shared_memory_per_block_optin >= 162 << 10


# They change as requests come and go.
@triton.jit(do_not_specialize=["table_row", "table_width", "num_parts"])
def _context_kernel(
    queries,
    cache,
    tables,
    tiles,
    parts,
    table_row,
    table_width,
    num_parts,
    layer: tl.constexpr,
    blocks: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of a context's rows, with the query heads of one KV head, and a part of its keys."""
    after_previous(PDL)
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq = tl.load(tiles + tile * 3)
    m, d = tl.arange(0, blocks.BLOCK_M), tl.arange(0, blocks.BLOCK_D)
    row, head, is_row = _rows_of_tile(tiles, tile, kv_head, m, layer)
    positions = tl.load(tables.positions + row, mask=is_row, other=0).to(tl.int32)
    earliest, start, end = _keys_of_tile(positions, is_row, layer, blocks)
    used, size = _parts_of_tile(start, end, num_parts, blocks)
    if part >= used:
        return
    start += part * size
    end = tl.minimum(start + size, end)
    inside = is_row[:, None] & (d[None, :] < layer.dim)
    q = load_heads(queries, row, head, d, inside)
    keys = keys_of(cache, kv_head, tables.blocks + seq * table_row, table_width)
    scale = score_scale(queries, cache, kv_head)
    sums = no_sums(blocks.BLOCK_M, blocks.BLOCK_D)
    if blocks.SPLIT:
        # From here on there are keys that some row does not see yet.
        partly = tl.minimum(earliest + 1, end) // blocks.BLOCK_N * blocks.BLOCK_N
        if layer.window > 0:
            # Up to here there are keys that some row does not see any more.
            last = tl.max(tl.where(is_row, positions, 0), 0) + 1
            clear = tl.cdiv(tl.maximum(last - layer.window, 0), blocks.BLOCK_N) * blocks.BLOCK_N
            clear = tl.maximum(tl.minimum(clear, end), start)
            sums = add_keys(
                sums, q, positions, None, start, clear, keys, scale, layer, blocks, True, True
            )
            start = clear
        sums = add_keys(
            sums, q, positions, None, start, partly, keys, scale, layer, blocks, False, True
        )
        start = tl.maximum(start, partly)
    sums = add_keys(sums, q, positions, None, start, end, keys, scale, layer, blocks, True, True)
    best, total, acc = sums
    acc = as_values(acc, cache, kv_head)
    is_whole = True
    if blocks.IS_CUT:
        is_whole = used == 1
    if is_whole:
        total, acc = with_sinks(queries, head, is_row, best, total, acc)
        acc = acc / tl.where(is_row, total, 1.0)[:, None]
        store_heads(queries, row, head, d, acc, inside)
    else:
        index = ((tile * layer.kv_heads + kv_head) * num_parts + part) * blocks.BLOCK_M + m
        tl.store(parts.acc + index[:, None] * blocks.BLOCK_D + d[None, :], acc)
        tl.store(parts.stats + index * 2, best)
        tl.store(parts.stats + index * 2 + 1, total)


@triton.jit
def _rows_of_tile(tiles, tile, kv_head, m, layer: tl.constexpr):
    """Returns row, head and whether they exist, of the pairs `m` of a context's tile."""
    first_row, rows = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    row = (first_row + m // layer.per_kv).to(tl.int64)
    return row, kv_head * layer.per_kv + m % layer.per_kv, m // layer.per_kv < rows


@triton.jit
def _keys_of_tile(positions, is_row, layer: tl.constexpr, blocks: tl.constexpr):
    """Returns a tile's first position, and the keys start … end - 1 that its rows see."""
    end = tl.max(tl.where(is_row, positions, 0), 0) + 1
    earliest = tl.min(tl.where(is_row, positions, end), 0)
    start = end * 0
    if layer.window > 0:
        start = tl.maximum(earliest - layer.window + 1, 0) // blocks.BLOCK_N * blocks.BLOCK_N
    return earliest, start, end


@triton.jit
def _parts_of_tile(start, end, num_parts, blocks: tl.constexpr):
    """Returns how many parts a tile's keys are cut into, and the keys of a part."""
    count = tl.cdiv(end - start, blocks.BLOCK_N)
    size = tl.maximum(tl.cdiv(count, num_parts), blocks.LEAST)
    return tl.cdiv(count, size), size * blocks.BLOCK_N


@triton.jit(do_not_specialize=["num_parts"])
def _join_context_kernel(
    queries,
    tables,
    tiles,
    parts,
    num_parts,
    layer: tl.constexpr,
    blocks: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Joins the parts of ROWS pairs of a row and a head of one tile, where there are several."""
    after_previous(PDL)
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    m, d = tl.arange(0, blocks.BLOCK_M), tl.arange(0, blocks.BLOCK_D)
    row, _head, is_row = _rows_of_tile(tiles, tile, kv_head, m, layer)
    positions = tl.load(tables.positions + row, mask=is_row, other=0).to(tl.int32)
    _earliest, start, end = _keys_of_tile(positions, is_row, layer, blocks)
    used, _size = _parts_of_tile(start, end, num_parts, blocks)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row, head, is_row = _rows_of_tile(tiles, tile, kv_head, m, layer)
    if used == 1:
        return
    if tl.sum(is_row.to(tl.int32), 0) == 0:
        return
    best, total, acc = no_sums(ROWS, blocks.BLOCK_D)
    first = (tile * layer.kv_heads + kv_head) * num_parts
    for part in range(0, used):
        index = (first + part) * blocks.BLOCK_M + m
        part_best = tl.load(parts.stats + index * 2)
        part_total = tl.load(parts.stats + index * 2 + 1)
        part_acc = tl.load(parts.acc + index[:, None] * blocks.BLOCK_D + d[None, :])
        new_best = tl.maximum(best, part_best)
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        keep, weight = tl.exp2(best - base), tl.exp2(part_best - base)
        total = total * keep + part_total * weight
        acc = acc * keep[:, None] + part_acc * weight[:, None]
        best = new_best
    total, acc = with_sinks(queries, head, is_row, best, total, acc)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    store_heads(queries, row, head, d, acc, is_row[:, None] & (d[None, :] < layer.dim))
