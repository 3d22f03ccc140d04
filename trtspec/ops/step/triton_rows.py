"""Triton kernels of a step's rows and slots; each has its twin in `rows.py`.

A program works on one request: launching takes longer than the arithmetic. KV groups and other
lists of tensors are tuples, unrolled when a kernel is compiled.
"""
# mypy: disallow-untyped-defs=False
# (kernels are Triton's language, not Python's)

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...metadata.attention import NULL_BLOCK, AttentionMetadata
from ...metadata.sampling import SlotSampling
from ..launch.triton import after_previous, dependent_launch
from .rows import ContextLayout, GatheredContexts, StepRows

_NULL_BLOCK = tl.constexpr(NULL_BLOCK)
BLOCK = 128
"""Elements of a program where there are many."""


class Grid(NamedTuple):
    """A matrix with a row per request, with any strides."""

    x: Tensor  # [B, R]
    seq_stride: int
    row_stride: int

    @classmethod
    def of(cls, x: Tensor) -> Grid:
        return cls(x, *x.stride())


class AcceptedTokens(NamedTuple):
    """A step's accepted tokens."""

    tokens: Tensor  # [B, K+1] int32, -1 past the length
    stride: int  # from row to row
    lens: Tensor  # [B] int32

    @classmethod
    def of(cls, tokens: Tensor, lens: Tensor) -> AcceptedTokens:
        return cls(tokens, tokens.stride(0), lens)


class KvGroups(NamedTuple):
    """Per KV group: its block table, and the slots of a pass's rows."""

    tables: tuple[Tensor, ...]  # [B, M] int32
    strides: tuple[int, ...]  # from row to row
    widths: tuple[int, ...]  # M
    page_sizes: tuple[int, ...]
    slots: tuple[Tensor, ...]  # [T] int64, written

    @classmethod
    def of(cls, tables: Sequence[Tensor], page_sizes: Sequence[int], num_rows: int) -> KvGroups:
        """Allocates the slots of T = `num_rows` rows."""
        return cls(
            tables=tuple(tables),
            strides=tuple(table.stride(0) for table in tables),
            widths=tuple(table.shape[1] for table in tables),
            page_sizes=tuple(page_sizes),
            slots=tuple(ints(table, num_rows) for table in tables),
        )


class _Slots(NamedTuple):
    """Slot state that a step reads and writes."""

    next_tokens: Tensor  # [S, K+1] int32
    stride: int  # from row to row
    past_lens: Tensor  # [S] int64


class StepRoom(NamedTuple):
    """What `step` and `draft_steps` write."""

    positions: Tensor  # [B * R] int64, guarded
    lens: Tensor  # [B] int32, KV lengths
    ids: Tensor | None  # [B * R] int64


def ints(like: Tensor, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Allocates integers on the device of another tensor."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def step(
    positions: Tensor,
    tables: tuple[Tensor, ...],
    page_sizes: tuple[int, ...],
    max_seq_len: int,
    *,
    advance: int,
    tokens: Tensor | None = None,
    seq_lens: Tensor | None = None,
    num_rows: int | None = None,
) -> tuple[Tensor, tuple[Tensor, ...], Tensor, Tensor | None]:
    """Guards positions, and finds their slots and KV lengths: `draft_step`, `step_slots_and_lens`.

    Args:
        positions: [B, R] int.
        advance: added to them.
        tokens: [B, R] int, of `draft_step`.
        seq_lens: [B] int32, the KV lengths of the rows before, of `step_slots_and_lens`. None: a
            length is the last row's position + 1.
        num_rows: of the pass, at least B: those beyond are padding. None is B.

    Returns:
        (positions, slots per group, KV lengths, tokens as int64), R rows per request.
    """
    num_seqs, rows = positions.shape
    padded = num_seqs if num_rows is None else num_rows
    groups = KvGroups.of(tables, page_sizes, padded * rows)
    out = StepRoom(
        positions=ints(positions, padded * rows),
        lens=ints(positions, padded, dtype=torch.int32),
        ids=None if tokens is None else ints(positions, padded * rows),
    )
    token_grid = None if tokens is None else Grid.of(tokens)
    _step_kernel[(padded,)](
        Grid.of(positions),
        seq_lens,
        token_grid,
        groups,
        out,
        num_seqs,
        rows,
        advance,
        max_seq_len,
        BLOCK=triton.next_power_of_2(rows),
        num_warps=1,
        **dependent_launch(positions),
    )
    return out.positions, groups.slots, out.lens, out.ids


@triton.jit
def _step_kernel(
    positions,
    len_ptr,
    tokens,
    groups,
    out,
    num_seqs,
    rows,
    advance,
    max_seq_len,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    seq = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    in_batch = seq < num_seqs
    is_row = row < rows
    mask = is_row & in_batch
    entry = positions.x + seq * positions.seq_stride + row * positions.row_stride
    position = tl.load(entry, mask=mask, other=0).to(tl.int64) + advance
    inside = mask & (position < max_seq_len)
    position = tl.where(inside, position, 0)
    index = seq * rows + row
    tl.store(out.positions + index, position, mask=is_row)
    store_slots(groups, seq, index, position, inside, is_row)
    new_len = tl.sum(tl.where(row == rows - 1, position, 0), 0) + 1
    if len_ptr is not None:
        known = tl.load(len_ptr + seq, mask=in_batch, other=0).to(tl.int64) + 1
        fits = tl.sum((inside & (row == rows - 1)).to(tl.int32), 0) > 0
        new_len = tl.minimum(tl.where(fits, known, 1), max_seq_len)
    tl.store(out.lens + seq, new_len.to(tl.int32))
    if out.ids is not None:
        entry = tokens.x + seq * tokens.seq_stride + row * tokens.row_stride
        token = tl.load(entry, mask=mask, other=0)
        tl.store(out.ids + index, token.to(tl.int64), mask=is_row)


@triton.jit
def store_slots(groups, seq, index, position, inside, mask):
    """Writes the KV slots of these rows of a request, or of one each, per group; `position` is
    guarded."""
    for i in tl.static_range(len(groups.tables)):
        page_size = groups.page_sizes[i]
        page = position // page_size
        is_known = inside & (page < groups.widths[i])
        entry = groups.tables[i] + seq * groups.strides[i] + page
        block = tl.load(entry, mask=is_known, other=_NULL_BLOCK)
        slot = block.to(tl.int64) * page_size + position % page_size
        tl.store(groups.slots[i] + index, tl.where(block != _NULL_BLOCK, slot, -1), mask=mask)


def gather_step_inputs(
    slot_ids: Tensor,
    next_tokens: Tensor,
    past_lens: Tensor,
    sampling: SlotSampling,
    block_tables: Sequence[Tensor],
    page_size: int,
    rows: int,
    max_seq_len: int,
    first_row: int = 0,
) -> tuple[StepRows, Tensor]:
    """Gathers a step's rows from the slots."""
    num_seqs = slot_ids.shape[0]
    total = num_seqs * rows
    groups = KvGroups.of(block_tables, (page_size,) * len(block_tables), total)
    tokens = ints(slot_ids, num_seqs, rows, dtype=torch.int32)
    out = StepRows(
        input_ids=ints(slot_ids, total),
        position_ids=ints(slot_ids, total),
        slot_mappings=groups.slots,
        kv_lens=ints(slot_ids, num_seqs, dtype=torch.int32),
        gather_ids=ints(slot_ids, total),
        next_positions=ints(slot_ids, total),
        sampling=SlotSampling(*(ints(slot_ids, total, dtype=c.dtype) for c in sampling)),
    )
    slots = _Slots(next_tokens, next_tokens.stride(0), past_lens)
    _gather_kernel[(num_seqs,)](
        slot_ids,
        slots,
        sampling,
        groups,
        tokens,
        out,
        rows,
        max_seq_len,
        first_row,
        BLOCK=triton.next_power_of_2(rows),
        num_warps=1,
        **dependent_launch(slot_ids),
    )
    return out, tokens[:, 1:]


@triton.jit(do_not_specialize=["first_row"], do_not_specialize_on_alignment=["slot_id_ptr"])
def _gather_kernel(
    slot_id_ptr,
    slots,
    sampling,
    groups,
    token_ptr,
    out,
    rows,
    max_seq_len,
    first_row,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_id_ptr + seq).to(tl.int64)
    past = tl.load(slots.past_lens + slot)
    row = tl.arange(0, BLOCK)
    mask = row < rows
    index = seq * rows + row
    token = tl.load(slots.next_tokens + slot * slots.stride + row, mask=mask, other=0)
    tl.store(token_ptr + index, token, mask=mask)
    tl.store(out.input_ids + index, token.to(tl.int64), mask=mask)
    inside = mask & (past + row < max_seq_len)
    position = tl.where(inside, past + row, 0)
    tl.store(out.position_ids + index, position, mask=mask)
    tl.store(out.next_positions + index, position + 1, mask=mask)
    tl.store(out.gather_ids + index, index + first_row, mask=mask)
    tl.store(out.kv_lens + seq, tl.minimum(past + rows, max_seq_len).to(tl.int32))
    store_slots(groups, seq, index, position, inside, mask)
    for i in tl.static_range(len(sampling)):
        tl.store(out.sampling[i] + index, tl.load(sampling[i] + slot), mask=mask)


def gather_context_inputs(
    slot_ids: Tensor,
    layout: ContextLayout,
    sampling: SlotSampling,
    block_tables: Sequence[Tensor],
    page_size: int,
    max_seq_len: int,
) -> GatheredContexts:
    """Gathers what a pass reads of contexts."""
    num_contexts, num_rows = slot_ids.shape[0], layout.positions.shape[0]
    groups = KvGroups.of(block_tables, (page_size,) * len(block_tables), num_rows)
    out = GatheredContexts(
        slot_mappings=groups.slots,
        kv_lens=ints(slot_ids, num_contexts, dtype=torch.int32),
        next_positions=ints(slot_ids, num_contexts),
        sampling=SlotSampling(*(ints(slot_ids, num_contexts, dtype=c.dtype) for c in sampling)),
    )
    _gather_contexts_kernel[(triton.cdiv(max(num_rows, num_contexts), BLOCK),)](
        slot_ids,
        layout,
        sampling,
        groups,
        out,
        num_rows,
        num_contexts,
        max_seq_len,
        BLOCK=BLOCK,
        **dependent_launch(slot_ids),
    )
    return out


@triton.jit
def _gather_contexts_kernel(
    slot_id_ptr,
    layout,
    sampling,
    groups,
    out,
    num_rows,
    num_contexts,
    max_seq_len,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK rows, and as many contexts."""
    after_previous(PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_row = i < num_rows
    owner = tl.load(layout.owners + i, mask=is_row, other=-1)
    position = tl.load(layout.positions + i, mask=is_row, other=0)
    store_slots(groups, owner, i, position, owner >= 0, is_row)
    is_context = i < num_contexts
    end = tl.load(layout.ends + i, mask=is_context, other=0)
    tl.store(out.kv_lens + i, tl.minimum(end, max_seq_len).to(tl.int32), mask=is_context)
    last = tl.load(layout.last_rows + i, mask=is_context, other=0)
    last = tl.load(layout.positions + last, mask=is_context, other=0)
    tl.store(out.next_positions + i, last + 1, mask=is_context)
    slot = tl.load(slot_id_ptr + i, mask=is_context, other=0)
    for j in tl.static_range(len(sampling)):
        value = tl.load(sampling[j] + slot, mask=is_context)
        tl.store(out.sampling[j] + i, value, mask=is_context)


def draft_step(
    meta: AttentionMetadata, tokens: Tensor, positions: Tensor, extra_kv: int, advance: int = 0
) -> tuple[Tensor, AttentionMetadata]:
    """Prepares a draft pass."""
    page_sizes = tuple(group.page_size for group in meta.kv_groups)
    guarded, slots, lens, ids = step(
        positions, meta.block_tables, page_sizes, meta.max_seq_len, advance=advance, tokens=tokens
    )
    assert ids is not None
    return ids, meta.for_rows(guarded.view(positions.shape), slots, extra_kv, lens)


ALIGNED = 4
"""Each pass's numbers begin at a multiple of this, and thereby at 16 bytes: kernels would be
compiled once more for others."""


def draft_steps(
    meta: AttentionMetadata, positions: Tensor, extra_kv: int, count: int
) -> tuple[AttentionMetadata, ...]:
    """Prepares draft passes of one row per request in one launch."""
    num_seqs = positions.shape[0]
    passes = room_of_passes(meta, num_seqs, count)
    _steps_kernel[(triton.cdiv(num_seqs, BLOCK), count)](
        positions,
        positions.stride(0),
        passes.groups,
        passes.out,
        num_seqs,
        passes.width,
        meta.max_seq_len,
        BLOCK=BLOCK,
        **dependent_launch(positions),
    )
    return passes_of(meta, passes, num_seqs, extra_kv)


class RoomOfPasses(NamedTuple):
    """Memory of passes of one row per request, whose numbers stand one behind the other."""

    width: int  # from pass to pass
    groups: KvGroups
    out: StepRoom


def room_of_passes(meta: AttentionMetadata, num_seqs: int, count: int) -> RoomOfPasses:
    """Allocates what `passes_of` takes."""
    width = triton.cdiv(num_seqs, ALIGNED) * ALIGNED
    page_sizes, like = tuple(group.page_size for group in meta.kv_groups), meta.position_ids
    out = StepRoom(
        positions=ints(like, count * width),
        lens=ints(like, count * width, dtype=torch.int32),
        ids=None,
    )
    return RoomOfPasses(width, KvGroups.of(meta.block_tables, page_sizes, count * width), out)


def passes_of(
    meta: AttentionMetadata, room: RoomOfPasses, num_seqs: int, extra_kv: int
) -> tuple[AttentionMetadata, ...]:
    """Returns the metadata of passes whose numbers are in this room."""
    width, groups, out = room
    starts = range(0, out.positions.shape[0], width)
    return tuple(
        meta.for_rows(
            out.positions[start : start + num_seqs].view(-1, 1),
            tuple(slots[start : start + num_seqs] for slots in groups.slots),
            extra_kv,
            out.lens[start : start + num_seqs],
        )
        for start in starts
    )


@triton.jit
def _steps_kernel(
    position_ptr,
    position_stride,
    groups,
    out,
    num_seqs,
    width,
    max_seq_len,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    seq = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = seq < num_seqs
    position = tl.load(position_ptr + seq * position_stride, mask=mask, other=0).to(tl.int64)
    position += tl.program_id(1)
    inside = mask & (position < max_seq_len)
    position = tl.where(inside, position, 0)
    index = tl.program_id(1).to(tl.int64) * width + seq
    tl.store(out.positions + index, position, mask=mask)
    tl.store(out.lens + index, (position + 1).to(tl.int32), mask=mask)
    store_slots(groups, seq, index, position, inside, mask)


def save_step(
    slot_ids: Tensor,
    position_ids: Tensor,
    lens: Tensor,
    new_tokens: Tensor,
    past_lens: Tensor,
    next_tokens: Tensor,
) -> None:
    """Writes the next step's inputs to the slots."""
    num_seqs, columns = new_tokens.shape
    rows = position_ids.shape[0] // max(num_seqs, 1)
    new = AcceptedTokens.of(new_tokens, lens)
    slots = _Slots(next_tokens, next_tokens.stride(0), past_lens)
    _save_kernel[(num_seqs,)](
        slot_ids,
        position_ids,
        new,
        slots,
        past_lens.shape[0] - 1,
        rows,
        columns,
        BLOCK=triton.next_power_of_2(columns),
        num_warps=1,
        **dependent_launch(slot_ids),
    )


@triton.jit(do_not_specialize_on_alignment=["slot_id_ptr", "position_ptr"])
def _save_kernel(
    slot_id_ptr,
    position_ptr,
    new,
    slots,
    scratch_slot,
    rows,
    columns,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_id_ptr + seq).to(tl.int64)
    past = tl.load(position_ptr + seq * rows).to(tl.int64) + tl.load(new.lens + seq)
    tl.store(slots.past_lens + slot, tl.where(slot == scratch_slot, 0, past))
    column = tl.arange(0, BLOCK)
    tokens = tl.load(new.tokens + seq * new.stride + column, mask=column < columns, other=0)
    tl.store(slots.next_tokens + slot * slots.stride + column, tokens, mask=column < columns)
