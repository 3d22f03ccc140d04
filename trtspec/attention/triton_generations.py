"""Attention of generation rows over the paged cache: lengths and block tables are the device's.

Requests are split over their keys (`split_kv.py`). All query rows of a request that share a KV head
are one tile. On Hopper a kernel of `csrc/` serves most of them (`csrc_kernels.py`).
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.launch.machine import MULTIPROCESSORS
from ..ops.launch.triton import after_previous, dependent_launch
from ..ops.layer.triton_kv_codes import starts_with_nan
from . import csrc_kernels
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
from .split_kv import (
    BLOCK_N,
    JOIN_PROGRAMS,
    Cut,
    JoinSizes,
    Parts,
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

MANY_PAIRS = 24
"""Of a request and a KV head, with heads of at most 64: from here on fewer parts are faster."""


def most_rows(q: Tensor, cached: CachedLayer) -> int:
    """Returns how many rows of a generation are one tile."""
    return MAX_TILE // (q.shape[1] // cached.kv_heads * padded_dim(q.shape[2]))


def paged_attention(
    q: Tensor, cached: CachedLayer, tables: Tables, rows: int,
    out: Tensor | None = None, is_beside: bool = False,
) -> Tensor:  # fmt: skip
    """Returns the attention of generation rows over a paged cache, of the shape of `q`.

    Args:
        q: [G * rows, Hq, D]; where the tables have `starts`, as many rows as they say.
        tables: blocks [G, M] int32 and a position, int64, for each row. A row sees the keys up to
            its own position. A request's rows follow one another, or are all at the last one's;
            those past the maximum length are at 0. The kernel that runs just before may write keys
            at most 64 before a request's first row; older ones may be read before it ends.
        rows: of each request, or at most where the tables have `starts`.
        out: where to write it, of the shape of `q`; by default a new tensor.
        is_beside: the kernel just launched is attention of other rows of the pass. It writes
            nothing that this reads, so this may run beside it.
    """
    num_seqs, table_width = tables.blocks.shape
    out = torch.empty_like(q) if out is None else out
    layer, queries = kernel_arguments(q, cached, out)
    if csrc_kernels.attend(queries, cached, tables, layer, rows, is_beside):
        return out
    pairs, tile = num_seqs * layer.kv_heads, triton.next_power_of_2(rows * layer.per_kv)
    block_n, programs = _cut(pairs, padded_dim(layer.dim), q.dtype)
    cut = Cut(
        rows=rows,
        tiles=1,
        PROGRAMS=programs,
        SEQS=triton.next_power_of_2(num_seqs),
        BLOCK_M=max(16, tile),
        BLOCK_N=block_n,
        BLOCK_D=padded_dim(layer.dim),
        PREFETCH=pairs < MULTIPROCESSORS,  # with more, DRAM is busy and asking early costs
    )
    most_parts = cut.most_parts(num_seqs, layer, table_width)
    parts = Parts.empty(cut.most_joined(most_parts), cut.BLOCK_M, cut.BLOCK_D, q.device)
    _partial_kernel[(most_parts,)](
        queries,
        Cache.of(cached),
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
    keys = keys_of(cache, kv_head, tables.blocks + part.seq * table_row, table_width)
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
    scale = score_scale(queries, cache, kv_head)
    best, total, acc = add_keys(
        sums, q, positions, firsts, part.start, part.end, keys, scale, layer, cut, True, False
    )
    acc = as_values(acc, cache, kv_head)
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


@triton.jit
def _own_is_nan(positions, is_row, keys, layer: tl.constexpr):
    """Whether the key or value at a row's own position is NaN."""
    page = positions // layer.page_size
    inside = is_row & (page < keys.table_width)
    block = tl.load(keys.blocks + page, mask=inside, other=0)
    slot = block.to(tl.int64) * layer.page_size + positions % layer.page_size
    of_key = starts_with_nan(keys.k + slot * keys.k_row, inside)
    return of_key | starts_with_nan(keys.v + slot * keys.v_row, inside)
