"""Paged attention in Triton: lengths and block tables come from the device.

Generations are split over their keys (`split_kv.py`). All query rows of a request that share a KV
head are one tile. On Hopper a kernel of `csrc/` serves most of them (`csrc_kernels.py`).

Contexts are cut into tiles of query rows ("flash attention"); one launch serves those of all
requests in a pass. The host knows their lengths and says which rows a tile has. Where the tiles are
too few for the GPU, as behind a long prefix that was found in the cache, their keys are cut too. A
captured pass of a few rows behind one is read as a generation's (`FEW_ROWS`). On Hopper a kernel of
`csrc/` serves heads of 64 and 128 (`csrc_prompts.py`).
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import ConfigError
from ..metadata.attention import AttentionMetadata
from ..ops.launch.machine import MULTIPROCESSORS
from ..ops.launch.triton import after_previous, dependent_launch
from ..ops.layer.kv_codes import as_bytes
from ..ops.layer.triton_fp8 import is_quick
from ..ops.layer.triton_kv_codes import decoded, starts_with_nan
from . import csrc_kernels, csrc_prompts
from .base import CachedLayer
from .mla import latent_attention
from .split_kv import (
    BLOCK_N,
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
    with_sinks,
)
from .tiles import context_tiles
from .torch_sdpa import TorchAttention

MAX_TILE = 128 * 128  # query rows times head size that one program's registers hold
CONTEXT_TILE = 128  # query rows of a context's tile, times the heads that share keys
FEW_ROWS = 8
"""Rows of a lone context in a captured pass that are attended as a generation's.

They are what the prefix cache leaves of a long prompt: few rows that see many keys. Unused ones are
at position 0, and see its key.
"""
MANY_PAIRS = 24
"""Of a request and a KV head, with heads of at most 64: from here on fewer parts are faster."""
MAX_CONTEXT_PARTS = 16  # of a tile's keys
CONTIGUOUS = torch.contiguous_format
JOIN_ROWS = 16  # pairs of a row and a head that a program joins the parts of


class TritonAttention(TorchAttention):
    name: ClassVar[str] = "triton"
    lengths_on_device: ClassVar[bool] = True
    contexts_on_device: ClassVar[bool] = True

    def _attend(self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer) -> Tensor:
        if cached.is_latent:
            return latent_attention(q, meta, cached)
        rows, size = meta.num_context_tokens, _context_tile(q, cached)
        is_padded = meta.last_context_rows is not None
        if rows and not size and is_padded:
            raise ConfigError(
                f"{q.shape[1]} query heads on {cached.kv_heads} KV heads are too many for a graph "
                "of prompts: set CudaGraphConfig(context_tokens=())."
            )
        if not rows or not size:
            return super()._attend(q, meta, cached)
        tables = Tables(blocks=meta.block_tables[cached.kv_group], positions=meta.position_ids)
        # Codes are left to the other kernel, which finds NaN in earlier rows of the pass.
        has_few_rows = meta.num_seqs == 1 and rows <= min(FEW_ROWS, size)
        if is_padded and has_few_rows and cached.k_scales is None:
            return paged_attention(q, cached, tables, rows)
        out = _zeroed(q, meta) if is_padded else torch.empty_like(q, memory_format=CONTIGUOUS)
        context_attention(q, cached, tables, context_tiles(meta, size), size, out)
        if meta.num_generations:
            out[rows:] = self._generation(q[rows:], meta, cached)
        return out

    def _reads_packed(self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer) -> bool:
        return cached.is_latent or meta.rows_per_generation <= _most_rows(q, cached)

    def _generation(self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer) -> Tensor:
        rows, most = meta.rows_per_generation, _most_rows(q, cached)
        if not most:
            return super()._generation(q, meta, cached)
        tables = Tables(
            blocks=meta.block_tables[cached.kv_group][meta.num_contexts :],
            positions=meta.position_ids[meta.num_context_tokens :],
            starts=None if meta.packed is None else meta.packed.starts,
        )
        if cached.window is not None and meta.window_position_ids is not None:
            firsts = meta.first_keys(cached.window)[meta.num_context_tokens :]
            tables = tables._replace(firsts=firsts)
            cached = cached._replace(window=cached.window + rows - 1)
        if rows <= most:
            return paged_attention(q, cached, tables, rows)
        # Long drafts, or wide heads of which many share keys: some rows of every request at a time.
        outs = []
        for start in range(0, rows, most):
            some = slice(start, start + most)
            part, of_part = q.view(-1, rows, *q.shape[1:])[:, some], tables.of_rows(rows, some)
            out = paged_attention(part.flatten(0, 1), cached, of_part, part.shape[1])
            outs.append(out.view(part.shape))
        return torch.cat(outs, dim=1).flatten(0, 1)


def _zeroed(q: Tensor, meta: AttentionMetadata) -> Tensor:
    """Returns a tensor like q whose padding rows are zeros, so that they stay finite.

    They belong to no tile, so the layers of a pass take turns at one tensor.
    """
    key = "attention of prompts", q.shape, q.dtype
    if key not in meta.derived:
        meta.derived[key] = torch.zeros_like(q, memory_format=CONTIGUOUS)
    return meta.derived[key]


def _most_rows(q: Tensor, cached: CachedLayer) -> int:
    """Returns how many rows of a generation are one tile."""
    return MAX_TILE // (q.shape[1] // cached.kv_heads * q.shape[2])


def paged_attention(q: Tensor, cached: CachedLayer, tables: Tables, rows: int) -> Tensor:
    """Returns the attention of generation rows over a paged cache, of the shape of `q`.

    Args:
        q: [G * rows, Hq, D]; where the tables have `starts`, as many rows as they say.
        tables: blocks [G, M] int32 and a position, int64, for each row. A row sees the keys up to
            its own position. A request's rows follow one another, or are all at the last one's;
            those past the maximum length are at 0. The kernel that runs just before may write keys
            at most 64 before a request's first row; older ones may be read before it ends.
        rows: of each request, or at most where the tables have `starts`.
    """
    num_seqs, table_width = tables.blocks.shape
    out = torch.empty_like(q)
    layer, queries = _arguments(q, cached, out)
    if csrc_kernels.attend(queries, cached, tables, layer, rows):
        return out
    pairs, tile = num_seqs * layer.kv_heads, triton.next_power_of_2(rows * layer.per_kv)
    block_n, programs = _cut(pairs, _block_d(layer.dim), q.dtype)
    cut = Cut(
        rows=rows,
        tiles=1,
        PROGRAMS=programs,
        SEQS=triton.next_power_of_2(num_seqs),
        BLOCK_M=max(16, tile),
        BLOCK_N=block_n,
        BLOCK_D=_block_d(layer.dim),
        PREFETCH=pairs < MULTIPROCESSORS,  # with more, DRAM is busy and asking early costs
    )
    most_parts = cut.most_parts(num_seqs, layer, table_width)
    parts = Parts.empty(most_parts, cut.BLOCK_M, cut.BLOCK_D, q.device)
    _partial_kernel[(most_parts,)](
        queries,
        _cache(cached),
        tables,
        tables.blocks.stride(0),
        table_width,
        num_seqs,
        parts,
        layer=layer,
        cut=cut,
        num_warps=4,
        num_stages=2,
        **dependent_launch(q),
    )
    join_rows = min(tile, triton.next_power_of_2(triton.cdiv(pairs * tile, JOIN_PROGRAMS)))
    join_parts = min(triton.next_power_of_2(programs // pairs + 1), 64)
    sizes = JoinSizes(ROWS=join_rows, PARTS=join_parts, COLUMNS=cut.BLOCK_D)
    join(parts, queries, tables, layer, cut, sizes)
    return out


def _arguments(q: Tensor, cached: CachedLayer, out: Tensor) -> tuple[Layer, Queries]:
    """Returns the kernels' arguments of a layer and of its queries."""
    dim = q.shape[2]
    factor, cap = _base_2(dim, cached.scale, cached.softcap)
    layer = Layer(
        kv_heads=cached.kv_heads,
        per_kv=q.shape[1] // cached.kv_heads,
        dim=dim,
        page_size=cached.page_size,
        window=-1 if cached.window is None else cached.window,
        cap=cap,
        CODES=cached.k_scales is not None,
        QUICK=is_quick(cached.k_slots, q.dtype),
    )
    return layer, Queries.of(q, out, factor, cached.sinks)


def _base_2(dim: int, scale: float | None, softcap: float | None) -> tuple[float, float]:
    """Returns (factor, cap), both times log2 e.

    `factor` scales a product of query and key; with a softcap it is 2 * scale / softcap. No softcap
    is a cap of 0.
    """
    factor = (dim**-0.5 if scale is None else scale) * LOG2_E
    return (factor, 0.0) if softcap is None else (2 * factor / softcap, softcap * LOG2_E)


def _cut(pairs: int, block_d: int, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the keys of a block and the programs that all keys are cut for, by measurement.

    With more pairs fewer programs with larger blocks are faster.

    Args:
        pairs: of a request and a KV head.
    """
    each = 4 if block_d > 64 else 6
    if block_d > 256:  # two stages of keys and values have to fit shared memory
        return BLOCK_N // (4 if dtype == torch.float32 else 2), each * MULTIPROCESSORS
    if pairs < MULTIPROCESSORS:
        if pairs >= MANY_PAIRS and block_d <= 64 and dtype != torch.float32:
            return 2 * BLOCK_N, 2 * MULTIPROCESSORS
        return BLOCK_N, each * MULTIPROCESSORS
    too_large = block_d > 128 or dtype == torch.float32
    if too_large or (block_d > 64 and pairs >= 3 * MULTIPROCESSORS):
        return BLOCK_N, 2 * MULTIPROCESSORS
    return 2 * BLOCK_N, (each - 2) * MULTIPROCESSORS


def _context_tile(q: Tensor, cached: CachedLayer) -> int:
    """Returns the rows of a context's tile; 0 if the heads that share keys are more than fit."""
    block_d = _block_d(q.shape[2])
    most = min(CONTEXT_TILE, MAX_TILE // block_d)
    if q.dtype == torch.float32:  # such products keep whole rows in registers
        most = min(64, 4096 // block_d)
    return most // (q.shape[1] // cached.kv_heads)


@cache
def _has_room(device: torch.device) -> bool:
    """Whether a program may have the shared memory of a Hopper GPU or of data centre Blackwell.

    On other GPUs the tiles that are best there would spill.
    """
    if device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.major >= 9 and properties.shared_memory_per_block_optin >= 162 << 10


def _block_d(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))  # tl.dot needs 16


class ContextBlocks(NamedTuple):
    """How a tile of a context is worked on."""

    SPLIT: bool  # keys that all rows see are looked at without a mask, in a loop of their own
    PARTS: int  # that a tile's keys are cut into, at most
    LEAST: int  # blocks of keys of a part, at least
    BLOCK_M: int  # pairs of a row and a head
    BLOCK_N: int  # keys
    BLOCK_D: int


def context_attention(
    q: Tensor, cached: CachedLayer, tables: Tables, tiles: Tensor, tile_rows: int, out: Tensor
) -> None:
    """Writes the attention of contexts' rows over a paged cache into `out`.

    Args:
        q, out: [T, Hq, D]; rows of no tile are left alone.
        tables: blocks [B, M] int32 and positions [T] int64, which never fall in a tile.
        tiles: [N, 3] int32, as of `context_tiles`, of at most `tile_rows` rows each.
    """
    layer, queries = _arguments(q, cached, out)
    module = csrc_prompts.module_for(queries, cached, layer)
    if module is not None:
        blocks = _csrc_blocks(layer, len(tiles), tables)
        parts = _parts_of(blocks, layer, tiles)
        sizes = csrc_prompts.Sizes(tile_rows, blocks.PARTS, blocks.LEAST)
        csrc_prompts.attend(module, queries, cached, tables, tiles, layer, sizes, parts)
    else:
        blocks = _triton_blocks(q, layer, len(tiles), tile_rows)
        parts = _parts_of(blocks, layer, tiles)
        _context_kernel[(len(tiles), layer.kv_heads, blocks.PARTS)](
            queries,
            _cache(cached),
            tables,
            tiles,
            parts,
            tables.blocks.stride(0),
            tables.blocks.shape[1],
            layer=layer,
            blocks=blocks,
            num_warps=_num_warps(q, blocks),
            num_stages=2,
            **dependent_launch(q),
        )
    if blocks.PARTS > 1:
        _join_context_kernel[(len(tiles), layer.kv_heads, blocks.BLOCK_M // JOIN_ROWS)](
            queries,
            tables,
            tiles,
            parts,
            layer=layer,
            blocks=blocks,
            ROWS=JOIN_ROWS,
            num_warps=4,
            **dependent_launch(q),
        )


def _triton_blocks(q: Tensor, layer: Layer, tiles: int, tile_rows: int) -> ContextBlocks:
    """Returns how Triton's kernel works on tiles, by measurement."""
    block_d = _block_d(layer.dim)
    block_n = BLOCK_N // max(block_d // 128, 1)
    if q.dtype == torch.float32:  # several loops would spill
        block_n = max(block_n // 2, 16)
    elif block_d == 128 and _has_room(q.device):
        block_n = 2 * BLOCK_N
    return ContextBlocks(
        SPLIT=q.dtype != torch.float32,
        PARTS=_context_parts(tiles * layer.kv_heads),
        LEAST=1,
        BLOCK_M=max(16, triton.next_power_of_2(tile_rows * layer.per_kv)),
        BLOCK_N=block_n,
        BLOCK_D=block_d,
    )


def _num_warps(q: Tensor, blocks: ContextBlocks) -> int:
    if q.dtype == torch.float32:
        return 8 if blocks.BLOCK_D <= 128 else 4
    if blocks.BLOCK_D > 64 and _has_room(q.device):
        return 8 if blocks.BLOCK_D == 128 else 4
    return 8 if blocks.BLOCK_M * blocks.BLOCK_D > 128 * 64 else 4


def _csrc_blocks(layer: Layer, tiles: int, tables: Tables) -> ContextBlocks:
    """Returns how the kernel of csrc works on tiles."""
    return ContextBlocks(
        SPLIT=False,
        PARTS=csrc_prompts.most_parts(
            tiles * layer.kv_heads, tables.blocks.shape[1] * layer.page_size
        ),
        LEAST=csrc_prompts.PART_TILES,
        BLOCK_M=csrc_prompts.TILE_PAIRS,
        BLOCK_N=csrc_prompts.TILE_KEYS,
        BLOCK_D=layer.dim,
    )


def _parts_of(blocks: ContextBlocks, layer: Layer, tiles: Tensor) -> Parts:
    """Returns room for the sums of parts, if there are several."""
    count = len(tiles) * layer.kv_heads * blocks.PARTS if blocks.PARTS > 1 else 0
    return Parts.empty(count, blocks.BLOCK_M, blocks.BLOCK_D, tiles.device)


def _context_parts(groups: int) -> int:
    """Returns into how many parts Triton's kernel cuts the keys of tiles.

    Args:
        groups: tiles, times KV heads.
    """
    if groups >= MULTIPROCESSORS:
        return 1
    return min(triton.cdiv(4 * MULTIPROCESSORS, groups), MAX_CONTEXT_PARTS)


class Cache(NamedTuple):
    """A layer's keys and values, [slots, Hkv, D]; rows and heads are strides."""

    k: Tensor
    v: Tensor
    k_row: int
    k_head: int
    v_row: int
    v_head: int
    k_scales: Tensor | None  # [Hkv], where k and v are codes in FP8; None is floats
    v_scales: Tensor | None


def _cache(cached: CachedLayer) -> Cache:
    k, v = as_bytes(cached.k_slots), as_bytes(cached.v_slots)
    return Cache(
        k=k,
        v=v,
        k_row=k.stride(0),
        k_head=k.stride(1),
        v_row=v.stride(0),
        v_head=v.stride(1),
        k_scales=cached.k_scales,
        v_scales=cached.v_scales,
    )


@triton.jit
def _keys_of(cache, kv_head, blocks, table_width):
    """Returns the `Keys` of a KV head."""
    k, v = cache.k + kv_head * cache.k_head, cache.v + kv_head * cache.v_head
    return Keys(k, v, cache.k_row, cache.v_row, blocks, table_width)


@triton.jit
def _score_scale(queries, cache, kv_head):
    """Returns what a product of a query and a key is multiplied by."""
    scale = queries.scale
    if cache.k_scales is not None:
        scale = scale * tl.load(cache.k_scales + kv_head)
    return scale


@triton.jit
def _as_values(acc, cache, kv_head):
    """Returns sums of weighted values as what the values stand for."""
    if cache.v_scales is not None:
        acc = acc * tl.load(cache.v_scales + kv_head)
    return acc


@triton.jit
def _own_is_nan(positions, is_row, keys, layer: tl.constexpr):
    """Whether the key or value at a row's own position is NaN."""
    page = positions // layer.page_size
    inside = is_row & (page < keys.table_width)
    block = tl.load(keys.blocks + page, mask=inside, other=0)
    slot = block.to(tl.int64) * layer.page_size + positions % layer.page_size
    of_key = starts_with_nan(keys.k + slot * keys.k_row, inside)
    return of_key | starts_with_nan(keys.v + slot * keys.v_row, inside)


@triton.jit
def _sums(
    sums,
    q,
    positions,
    firsts,
    start,
    end,
    keys,
    scale,
    layer: tl.constexpr,
    blocks: tl.constexpr,
    MASKED: tl.constexpr,
    FINDS_NAN: tl.constexpr,
):
    """Returns softmax sums with the keys at positions start … end - 1 added.

    They are those of query rows, in base 2: the largest score, the sum of weights, the sum of
    weighted values. Not MASKED are whole blocks of keys that every row sees.

    Args:
        firsts: the first key of each row; None is what the layer's window says.
        blocks: a `Cut` or `ContextBlocks`.
        FINDS_NAN: keys and values that are NaN count where they are codes too.
    """
    best, total, acc = sums
    d = tl.arange(0, blocks.BLOCK_D)
    for begin in range(start, end, blocks.BLOCK_N):
        n = begin + tl.arange(0, blocks.BLOCK_N)
        page = n // layer.page_size
        inside = (n[:, None] < end) & (d[None, :] < layer.dim)
        if MASKED:
            block = tl.load(keys.blocks + page, mask=(n < end) & (page < keys.table_width), other=0)
        else:
            block = tl.load(keys.blocks + page)
        slot = block.to(tl.int64) * layer.page_size + n % layer.page_size
        if MASKED or layer.dim < blocks.BLOCK_D:
            k = tl.load(keys.k + slot[:, None] * keys.k_row + d[None, :], mask=inside, other=0)
            v = tl.load(keys.v + slot[:, None] * keys.v_row + d[None, :], mask=inside, other=0)
        else:
            k = tl.load(keys.k + slot[:, None] * keys.k_row + d[None, :])
            v = tl.load(keys.v + slot[:, None] * keys.v_row + d[None, :])
        if layer.CODES:
            k = decoded(k, q.dtype, layer.QUICK)
            v = decoded(v, q.dtype, layer.QUICK)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if layer.cap > 0:  # tanh(x / 2) = 1 - 2 / (exp(x) + 1)
            scores = layer.cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
        if FINDS_NAN and layer.CODES:
            is_nan = starts_with_nan(keys.k + slot * keys.k_row, n < end)
            is_nan = is_nan | starts_with_nan(keys.v + slot * keys.v_row, n < end)
            scores = tl.where(is_nan[None, :], float("nan"), scores)
        if MASKED:
            seen = (n[None, :] <= positions[:, None]) & (n[None, :] < end)
            if firsts is not None:
                seen = seen & (n[None, :] >= firsts[:, None])
            elif layer.window > 0:
                seen = seen & (n[None, :] > positions[:, None] - layer.window)
            scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet has no best: keep its weights at zero, not NaN.
        base = tl.where(new_best == float("-inf"), 0.0, new_best) if MASKED else new_best
        weights = tl.exp2(scores - base[:, None])
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(weights, 1)
        acc = acc * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best
    return best, total, acc


@triton.jit(do_not_specialize=["table_row", "table_width"])  # they change as requests come and go
def _context_kernel(
    queries,
    cache,
    tables,
    tiles,
    parts,
    table_row,
    table_width,
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
    used, size = _parts_of_tile(start, end, blocks)
    if part >= used:
        return
    start += part * size
    end = tl.minimum(start + size, end)
    inside = is_row[:, None] & (d[None, :] < layer.dim)
    q = load_heads(queries, row, head, d, inside)
    keys = _keys_of(cache, kv_head, tables.blocks + seq * table_row, table_width)
    scale = _score_scale(queries, cache, kv_head)
    sums = no_sums(blocks.BLOCK_M, blocks.BLOCK_D)
    if blocks.SPLIT:
        # From here on there are keys that some row does not see yet.
        partly = tl.minimum(earliest + 1, end) // blocks.BLOCK_N * blocks.BLOCK_N
        if layer.window > 0:
            # Up to here there are keys that some row does not see any more.
            last = tl.max(tl.where(is_row, positions, 0), 0) + 1
            clear = tl.cdiv(tl.maximum(last - layer.window, 0), blocks.BLOCK_N) * blocks.BLOCK_N
            clear = tl.maximum(tl.minimum(clear, end), start)
            sums = _sums(
                sums, q, positions, None, start, clear, keys, scale, layer, blocks, True, True
            )
            start = clear
        sums = _sums(
            sums, q, positions, None, start, partly, keys, scale, layer, blocks, False, True
        )
        start = tl.maximum(start, partly)
    sums = _sums(sums, q, positions, None, start, end, keys, scale, layer, blocks, True, True)
    best, total, acc = sums
    acc = _as_values(acc, cache, kv_head)
    is_whole = True
    if blocks.PARTS > 1:
        is_whole = used == 1
    if is_whole:
        total, acc = with_sinks(queries, head, is_row, best, total, acc)
        acc = acc / tl.where(is_row, total, 1.0)[:, None]
        store_heads(queries, row, head, d, acc, inside)
    else:
        index = ((tile * layer.kv_heads + kv_head) * blocks.PARTS + part) * blocks.BLOCK_M + m
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
def _parts_of_tile(start, end, blocks: tl.constexpr):
    """Returns how many parts a tile's keys are cut into, and the keys of a part."""
    count = tl.cdiv(end - start, blocks.BLOCK_N)
    size = tl.maximum(tl.cdiv(count, blocks.PARTS), blocks.LEAST)
    return tl.cdiv(count, size), size * blocks.BLOCK_N


@triton.jit
def _join_context_kernel(
    queries,
    tables,
    tiles,
    parts,
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
    used, _size = _parts_of_tile(start, end, blocks)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row, head, is_row = _rows_of_tile(tiles, tile, kv_head, m, layer)
    if used == 1:
        return
    if tl.sum(is_row.to(tl.int32), 0) == 0:
        return
    best, total, acc = no_sums(ROWS, blocks.BLOCK_D)
    first = (tile * layer.kv_heads + kv_head) * blocks.PARTS
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
    """One part of the keys of one request and KV head.

    It yields its rows' softmax sums in base 2, or their attention where it is the only part.
    """
    kv_head, number = tl.program_id(0) % layer.kv_heads, tl.program_id(0) // layer.kv_heads
    part = find_part(number, tables, num_seqs, table_width, layer, cut)
    keys = _keys_of(cache, kv_head, tables.blocks + part.seq * table_row, table_width)
    if PDL and cut.PREFETCH:  # noqa: SIM102 - the outer one is for the compiler
        if part.seq < num_seqs:
            prefetch(part.start, part.end, keys, layer.page_size, layer.dim, cut.BLOCK_N)
    after_previous(PDL)  # which wrote q and the pass's own keys; positions and tables are older
    if part.seq >= num_seqs:
        return

    m, d = tl.arange(0, cut.BLOCK_M), tl.arange(0, cut.BLOCK_D)
    row, head, is_row = pairs_of(part.seq, kv_head, m, tables.starts, layer, cut)
    positions = tl.load(tables.positions + row, mask=is_row, other=0).to(tl.int32)
    firsts = None
    if tables.firsts is not None:
        firsts = tl.load(tables.firsts + row, mask=is_row, other=0).to(tl.int32)
    inside = is_row[:, None] & (d[None, :] < layer.dim)
    q = load_heads(queries, row, head, d, inside)
    sums = no_sums(cut.BLOCK_M, cut.BLOCK_D)
    scale = _score_scale(queries, cache, kv_head)
    best, total, acc = _sums(
        sums, q, positions, firsts, part.start, part.end, keys, scale, layer, cut, True, False
    )
    acc = _as_values(acc, cache, kv_head)
    if layer.CODES:
        # NaN in earlier rows was found when their pass ran: in a prompt's attention, or in logits.
        own = _own_is_nan(positions, is_row, keys, layer)
        acc = tl.where(own[:, None], float("nan"), acc)
    if part.is_whole:
        total, acc = with_sinks(queries, head, is_row, best, total, acc)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        store_heads(queries, row, head, d, acc, inside)
    else:
        store_part(parts, part, kv_head, m, best, total, acc, layer, cut)
