"""Triton kernels of a mixture of experts; their twins are in `torch.py`.

Rows are sorted by expert, so that each expert's weights are read once for all of its rows. The
product below does so at the memory's speed up to some 32 rows an expert (docs/performance.md).
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch
from ..layer.norm import Norm
from ..layer.triton_norm import NormWeight

_ROUTER_COLUMNS = 4096


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """As its twin. One program works on each row and expert.

    The few rows read a weight that is in L2 by then, and a program per weight row is what hides its
    latency.
    """
    rows, size = x.shape
    out = torch.empty((rows, weight.shape[0]), dtype=torch.float32, device=x.device)
    _router_kernel[(rows, weight.shape[0])](
        x,
        weight,
        out,
        x.stride(0),
        size,
        BLOCK=min(_ROUTER_COLUMNS, triton.next_power_of_2(size)),
        **dependent_launch(x),
    )
    return out


@triton.jit
def _router_kernel(x_ptr, weight_ptr, out_ptr, x_row, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row's score of one expert."""
    after_previous(PDL)
    row, expert = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, total = tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        d = start + column
        x = tl.load(x_ptr + row * x_row + d, mask=d < size, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + expert * size + d, mask=d < size, other=0.0)
        total += x * weight.to(tl.float32)
    tl.store(out_ptr + row * tl.num_programs(1) + expert, tl.sum(total, 0))


def normed_router_logits(x: Tensor, norm: Norm, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As its namesake. Each program normalizes its row again, which takes no longer than to wait
    for another kernel."""
    rows, size = x.shape
    normed = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    out = torch.empty((rows, weight.shape[0]), dtype=torch.float32, device=x.device)
    _normed_router_kernel[(weight.shape[0], rows)](
        x,
        NormWeight(norm.weight, norm.eps),
        weight,
        normed,
        out,
        x.stride(0),
        size,
        OFFSET=norm.offset,
        BLOCK=triton.next_power_of_2(size),
        num_warps=4 if size <= 2048 else 8,  # as of `rms_norm`
        **dependent_launch(x),
    )
    return normed, out


@triton.jit
def _normed_router_kernel(
    x_ptr,
    norm,
    weight_ptr,
    normed_ptr,
    out_ptr,
    x_row,
    size,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row's score of one expert; the first expert's program keeps the row."""
    expert, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < size
    weight = tl.load(weight_ptr + expert * size + d, mask=inside, other=0.0).to(tl.float32)
    of_norm = tl.load(norm.weight + d, mask=inside, other=0.0).to(tl.float32) + OFFSET
    after_previous(PDL)
    x = tl.load(x_ptr + row * x_row + d, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + norm.eps)
    normed = (x * scale * of_norm).to(normed_ptr.dtype.element_ty)
    if expert == 0:
        tl.store(normed_ptr + row * size + d, normed, mask=inside)
    score = tl.sum(normed.to(tl.float32) * weight, 0)
    tl.store(out_ptr + row * tl.num_programs(0) + expert, score)


class Chosen(NamedTuple):
    """Where the chosen experts go, each [T, top_k]."""

    ids: Tensor
    weights: Tensor


class RouteSizes(NamedTuple):
    TOP_K: int
    TOPK_GROUP: int
    SIGMOID: bool
    NORMALIZE: bool
    GROUPS: int  # at least the groups, a power of two
    MEMBERS: int  # the same of a group's experts
    CHOICES: int  # the same of top_k


def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    scoring: str = "sigmoid",
    n_group: int = 1,
    topk_group: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
    logit_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As its twin; of equal scores the first expert's is taken. One program works on each row."""
    rows, count = logits.shape
    ids = torch.empty((rows, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    sizes = RouteSizes(
        TOP_K=top_k,
        TOPK_GROUP=topk_group,
        SIGMOID=scoring == "sigmoid",
        NORMALIZE=normalize,
        GROUPS=triton.next_power_of_2(n_group),
        MEMBERS=triton.next_power_of_2(count // n_group),
        CHOICES=triton.next_power_of_2(top_k),
    )
    _route_kernel[(rows,)](
        logits.contiguous(),
        logit_bias,
        bias,
        Chosen(ids, weights),
        count,
        count // n_group,
        n_group,
        scale,
        sizes=sizes,
        num_warps=1 if sizes.GROUPS * sizes.MEMBERS <= 256 else 4,
        **dependent_launch(logits),
    )
    return ids, weights


@triton.jit
def _route_kernel(
    logits_ptr,
    logit_bias_ptr,
    bias_ptr,
    chosen,
    count,
    per_group,
    n_group,
    scale,
    sizes: tl.constexpr,
    PDL: tl.constexpr,
):
    """The experts of one row, chosen one after the other."""
    after_previous(PDL)
    TOP_K: tl.constexpr = sizes.TOP_K
    TOPK_GROUP: tl.constexpr = sizes.TOPK_GROUP
    CHOICES: tl.constexpr = sizes.CHOICES
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, sizes.GROUPS), tl.arange(0, sizes.MEMBERS)
    experts = group[:, None] * per_group + member[None, :]  # [G, E/G]
    inside = (group[:, None] < n_group) & (member[None, :] < per_group)
    nothing = float("-inf")
    logits = tl.load(logits_ptr + row * count + experts, mask=inside, other=nothing)
    if logit_bias_ptr is not None:
        logits += tl.load(logit_bias_ptr + experts, mask=inside, other=0.0)
    if sizes.SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + experts, mask=inside, other=0.0)
    choice = tl.where(inside & (choice == choice), choice, nothing)  # NaN is chosen last
    if sizes.GROUPS > 1:
        best = tl.max(choice, 1)
        others = tl.where(member[None, :] == tl.argmax(choice, 1)[:, None], nothing, choice)
        sums = best + tl.max(others, 1)
        searched = group < 0
        for _ in tl.static_range(TOPK_GROUP):
            taken = group == tl.argmax(sums, 0)
            searched = searched | taken
            sums = tl.where(taken, nothing, sums)
        choice = tl.where(searched[:, None], choice, nothing)
    size: tl.constexpr = sizes.GROUPS * sizes.MEMBERS
    choice, scores = tl.reshape(choice, [size]), tl.reshape(scores, [size])
    experts, index = tl.reshape(experts, [size]), tl.arange(0, size)
    slot = tl.arange(0, CHOICES)
    ids, weights = tl.zeros([CHOICES], tl.int32), tl.zeros([CHOICES], tl.float32)
    nan = tl.max((scores != scores).to(tl.int32), 0)
    for i in tl.static_range(TOP_K):
        taken = index == tl.argmax(choice, 0)
        ids = tl.where(slot == i, tl.sum(tl.where(taken, experts, 0), 0), ids)
        weights = tl.where(slot == i, tl.sum(tl.where(taken, scores, 0.0), 0), weights)
        choice = tl.where(taken, nothing, choice)
    if sizes.NORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    weights = tl.where(nan > 0, float("nan"), weights)  # which would else be lost with its expert
    tl.store(chosen.ids + row * TOP_K + slot, ids.to(tl.int64), mask=slot < TOP_K)
    tl.store(chosen.weights + row * TOP_K + slot, weights * scale, mask=slot < TOP_K)


def sort_by_expert(ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As its twin. One program works for each expert and looks at all pairs.

    An expert's pairs begin where those of the experts before it end, and each program counts them,
    so none waits for another.
    """
    pairs, device = ids.numel(), ids.device
    rows = torch.empty(pairs, dtype=torch.int64, device=device)
    positions = torch.empty(pairs, dtype=torch.int64, device=device)
    ends = torch.empty(count, dtype=torch.int32, device=device)
    block = min(1024, triton.next_power_of_2(max(pairs, 1)))
    _sort_kernel[(count,)](
        ids.contiguous(),
        rows,
        positions,
        ends,
        pairs,
        ids.shape[1],
        BLOCK=block,
        **dependent_launch(ids),
    )
    return rows, ends, positions


@triton.jit
def _sort_kernel(
    ids_ptr, rows_ptr, positions_ptr, ends_ptr, pairs, top_k, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """The pairs of one expert."""
    after_previous(PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before, count = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        pair = start + lane
        ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=1 << 30).to(tl.int32)
        before += (ids < expert).to(tl.int32)
        count += (ids == expert).to(tl.int32)
    begin = tl.sum(before, 0)
    tl.store(ends_ptr + expert, begin + tl.sum(count, 0))
    for start in range(0, pairs, BLOCK):
        pair = start + lane
        ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=1 << 30).to(tl.int32)
        mine = (ids == expert).to(tl.int32)
        position = begin + tl.cumsum(mine, 0) - 1
        tl.store(rows_ptr + position, (pair // top_k).to(tl.int64), mask=mine > 0)
        tl.store(positions_ptr + pair, position.to(tl.int64), mask=mine > 0)
        begin += tl.sum(mine, 0)


class Tiles(NamedTuple):
    """The tile of a product that one program computes, and how."""

    ROWS: int
    COLUMNS: int
    DEPTH: int
    COUNT: int  # at least the experts, a power of two
    PRECISION: str


def grouped_matmul(
    x: Tensor, weight: Tensor, ends: Tensor, average: float, bias: Tensor | None = None
) -> Tensor:
    """As its twin. Expert e's rows end at ends[e], which stays on the device.

    So tiles of rows are counted there, and the grid has as many as there can be at most.
    """
    pairs, size = x.shape
    count, columns = weight.shape[:2]
    out = torch.empty((pairs, columns), dtype=x.dtype, device=x.device)
    shape = _tile(average, x.dtype)
    tiles = min(triton.cdiv(pairs, shape.rows) + count, pairs)
    _grouped_matmul_kernel[(tiles, triton.cdiv(columns, shape.columns))](
        x,
        weight,
        bias,
        ends,
        out,
        columns,
        size,
        count,
        tiles=Tiles(
            ROWS=shape.rows,
            COLUMNS=shape.columns,
            DEPTH=shape.depth,
            COUNT=triton.next_power_of_2(count),
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        ),
        num_stages=shape.stages,
        num_warps=shape.warps,
        **dependent_launch(x),
    )
    return out


class TileShape(NamedTuple):
    rows: int
    columns: int
    depth: int
    stages: int = 3
    warps: int = 4


def _tile(rows_per_expert: float, dtype: torch.dtype) -> TileShape:
    """Returns the fastest tile, by measurement on an H200."""
    if dtype == torch.float32:
        return TileShape(16 if rows_per_expert < 12 else 64, 64, 32)
    if rows_per_expert < 12:
        return TileShape(16, 64, 128)
    if rows_per_expert < 32:
        return TileShape(64, 64, 64)
    return TileShape(64, 128, 64, stages=4, warps=8)


@triton.jit
def find_tile(ends_ptr, count, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """The expert whose rows this program's tile has, the tile's first row, and the expert's end.

    A program without a tile gets `count` or more for the expert.
    """
    tile, experts = tl.program_id(0), tl.arange(0, COUNT)
    ends = tl.load(ends_ptr + experts, mask=experts < count, other=0)
    begins = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < count), other=0)
    counts = (ends - begins + ROWS - 1) // ROWS
    last_tiles = tl.cumsum(counts, 0)  # [E], one past each expert's last
    expert = tl.sum(((last_tiles <= tile) & (experts < count)).to(tl.int32), 0)
    mine = experts == expert
    begin, end = tl.sum(tl.where(mine, begins, 0), 0), tl.sum(tl.where(mine, ends, 0), 0)
    first_tile = tl.sum(tl.where(mine, last_tiles - counts, 0), 0)
    return expert, begin + (tile - first_tile) * ROWS, end


@triton.jit
def _grouped_matmul_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ends_ptr,
    out_ptr,
    columns,
    size,
    count,
    tiles: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of one expert's rows."""
    ROWS: tl.constexpr = tiles.ROWS
    COLUMNS: tl.constexpr = tiles.COLUMNS
    after_previous(PDL)
    expert, begin, end = find_tile(ends_ptr, count, ROWS, tiles.COUNT)
    if expert >= count:
        return
    row = begin + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x_ptrs = x_ptr + row[:, None].to(tl.int64) * size
    weight_ptrs = weight_ptr + (expert.to(tl.int64) * columns + column[None, :]) * size
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, size, tiles.DEPTH):
        d = start + tl.arange(0, tiles.DEPTH)
        x_inside = (row[:, None] < end) & (d[None, :] < size)
        x = tl.load(x_ptrs + d[None, :], mask=x_inside, other=0.0)
        inside = (column[None, :] < columns) & (d[:, None] < size)
        weight = tl.load(weight_ptrs + d[:, None], mask=inside, other=0.0)
        total = tl.dot(x, weight, total, input_precision=tiles.PRECISION)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * columns + column, mask=column < columns, other=0.0)
        total += bias.to(tl.float32)[None, :]
    out_ptrs = out_ptr + row[:, None].to(tl.int64) * columns + column[None, :]
    inside = (row[:, None] < end) & (column[None, :] < columns)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_turned(total, bias_ptr, out_ptr, expert, rows, columns):
    """Stores a tile's sums [C, R], with the expert's bias.

    Args:
        rows: the tile's rows [R] and the end of the expert's. columns: the tile's [C] and all.
    """
    row, end = rows
    column, count = columns
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * count + column, mask=column < count, other=0.0)
        total += bias.to(tl.float32)[:, None]
    out_ptrs = out_ptr + row[:, None].to(tl.int64) * count + column[None, :]
    inside = (row[:, None] < end) & (column[None, :] < count)
    tl.store(out_ptrs, tl.trans(total).to(out_ptr.dtype.element_ty), mask=inside)


def combine(
    y: Tensor, positions: Tensor, weights: Tensor, residual: Tensor | None = None
) -> Tensor:
    """As its twin."""
    rows, top_k = weights.shape
    size = y.shape[1]
    out = residual
    if out is None:
        out = torch.empty((rows, size), dtype=y.dtype, device=y.device)
    block = min(1024, triton.next_power_of_2(size))
    _combine_kernel[(rows, triton.cdiv(size, block))](
        y,
        positions,
        weights.contiguous(),
        out,
        y.stride(0),
        out.stride(0),
        size,
        ADDS=residual is not None,
        TOP_K=top_k,
        BLOCK=block,
        **dependent_launch(y),
    )
    return out


@triton.jit
def _combine_kernel(
    y_ptr,
    positions_ptr,
    weights_ptr,
    out_ptr,
    y_row,
    out_row,
    size,
    ADDS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK numbers of one row."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        position = tl.load(positions_ptr + row * TOP_K + i)
        weight = tl.load(weights_ptr + row * TOP_K + i)
        y = tl.load(y_ptr + position * y_row + d, mask=d < size, other=0.0)
        total += weight * y.to(tl.float32)
    out_ptrs = out_ptr + row * out_row + d
    if ADDS:
        total += tl.load(out_ptrs, mask=d < size, other=0.0).to(tl.float32)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=d < size)
