"""Triton kernels of what a step does between its networks; each has its twin in `rows.py`.

A program works on one request: these are bound by launching, not by arithmetic. KV groups and
other lists of tensors are tuples, unrolled when a kernel is compiled.
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
from .rows import MaskedRows, StepRows

_NULL_BLOCK = tl.constexpr(NULL_BLOCK)
BLOCK = 128
"""Elements of a program where there are many."""


class _Grid(NamedTuple):
    """A matrix with a row per request; neither of its dimensions need be dense."""

    x: Tensor  # [B, R]
    seq_stride: int
    row_stride: int

    @classmethod
    def of(cls, x: Tensor) -> _Grid:
        return cls(x, *x.stride())


class _Accepted(NamedTuple):
    """What came out of a step."""

    tokens: Tensor  # [B, K+1] int32, -1 past the length
    stride: int  # from row to row
    lens: Tensor  # [B] int32


class _KvGroups(NamedTuple):
    """Per KV group: where its blocks are, and where a pass's rows go."""

    tables: tuple[Tensor, ...]  # [B, M] int32
    strides: tuple[int, ...]  # from row to row
    widths: tuple[int, ...]  # M
    page_sizes: tuple[int, ...]
    slots: tuple[Tensor, ...]  # [T] int64, written

    @classmethod
    def of(cls, tables: Sequence[Tensor], page_sizes: Sequence[int], num_rows: int) -> _KvGroups:
        """Allocates the slots of T = `num_rows` rows."""
        return cls(
            tables=tuple(tables),
            strides=tuple(table.stride(0) for table in tables),
            widths=tuple(table.shape[1] for table in tables),
            page_sizes=tuple(page_sizes),
            slots=tuple(ints(table, num_rows) for table in tables),
        )


class _Slots(NamedTuple):
    """What a step finds in the slots, and leaves there."""

    next_tokens: Tensor  # [S, K+1] int32
    stride: int  # from row to row
    past_lens: Tensor  # [S] int64


class _StepOutputs(NamedTuple):
    """Of `step`."""

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
    """`draft_step` (with `tokens`) and `step_slots_and_lens` (with `seq_lens`, `num_rows`).

    Returns:
        (positions, slots per group, KV lengths, tokens as int64), R rows per request.
    """
    num_seqs, rows = positions.shape
    padded = num_seqs if num_rows is None else num_rows
    groups = _KvGroups.of(tables, page_sizes, padded * rows)
    out = _StepOutputs(
        positions=ints(positions, padded * rows),
        lens=ints(positions, padded, dtype=torch.int32),
        ids=None if tokens is None else ints(positions, padded * rows),
    )
    given = None if tokens is None else _Grid.of(tokens)
    _step_kernel[(padded,)](
        _Grid.of(positions),
        seq_lens,
        given,
        groups,
        out,
        num_seqs,
        rows,
        advance,
        max_seq_len,
        BLOCK=triton.next_power_of_2(rows),
        num_warps=1,
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
):
    seq = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    in_batch = seq < num_seqs
    is_row = row < rows
    mask = is_row & in_batch
    place = positions.x + seq * positions.seq_stride + row * positions.row_stride
    position = tl.load(place, mask=mask, other=0).to(tl.int64) + advance
    inside = mask & (position < max_seq_len)
    position = tl.where(inside, position, 0)
    index = seq * rows + row
    tl.store(out.positions + index, position, mask=is_row)
    _store_slots(groups, seq, index, position, inside, is_row)
    new_len = tl.sum(tl.where(row == rows - 1, position, 0), 0) + 1
    if len_ptr is not None:
        known = tl.load(len_ptr + seq, mask=in_batch, other=0).to(tl.int64) + 1
        fits = tl.sum((inside & (row == rows - 1)).to(tl.int32), 0) > 0
        new_len = tl.minimum(tl.where(fits, known, 1), max_seq_len)
    tl.store(out.lens + seq, new_len.to(tl.int32))
    if out.ids is not None:
        place = tokens.x + seq * tokens.seq_stride + row * tokens.row_stride
        token = tl.load(place, mask=mask, other=0)
        tl.store(out.ids + index, token.to(tl.int64), mask=is_row)


@triton.jit
def _store_slots(groups, seq, index, position, inside, mask):
    """Where each KV group keeps these rows of one request; `position` is guarded."""
    for i in tl.static_range(len(groups.tables)):
        page_size = groups.page_sizes[i]
        page = position // page_size
        is_known = inside & (page < groups.widths[i])
        place = groups.tables[i] + seq * groups.strides[i] + page
        block = tl.load(place, mask=is_known, other=_NULL_BLOCK)
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
    groups = _KvGroups.of(block_tables, (page_size,) * len(block_tables), total)
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
    )
    return out, tokens[:, 1:]


@triton.jit
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
):
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
    _store_slots(groups, seq, index, position, inside, mask)
    for i in tl.static_range(len(sampling)):
        tl.store(out.sampling[i] + index, tl.load(sampling[i] + slot), mask=mask)


def shift_for_drafting(
    accepted: Tensor, lens: Tensor, position_ids: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Finds what a head reads, and the row that proposes."""
    num_seqs = accepted.shape[0]
    ids = ints(accepted, num_seqs * rows)
    last_rows, positions = (ints(accepted, num_seqs) for _ in range(2))
    _shift_kernel[(num_seqs,)](
        _Accepted(accepted, accepted.stride(0), lens),
        position_ids,
        ids,
        last_rows,
        positions,
        rows,
        BLOCK=triton.next_power_of_2(rows),
        num_warps=1,
    )
    return ids, last_rows, positions


@triton.jit
def _shift_kernel(
    accepted, position_ptr, id_ptr, last_ptr, last_position_ptr, rows, BLOCK: tl.constexpr
):
    seq = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    mask = row < rows
    token = tl.load(accepted.tokens + seq * accepted.stride + row, mask=mask, other=0)
    tl.store(id_ptr + seq * rows + row, token.to(tl.int64), mask=mask)
    length = tl.load(accepted.lens + seq).to(tl.int64)
    tl.store(last_ptr + seq, seq * rows + length - 1)
    tl.store(last_position_ptr + seq, tl.load(position_ptr + seq * rows).to(tl.int64) + length)


def last_two_tokens(
    input_ids: Tensor, position_ids: Tensor, accepted: Tensor, lens: Tensor, certain: Tensor
) -> tuple[Tensor, Tensor]:
    """Finds the bonus and the token before it."""
    num_seqs = accepted.shape[0]
    tokens = ints(accepted, num_seqs, 2, dtype=torch.int32)
    positions = ints(accepted, num_seqs, 2)
    _last_two_kernel[(triton.cdiv(num_seqs, BLOCK),)](
        input_ids,
        position_ids,
        _Accepted(accepted, accepted.stride(0), lens),
        certain,
        tokens,
        positions,
        num_seqs,
        BLOCK=BLOCK,
    )
    return tokens, positions


@triton.jit
def _last_two_kernel(
    id_ptr,
    position_ptr,
    accepted,
    certain_ptr,
    token_ptr,
    last_position_ptr,
    num_seqs,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = seq < num_seqs
    row = tl.load(certain_ptr + seq, mask=mask, other=0)
    length = tl.load(accepted.lens + seq, mask=mask, other=1).to(tl.int64)
    read = tl.load(id_ptr + row, mask=mask, other=0).to(tl.int32)
    last = accepted.tokens + seq.to(tl.int64) * accepted.stride + length - 1
    before = tl.load(last - 1, mask=mask & (length > 1), other=0)
    tl.store(token_ptr + 2 * seq, tl.where(length > 1, before, read), mask=mask)
    tl.store(token_ptr + 2 * seq + 1, tl.load(last, mask=mask, other=0), mask=mask)
    position = tl.load(position_ptr + row, mask=mask, other=0).to(tl.int64) + length
    tl.store(last_position_ptr + 2 * seq, position - 1, mask=mask)
    tl.store(last_position_ptr + 2 * seq + 1, position, mask=mask)


class _Masked(NamedTuple):
    """Of `masked_rows`: what its rows follow from."""

    positions: Tensor  # [T] int64
    certain: Tensor  # [B] int64
    rows: int
    num_proposals: int
    mask_token: int
    offset: int


def masked_rows(
    accepted: Tensor,
    lens: Tensor,
    position_ids: Tensor,
    certain: Tensor,
    num_rows: int,
    num_proposals: int,
    mask_token: int,
    offset: int,
) -> MaskedRows:
    """Makes the accepted tokens and the masks after them."""
    num_seqs = accepted.shape[0]
    out = MaskedRows(
        tokens=ints(accepted, num_seqs, num_rows, dtype=torch.int32),
        positions=ints(accepted, num_seqs, num_rows),
        sources=ints(accepted, num_seqs * num_rows),
        proposing=ints(accepted, num_proposals * num_seqs),
        last_positions=ints(accepted, num_seqs),
    )
    masked = _Masked(position_ids, certain, num_rows, num_proposals, mask_token, offset)
    _masked_rows_kernel[(num_seqs,)](
        _Accepted(accepted, accepted.stride(0), lens),
        masked,
        out,
        num_seqs,
        position_ids.shape[0],
        BLOCK=triton.next_power_of_2(num_rows),
        num_warps=1,
    )
    return out


@triton.jit
def _masked_rows_kernel(accepted, masked, out, num_seqs, total, BLOCK: tl.constexpr):
    seq = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    rows = masked.rows
    mask = row < rows
    index = seq * rows + row
    length = tl.load(accepted.lens + seq).to(tl.int64)
    certain = tl.load(masked.certain + seq)
    start = tl.load(masked.positions + certain).to(tl.int64)
    is_known = row < length
    place = accepted.tokens + seq * accepted.stride + row
    token = tl.load(place, mask=mask & is_known, other=0)
    token = tl.where(is_known, token.to(tl.int32), masked.mask_token)
    tl.store(out.tokens + index, token, mask=mask)
    tl.store(out.positions + index, start + masked.offset + row, mask=mask)
    tl.store(out.sources + index, tl.where(is_known, certain + row, total), mask=mask)
    first = seq * rows + length - 1
    place = out.proposing + row * num_seqs + seq
    tl.store(place, first + row, mask=row < masked.num_proposals)
    tl.store(out.last_positions + seq, start + length)


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


def gather_distinct(rows: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gathers the same rows of several states."""
    sizes = tuple(state.shape[1] for state in states)
    outs = tuple(
        torch.empty((rows.shape[0], size), dtype=state.dtype, device=state.device)
        for state, size in zip(states, sizes, strict=True)
    )
    strides = tuple(state.stride(0) for state in states)
    block = min(1024, triton.next_power_of_2(max(sizes)))
    _gather_rows_kernel[(rows.shape[0], triton.cdiv(max(sizes), block))](
        rows, states, strides, outs, sizes, BLOCK=block
    )
    return outs


@triton.jit
def _gather_rows_kernel(row_ptr, state_ptrs, strides, out_ptrs, sizes, BLOCK: tl.constexpr):
    out_row = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + out_row)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for i in tl.static_range(len(state_ptrs)):
        x = tl.load(state_ptrs[i] + row * strides[i] + d, mask=d < sizes[i], other=0.0)
        tl.store(out_ptrs[i] + out_row * sizes[i] + d, x, mask=d < sizes[i])


def to_target_ids(tokens: Tensor, d2t: Tensor) -> Tensor:
    """Adds each token's offset to it."""
    count = tokens.shape[0]
    out = ints(tokens, count, dtype=torch.int32)
    _target_ids_kernel[(triton.cdiv(count, BLOCK),)](tokens, d2t, out, count, BLOCK=BLOCK)
    return out


@triton.jit
def _target_ids_kernel(token_ptr, d2t_ptr, out_ptr, count, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + row, mask=row < count, other=0).to(tl.int64)
    offset = tl.load(d2t_ptr + token, mask=row < count, other=0)
    tl.store(out_ptr + row, (token + offset).to(tl.int32), mask=row < count)


def limit_drafts(
    proposals: tuple[Tensor, ...], positions: Tensor, max_seq_len: int, max_draft_len: int
) -> Tensor:
    """Puts proposals side by side, up to the maximum length."""
    num_seqs = positions.shape[0]
    drafts = ints(positions, num_seqs, max_draft_len, dtype=torch.int32)
    _limit_kernel[(triton.cdiv(num_seqs, BLOCK),)](
        proposals,
        positions,
        positions.stride(0),
        drafts,
        num_seqs,
        max_seq_len,
        WIDTH=max_draft_len,
        BLOCK=BLOCK,
    )
    return drafts


@triton.jit
def _limit_kernel(
    proposal_ptrs,
    position_ptr,
    position_seq,
    draft_ptr,
    num_seqs,
    max_seq_len,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = seq < num_seqs
    room = max_seq_len - 1 - tl.load(position_ptr + seq * position_seq, mask=mask, other=0)
    for i in tl.static_range(WIDTH):
        draft = tl.full([BLOCK], -1, tl.int32)
        if i < len(proposal_ptrs):
            proposal = tl.load(proposal_ptrs[i] + seq, mask=mask & (i < room), other=-1)
            draft = proposal.to(tl.int32)
        tl.store(draft_ptr + seq * WIDTH + i, draft, mask=mask)


def next_new_tokens(accepted: Tensor, lens: Tensor, drafts: Tensor) -> Tensor:
    """Puts each request's last accepted token before its drafts."""
    num_seqs, columns = drafts.shape[0], drafts.shape[1] + 1
    out = ints(accepted, num_seqs, columns, dtype=torch.int32)
    _next_new_kernel[(num_seqs,)](
        _Accepted(accepted, accepted.stride(0), lens),
        _Grid.of(drafts),
        out,
        columns,
        BLOCK=triton.next_power_of_2(columns),
        num_warps=1,
    )
    return out


@triton.jit
def _next_new_kernel(accepted, drafts, out_ptr, columns, BLOCK: tl.constexpr):
    seq = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    length = tl.load(accepted.lens + seq)
    last = tl.load(accepted.tokens + seq * accepted.stride + length - 1).to(tl.int32)
    place = drafts.x + seq * drafts.seq_stride + (column - 1) * drafts.row_stride
    draft = tl.load(place, mask=mask & (column > 0), other=-1).to(tl.int32)
    tl.store(out_ptr + seq * columns + column, tl.where(column > 0, draft, last), mask=mask)


def save_step(
    slot_ids: Tensor,
    position_ids: Tensor,
    lens: Tensor,
    new_tokens: Tensor,
    past_lens: Tensor,
    next_tokens: Tensor,
) -> None:
    """Leaves the next step's inputs in the slots."""
    num_seqs, columns = new_tokens.shape
    rows = position_ids.shape[0] // max(num_seqs, 1)
    new = _Accepted(new_tokens, new_tokens.stride(0), lens)
    slots = _Slots(next_tokens, next_tokens.stride(0), past_lens)
    _save_kernel[(num_seqs,)](
        slot_ids,
        position_ids,
        new,
        slots,
        rows,
        columns,
        BLOCK=triton.next_power_of_2(columns),
        num_warps=1,
    )


@triton.jit
def _save_kernel(slot_id_ptr, position_ptr, new, slots, rows, columns, BLOCK: tl.constexpr):
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_id_ptr + seq).to(tl.int64)
    past = tl.load(position_ptr + seq * rows).to(tl.int64) + tl.load(new.lens + seq)
    tl.store(slots.past_lens + slot, past)
    column = tl.arange(0, BLOCK)
    tokens = tl.load(new.tokens + seq * new.stride + column, mask=column < columns, other=0)
    tl.store(slots.next_tokens + slot * slots.stride + column, tokens, mask=column < columns)
