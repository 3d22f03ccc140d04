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
TRIED_PARTS = 64
"""How many parts reach the first key tried for top-p, if the parts' largest weigh too little."""
FILTER_WARPS = 8
_GROUP = 64  # parts that the filters read at a time
_LEAST_TEMPERATURE = tl.constexpr(1e-30)
_BLOCK, _WHOLE_BLOCK = tl.constexpr(1024), tl.constexpr(2048)
"""Values that a search reads at a time, among candidates and in a whole row."""


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
    TRIED: int
    CHUNKS: int
    LOW_BITS: int


class _Values(NamedTuple):
    """Logits among which the filters search."""

    x: Tensor  # [length]
    indices: Tensor | None  # [length] int32, their indices; None: 0 … length-1
    length: int


class _Scale(NamedTuple):
    """A logit x weighs exp((x - base) * rate)."""

    rate: float  # 1 / temperature
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
        TRIED=min(TRIED_PARTS, num_parts),
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
    """Filters one row.

    What passes is above some key that the largest logits of all parts tell. Logits above it are
    copied aside as candidates, from the parts that have any, and the search goes on among these.

    - top-k: the largest key that k of the parts' largest reach.
    - top-p: the largest key such that those of them that reach it weigh top_p together. There may
      be none, for likely tokens may share a part. Then the key is tried that TRIED parts reach,
      then that of four times as many, until the candidates weigh enough. At last a key is taken
      below which everything together weighs less than 1 - top_p.

    A flat row has too many candidates. There the range is narrowed first that the threshold is in.
    """
    after_previous(PDL)
    LOW_BITS: tl.constexpr = SIZES.LOW_BITS
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(rows.temperatures + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    top_k = tl.where(top_k >= rows.vocab, 0, top_k)
    base, total = row_total(rows, row, divisor_of(temperature), SIZES.CHUNKS)
    lowest = key_of(tl.full([], float("-inf"), tl.float32), LOW_BITS)
    threshold, last, kept = lowest, 0x7FFFFFFF, total
    if (temperature > 0) & ((top_k > 0) | (top_p < 1.0)):
        num_parts, parts_ptr = scratch.num_parts, scratch.parts + row * scratch.num_parts
        largest = _Values(parts_ptr, None, num_parts)
        scale = _Scale(1.0 / tl.maximum(temperature, _LEAST_TEMPERATURE), base)
        highest, wanted = key_of(base, LOW_BITS), top_p * total
        i = tl.arange(0, SIZES.PARTS)
        parts = tl.load(parts_ptr + i, mask=i < num_parts, other=float("inf"))
        sure = lowest  # nothing below this key passes
        bound, tried = sure, tl.zeros([], tl.int32) + SIZES.TRIED
        far, above = base, 0.0
        if top_k > 0:
            tried = top_k
        else:
            far = base + temperature * tl.log(0.5 * (1.0 - top_p) * total / rows.vocab)
            sure = key_of(far, LOW_BITS)
            below, _ = _between(
                largest, lowest - 1, highest, wanted, scale, False, LOW_BITS, SIZES.PARTS
            )
            if below >= lowest:
                bound = tl.maximum(below + 1, sure)
                sure, tried = bound, 0
        count, is_done = 0, False
        while not is_done:
            if tried > num_parts:
                bound = sure
            elif tried > 0:
                reached = tried.to(tl.float32)
                bound, _ = _between(
                    largest, lowest, highest + 1, reached, scale, True, LOW_BITS, SIZES.PARTS
                )
                bound = tl.maximum(bound, sure)
            count, mass = _copy_aside(rows, row, parts, scratch, bound, highest, scale, SIZES)
            is_done = (top_k > 0) | (bound <= sure) | (mass >= wanted) | (count > SIZES.CAPACITY)
            tried = tl.where(tried < num_parts, tl.minimum(4 * tried, num_parts), num_parts + 1)
        whole = _Values(rows.logits + row * rows.stride, None, rows.vocab)
        if top_k > 0:
            sure = bound
        elif count > SIZES.CAPACITY:
            low, high, above = _narrow(whole, far, base, wanted, scale, LOW_BITS, _WHOLE_BLOCK)
            bound = tl.maximum(low, sure)
            count, _ = _copy_aside(rows, row, parts, scratch, bound, high, scale, SIZES)
        if count <= SIZES.CAPACITY:
            offset = row * SIZES.CAPACITY
            found = _Values(scratch.candidates + offset, scratch.indices + offset, count)
            threshold, last, kept = _search(
                found, top_k, top_p, scale, total, above, bound, LOW_BITS, _BLOCK
            )
        else:
            threshold, last, kept = _search(
                whole, top_k, top_p, scale, total, 0.0, sure, LOW_BITS, _WHOLE_BLOCK
            )
    tl.store(rows.threshold + row, threshold)
    tl.store(rows.last + row, last)
    tl.store(rows.kept + row, kept)


@triton.jit
def _copy_aside(rows, row, parts, scratch, bound, upper, scale, SIZES: tl.constexpr):
    """Copies a row's logits to the scratch memory.

    Args:
        bound, upper: the lowest and the highest key of what is copied.
        parts: [PARTS], the largest logit of every part.

    Returns:
        (their number, their weight). With more than CAPACITY the rest is not looked at.
    """
    CAPACITY: tl.constexpr = SIZES.CAPACITY
    PART: tl.constexpr = SIZES.PART
    GROUP: tl.constexpr = SIZES.GROUP
    num_parts, live_ptr = scratch.num_parts, scratch.live + row * scratch.num_parts
    i = tl.arange(0, SIZES.PARTS)
    is_live = (key_of(parts, SIZES.LOW_BITS) >= bound) & (i < num_parts)
    tl.debug_barrier()  # other threads' loads of a try before must be done
    tl.store(live_ptr + tl.cumsum(is_live.to(tl.int32), 0) - 1, i, mask=is_live)
    num_live = tl.sum(is_live.to(tl.int32), 0)
    tl.debug_barrier()  # other threads' stores must be done
    count, start, mass = 0, 0, 0.0
    while (start < num_live) & (count <= CAPACITY):
        j = start + tl.arange(0, GROUP)
        part = tl.load(live_ptr + j, mask=j < num_live, other=num_parts)
        v = tl.reshape(part[:, None] * PART + tl.arange(0, PART)[None, :], [GROUP * PART])
        logits_ptr = rows.logits + row * rows.stride
        x = clean(tl.load(logits_ptr + v, mask=v < rows.vocab, other=float("-inf")))
        key = key_of(x, SIZES.LOW_BITS)
        is_candidate = (key >= bound) & (key <= upper) & (v < rows.vocab)
        entry = count + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
        fits = is_candidate & (entry < CAPACITY)
        tl.store(scratch.candidates + row * CAPACITY + entry, x, mask=fits)
        tl.store(scratch.indices + row * CAPACITY + entry, v, mask=fits)
        count += tl.sum(is_candidate.to(tl.int32), 0)
        mass += tl.sum(tl.where(is_candidate, _weight_of(x, scale), 0.0), 0)
        start += GROUP
    tl.debug_barrier()
    return count, mass


@triton.jit
def _narrow(values, low, high, wanted, scale, LOW_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Narrows the range of logits low … high, between which what is above falls below `wanted`.

    It is cut in eight three times: in logits, whose keys are dense around 0.

    Returns:
        (the key of low, that of high, the weight of logits with larger keys than the latter).
    """
    i, above = tl.arange(0, 8), 0.0
    for _ in range(3):
        tried = low + (high - low) * (i.to(tl.float32) * 0.125)
        keys = key_of(tried, LOW_BITS)[None, :]
        sums = tl.zeros([BLOCK, 8], tl.float32)
        for start in range(0, values.length, BLOCK):
            x = _values_at(values, start, BLOCK)
            weight = _weight_of(x, scale)[:, None]
            sums += tl.where(key_of(x, LOW_BITS)[:, None] > keys, weight, 0.0)
        weights = tl.sum(sums, 0)
        reached = tl.sum(((weights >= wanted) | (i == 0)).to(tl.int32), 0)
        low = tl.sum(tl.where(i == reached - 1, tried, 0.0), 0)
        if reached < 8:
            high = tl.sum(tl.where(i == reached, tried, 0.0), 0)
            above = tl.sum(tl.where(i == reached, weights, 0.0), 0)
    return key_of(low, LOW_BITS), key_of(high, LOW_BITS), above


@triton.jit
def _weight_of(x, scale):
    return tl.exp((x - scale.base) * scale.rate)


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
        tried = (low + ((high - low) * i >> 3)).to(tl.int32)  # the first is low, which is known
        sums = tl.zeros([BLOCK, 8], tl.float32)  # added up at the end: that has threads wait
        for start in range(0, values.length, BLOCK):
            x = _values_at(values, start, BLOCK)
            keys = key_of(x, LOW_BITS)[:, None]
            if COUNTS:
                weights = tl.where(keys >= tried[None, :], 1.0, 0.0)
            else:
                weight = _weight_of(x, scale)[:, None]
                weights = tl.where(keys > tried[None, :], weight, 0.0)
            sums += weights
        reached = tl.sum(((tl.sum(sums, 0) >= wanted) | (i == 0)).to(tl.int64), 0)
        width = high - low
        high = low + (width * reached >> 3)
        low += width * (reached - 1) >> 3
    return low.to(tl.int32), high.to(tl.int32)


@triton.jit
def _search(
    values, top_k, top_p, scale, total, above, bound, LOW_BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns (smallest key that passes, last index at which it passes, sum of what passes).

    Nothing below the bound passes. Without top-k `total` is the sum over all logits, not over these
    values alone, and `above` that of logits above these.
    """
    highest = key_of(scale.base, LOW_BITS)
    threshold, equals, room, kept = bound, 0, 0x7FFFFFFF, total
    if top_k > 0:
        wanted = top_k.to(tl.float32)
        threshold, _ = _between(values, bound, highest + 1, wanted, scale, True, LOW_BITS, BLOCK)
        number, equals, weight, kept = _around(values, threshold, scale, LOW_BITS, BLOCK)
        room = top_k - number
        kept += room * weight
    if top_p < 1.0:
        wanted, first, first_room = top_p * kept - above, threshold, room
        _, threshold = _between(values, first - 1, highest, wanted, scale, False, LOW_BITS, BLOCK)
        threshold = tl.maximum(threshold, first)  # top_p * all may round to more than all
        number, equals, weight, kept = _around(values, threshold, scale, LOW_BITS, BLOCK)
        room = tl.where(threshold == first, first_room, equals)
        needed = tl.ceil((wanted - kept) / weight)
        room = tl.maximum(tl.minimum(needed, room.to(tl.float32)), 1.0).to(tl.int32)
        kept += above + room * weight
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
        mass += tl.where(keys > key, _weight_of(x, scale), 0.0)
        value = tl.maximum(value, tl.max(tl.where(keys == key, x, float("-inf")), 0))
    weight = _weight_of(value, scale)
    return tl.sum(above, 0), tl.sum(equals, 0), weight, tl.sum(mass, 0)
