"""Triton kernels of a mixture of experts; their twins in torch are in `moe.py`.

Rows are sorted by expert, so that each expert's weights are read once for all of its rows: the
product below does so at the memory's speed up to some 32 rows an expert (docs/performance.md).
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch

_ROUTER_COLUMNS = 4096


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """As `moe.router_logits`. One program for each row and expert: the few rows read a weight that
    is in L2 by then, and a program per weight row is what hides its latency."""
    rows, size = x.shape
    out = torch.empty((rows, weight.shape[0]), dtype=torch.float32, device=x.device)
    _router_kernel[(rows, weight.shape[0])](
        x, weight, out, x.stride(0), size, BLOCK=min(_ROUTER_COLUMNS, triton.next_power_of_2(size)),
        **dependent_launch(x),
    )  # fmt: skip
    return out


@triton.jit
def _router_kernel(x_ptr, weight_ptr, out_ptr, x_row, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    row, expert = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, total = tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        d = start + column
        x = tl.load(x_ptr + row * x_row + d, mask=d < size, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + expert * size + d, mask=d < size, other=0.0)
        total += x * weight.to(tl.float32)
    tl.store(out_ptr + row * tl.num_programs(1) + expert, tl.sum(total, 0))


def route(
    logits: Tensor, bias: Tensor | None, top_k: int, *, scoring: str, n_group: int,
    topk_group: int, normalize: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `moe.route`; of equal scores the first expert's is taken. One program for each row."""
    rows, count = logits.shape
    ids = torch.empty((rows, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    groups, places = triton.next_power_of_2(n_group), triton.next_power_of_2(count // n_group)
    _route_kernel[(rows,)](
        logits.contiguous(), logits if bias is None else bias, ids, weights, count,
        count // n_group, n_group, scale, TOP_K=top_k, TOPK_GROUP=topk_group,
        HAS_BIAS=bias is not None, SIGMOID=scoring == "sigmoid", NORMALIZE=normalize,
        GROUPS=groups, PLACES=places, CHOICES=triton.next_power_of_2(top_k),
        num_warps=1 if groups * places <= 256 else 4, **dependent_launch(logits),
    )  # fmt: skip
    return ids, weights


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, count, per_group, n_group, scale,
    TOP_K: tl.constexpr, TOPK_GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr, GROUPS: tl.constexpr, PLACES: tl.constexpr, CHOICES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, GROUPS), tl.arange(0, PLACES)
    experts = group[:, None] * per_group + place[None, :]  # [G, E/G]
    inside = (group[:, None] < n_group) & (place[None, :] < per_group)
    nothing = float("-inf")
    logits = tl.load(logits_ptr + row * count + experts, mask=inside, other=nothing)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + experts, mask=inside, other=0.0)
    choice = tl.where(inside & (choice == choice), choice, nothing)  # NaN is chosen last
    if GROUPS > 1:
        best = tl.max(choice, 1)
        others = tl.where(place[None, :] == tl.argmax(choice, 1)[:, None], nothing, choice)
        sums = best + tl.max(others, 1)
        searched = group < 0
        for _ in tl.static_range(TOPK_GROUP):
            taken = group == tl.argmax(sums, 0)
            searched = searched | taken
            sums = tl.where(taken, nothing, sums)
        choice = tl.where(searched[:, None], choice, nothing)
    size: tl.constexpr = GROUPS * PLACES
    choice, scores = tl.reshape(choice, [size]), tl.reshape(scores, [size])
    experts, index = tl.reshape(experts, [size]), tl.arange(0, size)
    slot = tl.arange(0, CHOICES)
    ids, weights = tl.zeros([CHOICES], tl.int32), tl.zeros([CHOICES], tl.float32)
    for i in tl.static_range(TOP_K):
        taken = index == tl.argmax(choice, 0)
        ids = tl.where(slot == i, tl.sum(tl.where(taken, experts, 0), 0), ids)
        weights = tl.where(slot == i, tl.sum(tl.where(taken, scores, 0.0), 0), weights)
        choice = tl.where(taken, nothing, choice)
    if NORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    tl.store(ids_ptr + row * TOP_K + slot, ids.to(tl.int64), mask=slot < TOP_K)
    tl.store(weights_ptr + row * TOP_K + slot, weights * scale, mask=slot < TOP_K)


def sort_by_expert(ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `moe.sort_by_expert`. One program for each expert, which looks at all pairs: where its
    own begin is the number of those of experts before it, so no program waits for another."""
    pairs, device = ids.numel(), ids.device
    rows = torch.empty(pairs, dtype=torch.int64, device=device)
    places = torch.empty(pairs, dtype=torch.int64, device=device)
    ends = torch.empty(count, dtype=torch.int32, device=device)
    block = min(1024, triton.next_power_of_2(max(pairs, 1)))
    _sort_kernel[(count,)](
        ids.contiguous(), rows, places, ends, pairs, ids.shape[1], BLOCK=block,
        **dependent_launch(ids),
    )  # fmt: skip
    return rows, ends, places


@triton.jit
def _sort_kernel(
    ids_ptr, rows_ptr, places_ptr, ends_ptr, pairs, top_k, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    after_previous(PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before, own = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        pair = start + lane
        ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=1 << 30).to(tl.int32)
        before += (ids < expert).to(tl.int32)
        own += (ids == expert).to(tl.int32)
    begin = tl.sum(before, 0)
    tl.store(ends_ptr + expert, begin + tl.sum(own, 0))
    for start in range(0, pairs, BLOCK):
        pair = start + lane
        ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=1 << 30).to(tl.int32)
        mine = (ids == expert).to(tl.int32)
        place = begin + tl.cumsum(mine, 0) - 1
        tl.store(rows_ptr + place, (pair // top_k).to(tl.int64), mask=mine > 0)
        tl.store(places_ptr + pair, place.to(tl.int64), mask=mine > 0)
        begin += tl.sum(mine, 0)


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [N, K], sorted by expert, each times its own of weight [E, M, K]: [N, M]. Expert e's rows
    end at ends[e], which stays on the device: tiles of rows are counted out there, and the grid has
    as many as there can be at most."""
    pairs, size = x.shape
    count, columns = weight.shape[:2]
    out = torch.empty((pairs, columns), dtype=x.dtype, device=x.device)
    rows, width, depth, stages, warps = _tile(pairs / count, x.dtype)
    tiles = min(triton.cdiv(pairs, rows) + count, pairs)
    _grouped_matmul_kernel[(tiles, triton.cdiv(columns, width))](
        x, weight, ends, out, pairs, columns, size, count, ROWS=rows, COLUMNS=width, DEPTH=depth,
        COUNT=triton.next_power_of_2(count), num_stages=stages, num_warps=warps,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **dependent_launch(x),
    )  # fmt: skip
    return out


def _tile(rows_per_expert: float, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Rows, columns, depth, stages and warps, by measurement on an H200."""
    if dtype == torch.float32:
        return (16 if rows_per_expert < 12 else 64), 64, 32, 3, 4
    if rows_per_expert < 12:
        return 16, 64, 128, 3, 4
    return (64, 64, 64, 3, 4) if rows_per_expert < 32 else (64, 128, 64, 4, 8)


@triton.jit
def _grouped_matmul_kernel(
    x_ptr, weight_ptr, ends_ptr, out_ptr, pairs, columns, size, count, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, COUNT: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    tile, experts = tl.program_id(0), tl.arange(0, COUNT)
    ends = tl.load(ends_ptr + experts, mask=experts < count, other=0)
    begins = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < count), other=0)
    tiles = (ends - begins + ROWS - 1) // ROWS
    last_tiles = tl.cumsum(tiles, 0)  # [E], one past each expert's last
    expert = tl.sum(((last_tiles <= tile) & (experts < count)).to(tl.int32), 0)
    if expert >= count:
        return
    mine = experts == expert
    begin, end = tl.sum(tl.where(mine, begins, 0), 0), tl.sum(tl.where(mine, ends, 0), 0)
    first_tile = tl.sum(tl.where(mine, last_tiles - tiles, 0), 0)
    row = begin + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x_ptrs = x_ptr + row[:, None].to(tl.int64) * size
    weight_ptrs = weight_ptr + (expert.to(tl.int64) * columns + column[None, :]) * size
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, size, DEPTH):
        d = start + tl.arange(0, DEPTH)
        x_inside = (row[:, None] < end) & (d[None, :] < size)
        x = tl.load(x_ptrs + d[None, :], mask=x_inside, other=0.0)
        inside = (column[None, :] < columns) & (d[:, None] < size)
        weight = tl.load(weight_ptrs + d[:, None], mask=inside, other=0.0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
    out_ptrs = out_ptr + row[:, None].to(tl.int64) * columns + column[None, :]
    inside = (row[:, None] < end) & (column[None, :] < columns)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)


def combine(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """As `moe.combine`."""
    rows, top_k = weights.shape
    size = y.shape[1]
    out = torch.empty((rows, size), dtype=y.dtype, device=y.device)
    block = min(1024, triton.next_power_of_2(size))
    _combine_kernel[(rows, triton.cdiv(size, block))](
        y, places, weights.contiguous(), out, y.stride(0), size, TOP_K=top_k, BLOCK=block,
        **dependent_launch(y),
    )  # fmt: skip
    return out


@triton.jit
def _combine_kernel(
    y_ptr, places_ptr, weights_ptr, out_ptr, y_row, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        place = tl.load(places_ptr + row * TOP_K + i)
        weight = tl.load(weights_ptr + row * TOP_K + i)
        total += weight * tl.load(y_ptr + place * y_row + d, mask=d < size, other=0.0).to(
            tl.float32
        )
    tl.store(out_ptr + row * size + d, total.to(out_ptr.dtype.element_ty), mask=d < size)
