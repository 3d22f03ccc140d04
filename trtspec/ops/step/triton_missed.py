"""Triton kernels that keep and take the rows that a head reads late; each has its twin in
`missed.py`."""
# mypy: disallow-untyped-defs=False
# (kernels are Triton's language, not Python's)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...metadata.missed import MissedRows
from ..launch.triton import after_previous, dependent_launch
from .missed import TakenRows
from .triton_rows import KvGroups, ints, store_slots

COLUMNS = 1024
"""Of a row's states, those that a program copies."""


class _Kept(NamedTuple):
    """One row of each request."""

    slot_ids: Tensor  # [B] int64
    positions: Tensor  # [B] int64
    kv_slots: Tensor  # [B] int64
    hidden: Tensor  # [B, width]
    row: int  # stride of hidden
    tokens: Tensor  # [B] int32
    token_stride: int


def keep_missed(
    slot_ids: Tensor,
    position_ids: Tensor,
    kv_slots: Tensor,
    hidden: Tensor,
    tokens: Tensor,
    missed: MissedRows,
) -> None:
    """Keeps one row of each request."""
    kept = _Kept(
        slot_ids=slot_ids,
        positions=position_ids,
        kv_slots=kv_slots,
        hidden=hidden,
        row=hidden.stride(0),
        tokens=tokens,
        token_stride=tokens.stride(0),
    )
    width = hidden.shape[1]
    _keep_missed_kernel[(slot_ids.shape[0], triton.cdiv(width, COLUMNS))](
        kept,
        missed,
        missed.positions.shape[1],
        width,
        BLOCK=COLUMNS,
        num_warps=4,
        **dependent_launch(slot_ids),
    )


@triton.jit
def _keep_missed_kernel(kept, missed, capacity, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A block of columns of one request's row."""
    after_previous(PDL)
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(kept.slot_ids + seq).to(tl.int64)
    position = tl.load(kept.positions + seq).to(tl.int64)
    place = slot * capacity + position % capacity
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.load(kept.hidden + seq * kept.row + column, mask=column < width)
    tl.store(missed.hidden + place * width + column, state, mask=column < width)
    if tl.program_id(1) == 0:
        token = tl.load(kept.tokens + seq * kept.token_stride)
        tl.store(missed.tokens + place, token.to(tl.int64))
        is_written = tl.load(kept.kv_slots + seq) >= 0
        tl.store(missed.positions + place, tl.where(is_written, position, -1))


def take_missed(
    slot_ids: Tensor,
    missed: MissedRows,
    rope_deltas: Tensor | None,
    block_tables: tuple[Tensor, ...],
    page_size: int,
) -> TakenRows:
    """Returns the rows of these requests, and forgets them."""
    num_seqs, (_, capacity, width) = slot_ids.shape[0], missed.hidden.shape
    total = num_seqs * capacity
    groups = KvGroups.of(block_tables, (page_size,) * len(block_tables), total)
    out = TakenRows(
        is_row=ints(slot_ids, total, dtype=torch.bool),
        hidden=missed.hidden.new_empty(total, width),
        tokens=ints(slot_ids, total),
        positions=ints(slot_ids, total),
        rotary=ints(slot_ids, total),
        kv_lens=ints(slot_ids, total, dtype=torch.int32),
        slot_mappings=groups.slots,
    )
    # One program of each request for all but the states, the others for parts of a row's states.
    _take_missed_kernel[(num_seqs, 1 + capacity * triton.cdiv(width, COLUMNS))](
        slot_ids,
        missed,
        rope_deltas,
        groups,
        out,
        width,
        CAPACITY=capacity,
        BLOCK=COLUMNS,
        num_warps=4,
        **dependent_launch(slot_ids),
    )
    return out


@triton.jit
def _take_missed_kernel(
    slot_id_ptr,
    missed,
    rope_delta_ptr,
    groups,
    out,
    width,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_id_ptr + seq).to(tl.int64)
    if tl.program_id(1) == 0:
        rows = tl.arange(0, CAPACITY)
        place, index = slot * CAPACITY + rows, seq * CAPACITY + rows
        kept = tl.load(missed.positions + place)
        tl.debug_barrier()  # all threads have read them
        tl.store(missed.positions + place, tl.full([CAPACITY], -1, tl.int64))
        tl.store(out.tokens + index, tl.load(missed.tokens + place))
        tl.store(out.is_row + index, kept >= 0)
        position = tl.maximum(kept, 0)
        rotary = position
        if rope_delta_ptr is not None:
            rotary = tl.maximum(position + tl.load(rope_delta_ptr + slot), 0)
        tl.store(out.positions + index, position)
        tl.store(out.rotary + index, rotary)
        tl.store(out.kv_lens + index, (position + 1).to(tl.int32))
        store_slots(groups, seq, index, position, kept >= 0, rows < CAPACITY)
    else:
        parts = tl.cdiv(width, BLOCK)
        row, part = (tl.program_id(1) - 1) // parts, (tl.program_id(1) - 1) % parts
        column = part * BLOCK + tl.arange(0, BLOCK)
        state = tl.load(
            missed.hidden + (slot * CAPACITY + row) * width + column, mask=column < width
        )
        tl.store(out.hidden + (seq * CAPACITY + row) * width + column, state, mask=column < width)
