"""Split-KV ("flash decoding"): one request's keys are read by several programs, then joined.

    keys of all requests and groups      programs, each with one part
    request 0  |====|====|==|            full parts first, then the rests
    request 1  |====|=|                  a request of one part writes its attention itself,
    request 2  |==|                      those of several parts are joined by a second kernel

A group is a set of query heads that reads the same keys: those of a KV head in paged attention,
those of a tile in latent attention. The parts of all requests have one size, for as many programs
as the GPU runs at once. One long request thus fills the GPU, and a short one beside it does not
wait.

Each program finds its part from the requests' positions on the device, so a captured graph stays
right as sequences grow.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.launch.machine import MULTIPROCESSORS
from ..ops.launch.triton import after_previous, dependent_launch

BLOCK_N = 64  # keys that a program reads at a time, if nothing else was chosen
LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
JOIN_PROGRAMS = 8 * MULTIPROCESSORS


# -- arguments of kernels --------------------------------------------------------------------------
class Queries(NamedTuple):
    """Query rows, and where their attention goes. Rows and heads are strides."""

    q: Tensor  # [T, Hq, D]
    q_row: int
    q_head: int
    out: Tensor  # [T, Hq, Dv]
    out_row: int
    out_head: int
    scale: float  # of a product of query and key, for scores in base 2
    sinks: Tensor | None = None  # [Hq], logits beside the scores

    @classmethod
    def of(cls, q: Tensor, out: Tensor, scale: float, sinks: Tensor | None = None) -> Queries:
        return cls(
            q=q,
            q_row=q.stride(0),
            q_head=q.stride(1),
            out=out,
            out_row=out.stride(0),
            out_head=out.stride(1),
            scale=scale,
            sinks=sinks,
        )


class Tables(NamedTuple):
    """Where the requests' keys are, and the rows' positions."""

    blocks: Tensor  # [B, M] int32
    positions: Tensor  # [T] int64
    starts: Tensor | None = None
    """[B+1] int32: each request's first row, where they have different numbers of them."""
    firsts: Tensor | None = None
    """[T] int64: the first key of each row, where a window does not say it. The layer's window then
    holds at least those of all rows."""

    def of_rows(self, count: int, some: slice) -> Tables:
        """Returns the tables of some of each request's `count` rows."""

        def cut(x: Tensor) -> Tensor:
            return x.view(-1, count)[:, some].flatten().contiguous()

        firsts = self.firsts
        return self._replace(
            positions=cut(self.positions), firsts=None if firsts is None else cut(firsts)
        )


class Keys(NamedTuple):
    """Keys and values of one request and KV head; made inside kernels."""

    k: Tensor  # pointers to the cache's slot 0
    v: Tensor
    k_row: int
    v_row: int
    blocks: Tensor  # pointer to the request's row of the block table
    table_width: int


class Layer(NamedTuple):
    """What is constant for a layer of a model."""

    kv_heads: int
    per_kv: int  # query heads that read one KV head
    dim: int  # numbers of a value, and of a key where `rotated` is 0
    page_size: int
    window: int = -1  # how many keys a row sees; -1 is all up to its own
    cap: float = 0.0  # of scores in base 2; 0 is none
    rotated: int = 0  # further numbers of a latent key that its value does not have
    CODES: bool = False  # keys and values are in FP8
    QUICK: bool = False  # and are read as of `triton_fp8.codes_to`


class Cut(NamedTuple):
    """How the keys of a launch's requests are cut."""

    rows: int  # query rows of a request
    tiles: int  # of BLOCK_M pairs of a row and a head, for each KV head of a request
    PROGRAMS: int  # that all keys are cut for
    SEQS: int  # at least the requests, a power of two
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int  # at least `dim`, a power of two
    BLOCK_R: int = 16  # the same of `rotated`
    PREFETCH: bool = False  # asks for the first keys before the kernel before has ended

    def most_parts(self, num_seqs: int, layer: Layer, table_width: int) -> int:
        """Returns how many parts there can be at most."""
        groups = num_seqs * layer.kv_heads * self.tiles
        blocks = triton.cdiv(table_width * layer.page_size, self.BLOCK_N)
        return min(groups + self.PROGRAMS, groups * blocks)

    def most_joined(self, most_parts: int) -> int:
        """Returns how many parts there can be at most of requests that have several.

        Such a request's last part may be nearly empty, but its others are full. So at most half of
        them are short, and there are at most `PROGRAMS` full ones.
        """
        return min(most_parts, 2 * self.PROGRAMS)


class Parts(NamedTuple):
    """The softmax sums of parts, for groups of BLOCK_M pairs of a row and a head."""

    acc: Tensor  # [parts, BLOCK_M, BLOCK_D] float32, sums of weighted values
    stats: Tensor  # [parts, BLOCK_M, 2] float32, the largest score and the sum of weights

    @classmethod
    def empty(cls, count: int, block_m: int, block_d: int, device: torch.device) -> Parts:
        acc = torch.empty((count, block_m, block_d), dtype=torch.float32, device=device)
        return cls(acc, torch.empty((count, block_m, 2), dtype=torch.float32, device=device))


class Part(NamedTuple):
    """What a program has found to be its part; made inside kernels."""

    seq: int
    start: int  # its first key
    end: int
    number: int  # among the parts of its request
    is_whole: bool  # it is the request's only one
    full: Tensor  # [SEQS], full parts of each request
    rest: Tensor  # [SEQS], 1 where a part is left over that is not full


class JoinSizes(NamedTuple):
    """What one program of the joining kernel works on at once."""

    ROWS: int  # pairs of a row and a head
    PARTS: int
    COLUMNS: int  # numbers of a value


# -- the host ------------------------------------------------------------------------------------
def join(
    parts: Parts, queries: Queries, tables: Tables, layer: Layer, cut: Cut, sizes: JoinSizes
) -> None:
    """Writes the attention of every request that has several parts."""
    num_seqs, table_width = tables.blocks.shape
    pairs = min(cut.BLOCK_M, triton.next_power_of_2(cut.rows * layer.per_kv))
    blocks = pairs // sizes.ROWS * (cut.BLOCK_D // sizes.COLUMNS)
    _join_kernel[(num_seqs, layer.kv_heads * cut.tiles, blocks)](
        parts,
        queries,
        tables,
        table_width,
        num_seqs,
        layer=layer,
        cut=cut,
        sizes=sizes,
        num_warps=4,
        **dependent_launch(queries.q),
    )


# -- inside kernels --------------------------------------------------------------------------------
@triton.jit
def blocks_of(
    position, table_width, rows: tl.constexpr, layer: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Returns the first block of keys, and the number of blocks, that a request's rows see.

    The rows begin at `position` and follow one another: none sees a key past it plus their number.
    """
    first = position * 0
    if layer.window > 0:
        first = tl.maximum(position - layer.window + 1, 0) // BLOCK_N
    end = tl.minimum(position + rows, table_width * layer.page_size)
    return first, tl.cdiv(end, BLOCK_N) - first


@triton.jit
def share_out(tables, num_seqs, table_width, layer: tl.constexpr, cut: tl.constexpr):
    """Returns how the keys of all requests are cut.

    These are the requests' first positions, their numbers of full parts, 1 where there is a rest
    (each [SEQS]), and the number of blocks of a full part.
    """
    s = tl.arange(0, cut.SEQS)
    row = s * cut.rows
    if tables.starts is not None:
        row = tl.load(tables.starts + s, mask=s < num_seqs, other=0, cache_modifier=".cg")
    starts = tl.load(tables.positions + row, mask=s < num_seqs, other=0, cache_modifier=".cg").to(
        tl.int32
    )
    _first, blocks = blocks_of(starts, table_width, cut.rows, layer, cut.BLOCK_N)
    blocks = tl.where(s < num_seqs, blocks, 0)
    groups: tl.constexpr = layer.kv_heads * cut.tiles
    part = tl.maximum(tl.cdiv(tl.sum(blocks, 0) * groups, cut.PROGRAMS), 1)
    return starts, blocks // part, (blocks % part > 0).to(tl.int32), part


@triton.jit
def find_part(number, tables, num_seqs, table_width, layer: tl.constexpr, cut: tl.constexpr):
    """Returns the `Part` of the program `number` of a group.

    All full parts come before all rests, so that what starts last is short. A program without a
    part has `seq` >= `num_seqs`.
    """
    starts, full, rest, size = share_out(tables, num_seqs, table_width, layer, cut)
    num_full = tl.sum(full, 0)
    is_rest = number >= num_full
    counts = tl.where(is_rest, rest, full)
    number -= tl.where(is_rest, num_full, 0)
    seq = tl.sum((tl.cumsum(counts, 0) <= number).to(tl.int32), 0)
    s = tl.arange(0, cut.SEQS)
    position = tl.sum(tl.where(s == seq, starts, 0), 0)
    first, blocks = blocks_of(position, table_width, cut.rows, layer, cut.BLOCK_N)
    number -= tl.sum(tl.where(s < seq, full, 0), 0)
    number = tl.where(is_rest, blocks // size, number)
    start = (first + number * size) * cut.BLOCK_N
    end = tl.minimum(start + size * cut.BLOCK_N, position + cut.rows)
    return Part(seq, start, end, number, blocks <= size, full, rest)


@triton.jit
def pairs_of(seq, group, m, start_ptr, layer: tl.constexpr, cut: tl.constexpr):
    """Returns row, head and whether they exist, of the pairs `m` of a request's group."""
    pair, head = m, group * layer.per_kv
    if cut.tiles > 1:  # then there is one KV head
        pair, head = group * cut.BLOCK_M + m, 0
    first, rows = seq * cut.rows, cut.rows
    if start_ptr is not None:
        first = tl.load(start_ptr + seq)
        rows = tl.load(start_ptr + seq + 1) - first
    return first + pair // layer.per_kv, head + pair % layer.per_kv, pair // layer.per_kv < rows


@triton.jit
def no_sums(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns the softmax sums over no keys."""
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return best, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def with_sinks(queries, head, is_pair, best, total, acc):
    """Returns the sums of weights and of weighted values with the heads' sinks added, if any.

    A sink is one more score, without a value. It is added once: to the sums over all keys.
    """
    if queries.sinks is not None:
        sinks = tl.load(queries.sinks + head, mask=is_pair, other=float("-inf")).to(tl.float32)
        sinks *= _LOG2_E
        new_best = tl.maximum(best, sinks)
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        keep = tl.exp2(best - base)
        total = total * keep + tl.exp2(sinks - base)
        acc = acc * keep[:, None]
    return total, acc


@triton.jit
def store_part(parts, part, group, m, best, total, acc, layer: tl.constexpr, cut: tl.constexpr):
    """Stores a part's softmax sums for the joining kernel."""
    groups: tl.constexpr = layer.kv_heads * cut.tiles
    before = _joined_before(part.seq, part.full + part.rest, cut)
    index = ((before + part.number) * groups + group) * cut.BLOCK_M + m
    d = tl.arange(0, cut.BLOCK_D)
    tl.store(parts.acc + index[:, None] * cut.BLOCK_D + d[None, :], acc)
    tl.store(parts.stats + index * 2, best)
    tl.store(parts.stats + index * 2 + 1, total)


@triton.jit
def _joined_before(seq, counts, cut: tl.constexpr):
    """Returns how many parts to join the requests before `seq` have.

    Args:
        counts: [SEQS], each request's parts.
    """
    s = tl.arange(0, cut.SEQS)
    return tl.sum(tl.where((s < seq) & (counts > 1), counts, 0), 0)


@triton.jit
def prefetch(begin, end, keys, page_size: tl.constexpr, dim: tl.constexpr, BLOCK_N: tl.constexpr):
    """Asks for a block of keys and values, so that they are in L2 when they are read."""
    n = tl.minimum(begin + tl.arange(0, BLOCK_N), end - 1)
    page = tl.minimum(n // page_size, keys.table_width - 1)
    block = tl.load(keys.blocks + page, cache_modifier=".cg")
    slot = block.to(tl.int64) * page_size + n % page_size
    size: tl.constexpr = keys.k.dtype.element_ty.primitive_bitwidth // 8
    for line in tl.static_range(0, dim * size, 128):
        for_k = (keys.k + slot * keys.k_row + line // size).to(tl.int64)
        for_v = (keys.v + slot * keys.v_row + line // size).to(tl.int64)
        _prefetch_l2(for_k)
        _prefetch_l2(for_v)


@triton.jit
def _prefetch_l2(address):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["table_width", "num_seqs"])
def _join_kernel(
    parts,
    queries,
    tables,
    table_width,
    num_seqs,
    layer: tl.constexpr,
    cut: tl.constexpr,
    sizes: tl.constexpr,
    PDL: tl.constexpr,
):
    """Joins COLUMNS numbers of ROWS pairs of one request and group, PARTS parts at a time."""
    ROWS: tl.constexpr = sizes.ROWS
    COLUMNS: tl.constexpr = sizes.COLUMNS
    groups: tl.constexpr = layer.kv_heads * cut.tiles
    columns: tl.constexpr = cut.BLOCK_D // COLUMNS
    seq, group = tl.program_id(0), tl.program_id(1)
    _starts, full, rest, _size = share_out(tables, num_seqs, table_width, layer, cut)
    s = tl.arange(0, cut.SEQS)
    count = tl.sum(tl.where(s == seq, full + rest, 0), 0)
    before = _joined_before(seq, full + rest, cut)
    after_previous(PDL)
    if count == 1:
        return
    m = tl.program_id(2) // columns * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(2) % columns * COLUMNS + tl.arange(0, COLUMNS)
    best, total, acc = no_sums(ROWS, COLUMNS)
    for begin in range(0, count, sizes.PARTS):
        part = begin + tl.arange(0, sizes.PARTS)
        index = ((before + part) * groups + group)[:, None] * cut.BLOCK_M + m[None, :]
        is_part = (part < count)[:, None] & (m < cut.BLOCK_M)[None, :]
        bests = tl.load(parts.stats + index * 2, mask=is_part, other=float("-inf"))
        totals = tl.load(parts.stats + index * 2 + 1, mask=is_part, other=0.0)
        sums = parts.acc + index[:, :, None] * cut.BLOCK_D + d[None, None, :]
        sums = tl.load(sums, mask=is_part[:, :, None], other=0.0)
        new_best = tl.maximum(best, tl.max(bests, 0))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(bests - base[None, :])
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(totals * weights, 0)
        acc = acc * keep[:, None] + tl.sum(sums * weights[:, :, None], 0)
        best = new_best
    row, head, is_pair = pairs_of(seq, group, m, tables.starts, layer, cut)
    total, acc = with_sinks(queries, head, is_pair, best, total, acc)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    inside = is_pair[:, None] & (d[None, :] < layer.dim)
    store_heads(queries, row.to(tl.int64), head, d, acc, inside)


@triton.jit
def load_heads(queries, row, head, d, inside):
    """Loads numbers `d` of the query heads (row, head), 0 where not `inside`."""
    pointer = queries.q + row[:, None] * queries.q_row + head[:, None] * queries.q_head + d[None, :]
    return tl.load(pointer, mask=inside, other=0.0)


@triton.jit
def store_heads(queries, row, head, d, out, inside):
    """Stores numbers `d` of the attention of the query heads (row, head)."""
    pointer = queries.out + row[:, None] * queries.out_row + head[:, None] * queries.out_head
    tl.store(pointer + d[None, :], out.to(queries.out.dtype.element_ty), mask=inside)
