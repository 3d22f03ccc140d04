"""Triton kernels of drafting's bookkeeping; each has its twin in torch in `drafting.py`.

A program works on one request: these are bound by launching, not by arithmetic. KV groups and
other lists of tensors are tuples, unrolled when a kernel is compiled.
"""
# mypy: disallow-untyped-defs=False
# (kernels are Triton's language, not Python's)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...metadata.attention import NULL_BLOCK
from ...metadata.sampling import SlotSampling

_NULL_BLOCK = tl.constexpr(NULL_BLOCK)
_BLOCK = 128  # elements of a program where there are many


def _ints(like: Tensor, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


# -- vLLM's drafting kernels -------------------------------------------------------------------
def next_tokens_padded(
    sampled: Tensor, backup: Tensor, discard: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    num_seqs, columns = sampled.shape
    count, token = (_ints(sampled, num_seqs, dtype=torch.int32) for _ in range(2))
    _next_tokens_kernel[(num_seqs,)](
        sampled, backup, discard, count, token, sampled.stride(0), columns, vocab_size,
        BLOCK=triton.next_power_of_2(columns), num_warps=1,
    )  # fmt: skip
    return count, token


@triton.jit
def _next_tokens_kernel(
    sampled_ptr, backup_ptr, discard_ptr, count_ptr, token_ptr, sampled_row, columns, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    tokens = tl.load(sampled_ptr + seq * sampled_row + column, mask=column < columns, other=-1)
    valid = (tokens >= 0) & (tokens < vocab_size) & (tl.load(discard_ptr + seq) == 0)
    last = tl.max(tl.where(valid, column, -1), 0)
    own = tl.sum(tl.where(column == last, tokens, 0), 0)
    tl.store(count_ptr + seq, tl.sum(valid.to(tl.int32), 0))
    tl.store(token_ptr + seq, tl.where(last >= 0, own, tl.load(backup_ptr + seq)).to(tl.int32))


def inputs_padded(
    query_starts: Tensor, num_drafts: Tensor, num_valid: Tensor
) -> tuple[Tensor, Tensor]:
    num_seqs = num_drafts.shape[0]
    rows = _ints(query_starts, num_seqs)
    rejected = _ints(query_starts, num_seqs, dtype=torch.int32)
    _inputs_padded_kernel[(triton.cdiv(num_seqs, _BLOCK),)](
        query_starts, num_drafts, num_valid, rows, rejected, num_seqs, BLOCK=_BLOCK
    )
    return rows, rejected


@triton.jit
def _inputs_padded_kernel(
    start_ptr, drafts_ptr, valid_ptr, row_ptr, rejected_ptr, num_seqs, BLOCK: tl.constexpr
):
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = seq < num_seqs
    drafts = tl.load(drafts_ptr + seq, mask=mask, other=0)
    valid = tl.load(valid_ptr + seq, mask=mask, other=0)
    end = tl.load(start_ptr + seq + 1, mask=mask, other=0).to(tl.int64)
    rejected = tl.where(drafts > 0, drafts + 1 - valid, 0)
    tl.store(row_ptr + seq, end - 1 - rejected, mask=mask)
    tl.store(rejected_ptr + seq, rejected.to(tl.int32), mask=mask)


def compact_rejected(
    query_starts: Tensor, num_rejected: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    num_seqs = num_rejected.shape[0]
    starts = torch.empty_like(query_starts, dtype=torch.int32)
    rows = _ints(query_starts, num_rows)
    _compact_kernel[(num_seqs + 1,)](
        query_starts, num_rejected, starts, rows, num_seqs, num_rows, BLOCK=_BLOCK
    )
    return starts, rows


@triton.jit
def _compact_kernel(
    start_ptr, rejected_ptr, new_start_ptr, row_ptr, num_seqs, num_rows, BLOCK: tl.constexpr
):
    """Program b writes request b's rows, the last one what is left of the pass."""
    seq = tl.program_id(0)
    new_start = seq * 0
    for begin in range(0, seq, BLOCK):
        before = begin + tl.arange(0, BLOCK)
        mask = before < seq
        begins = tl.load(start_ptr + before, mask=mask, other=0)
        ends = tl.load(start_ptr + before + 1, mask=mask, other=0)
        rejected = tl.load(rejected_ptr + before, mask=mask, other=0)
        new_start += tl.sum(tl.maximum(ends - begins - rejected, 0).to(tl.int32), 0)
    tl.store(new_start_ptr + seq, new_start)
    is_request = seq < num_seqs
    start = tl.load(start_ptr + seq)
    end = tl.load(start_ptr + seq + 1, mask=is_request, other=0)
    kept = tl.maximum(end - start - tl.load(rejected_ptr + seq, mask=is_request, other=0), 0)
    kept = tl.where(is_request, kept, num_rows - new_start)
    for begin in range(0, kept, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        old = tl.where(is_request, start + place, -1)
        tl.store(row_ptr + new_start + place, old.to(tl.int64), mask=place < kept)


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
    """`step_slots_and_lens` (with `seq_lens`, `num_rows`) and `draft_step` (with `tokens`).

    Returns:
        (positions, slots per group, KV lengths, tokens as int64), R rows per request.
    """
    num_seqs, rows = positions.shape
    padded = num_seqs if num_rows is None else num_rows
    guarded = _ints(positions, padded * rows)
    slots = tuple(torch.empty_like(guarded) for _ in tables)
    lens = _ints(positions, padded, dtype=torch.int32)
    ids = None if tokens is None else torch.empty_like(guarded)
    _step_kernel[(padded,)](
        positions, *positions.stride(), seq_lens,
        tokens, *((0, 0) if tokens is None else tokens.stride()),
        guarded, slots, lens, ids,
        tables, tuple(t.stride(0) for t in tables), tuple(t.shape[1] for t in tables), page_sizes,
        num_seqs, rows, advance, max_seq_len,
        BLOCK=triton.next_power_of_2(rows), num_warps=1,
    )  # fmt: skip
    return guarded, slots, lens, ids


@triton.jit
def _step_kernel(
    position_ptr, position_seq, position_row, len_ptr, token_ptr, token_seq, token_row,
    guarded_ptr, slot_ptrs, new_len_ptr, id_ptr,
    table_ptrs, table_rows, widths, page_sizes,
    num_seqs, rows, advance, max_seq_len, BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    in_batch = seq < num_seqs
    is_row = row < rows
    mask = is_row & in_batch
    place = position_ptr + seq * position_seq + row * position_row
    position = tl.load(place, mask=mask, other=0).to(tl.int64) + advance
    inside = mask & (position < max_seq_len)
    position = tl.where(inside, position, 0)
    out = seq * rows + row
    tl.store(guarded_ptr + out, position, mask=is_row)
    _store_slots(
        slot_ptrs, table_ptrs, table_rows, widths, page_sizes, seq, out, position, inside, is_row
    )
    new_len = tl.sum(tl.where(row == rows - 1, position, 0), 0) + 1
    if len_ptr is not None:
        known = tl.load(len_ptr + seq, mask=in_batch, other=0).to(tl.int64) + 1
        fits = tl.sum((inside & (row == rows - 1)).to(tl.int32), 0) > 0
        new_len = tl.minimum(tl.where(fits, known, 1), max_seq_len)
    tl.store(new_len_ptr + seq, new_len.to(tl.int32))
    if token_ptr is not None:
        token = tl.load(token_ptr + seq * token_seq + row * token_row, mask=mask, other=0)
        tl.store(id_ptr + out, token.to(tl.int64), mask=is_row)


@triton.jit
def _store_slots(
    slot_ptrs, table_ptrs, table_rows, widths, page_sizes, seq, out, position, inside, mask
):
    """Where each KV group keeps these rows of one request; `position` is guarded."""
    for i in tl.static_range(len(table_ptrs)):
        page = position // page_sizes[i]
        is_known = inside & (page < widths[i])
        block = tl.load(
            table_ptrs[i] + seq * table_rows[i] + page, mask=is_known, other=_NULL_BLOCK
        )
        slot = block.to(tl.int64) * page_sizes[i] + position % page_sizes[i]
        tl.store(slot_ptrs[i] + out, tl.where(block != _NULL_BLOCK, slot, -1), mask=mask)


def expand_for_parallel_drafting(
    input_ids: Tensor,
    position_ids: Tensor,
    next_tokens: Tensor,
    num_rejected: Tensor,
    query_starts: Tensor,
    num_proposals: int,
    mask_token: int,
    padding_token: int,
    shift: bool,
) -> tuple[Tensor, ...]:
    num_seqs = next_tokens.shape[0]
    extra = num_proposals - 1 if shift else num_proposals
    total = input_ids.shape[0] + num_seqs * extra
    ids, positions, hidden_rows = (_ints(input_ids, total) for _ in range(3))
    is_rejected, is_masked = (_ints(input_ids, total, dtype=torch.bool) for _ in range(2))
    samples = _ints(input_ids, num_seqs, num_proposals)
    _expand_kernel[(num_seqs,)](
        input_ids, position_ids, next_tokens, num_rejected, query_starts,
        ids, positions, is_rejected, is_masked, samples, hidden_rows,
        num_seqs, total, num_proposals, extra, mask_token, padding_token,
        SHIFT=shift, BLOCK=_BLOCK,
    )  # fmt: skip
    return ids, positions, is_rejected, is_masked, samples, hidden_rows


@triton.jit
def _expand_kernel(
    id_ptr, position_ptr, next_ptr, rejected_ptr, start_ptr,
    new_id_ptr, new_position_ptr, is_rejected_ptr, is_masked_ptr, sample_ptr, hidden_ptr,
    num_seqs, total, num_proposals, extra, mask_token, padding_token,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    start = tl.load(start_ptr + seq).to(tl.int64)
    end = tl.load(start_ptr + seq + 1).to(tl.int64)
    new_start = start + seq * extra
    # The last request's program also fills the rows past the batch.
    new_end = tl.where(seq == num_seqs - 1, total, end + (seq + 1) * extra)
    valid = tl.minimum(tl.maximum(end - start - tl.load(rejected_ptr + seq), 1), end - start)
    bonus = valid - 1 if SHIFT else valid
    next_token = tl.load(next_ptr + seq).to(tl.int64)
    first = tl.load(position_ptr + start, mask=start < end, other=0).to(tl.int64)
    for begin in range(0, (new_end - new_start).to(tl.int32), BLOCK):
        place = begin + tl.arange(0, BLOCK)
        out = new_start + place
        mask = out < new_end
        is_rejected = (place >= bonus + num_proposals) | (start == end)
        is_masked = (place > bonus) & ~is_rejected
        source = start + place
        read = source + 1 if SHIFT else source
        token = tl.load(id_ptr + read, mask=mask & (place < bonus), other=0).to(tl.int64)
        token = tl.where(place == bonus, next_token, token)
        token = tl.where(is_masked, mask_token, token)
        tl.store(new_id_ptr + out, tl.where(is_rejected, padding_token, token), mask=mask)
        tl.store(new_position_ptr + out, tl.where(is_rejected, 0, first + place), mask=mask)
        tl.store(is_rejected_ptr + out, is_rejected, mask=mask)
        tl.store(is_masked_ptr + out, is_masked, mask=mask)
        tl.store(hidden_ptr + out, tl.where(place < valid, source, -1), mask=mask)
    for begin in range(0, num_proposals, BLOCK):
        proposal = begin + tl.arange(0, BLOCK)
        row = tl.maximum(tl.minimum(new_start + bonus + proposal, total - 1), 0)
        tl.store(sample_ptr + seq * num_proposals + proposal, row, mask=proposal < num_proposals)


def extend_queries(starts: Tensor, lens: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    new_starts, new_lens = torch.empty_like(starts), torch.empty_like(lens)
    _extend_kernel[(triton.cdiv(starts.shape[0], _BLOCK),)](
        starts, lens, new_starts, new_lens, lens.shape[0], num_rows, BLOCK=_BLOCK
    )
    return new_starts, new_lens


@triton.jit
def _extend_kernel(
    start_ptr, len_ptr, new_start_ptr, new_len_ptr, num_seqs, num_rows, BLOCK: tl.constexpr
):
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(start_ptr + seq, mask=seq <= num_seqs, other=0)
    length = tl.load(len_ptr + seq, mask=seq < num_seqs, other=0)
    tl.store(new_start_ptr + seq, start + seq * num_rows, mask=seq <= num_seqs)
    tl.store(new_len_ptr + seq, length + num_rows, mask=seq < num_seqs)


# -- our generation step -----------------------------------------------------------------------
def gather_step_inputs(
    slot_ids: Tensor,
    next_tokens: Tensor,
    past_lens: Tensor,
    sampling: SlotSampling,
    tables: tuple[Tensor, ...],
    page_size: int,
    rows: int,
    max_seq_len: int,
    first_row: int,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...], Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """(tokens [G, R] int32, then the fields of `StepRows`)."""
    num_seqs = slot_ids.shape[0]
    total = num_seqs * rows
    tokens = _ints(slot_ids, num_seqs, rows, dtype=torch.int32)
    ids, positions, gather_ids, following = (_ints(slot_ids, total) for _ in range(4))
    slots = tuple(torch.empty_like(positions) for _ in tables)
    lens = _ints(slot_ids, num_seqs, dtype=torch.int32)
    per_row = SlotSampling(*(_ints(slot_ids, total, dtype=column.dtype) for column in sampling))
    _gather_kernel[(num_seqs,)](
        slot_ids, next_tokens, next_tokens.stride(0), past_lens, sampling,
        tables, tuple(t.stride(0) for t in tables), tuple(t.shape[1] for t in tables),
        (page_size,) * len(tables),
        tokens, ids, positions, slots, lens, gather_ids, following, per_row,
        rows, max_seq_len, first_row,
        BLOCK=triton.next_power_of_2(rows), num_warps=1,
    )  # fmt: skip
    return tokens, ids, positions, slots, lens, gather_ids, following, per_row


@triton.jit
def _gather_kernel(
    slot_id_ptr, next_ptr, next_row, past_ptr, per_slot_ptrs,
    table_ptrs, table_rows, widths, page_sizes,
    token_ptr, id_ptr, position_ptr, slot_ptrs, len_ptr, gather_ptr, following_ptr, per_row_ptrs,
    rows, max_seq_len, first_row, BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_id_ptr + seq).to(tl.int64)
    past = tl.load(past_ptr + slot)
    row = tl.arange(0, BLOCK)
    mask = row < rows
    out = seq * rows + row
    token = tl.load(next_ptr + slot * next_row + row, mask=mask, other=0)
    tl.store(token_ptr + out, token, mask=mask)
    tl.store(id_ptr + out, token.to(tl.int64), mask=mask)
    inside = mask & (past + row < max_seq_len)
    position = tl.where(inside, past + row, 0)
    tl.store(position_ptr + out, position, mask=mask)
    tl.store(following_ptr + out, position + 1, mask=mask)
    tl.store(gather_ptr + out, out + first_row, mask=mask)
    tl.store(len_ptr + seq, tl.minimum(past + rows, max_seq_len).to(tl.int32))
    _store_slots(
        slot_ptrs, table_ptrs, table_rows, widths, page_sizes, seq, out, position, inside, mask
    )
    for i in tl.static_range(len(per_slot_ptrs)):
        tl.store(per_row_ptrs[i] + out, tl.load(per_slot_ptrs[i] + slot), mask=mask)


def shift_for_drafting(
    accepted: Tensor, lens: Tensor, position_ids: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    num_seqs = accepted.shape[0]
    ids = _ints(accepted, num_seqs * rows)
    last_rows, positions = (_ints(accepted, num_seqs) for _ in range(2))
    _shift_kernel[(num_seqs,)](
        accepted, accepted.stride(0), lens, position_ids, ids, last_rows, positions, rows,
        BLOCK=triton.next_power_of_2(rows), num_warps=1,
    )  # fmt: skip
    return ids, last_rows, positions


@triton.jit
def _shift_kernel(
    accepted_ptr, accepted_row, len_ptr, position_ptr, id_ptr, last_ptr, last_position_ptr, rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    mask = row < rows
    token = tl.load(accepted_ptr + seq * accepted_row + row, mask=mask, other=0)
    tl.store(id_ptr + seq * rows + row, token.to(tl.int64), mask=mask)
    length = tl.load(len_ptr + seq).to(tl.int64)
    tl.store(last_ptr + seq, seq * rows + length - 1)
    tl.store(last_position_ptr + seq, tl.load(position_ptr + seq * rows).to(tl.int64) + length)


def last_two_tokens(
    input_ids: Tensor, position_ids: Tensor, accepted: Tensor, lens: Tensor, certain: Tensor
) -> tuple[Tensor, Tensor]:
    num_seqs = accepted.shape[0]
    tokens = _ints(accepted, num_seqs, 2, dtype=torch.int32)
    positions = _ints(accepted, num_seqs, 2)
    _last_two_kernel[(triton.cdiv(num_seqs, _BLOCK),)](
        input_ids, position_ids, accepted, accepted.stride(0), lens, certain, tokens, positions,
        num_seqs, BLOCK=_BLOCK,
    )  # fmt: skip
    return tokens, positions


@triton.jit
def _last_two_kernel(
    id_ptr, position_ptr, accepted_ptr, accepted_row, len_ptr, certain_ptr,
    token_ptr, last_position_ptr, num_seqs, BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = seq < num_seqs
    row = tl.load(certain_ptr + seq, mask=mask, other=0)
    length = tl.load(len_ptr + seq, mask=mask, other=1).to(tl.int64)
    read = tl.load(id_ptr + row, mask=mask, other=0).to(tl.int32)
    last = accepted_ptr + seq.to(tl.int64) * accepted_row + length - 1
    before = tl.load(last - 1, mask=mask & (length > 1), other=0)
    tl.store(token_ptr + 2 * seq, tl.where(length > 1, before, read), mask=mask)
    tl.store(token_ptr + 2 * seq + 1, tl.load(last, mask=mask, other=0), mask=mask)
    position = tl.load(position_ptr + row, mask=mask, other=0).to(tl.int64) + length
    tl.store(last_position_ptr + 2 * seq, position - 1, mask=mask)
    tl.store(last_position_ptr + 2 * seq + 1, position, mask=mask)


def masked_rows(
    accepted: Tensor,
    lens: Tensor,
    position_ids: Tensor,
    certain: Tensor,
    num_rows: int,
    num_proposals: int,
    mask_token: int,
    offset: int,
) -> tuple[Tensor, ...]:
    num_seqs = accepted.shape[0]
    tokens = _ints(accepted, num_seqs, num_rows, dtype=torch.int32)
    positions = _ints(accepted, num_seqs, num_rows)
    sources = _ints(accepted, num_seqs * num_rows)
    proposing, last = _ints(accepted, num_proposals * num_seqs), _ints(accepted, num_seqs)
    _masked_rows_kernel[(num_seqs,)](
        accepted, accepted.stride(0), lens, position_ids, certain,
        tokens, positions, sources, proposing, last,
        num_seqs, num_rows, num_proposals, mask_token, offset, position_ids.shape[0],
        BLOCK=triton.next_power_of_2(num_rows), num_warps=1,
    )  # fmt: skip
    return tokens, positions, sources, proposing, last


@triton.jit
def _masked_rows_kernel(
    accepted_ptr, accepted_row, len_ptr, position_ptr, certain_ptr,
    token_ptr, row_position_ptr, source_ptr, proposing_ptr, last_ptr,
    num_seqs, rows, num_proposals, mask_token, offset, total, BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    mask = row < rows
    out = seq * rows + row
    length = tl.load(len_ptr + seq).to(tl.int64)
    certain = tl.load(certain_ptr + seq)
    start = tl.load(position_ptr + certain).to(tl.int64)
    is_known = row < length
    token = tl.load(accepted_ptr + seq * accepted_row + row, mask=mask & is_known, other=0)
    tl.store(token_ptr + out, tl.where(is_known, token.to(tl.int32), mask_token), mask=mask)
    tl.store(row_position_ptr + out, start + offset + row, mask=mask)
    tl.store(source_ptr + out, tl.where(is_known, certain + row, total), mask=mask)
    proposed = row < num_proposals
    tl.store(proposing_ptr + row * num_seqs + seq, seq * rows + length - 1 + row, mask=proposed)
    tl.store(last_ptr + seq, start + length)


def gather_rows(rows: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    sizes = tuple(state.shape[1] for state in states)
    outs = tuple(
        torch.empty((rows.shape[0], size), dtype=state.dtype, device=state.device)
        for state, size in zip(states, sizes, strict=True)
    )
    block = min(1024, triton.next_power_of_2(max(sizes)))
    _gather_rows_kernel[(rows.shape[0], triton.cdiv(max(sizes), block))](
        rows, states, tuple(state.stride(0) for state in states), outs, sizes, BLOCK=block
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
    count = tokens.shape[0]
    out = _ints(tokens, count, dtype=torch.int32)
    _target_ids_kernel[(triton.cdiv(count, _BLOCK),)](tokens, d2t, out, count, BLOCK=_BLOCK)
    return out


@triton.jit
def _target_ids_kernel(token_ptr, d2t_ptr, out_ptr, count, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + row, mask=row < count, other=0).to(tl.int64)
    offset = tl.load(d2t_ptr + token, mask=row < count, other=0)
    tl.store(out_ptr + row, (token + offset).to(tl.int32), mask=row < count)


def finish_drafts(
    proposals: tuple[Tensor, ...], positions: Tensor, max_seq_len: int, max_draft_len: int
) -> Tensor:
    num_seqs = positions.shape[0]
    drafts = _ints(positions, num_seqs, max_draft_len, dtype=torch.int32)
    _finish_kernel[(triton.cdiv(num_seqs, _BLOCK),)](
        proposals, positions, positions.stride(0), drafts, num_seqs, max_seq_len,
        WIDTH=max_draft_len, BLOCK=_BLOCK,
    )  # fmt: skip
    return drafts


@triton.jit
def _finish_kernel(
    proposal_ptrs, position_ptr, position_seq, draft_ptr, num_seqs, max_seq_len,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    num_seqs, columns = drafts.shape[0], drafts.shape[1] + 1
    out = _ints(accepted, num_seqs, columns, dtype=torch.int32)
    _next_new_kernel[(num_seqs,)](
        accepted, accepted.stride(0), lens, drafts, *drafts.stride(), out, columns,
        BLOCK=triton.next_power_of_2(columns), num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _next_new_kernel(
    accepted_ptr, accepted_row, len_ptr, draft_ptr, draft_row, draft_column, out_ptr, columns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    last = tl.load(accepted_ptr + seq * accepted_row + tl.load(len_ptr + seq) - 1).to(tl.int32)
    place = draft_ptr + seq * draft_row + (column - 1) * draft_column
    draft = tl.load(place, mask=mask & (column > 0), other=-1).to(tl.int32)
    tl.store(out_ptr + seq * columns + column, tl.where(column > 0, draft, last), mask=mask)


def save_step(
    slot_ids: Tensor, position_ids: Tensor, lens: Tensor, new_tokens: Tensor,
    past_lens: Tensor, next_tokens: Tensor,
) -> None:  # fmt: skip
    num_seqs, columns = new_tokens.shape
    _save_kernel[(num_seqs,)](
        slot_ids, position_ids, lens, new_tokens, new_tokens.stride(0),
        past_lens, next_tokens, next_tokens.stride(0),
        position_ids.shape[0] // max(num_seqs, 1), columns,
        BLOCK=triton.next_power_of_2(columns), num_warps=1,
    )  # fmt: skip


@triton.jit
def _save_kernel(
    slot_id_ptr, position_ptr, len_ptr, new_ptr, new_row, past_ptr, next_ptr, next_row,
    rows, columns, BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_id_ptr + seq).to(tl.int64)
    past = tl.load(position_ptr + seq * rows).to(tl.int64) + tl.load(len_ptr + seq)
    tl.store(past_ptr + slot, past)
    column = tl.arange(0, BLOCK)
    tokens = tl.load(new_ptr + seq * new_row + column, mask=column < columns, other=0)
    tl.store(next_ptr + slot * next_row + column, tokens, mask=column < columns)
