"""Triton kernels of `packing.py`."""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch
from .packing import Packing, PassRows
from .triton_rows import Grid, ints

LARGE_TILE = 1024  # drafts of all requests, from which a program has more warps


class _Drafts(NamedTuple):
    """Drafts of all requests, and what is known of them by slot."""

    slot_ids: Tensor  # [G] int64
    tokens: Grid  # [G, K']
    chances: Tensor  # [S+1, K] float32
    stride: int  # from slot to slot
    scratch: int  # the last slot


def save_chances(slot_ids: Tensor, probabilities: tuple[Tensor, ...], chances: Tensor) -> None:
    """Multiplies a request's probabilities up."""
    columns = chances.shape[1]
    _chances_kernel[(slot_ids.shape[0],)](
        slot_ids,
        probabilities,
        chances,
        columns,
        BLOCK=triton.next_power_of_2(columns),
        num_warps=1,
        **dependent_launch(slot_ids),
    )


@triton.jit
def _chances_kernel(
    slot_id_ptr, probability_ptrs, chance_ptr, columns, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    after_previous(PDL)
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_id_ptr + seq).to(tl.int64)
    column = tl.arange(0, BLOCK)
    chances = tl.zeros([BLOCK], tl.float32)
    chance = tl.load(probability_ptrs[0] + seq)
    chances = tl.where(column == 0, chance, chances)
    for depth in tl.static_range(1, len(probability_ptrs)):
        chance *= tl.load(probability_ptrs[depth] + seq)
        chances = tl.where(column == depth, chance, chances)
    tl.store(chance_ptr + slot * columns + column, chances, mask=column < columns)


def pack_rows(
    slot_ids: Tensor, drafts: Tensor, chances: Tensor, rows: PassRows, num_verified: int
) -> Packing:
    """Packs the rows of the likeliest drafts, in one launch."""
    batch, width = drafts.shape
    total = batch + num_verified
    out = Packing(
        rows=PassRows(
            ints(slot_ids, total),
            ints(slot_ids, total),
            tuple(ints(slot_ids, total) for _ in rows.slot_mappings),
        ),
        starts=ints(slot_ids, batch + 1, dtype=torch.int32),
        indices=ints(slot_ids, total),
        places=ints(slot_ids, batch * (width + 1)),
        drafts=ints(slot_ids, batch, width, dtype=torch.int32),
    )
    depths, seqs = triton.next_power_of_2(width + 1), triton.next_power_of_2(batch)
    _pack_kernel[(batch,)](
        _Drafts(slot_ids, Grid.of(drafts), chances, chances.stride(0), chances.shape[0] - 1),
        rows,
        out,
        batch,
        num_verified,
        width=width,
        DEPTHS=depths,
        SEQS=seqs,
        num_warps=4 if depths * seqs <= LARGE_TILE else 8,
        **dependent_launch(slot_ids),
    )
    return out


@triton.jit(do_not_specialize=["batch", "num_verified"])
def _pack_kernel(
    drafts,
    rows,
    out,
    batch,
    num_verified,
    width: tl.constexpr,
    DEPTHS: tl.constexpr,
    SEQS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every program chooses among all drafts, and writes the rows of its request."""
    after_previous(PDL)
    seq = tl.program_id(0).to(tl.int64)
    lens = _lens(drafts, batch, num_verified, width, DEPTHS, SEQS)
    s = tl.arange(0, SEQS)
    counts = tl.where(s < batch, lens + 1, 0)
    start = tl.sum(tl.where(s < seq, counts, 0), 0)
    length = tl.sum(tl.where(s == seq, lens, 0), 0)
    tl.store(out.starts + seq, start)
    tl.store(out.starts + batch, tl.sum(counts, 0), mask=seq == 0)

    depth = tl.arange(0, DEPTHS)
    whole = seq * (width + 1) + depth
    place = (start + tl.minimum(depth, length)).to(tl.int64)
    tl.store(out.places + whole, place, mask=depth <= width)
    is_row = depth <= length
    tl.store(out.indices + place, whole, mask=is_row)
    tl.store(out.rows.input_ids + place, tl.load(rows.input_ids + whole, mask=is_row), mask=is_row)
    positions = tl.load(rows.position_ids + whole, mask=is_row)
    tl.store(out.rows.position_ids + place, positions, mask=is_row)
    for i in tl.static_range(len(rows.slot_mappings)):
        slots = tl.load(rows.slot_mappings[i] + whole, mask=is_row)
        tl.store(out.rows.slot_mappings[i] + place, slots, mask=is_row)

    entry = drafts.tokens.x + seq * drafts.tokens.seq_stride + depth * drafts.tokens.row_stride
    token = tl.load(entry, mask=depth < length, other=-1)
    tl.store(out.drafts + seq * width + depth, token, mask=depth < width)


@triton.jit
def _lens(
    drafts, batch, num_verified, width: tl.constexpr, DEPTHS: tl.constexpr, SEQS: tl.constexpr
):
    """Returns how many drafts of each request are verified, [SEQS] int32."""
    index = tl.arange(0, DEPTHS * SEQS)  # by depth, then by request
    seq, depth = index % SEQS, index // SEQS
    is_draft = (seq < batch) & (depth < width)
    slot = tl.load(drafts.slot_ids + seq, mask=seq < batch, other=0)
    entry = drafts.tokens.x + seq * drafts.tokens.seq_stride + depth * drafts.tokens.row_stride
    token = tl.load(entry, mask=is_draft, other=-1)
    chance = tl.load(drafts.chances + slot * drafts.stride + depth, mask=is_draft, other=0.0)
    # Floats that are not negative compare as their bits do. A draft that is none is worth less
    # than one without a chance, and what is no draft at all least.
    bits = chance.to(tl.int32, bitcast=True) + 2
    is_real = (token >= 0) & (slot < drafts.scratch)
    key = tl.where(is_draft, tl.where(is_real, bits, 1), 0)
    least = 0  # the largest key that at least `num_verified` drafts reach
    for i in range(30, -1, -1):
        higher = least | (1 << i)
        count = tl.sum((key >= higher).to(tl.int32), 0)
        least = tl.where(count >= num_verified, higher, least)
    is_better, is_equal = key > least, key == least
    room = num_verified - tl.sum(is_better.to(tl.int32), 0)
    before = tl.cumsum(is_equal.to(tl.int32), 0) - is_equal.to(tl.int32)
    is_chosen = is_better | (is_equal & is_draft & (before < room))
    chosen = tl.reshape(is_chosen.to(tl.int32), (DEPTHS, SEQS))
    return tl.sum(chosen, 0)
