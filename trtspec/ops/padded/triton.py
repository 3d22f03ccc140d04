"""Triton kernels of vLLM's drafting operations; each has its twin in `torch.py`."""
# mypy: disallow-untyped-defs=False
# (kernels are Triton's language, not Python's)

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..step.triton_rows import BLOCK, ints, step
from .torch import ParallelRows, TargetRows


def next_tokens_padded(
    sampled: Tensor, backup: Tensor, discard: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Counts each request's tokens and finds the last."""
    num_seqs, columns = sampled.shape
    count, token = (ints(sampled, num_seqs, dtype=torch.int32) for _ in range(2))
    width = triton.next_power_of_2(columns)
    _next_tokens_kernel[(num_seqs,)](
        sampled,
        sampled.stride(0),
        columns,
        backup,
        discard,
        count,
        token,
        vocab_size,
        BLOCK=width,
        num_warps=1,
    )
    return count, token


@triton.jit
def _next_tokens_kernel(
    sampled_ptr,
    sampled_row,
    columns,
    backup_ptr,
    discard_ptr,
    count_ptr,
    token_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    tokens = tl.load(sampled_ptr + seq * sampled_row + column, mask=column < columns, other=-1)
    valid = (tokens >= 0) & (tokens < vocab_size) & (tl.load(discard_ptr + seq) == 0)
    last = tl.max(tl.where(valid, column, -1), 0)
    token = tl.sum(tl.where(column == last, tokens, 0), 0)
    tl.store(count_ptr + seq, tl.sum(valid.to(tl.int32), 0))
    tl.store(token_ptr + seq, tl.where(last >= 0, token, tl.load(backup_ptr + seq)).to(tl.int32))


def inputs_padded(
    query_starts: Tensor, num_drafts: Tensor, num_valid: Tensor
) -> tuple[Tensor, Tensor]:
    """Finds which row of each request proposes, and how many are rejected."""
    num_seqs = num_drafts.shape[0]
    rows = ints(query_starts, num_seqs)
    rejected = ints(query_starts, num_seqs, dtype=torch.int32)
    _inputs_padded_kernel[(triton.cdiv(num_seqs, BLOCK),)](
        query_starts, num_drafts, num_valid, rows, rejected, num_seqs, BLOCK=BLOCK
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
    """Removes rejected rows from the pass."""
    num_seqs = num_rejected.shape[0]
    starts = torch.empty_like(query_starts, dtype=torch.int32)
    rows = ints(query_starts, num_rows)
    _compact_kernel[(num_seqs + 1,)](
        query_starts, num_rejected, starts, rows, num_seqs, num_rows, BLOCK=BLOCK
    )
    return starts, rows


@triton.jit
def _compact_kernel(
    start_ptr, rejected_ptr, new_start_ptr, row_ptr, num_seqs, num_rows, BLOCK: tl.constexpr
):
    """Program b writes request b's rows; the last one also fills the pass's end."""
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
    left = tl.maximum(end - start - tl.load(rejected_ptr + seq, mask=is_request, other=0), 0)
    left = tl.where(is_request, left, num_rows - new_start)
    for begin in range(0, left, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        old = tl.where(is_request, start + index, -1)
        tl.store(row_ptr + new_start + index, old.to(tl.int64), mask=index < left)


def step_slots_and_lens(
    positions: Tensor,
    seq_lens: Tensor,
    block_tables: Sequence[Tensor],
    page_sizes: Sequence[int],
    max_seq_len: int,
    num_rows: int | None = None,
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Moves each request one token on."""
    guarded, slots, lens, _ = step(
        positions[:, None],
        tuple(block_tables),
        tuple(page_sizes),
        max_seq_len,
        advance=1,
        seq_lens=seq_lens,
        num_rows=num_rows,
    )
    return guarded, slots, lens


def expand_rows(
    target: TargetRows, num_proposals: int, extra: int, mask_token: int, padding_token: int
) -> ParallelRows:
    """Builds the rows of a masked drafter's pass."""
    like, num_seqs = target.input_ids, target.next_tokens.shape[0]
    total = like.shape[0] + num_seqs * extra
    out = ParallelRows(
        input_ids=ints(like, total),
        position_ids=ints(like, total),
        is_rejected=ints(like, total, dtype=torch.bool),
        is_masked=ints(like, total, dtype=torch.bool),
        rows_to_sample=ints(like, num_seqs, num_proposals),
        hidden_rows=ints(like, total),
    )
    _expand_kernel[(num_seqs,)](
        target,
        out,
        num_seqs,
        total,
        num_proposals,
        extra,
        mask_token,
        padding_token,
        BLOCK=BLOCK,
        SHIFT=extra < num_proposals,
    )
    return out


@triton.jit
def _expand_kernel(
    target,
    out,
    num_seqs,
    total,
    num_proposals,
    extra,
    mask_token,
    padding_token,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    start = tl.load(target.query_starts + seq).to(tl.int64)
    end = tl.load(target.query_starts + seq + 1).to(tl.int64)
    new_start = start + seq * extra
    # The last request's program also fills the rows past the batch.
    new_end = tl.where(seq == num_seqs - 1, total, end + (seq + 1) * extra)
    rejected = tl.load(target.num_rejected + seq)
    valid = tl.minimum(tl.maximum(end - start - rejected, 1), end - start)
    bonus = valid - 1 if SHIFT else valid
    next_token = tl.load(target.next_tokens + seq).to(tl.int64)
    first = tl.load(target.position_ids + start, mask=start < end, other=0).to(tl.int64)
    for begin in range(0, (new_end - new_start).to(tl.int32), BLOCK):
        index = begin + tl.arange(0, BLOCK)
        row = new_start + index
        mask = row < new_end
        is_rejected = (index >= bonus + num_proposals) | (start == end)
        is_masked = (index > bonus) & ~is_rejected
        source = start + index
        read = source + 1 if SHIFT else source
        token = tl.load(target.input_ids + read, mask=mask & (index < bonus), other=0).to(tl.int64)
        token = tl.where(index == bonus, next_token, token)
        token = tl.where(is_masked, mask_token, token)
        tl.store(out.input_ids + row, tl.where(is_rejected, padding_token, token), mask=mask)
        tl.store(out.position_ids + row, tl.where(is_rejected, 0, first + index), mask=mask)
        tl.store(out.is_rejected + row, is_rejected, mask=mask)
        tl.store(out.is_masked + row, is_masked, mask=mask)
        tl.store(out.hidden_rows + row, tl.where(index < valid, source, -1), mask=mask)
    for begin in range(0, num_proposals, BLOCK):
        proposal = begin + tl.arange(0, BLOCK)
        row = tl.maximum(tl.minimum(new_start + bonus + proposal, total - 1), 0)
        row_ptrs = out.rows_to_sample + seq * num_proposals + proposal
        tl.store(row_ptrs, row, mask=proposal < num_proposals)


def extend_starts(starts: Tensor, lens: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Adds rows to every request."""
    new_starts, new_lens = torch.empty_like(starts), torch.empty_like(lens)
    _extend_kernel[(triton.cdiv(starts.shape[0], BLOCK),)](
        starts, lens, new_starts, new_lens, lens.shape[0], num_rows, BLOCK=BLOCK
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
