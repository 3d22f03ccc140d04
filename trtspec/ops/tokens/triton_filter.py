"""Top-k and top-p in Triton without a sort: which logits of a row are kept, and their sum.

Twin: `apply_filters` in `sample.py`.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...metadata.sampling import SamplingMetadata
from ..launch.triton import after_previous
from . import triton_stats
from .triton_stats import LOW_BITS, Rows, clean, divisor_of, key_of, row_total, take_statistics

CAPACITY = 8192
"""Candidates of a row that the filters can put aside; with more they search the whole row."""
FILTER_WARPS = 8
_GROUP = 64  # parts that the filters read at a time


class _Scratch(NamedTuple):
    """Scratch memory of the filters."""

    parts: Tensor  # [R, P] float32, largest logit of every part
    num_parts: int
    live: Tensor  # [R, P] int32, the parts that hold candidates
    candidates: Tensor  # [R, CAPACITY] float32
    indices: Tensor  # [R, CAPACITY] int32, their indices


class _Sizes(NamedTuple):
    """What the filter's kernel is compiled for."""

    CAPACITY: int
    PART: int
    PARTS: int
    GROUP: int
    CHUNKS: int
    LOW_BITS: int


class _Values(NamedTuple):
    """Logits among which the filters search."""

    x: Tensor  # [length]
    indices: Tensor | None  # [length] int32, their indices; None: 0 … length-1
    length: int


class _Scale(NamedTuple):
    """A logit x weighs exp((x - base) / temperature)."""

    temperature: float
    base: float


def analyse(logits: Tensor, sampling: SamplingMetadata, launch: dict[str, bool]) -> Rows:
    """Takes the statistics of every row, and filters the rows if a request asks for it.

    Args:
        logits: [R, V], each row contiguous. sampling: R rows, contiguous.
        launch: of `dependent_launch`.
    """
    rows, parts = take_statistics(logits, sampling, launch)
    if parts is not None:
        _filter(rows, parts, sampling, launch)
    return rows


def _filter(rows: Rows, parts: Tensor, sampling: SamplingMetadata, launch: dict[str, bool]) -> None:
    """Writes threshold, last and kept. parts: [R, P] float32, largest logit of every part."""
    device, (num_rows, num_parts) = parts.device, parts.shape
    capacity = min(CAPACITY, rows.vocab)
    scratch = _Scratch(
        parts=parts,
        num_parts=num_parts,
        live=torch.empty(parts.shape, dtype=torch.int32, device=device),
        candidates=torch.empty((num_rows, capacity), dtype=torch.float32, device=device),
        indices=torch.empty((num_rows, capacity), dtype=torch.int32, device=device),
    )
    sizes = _Sizes(
        CAPACITY=capacity,
        PART=triton_stats.PART,
        PARTS=triton.next_power_of_2(num_parts),
        GROUP=_GROUP,
        CHUNKS=triton.next_power_of_2(rows.chunks),
        LOW_BITS=LOW_BITS[rows.logits.dtype],
    )
    _filter_kernel[(num_rows,)](
        rows,
        sampling.top_ks,
        sampling.top_ps,
        scratch,
        SIZES=sizes,
        num_warps=FILTER_WARPS,
        **launch,
    )


@triton.jit
def _filter_kernel(rows, top_k_ptr, top_p_ptr, scratch, SIZES: tl.constexpr, PDL: tl.constexpr):
    """Filters one row in two passes.

    The largest logits of all parts give a lower bound of what passes: the largest key that k of
    them reach (top-k), or that some of them reach which together weigh top_p. A key below which
    everything together weighs less than 1 - top_p is a bound too. Logits above the bound are copied
    aside as candidates, from the parts that have any. The search goes on among these.
    """
    after_previous(PDL)
    CAPACITY: tl.constexpr = SIZES.CAPACITY
    PART: tl.constexpr = SIZES.PART
    PARTS: tl.constexpr = SIZES.PARTS
    GROUP: tl.constexpr = SIZES.GROUP
    LOW_BITS: tl.constexpr = SIZES.LOW_BITS
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(rows.temperatures + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    top_k = tl.where(top_k >= rows.vocab, 0, top_k)
    base, total = row_total(rows, row, divisor_of(temperature), SIZES.CHUNKS)
    lowest = key_of(tl.full([], float("-inf"), tl.float32), LOW_BITS)
    threshold, last, kept = lowest, 0x7FFFFFFF, total
    if (temperature > 0) & ((top_k > 0) | (top_p < 1.0)):
        num_parts = scratch.num_parts
        parts_ptr = scratch.parts + row * num_parts
        largest, scale = _Values(parts_ptr, None, num_parts), _Scale(temperature, base)
        highest = key_of(base, LOW_BITS)
        bound = lowest
        if top_k > 0:
            if top_k <= num_parts:
                wanted = top_k.to(tl.float32)
                bound, _ = _between(
                    largest, lowest, highest + 1, wanted, scale, True, LOW_BITS, PARTS
                )
        else:
            below, _ = _between(
                largest, lowest - 1, highest, top_p * total, scale, False, LOW_BITS, PARTS
            )
            far = base + temperature * tl.log(0.5 * (1.0 - top_p) * total / rows.vocab)
            bound = tl.maximum(below + 1, key_of(far, LOW_BITS))
        i = tl.arange(0, PARTS)
        parts = tl.load(parts_ptr + i, mask=i < num_parts, other=float("-inf"))
        is_live = (key_of(parts, LOW_BITS) >= bound) & (i < num_parts)
        order = tl.cumsum(is_live.to(tl.int32), 0) - 1
        tl.store(scratch.live + row * num_parts + order, i, mask=is_live)
        num_live = tl.sum(is_live.to(tl.int32), 0)
        tl.debug_barrier()  # other threads' stores must be done
        count = 0
        for start in range(0, num_live, GROUP):
            j = start + tl.arange(0, GROUP)
            live_ptr = scratch.live + row * num_parts
            part = tl.load(live_ptr + j, mask=j < num_live, other=num_parts)
            v = tl.reshape(part[:, None] * PART + tl.arange(0, PART)[None, :], [GROUP * PART])
            logits_ptr = rows.logits + row * rows.stride
            x = clean(tl.load(logits_ptr + v, mask=v < rows.vocab, other=float("-inf")))
            is_candidate = (key_of(x, LOW_BITS) >= bound) & (v < rows.vocab)
            entry = count + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
            fits = is_candidate & (entry < CAPACITY)
            tl.store(scratch.candidates + row * CAPACITY + entry, x, mask=fits)
            tl.store(scratch.indices + row * CAPACITY + entry, v, mask=fits)
            count += tl.sum(is_candidate.to(tl.int32), 0)
        tl.debug_barrier()
        if count <= CAPACITY:
            offset = row * CAPACITY
            found = _Values(scratch.candidates + offset, scratch.indices + offset, count)
            threshold, last, kept = _search(found, top_k, top_p, scale, total, bound, LOW_BITS)
        else:
            whole = _Values(rows.logits + row * rows.stride, None, rows.vocab)
            threshold, last, kept = _search(whole, top_k, top_p, scale, total, bound, LOW_BITS)
    tl.store(rows.threshold + row, threshold)
    tl.store(rows.last + row, last)
    tl.store(rows.kept + row, kept)


@triton.jit
def _between(
    values,
    low,
    high,
    wanted,
    scale,
    COUNTS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns neighbouring keys between low and high that enclose `wanted`.

    With COUNTS `wanted` values reach the first key and not the second. Otherwise what is above the
    first weighs `wanted`, and what is above the second does not. Seven keys are tried at a time.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    i = tl.arange(0, 8)
    while low + 1 < high:
        tried = low + ((high - low) * i >> 3)  # the first is low itself, which is known
        sums = tl.zeros([8], tl.float32)
        for start in range(0, values.length, BLOCK):
            x = _values_at(values, start, BLOCK)
            keys = key_of(x, LOW_BITS).to(tl.int64)[:, None]
            if COUNTS:
                weights = tl.where(keys >= tried[None, :], 1.0, 0.0)
            else:
                weight = tl.exp((x - scale.base) / scale.temperature)[:, None]
                weights = tl.where(keys > tried[None, :], weight, 0.0)
            sums += tl.sum(weights, 0)
        reached = tl.sum(((sums >= wanted) | (i == 0)).to(tl.int64), 0)
        width = high - low
        high = low + (width * reached >> 3)
        low += width * (reached - 1) >> 3
    return low.to(tl.int32), high.to(tl.int32)


@triton.jit
def _search(values, top_k, top_p, scale, total, bound, LOW_BITS: tl.constexpr):
    """Returns (smallest key that passes, last index at which it passes, sum of what passes).

    Nothing below the bound passes. Without top-k `total` is the sum over all logits, not over these
    values alone.
    """
    BLOCK: tl.constexpr = 1024
    highest = key_of(scale.base, LOW_BITS)
    threshold, equals, room, kept = bound, 0, 0x7FFFFFFF, total
    if top_k > 0:
        wanted = top_k.to(tl.float32)
        threshold, _ = _between(values, bound, highest + 1, wanted, scale, True, LOW_BITS, BLOCK)
        number, equals, weight, kept = _around(values, threshold, scale, LOW_BITS, BLOCK)
        room = top_k - number
        kept += room * weight
    if top_p < 1.0:
        wanted, first, first_room = top_p * kept, threshold, room
        _, threshold = _between(values, first - 1, highest, wanted, scale, False, LOW_BITS, BLOCK)
        threshold = tl.maximum(threshold, first)  # top_p * all may round to more than all
        number, equals, weight, kept = _around(values, threshold, scale, LOW_BITS, BLOCK)
        room = tl.where(threshold == first, first_room, equals)
        needed = tl.ceil((wanted - kept) / weight)
        room = tl.maximum(tl.minimum(needed, room.to(tl.float32)), 1.0).to(tl.int32)
        kept += room * weight
    last = 0x7FFFFFFF
    if room < equals:  # of logits that are the same, the first
        seen = 0
        for start in range(0, values.length, BLOCK):
            v = start + tl.arange(0, BLOCK)
            x = _values_at(values, start, BLOCK)
            is_equal = (key_of(x, LOW_BITS) == threshold) & (v < values.length)
            order = seen + tl.cumsum(is_equal.to(tl.int32), 0)
            entry = v
            if values.indices is not None:
                entry = tl.load(values.indices + v, mask=v < values.length, other=0)
            entry = tl.where(is_equal & (order == room), entry, 0x7FFFFFFF)
            last = tl.minimum(last, tl.min(entry, 0))
            seen += tl.sum(is_equal.to(tl.int32), 0)
    return threshold, last, kept


@triton.jit
def _values_at(values, start, BLOCK: tl.constexpr):
    v = start + tl.arange(0, BLOCK)
    return clean(tl.load(values.x + v, mask=v < values.length, other=float("-inf")))


@triton.jit
def _around(values, key, scale, LOW_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns (number of logits above the key, number at it, weight of one at it, sum of the
    weights above)."""
    above, equals = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    value = float("-inf")
    for start in range(0, values.length, BLOCK):
        x = _values_at(values, start, BLOCK)
        keys = key_of(x, LOW_BITS)
        inside = start + tl.arange(0, BLOCK) < values.length
        above += (keys > key).to(tl.int32)
        equals += ((keys == key) & inside).to(tl.int32)
        mass += tl.where(keys > key, tl.exp((x - scale.base) / scale.temperature), 0.0)
        value = tl.maximum(value, tl.max(tl.where(keys == key, x, float("-inf")), 0))
    weight = tl.exp((value - scale.base) / scale.temperature)
    return tl.sum(above, 0), tl.sum(equals, 0), weight, tl.sum(mass, 0)
