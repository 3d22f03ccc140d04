"""The Triton kernels of `delta_rule.py`.

Rows that are computed together, of a generation or of a chunk of a prompt, are solved together:
`delta_rule._chunks` has the system of equations. It is inverted by halves, block by block, so that
a row costs no step of its own.

Heads of any size are served. Those that are no power of two, or below 16, are padded.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.machine import MULTIPROCESSORS
from ..launch.triton import after_previous, dependent_launch
from .delta_rule import (
    CHUNK,
    EPS,
    Contexts,
    DeltaMemory,
    DeltaRows,
    DeltaWeights,
    Generations,
)

COLUMNS, MANY_COLUMNS = 32, 64
"""Of a matrix, those that a program works on; the latter where there are many programs."""
STAGES_BYTES = 160 * 1024
"""Of shared memory, that a program needs that reads a chunk ahead."""
BY_WARPGROUPS = 128, 128
"""Keys and values of heads for which Triton's warpgroup instructions were seen to be right, on an
H200 with Triton 3.6. They have no tile of fewer than 64 columns."""
CONTEXTS = 64
"""That a chunk is looked for among, at least."""
NORM_HEADS = 8
"""Of a row, those that a program norms."""


class Strides(NamedTuple):
    """Between rows."""

    mixed: int
    gates: int


class Sizes(NamedTuple):
    """Of a layer, and the tiles of a launch. Tiles are powers of two, at least 16."""

    HEADS: int  # Hv
    KEY_HEADS: int  # Hk
    KEY: int  # Dk
    VALUE: int  # Dv
    TAPS: int  # W
    PLACES: int  # R
    KEY_TILE: int  # at least Dk
    COLUMNS: int  # of Dv, in a tile
    TAP_TILE: int  # at least W
    ROWS: int  # rows that are solved together
    PRECISION: str  # of products of float32
    SPLITS: bool  # whether products with float32 are of two numbers of the model's dtype each
    EPS: float

    @property
    def column_tiles(self) -> int:
        return triton.cdiv(self.VALUE, self.COLUMNS)


class Chunks(NamedTuple):
    """What is known of the rows of contexts before any matrix is."""

    q: Tensor  # [T, Hk, Dk], of length 1 / sqrt(Dk)
    k: Tensor  # [T, Hk, Dk], of length 1
    decays: Tensor  # [T, Hv] float32, sums of log decays since the chunk began
    scores: Tensor  # [T, Hv, CHUNK], of q with the chunk's k, decayed
    written: Tensor  # [T, Hv, Dv], what the matrix takes in if it holds nothing
    reads: Tensor  # [T, Hv, Dk], what is read of it and not taken in


def _sizes(rows: DeltaRows, weights: DeltaWeights, memory: DeltaMemory, columns: int) -> Sizes:
    _, heads, key, value = memory.matrices.shape
    is_wide = rows.mixed.dtype == torch.float32
    return Sizes(
        HEADS=heads,
        KEY_HEADS=(rows.mixed.shape[1] - heads * value) // (2 * key),
        KEY=key,
        VALUE=value,
        TAPS=weights.conv.shape[0],
        PLACES=memory.mixed.shape[1],
        KEY_TILE=_tile(key),
        COLUMNS=min(columns, _tile(value)),
        TAP_TILE=triton.next_power_of_2(weights.conv.shape[0]),
        ROWS=CHUNK,
        PRECISION="ieee" if is_wide else "tf32",
        SPLITS=splits(rows.mixed),
        EPS=EPS,
    )


def splits(x: Tensor) -> bool:
    """Returns whether products are of numbers of 16 bits; Triton's interpreter has none of bf16."""
    return x.dtype == torch.float16 or (x.is_cuda and x.dtype == torch.bfloat16)


def _is_large(x: Tensor) -> bool:
    """Returns whether a program has room for the next chunk while it works on one."""
    return x.is_cuda and x.element_size() == 2 and _shared_memory(x.device.index) >= STAGES_BYTES


@cache
def _shared_memory(device: int) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin


def _tile(size: int) -> int:
    return max(16, triton.next_power_of_2(size))  # tl.dot needs 16


def _strides(rows: DeltaRows) -> Strides:
    return Strides(rows.mixed.stride(0), rows.gates.stride(0))


def delta_generations(
    rows: DeltaRows, weights: DeltaWeights, memory: DeltaMemory, requests: Generations
) -> Tensor:
    """As its twin.

    Requests and memory are read before the kernel before has ended, which must not write them.
    """
    count = requests.slots.shape[0]
    total, heads = rows.mixed.shape[0], memory.matrices.shape[1]
    taps, places = weights.conv.shape[0], memory.mixed.shape[1]
    most = _tile((places - taps) // 2 + total // count)  # rows
    sizes = _sizes(rows, weights, memory, COLUMNS)._replace(ROWS=most)
    programs = sizes.column_tiles * heads * count
    warps = 8 if most < 64 else 2  # tiles of 64 rows could be warpgroups' (`delta_contexts`)
    if programs > MULTIPROCESSORS and most == 16:
        warps = 4
        if programs > 4 * MULTIPROCESSORS:
            sizes = sizes._replace(COLUMNS=min(MANY_COLUMNS, _tile(sizes.VALUE)))
    out = rows.mixed.new_empty(total, heads, sizes.VALUE)
    _generations_kernel[(sizes.column_tiles * heads, count)](
        rows,
        _strides(rows),
        weights,
        memory,
        requests,
        out,
        total // count,
        sizes=sizes,
        PARTS=min(warps, sizes.KEY_TILE // 16),
        num_warps=warps,
        **dependent_launch(rows.mixed),
    )
    return out


def delta_contexts(
    rows: DeltaRows, weights: DeltaWeights, memory: DeltaMemory, requests: Contexts
) -> Tensor:
    """As its twin. One kernel works on all chunks at once, another on one after the other.

    Matrices are read before the kernel before has ended, which must not write them. Kernels of two
    warps have none of Hopper's warpgroup instructions, which need four. Triton 3.6 and 3.7 compile
    some kernels with several products to wrong ones (triton-lang/triton#11366; tiles of 16 and 32
    columns are known to be).
    """
    total, count = rows.mixed.shape[0], requests.slots.shape[0]
    heads = memory.matrices.shape[1]
    by_warpgroups = splits(rows.mixed) and memory.matrices.shape[2:] == BY_WARPGROUPS
    is_few = count * heads < 2 * MULTIPROCESSORS and not by_warpgroups
    sizes = _sizes(rows, weights, memory, COLUMNS if is_few else MANY_COLUMNS)
    new, key_heads = rows.mixed.new_empty, sizes.KEY_HEADS
    chunks = Chunks(
        q=new(total, key_heads, sizes.KEY),
        k=new(total, key_heads, sizes.KEY),
        decays=new(total, heads, dtype=torch.float32),
        scores=new(total, heads, CHUNK),
        written=new(total, heads, sizes.VALUE),
        reads=new(total, heads, sizes.KEY),
    )
    out = new(total, heads, sizes.VALUE)
    most = (total + (CHUNK - 1) * count) // CHUNK  # chunks there can be
    prepare_warps, scan_warps = 2, 2
    if by_warpgroups:
        prepare_warps, scan_warps = 8, 4
    elif not splits(rows.mixed):  # no matrix instructions at all
        prepare_warps, scan_warps = 8, 4 if sizes.COLUMNS <= COLUMNS else 8
    launch = dependent_launch(rows.mixed)
    _prepare_kernel[(key_heads, most)](
        rows,
        _strides(rows),
        weights,
        memory.mixed,
        requests,
        chunks,
        count,
        sizes=sizes,
        VALUE_TILE=_tile(sizes.VALUE),
        CONTEXTS=max(CONTEXTS, triton.next_power_of_2(count)),  # few variants to compile
        num_warps=prepare_warps,
        num_stages=1,
        **launch,
    )
    _scan_kernel[(sizes.column_tiles, heads, count)](
        rows.mixed,
        rows.mixed.stride(0),
        memory,
        requests,
        chunks,
        out,
        total,
        sizes=sizes,
        num_warps=scan_warps,
        num_stages=2 if _is_large(rows.mixed) else 1,
        **launch,
    )
    return out


def norm_and_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As its twin; x is contiguous."""
    total, heads, size = x.shape
    out = x.new_empty(total, heads * size)
    _norm_and_gate_kernel[(total, triton.cdiv(heads, NORM_HEADS))](
        x,
        gate,
        gate.stride(0),
        weight,
        eps,
        out,
        heads,
        size,
        HEADS=NORM_HEADS,
        BLOCK=triton.next_power_of_2(size),
        num_warps=4,
        **dependent_launch(x),
    )
    return out


@triton.jit
def _norm_and_gate_kernel(
    x_ptr,
    gate_ptr,
    gate_row,
    weight_ptr,
    eps,
    out_ptr,
    heads,
    size,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some heads of one row."""
    kind = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    inside = (head < heads)[:, None] & (d < size)[None, :]
    column = head[:, None] * size + d[None, :]
    weight = tl.load(weight_ptr + d, mask=d < size, other=0.0)
    after_previous(PDL)
    x = tl.load(x_ptr + row * heads * size + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / size + eps)
    normed = (x * scale[:, None]).to(kind).to(tl.float32) * weight.to(tl.float32)[None, :]
    if weight.dtype != tl.float32:  # rounded in between, as torch's product is
        normed = normed.to(kind).to(tl.float32)
    tl.store(out_ptr + row * heads * size + column, (normed * _silu(gate)).to(kind), mask=inside)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _activated(total, kind):
    """Returns SiLU of a convolution's sums [1, ...], rounded as the twin rounds.

    The first axis is there to be summed: a compiler that may leave a sum out computes everything
    before it again for each product that wants its numbers in other threads.
    """
    return tl.sum(_silu(total.to(kind).to(tl.float32)).to(kind).to(tl.float32), 0).to(kind)


@triton.jit
def _of_length_1(x, sizes: tl.constexpr):
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + sizes.EPS)[:, None]


@triton.jit
def _dot(x, y, sizes: tl.constexpr):
    """Returns the product of x and y in float32. One or both have the model's dtype; float32 beside
    16 bits is a sum of two numbers of 16 bits, which hold more of it than tf32 does."""
    if not sizes.SPLITS:
        x, y = x.to(tl.float32), y.to(tl.float32)
        product = tl.dot(x, y, input_precision=sizes.PRECISION)
    elif y.dtype == tl.float32:
        high = y.to(x.dtype)
        product = tl.dot(x, (y - high.to(tl.float32)).to(x.dtype), tl.dot(x, high))
    elif x.dtype == tl.float32:
        high = x.to(y.dtype)
        product = tl.dot((x - high.to(tl.float32)).to(y.dtype), y, tl.dot(high, y))
    else:
        product = tl.dot(x, y)
    return product


@triton.jit
def _log_decay(x, weights, head):
    """Returns log decays of a head's gates."""
    x += tl.load(weights.dt_bias + head)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(tl.load(weights.a_log + head)) * softplus


@triton.jit
def _decayed(c, SIZE: tl.constexpr):
    """Returns exp(c_i - c_j) for j <= i, else 0: c falls, so no power exceeds 1."""
    i = tl.arange(0, SIZE)
    powers = tl.exp(tl.minimum(c[:, None] - c[None, :], 0.0))
    return tl.where(i[:, None] >= i[None, :], powers, 0.0)


@triton.jit
def _doubled(inverse, system, HALF: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the inverses of parts of 2 * HALF rows of 1 + system, from those of HALF rows.

    That of [[P, 0], [C, Q]] is that of its diagonal, D, less D [[0, 0], [C, 0]] D.
    """
    i, j = tl.arange(0, SIZE)[:, None] // HALF, tl.arange(0, SIZE)[None, :] // HALF
    below = tl.where((i == j + 1) & (j % 2 == 0), system, 0.0)
    if HALF == 1:
        return inverse - below
    half = tl.dot(inverse, below, input_precision=PRECISION)
    return inverse - tl.dot(half, inverse, input_precision=PRECISION)


@triton.jit
def _inverse(system, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the inverse of 1 + system, which has numbers below the diagonal alone.

    No power of the system is taken: where keys repeat they grow and cancel.
    """
    PART: tl.constexpr = 16  # rows whose inverses are found side by side
    PARTS: tl.constexpr = SIZE // PART
    i, number = tl.arange(0, PART), tl.arange(0, PARTS)
    if PARTS == 1:
        inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        for level in tl.static_range(4):
            inverse = _doubled(inverse, system, 1 << level, PART, PRECISION)
    else:
        is_diagonal = number[:, None, None, None] == number[None, None, :, None]
        parts = tl.reshape(system, [PARTS, PART, PARTS, PART])
        parts = tl.sum(tl.where(is_diagonal, parts, 0.0), 2)
        small = tl.where(i[None, :, None] == i[None, None, :], 1.0, 0.0)
        small = tl.broadcast_to(small, [PARTS, PART, PART])
        for level in tl.static_range(4):
            small = _doubled(small, parts, 1 << level, PART, PRECISION)
        inverse = tl.reshape(tl.where(is_diagonal, small[:, :, None, :], 0.0), [SIZE, SIZE])
        for level in tl.static_range(4, 8):
            if 1 << level < SIZE:
                inverse = _doubled(inverse, system, 1 << level, SIZE, PRECISION)
    return inverse


@triton.jit
def _generations_kernel(
    rows,
    strides,
    weights,
    memory,
    requests,
    out_ptr,
    own,
    sizes: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some columns of one head's matrix, of one request.

    Row i is that at position first - PAST + i. What it is made of is kept where i < PAST, and the
    request's own where not. No place that is read is written by this launch. A matrix is worked on
    in PARTS of its rows, by a warp each.
    """
    KEY: tl.constexpr = sizes.KEY
    VALUE: tl.constexpr = sizes.VALUE
    HEADS: tl.constexpr = sizes.HEADS
    PLACES: tl.constexpr = sizes.PLACES
    PRECISION: tl.constexpr = sizes.PRECISION
    PAST: tl.constexpr = (sizes.PLACES - sizes.TAPS) // 2
    PART: tl.constexpr = sizes.KEY_TILE // PARTS
    SHARED: tl.constexpr = sizes.HEADS // sizes.KEY_HEADS
    KEYS: tl.constexpr = sizes.KEY_HEADS * KEY
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * VALUE
    TILES: tl.constexpr = (VALUE + sizes.COLUMNS - 1) // sizes.COLUMNS
    kind = out_ptr.dtype.element_ty
    request = tl.program_id(1).to(tl.int64)
    slot = tl.load(requests.slots + request, cache_modifier=".cg")
    first = tl.load(requests.firsts + request, cache_modifier=".cg").to(tl.int32)
    taken_in = tl.load(requests.taken_in + request, cache_modifier=".cg").to(tl.int32)
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    d = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    value = (tile * sizes.COLUMNS + tl.arange(0, sizes.COLUMNS))[None, :]
    is_key, is_value = d < KEY, value < VALUE
    q_column = head // SHARED * KEY + d
    k_column, v_column = KEYS + q_column, 2 * KEYS + head * VALUE + value

    # What is older than the kernel before.
    cell = ((slot * HEADS + head) * KEY + d)[:, :, None] * VALUE + value[None, :, :]
    is_cell = is_key[:, :, None] & is_value[None, :, :]
    is_held = is_cell & (first > 0)
    state = tl.load(memory.matrices + cell, mask=is_held, other=0.0, cache_modifier=".cg")
    again = tl.minimum(tl.maximum(first - taken_in, 0), PAST)
    i = tl.arange(0, sizes.ROWS)
    is_row = (i >= PAST - again) & (i < PAST + own)
    is_own = is_row & (i >= PAST)

    after_previous(PDL)
    of_request = (slot, first, request * own, i - PAST, is_row)
    q = _convolved(rows.mixed, strides.mixed, memory, weights, of_request, q_column, is_key, sizes)
    k = _convolved(rows.mixed, strides.mixed, memory, weights, of_request, k_column, is_key, sizes)
    v = _convolved(
        rows.mixed, strides.mixed, memory, weights, of_request, v_column, is_value, sizes
    )
    v = tl.sum(v.to(tl.float32), 0)
    own_row, kept = request * own - PAST + i, slot * PLACES + (first - PAST + i) % PLACES
    own_gates = rows.gates + own_row * strides.gates + head
    kept_gates = memory.gates + kept * (2 * HEADS) + head
    gates = tl.where(is_own, own_gates, kept_gates)
    strength = tl.load(gates, mask=is_row, other=0.0)
    decay = tl.load(gates + HEADS, mask=is_row, other=0.0)

    # Each channel and gate is kept by one program.
    source, kept = own_row * strides.mixed, kept * CHANNELS
    _keep(rows.mixed, source, memory.mixed, kept, is_own, v_column, is_value)
    if tile == 0:
        tl.store(kept_gates, strength, mask=is_own)
        tl.store(kept_gates + HEADS, decay, mask=is_own)
        if head % SHARED == 0:
            _keep(rows.mixed, source, memory.mixed, kept, is_own, q_column, is_key)
            _keep(rows.mixed, source, memory.mixed, kept, is_own, k_column, is_key)

    b = tl.sigmoid(strength.to(tl.float32))
    g = _log_decay(decay.to(tl.float32), weights, head)
    c = tl.cumsum(tl.where(is_row, g, 0.0), 0)
    decays, power = _decayed(c, sizes.ROWS), tl.exp(c)
    # Lengths are set to 1 behind products: what goes into them is of the model's dtype.
    q_scale = _inverse_length(q, sizes) * KEY**-0.5
    k_scale = _inverse_length(k, sizes)
    k_columns = tl.permute(k, (0, 2, 1))
    system = tl.sum(_dot(k, k_columns, sizes), 0) * k_scale[:, None] * k_scale[None, :]
    system = tl.where(i[:, None] > i[None, :], system * decays * b[:, None], 0.0)
    seen = tl.sum(_dot(k, state, sizes), 0) * (k_scale * power)[:, None]
    wanted = tl.where(is_row, b, 0.0)[:, None] * (v - seen)
    inverse = _inverse(system, sizes.ROWS, PRECISION)
    written = tl.dot(inverse, wanted, input_precision=PRECISION)
    scores = tl.sum(_dot(q, k_columns, sizes), 0) * k_scale[None, :] * decays
    read = tl.sum(_dot(q, state, sizes), 0) * power[:, None]
    read = (read + tl.dot(scores, written, input_precision=PRECISION)) * q_scale[:, None]
    to = (own_row * HEADS + head)[:, None] * VALUE + value
    tl.store(out_ptr + to, read.to(kind), mask=is_own[:, None] & is_value)

    # The matrix takes in rows up to the request's first.
    last = tl.sum(tl.where(i == PAST, c, 0.0), 0)
    rest = tl.where(i <= PAST, tl.exp(tl.minimum(last - c, 0.0)), 0.0) * k_scale
    added = tl.broadcast_to((written * rest[:, None])[None], [PARTS, sizes.ROWS, sizes.COLUMNS])
    state = state * tl.exp(last) + _dot(k_columns, added, sizes)
    tl.store(memory.matrices + cell, state, mask=is_cell)


@triton.jit
def _inverse_length(x, sizes: tl.constexpr):
    """Returns 1 / length of rows [parts, rows, columns]."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(tl.sum(x * x, 2), 0) + sizes.EPS)


@triton.jit
def _convolved(mixed_ptr, stride, memory, weights, span, column, is_column, sizes: tl.constexpr):
    """Returns channels of a request's rows [parts, rows, columns]: its own, from its first on, and
    those that are kept. Columns are [parts, columns]."""
    slot, first, first_row, behind, is_row = span
    TAPS: tl.constexpr = sizes.TAPS
    PLACES: tl.constexpr = sizes.PLACES
    CHANNELS: tl.constexpr = 2 * sizes.KEY_HEADS * sizes.KEY + sizes.HEADS * sizes.VALUE
    shape: tl.constexpr = [1, column.shape[0], behind.shape[0], column.shape[1]]
    total = tl.zeros(shape, tl.float32)
    column, is_column = column[None, :, None, :], is_column[None, :, None, :]
    for tap in tl.static_range(TAPS):
        seen = behind + (tap - (TAPS - 1))
        own = mixed_ptr + first_row * stride + seen * stride
        kept = memory.mixed + slot * (PLACES * CHANNELS) + (first + seen) % PLACES * CHANNELS
        row = tl.where(seen >= 0, own, kept)
        mask = (is_row & (first + seen >= 0))[None, None, :, None] & is_column
        conv = tl.load(weights.conv + tap * CHANNELS + column, mask=is_column, other=0.0)
        mixed = tl.load(row[None, None, :, None] + column, mask=mask, other=0.0)
        total += mixed.to(tl.float32) * conv
    return _activated(total, mixed_ptr.dtype.element_ty)


@triton.jit
def _keep(mixed_ptr, row, kept_ptr, place, is_row, column, is_column):
    """Copies channels of rows to their places. Columns are [parts, columns]."""
    mask = is_row[None, :, None] & is_column[:, None, :]
    at = row[None, :, None] + column[:, None, :]
    mixed = tl.load(mixed_ptr + at, mask=mask, other=0.0)
    tl.store(kept_ptr + place[None, :, None] + column[:, None, :], mixed, mask=mask)


@triton.jit
def _prepare_kernel(
    rows,
    strides,
    weights,
    kept_ptr,
    requests,
    chunks,
    count,
    sizes: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    CONTEXTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One chunk's rows, of one key head and the heads that share it."""
    after_previous(PDL)
    KEY: tl.constexpr = sizes.KEY
    VALUE: tl.constexpr = sizes.VALUE
    HEADS: tl.constexpr = sizes.HEADS
    ROWS: tl.constexpr = sizes.ROWS
    PRECISION: tl.constexpr = sizes.PRECISION
    SHARED: tl.constexpr = sizes.HEADS // sizes.KEY_HEADS
    KEYS: tl.constexpr = sizes.KEY_HEADS * KEY
    kind = chunks.q.dtype.element_ty
    key_head, number = tl.program_id(0), tl.program_id(1)

    # The context whose chunk this is.
    context = tl.arange(0, CONTEXTS)
    is_there = context < count
    begins = tl.load(requests.last_rows + context - 1, mask=is_there & (context > 0), other=-1) + 1
    ends = tl.load(requests.last_rows + context, mask=is_there, other=-1) + 1
    numbers = tl.where(is_there, (tl.maximum(ends - begins, 0) + ROWS - 1) // ROWS, 0)
    last_numbers = tl.cumsum(numbers, 0)  # one past each context's last
    is_mine = (last_numbers > number) & (last_numbers - numbers <= number)
    if tl.sum(is_mine.to(tl.int32), 0) == 0:
        return
    begin = tl.sum(tl.where(is_mine, begins, 0), 0)
    end = tl.sum(tl.where(is_mine, ends, 0), 0)
    before = tl.sum(tl.where(is_mine, last_numbers - numbers, 0), 0)
    mine = tl.sum(tl.where(is_mine, context, 0), 0)
    slot = tl.load(requests.slots + mine).to(tl.int64)
    first = tl.load(requests.positions + begin)
    start = begin + (number - before) * ROWS
    row = start + tl.arange(0, ROWS).to(tl.int64)
    is_row = row < end
    span = (row, is_row, begin, slot, first)

    d = tl.arange(0, sizes.KEY_TILE)
    is_key = d < KEY
    column = key_head * KEY + d
    q = _channels(rows.mixed, strides.mixed, weights, kept_ptr, span, column, is_key, sizes)
    k = _channels(rows.mixed, strides.mixed, weights, kept_ptr, span, KEYS + column, is_key, sizes)
    q, k = (_of_length_1(q, sizes) * KEY**-0.5).to(kind), _of_length_1(k, sizes).to(kind)
    at = row[:, None] * KEYS + column[None, :]
    mask = is_row[:, None] & is_key[None, :]
    tl.store(chunks.q + at, q, mask=mask)
    tl.store(chunks.k + at, k, mask=mask)
    products, scores = _dot(k, tl.trans(k), sizes), _dot(q, tl.trans(k), sizes)

    i = tl.arange(0, ROWS)
    value = tl.arange(0, VALUE_TILE)
    is_value = value < VALUE
    for member in range(SHARED):
        head = key_head * SHARED + member
        gates = rows.gates + row * strides.gates + head
        b = tl.sigmoid(tl.load(gates, mask=is_row, other=0.0).to(tl.float32))
        g = _log_decay(tl.load(gates + HEADS, mask=is_row, other=0.0).to(tl.float32), weights, head)
        b, c = tl.where(is_row, b, 0.0), tl.cumsum(tl.where(is_row, g, 0.0), 0)
        of_head = row * HEADS + head
        tl.store(chunks.decays + of_head, c, mask=is_row)
        decays = _decayed(c, ROWS)
        to = of_head[:, None] * ROWS + i[None, :]
        tl.store(chunks.scores + to, (scores * decays).to(kind), mask=is_row[:, None])
        system = tl.where(i[:, None] > i[None, :], products * decays * b[:, None], 0.0)
        inverse = _inverse(system, ROWS, PRECISION)
        reads = _dot(inverse * (b * tl.exp(c))[None, :], k, sizes)
        tl.store(chunks.reads + of_head[:, None] * KEY + d[None, :], reads.to(kind), mask=mask)
        v_column = 2 * KEYS + head * VALUE + value
        v = _channels(rows.mixed, strides.mixed, weights, kept_ptr, span, v_column, is_value, sizes)
        written = _dot(inverse * b[None, :], v, sizes)
        to = of_head[:, None] * VALUE + value[None, :]
        tl.store(chunks.written + to, written.to(kind), mask=is_row[:, None] & is_value[None, :])


@triton.jit
def _channels(mixed_ptr, stride, weights, kept_ptr, span, column, is_column, sizes: tl.constexpr):
    """Returns channels of a chunk's rows [rows, columns]. Rows before the context's first are kept
    by position, or there are none."""
    row, is_row, begin, slot, first = span
    CHANNELS: tl.constexpr = 2 * sizes.KEY_HEADS * sizes.KEY + sizes.HEADS * sizes.VALUE
    total = tl.zeros([1, row.shape[0], column.shape[0]], tl.float32)
    column, is_column = column[None, None, :], is_column[None, None, :]
    TAPS: tl.constexpr = sizes.TAPS
    for tap in tl.static_range(TAPS):
        seen = row - (sizes.TAPS - 1 - tap)
        mask = (is_row & (seen >= begin))[None, :, None] & is_column
        conv = tl.load(weights.conv + tap * CHANNELS + column, mask=is_column, other=0.0)
        mixed = tl.load(mixed_ptr + seen[None, :, None] * stride + column, mask=mask, other=0.0)
        total += mixed.to(tl.float32) * conv
    if (first > 0) & (tl.min(row, 0) == begin):
        for tap in tl.static_range(TAPS - 1):
            seen = row - (sizes.TAPS - 1 - tap)
            position = first + (seen - begin)
            is_before = is_row & (seen < begin) & (position >= 0)
            mask = is_before[None, :, None] & is_column
            place = (slot * sizes.PLACES + position % sizes.PLACES) * CHANNELS
            conv = tl.load(weights.conv + tap * CHANNELS + column, mask=is_column, other=0.0)
            kept = tl.load(kept_ptr + place[None, :, None] + column, mask=mask, other=0.0)
            total += kept.to(tl.float32) * conv
    return _activated(total, mixed_ptr.dtype.element_ty)


@triton.jit
def _scan_kernel(
    mixed_ptr,
    mixed_row,
    memory,
    requests,
    chunks,
    out_ptr,
    total,
    sizes: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some columns of one head's matrix, chunk by chunk of one context."""
    KEY: tl.constexpr = sizes.KEY
    VALUE: tl.constexpr = sizes.VALUE
    HEADS: tl.constexpr = sizes.HEADS
    KEY_HEADS: tl.constexpr = sizes.KEY_HEADS
    ROWS: tl.constexpr = sizes.ROWS
    SHARED: tl.constexpr = HEADS // KEY_HEADS
    TILE: tl.constexpr = sizes.COLUMNS
    kind = out_ptr.dtype.element_ty
    tile, head, context = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head // SHARED
    i, d = tl.arange(0, ROWS), tl.arange(0, sizes.KEY_TILE)
    value = tile * TILE + tl.arange(0, TILE)
    is_key, is_value = d < KEY, value < VALUE
    begin = tl.load(requests.last_rows + context - 1, mask=context > 0, other=-1) + 1
    end = tl.load(requests.last_rows + context) + 1
    slot = tl.load(requests.slots + context).to(tl.int64)
    first = tl.load(requests.positions + begin, mask=begin < end, other=0)
    cell = ((slot * HEADS + head) * KEY + d)[:, None] * VALUE + value[None, :]
    is_cell = is_key[:, None] & is_value[None, :]
    is_held = is_cell & (first > 0)
    state = tl.load(memory.matrices + cell, mask=is_held, other=0.0, cache_modifier=".cg")
    after_previous(PDL)
    for start in range(begin, end, ROWS):
        row = start + i.to(tl.int64)
        is_row = row < end
        of_head, of_key = row * HEADS + head, row * KEY_HEADS + key_head
        mask = is_row[:, None] & is_key[None, :]
        reads = tl.load(chunks.reads + of_head[:, None] * KEY + d[None, :], mask=mask, other=0.0)
        to = of_head[:, None] * VALUE + value[None, :]
        is_out = is_row[:, None] & is_value[None, :]
        written = tl.load(chunks.written + to, mask=is_out, other=0.0).to(tl.float32)
        k = tl.load(chunks.k + of_key[:, None] * KEY + d[None, :], mask=mask, other=0.0)
        q = tl.load(chunks.q + of_key[:, None] * KEY + d[None, :], mask=mask, other=0.0)
        scores = tl.load(
            chunks.scores + of_head[:, None] * ROWS + i[None, :], mask=is_row[:, None], other=0.0
        )
        c = tl.load(chunks.decays + of_head, mask=is_row, other=0.0)
        last = tl.load(chunks.decays + (tl.minimum(start + ROWS, end) - 1) * HEADS + head)
        written -= _dot(reads, state, sizes)
        read = _dot(q, state, sizes) * tl.exp(c)[:, None]
        read += _dot(scores, written, sizes)
        tl.store(out_ptr + to, read.to(kind), mask=is_out)
        rest = tl.where(is_row, tl.exp(tl.minimum(last - c, 0.0)), 0.0)
        state = state * tl.exp(last) + _dot(tl.trans(k), written * rest[:, None], sizes)
    if begin < end:
        tl.store(memory.matrices + cell, state, mask=is_cell)
        _keep_last(mixed_ptr, mixed_row, memory, (begin, end, slot, first), head, value, sizes)
    if context == tl.num_programs(2) - 1:  # rows of padding
        for start in range(end, total, ROWS):
            row = start + i.to(tl.int64)
            to = (row * HEADS + head)[:, None] * VALUE + value[None, :]
            nothing = tl.zeros([ROWS, TILE], kind)
            tl.store(out_ptr + to, nothing, mask=(row < total)[:, None] & is_value[None, :])


@triton.jit
def _keep_last(mixed_ptr, mixed_row, memory, span, head, value, sizes: tl.constexpr):
    """Keeps what the convolution of later rows sees of a context; each channel once."""
    begin, end, slot, first = span
    KEY: tl.constexpr = sizes.KEY
    KEYS: tl.constexpr = sizes.KEY_HEADS * KEY
    CHANNELS: tl.constexpr = 2 * KEYS + sizes.HEADS * sizes.VALUE
    SHARED: tl.constexpr = sizes.HEADS // sizes.KEY_HEADS
    tap, d = tl.arange(0, sizes.TAP_TILE), tl.arange(0, sizes.KEY_TILE)
    row = end - (sizes.TAPS - 1) + tap.to(tl.int64)
    is_row = (row < end) & (row >= begin)
    place = (slot * sizes.PLACES + (first + row - begin) % sizes.PLACES) * CHANNELS
    row = row * mixed_row
    v_column = (2 * KEYS + head * sizes.VALUE + value)[None, :]
    q_column = (head // SHARED * KEY + d)[None, :]
    is_value, is_key = (value < sizes.VALUE)[None, :], (d < KEY)[None, :]
    _keep(mixed_ptr, row, memory.mixed, place, is_row, v_column, is_value)
    if (tl.program_id(0) == 0) & (head % SHARED == 0):
        _keep(mixed_ptr, row, memory.mixed, place, is_row, q_column, is_key)
        _keep(mixed_ptr, row, memory.mixed, place, is_row, KEYS + q_column, is_key)
