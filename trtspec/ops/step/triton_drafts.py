"""Triton kernels between acceptance and the next drafts; each has its twin in `rows.py`."""
# mypy: disallow-untyped-defs=False
# (kernels are Triton's language, not Python's)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...metadata.accepted_path import certain_rows
from ...metadata.attention import AttentionMetadata
from ..launch.triton import after_previous, dependent_launch
from .rows import BlockShape, BlockStart, ChainStart, MaskedRows
from .triton_rows import (
    BLOCK,
    AcceptedTokens,
    Grid,
    KvGroups,
    ints,
    passes_of,
    room_of_passes,
    store_slots,
)


def shift_for_drafting(
    accepted: Tensor, lens: Tensor, position_ids: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Finds what a head reads, and the row that proposes."""
    num_seqs = accepted.shape[0]
    ids = ints(accepted, num_seqs * rows)
    last_rows, positions = (ints(accepted, num_seqs) for _ in range(2))
    _shift_kernel[(num_seqs,)](
        AcceptedTokens.of(accepted, lens),
        position_ids,
        ids,
        last_rows,
        positions,
        rows,
        BLOCK=triton.next_power_of_2(rows),
        num_warps=1,
        **dependent_launch(accepted),
    )
    return ids, last_rows, positions


@triton.jit
def _shift_kernel(
    accepted,
    position_ptr,
    id_ptr,
    last_ptr,
    last_position_ptr,
    rows,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    seq = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    mask = row < rows
    token = tl.load(accepted.tokens + seq * accepted.stride + row, mask=mask, other=0)
    tl.store(id_ptr + seq * rows + row, token.to(tl.int64), mask=mask)
    length = tl.load(accepted.lens + seq).to(tl.int64)
    tl.store(last_ptr + seq, seq * rows + length - 1)
    tl.store(last_position_ptr + seq, tl.load(position_ptr + seq * rows).to(tl.int64) + length)


class _ChainRoom(NamedTuple):
    """What `start_chain` writes beside its passes."""

    ids: Tensor  # [G*R] int64
    proposing: Tensor  # [G] int64
    positions: Tensor  # [G] int64


def start_chain(
    meta: AttentionMetadata, accepted: Tensor, lens: Tensor, extra_kv: int, count: int
) -> ChainStart:
    """Finds what a head reads, the rows that propose, and the passes that follow."""
    num_seqs, rows = accepted.shape[0], meta.rows_per_generation
    passes = room_of_passes(meta, num_seqs, count)
    out = _ChainRoom(
        ids=ints(accepted, num_seqs * rows),
        proposing=ints(accepted, num_seqs),
        positions=ints(accepted, num_seqs),
    )
    _start_kernel[(num_seqs,)](
        AcceptedTokens.of(accepted, lens),
        meta.position_ids,
        passes.groups,
        passes.out,
        out,
        rows,
        count,
        passes.width,
        meta.max_seq_len,
        BLOCK=triton.next_power_of_2(rows),
        PASSES=triton.next_power_of_2(count),
        num_warps=1,
        **dependent_launch(accepted),
    )
    return ChainStart(*out, passes_of(meta, passes, num_seqs, extra_kv))


@triton.jit
def _start_kernel(
    accepted,
    position_ptr,
    groups,
    passes,
    out,
    rows,
    count,
    width,
    max_seq_len,
    BLOCK: tl.constexpr,
    PASSES: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    seq = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    mask = row < rows
    token = tl.load(accepted.tokens + seq * accepted.stride + row, mask=mask, other=0)
    tl.store(out.ids + seq * rows + row, token.to(tl.int64), mask=mask)
    length = tl.load(accepted.lens + seq).to(tl.int64)
    last = tl.load(position_ptr + seq * rows).to(tl.int64) + length
    tl.store(out.proposing + seq, seq * rows + length - 1)
    tl.store(out.positions + seq, last)
    i = tl.arange(0, PASSES)
    is_pass = i < count
    inside = is_pass & (last - 1 + i < max_seq_len)
    position = tl.where(inside, last - 1 + i, 0)
    index = i.to(tl.int64) * width + seq
    tl.store(passes.positions + index, position, mask=is_pass)
    tl.store(passes.lens + index, (position + 1).to(tl.int32), mask=is_pass)
    store_slots(groups, seq, index, position, inside, is_pass)


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
        AcceptedTokens.of(accepted, lens),
        certain,
        tokens,
        positions,
        num_seqs,
        BLOCK=BLOCK,
        **dependent_launch(accepted),
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
    PDL: tl.constexpr,
):
    after_previous(PDL)
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
    """Inputs of `masked_rows`."""

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
    """Builds rows of the accepted tokens and of masks after them."""
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
        AcceptedTokens.of(accepted, lens),
        masked,
        out,
        num_seqs,
        position_ids.shape[0],
        BLOCK=triton.next_power_of_2(num_rows),
        num_warps=1,
        **dependent_launch(accepted),
    )
    return out


@triton.jit
def _masked_rows_kernel(
    accepted, masked, out, num_seqs, total, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    after_previous(PDL)
    seq = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    rows = masked.rows
    mask = row < rows
    index = seq * rows + row
    length = tl.load(accepted.lens + seq).to(tl.int64)
    certain = tl.load(masked.certain + seq)
    start = tl.load(masked.positions + certain).to(tl.int64)
    is_known = row < length
    entry = accepted.tokens + seq * accepted.stride + row
    token = tl.load(entry, mask=mask & is_known, other=0)
    token = tl.where(is_known, token.to(tl.int32), masked.mask_token)
    tl.store(out.tokens + index, token, mask=mask)
    tl.store(out.positions + index, start + masked.offset + row, mask=mask)
    tl.store(out.sources + index, tl.where(is_known, certain + row, total), mask=mask)
    first = seq * rows + length - 1
    entry = out.proposing + row * num_seqs + seq
    tl.store(entry, first + row, mask=row < masked.num_proposals)
    tl.store(out.last_positions + seq, start + length)


class _BlockRoom(NamedTuple):
    """What `start_block` writes beside the slots."""

    tokens: Tensor  # [B, R] int32
    ids: Tensor  # [B * R] int64
    proposing: Tensor  # [P * B] int64
    last_positions: Tensor  # [B] int64
    positions: Tensor  # [B * R] int64, guarded
    largest: Tensor  # [B * R] int64, of a request's
    lens: Tensor  # [B] int32, KV lengths


def start_block(
    meta: AttentionMetadata, accepted: Tensor, lens: Tensor, block: BlockShape, extra_kv: int
) -> BlockStart:
    """Builds rows of the last accepted token and of masks after it, and their metadata."""
    num_seqs, rows = accepted.shape[0], block.num_rows
    page_sizes = tuple(group.page_size for group in meta.kv_groups)
    groups = KvGroups.of(meta.block_tables, page_sizes, num_seqs * rows)
    out = _BlockRoom(
        tokens=ints(accepted, num_seqs, rows, dtype=torch.int32),
        ids=ints(accepted, num_seqs * rows),
        proposing=ints(accepted, block.num_proposals * num_seqs),
        last_positions=ints(accepted, num_seqs),
        positions=ints(accepted, num_seqs * rows),
        largest=ints(accepted, num_seqs * rows),
        lens=ints(accepted, num_seqs, dtype=torch.int32),
    )
    _start_block_kernel[(num_seqs,)](
        AcceptedTokens.of(accepted, lens),
        meta.position_ids,
        certain_rows(meta) if meta.num_contexts else None,
        meta.rows_per_generation,
        groups,
        block,
        out,
        num_seqs,
        meta.max_seq_len,
        BLOCK=triton.next_power_of_2(rows),
        num_warps=1,
        **dependent_launch(accepted),
    )
    positions = out.positions.view(num_seqs, rows)
    own = meta.for_rows(positions, groups.slots, extra_kv, out.lens)
    own.know_largest_positions(out.largest)
    return BlockStart(out.tokens, out.ids, out.proposing, out.last_positions, own)


@triton.jit
def _start_block_kernel(
    accepted,
    position_ptr,
    certain_ptr,
    generation_rows,
    groups,
    block,
    out,
    num_seqs,
    max_seq_len,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    seq = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    mask = row < block.num_rows
    certain = seq * generation_rows
    if certain_ptr is not None:
        certain = tl.load(certain_ptr + seq)
    length = tl.load(accepted.lens + seq).to(tl.int64)
    last = tl.load(position_ptr + certain).to(tl.int64) + length
    bonus = tl.load(accepted.tokens + seq * accepted.stride + length - 1).to(tl.int32)
    index = seq * block.num_rows + row
    token = tl.where(row == 0, bonus, block.mask_token)
    tl.store(out.tokens + index, token, mask=mask)
    tl.store(out.ids + index, token.to(tl.int64), mask=mask)
    tl.store(out.last_positions + seq, last)
    proposal = row - (block.num_rows - block.num_proposals)
    entry = out.proposing + proposal * num_seqs + seq
    tl.store(entry, index, mask=mask & (proposal >= 0))
    inside = mask & (last + row < max_seq_len)
    position = tl.where(inside, last + row, 0)
    tl.store(out.positions + index, position, mask=mask)
    largest = tl.full([BLOCK], 0, tl.int64) + tl.max(position, 0)
    tl.store(out.largest + index, largest, mask=mask)
    final = last + block.num_rows - 1
    final = tl.where(final < max_seq_len, final, 0)
    tl.store(out.lens + seq, (final + 1).to(tl.int32))
    store_slots(groups, seq, index, position, inside, mask)


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
        rows,
        states,
        strides,
        outs,
        sizes,
        BLOCK=block,
        **dependent_launch(rows),
    )
    return outs


@triton.jit
def _gather_rows_kernel(
    row_ptr, state_ptrs, strides, out_ptrs, sizes, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    after_previous(PDL)
    out_row = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + out_row)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for i in tl.static_range(len(state_ptrs)):
        x = tl.load(state_ptrs[i] + row * strides[i] + d, mask=d < sizes[i], other=0.0)
        tl.store(out_ptrs[i] + out_row * sizes[i] + d, x, mask=d < sizes[i])


def shift_contexts(
    input_ids: Tensor, following: Tensor, next_prompt_tokens: Tensor | None, last_rows: Tensor
) -> Tensor:
    """Shifts contexts' ids left by one."""
    num_rows, num_contexts = input_ids.shape[0], last_rows.shape[0]
    shifted = torch.empty_like(input_ids)
    _shift_contexts_kernel[(triton.cdiv(num_rows, 32),)](
        input_ids,
        following,
        following.stride(0),
        next_prompt_tokens,
        last_rows,
        shifted,
        num_rows,
        num_contexts,
        CONTEXTS=triton.next_power_of_2(num_contexts),
        BLOCK=32,
        **dependent_launch(input_ids),
    )
    return shifted


@triton.jit
def _shift_contexts_kernel(
    id_ptr,
    following_ptr,
    following_seq,
    next_prompt_ptr,
    last_row_ptr,
    out_ptr,
    num_rows,
    num_contexts,
    CONTEXTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    c = tl.arange(0, CONTEXTS)
    last = tl.load(last_row_ptr + c, mask=c < num_contexts, other=-1)
    first = tl.min(tl.where(last[None, :] == row[:, None], c[None, :], CONTEXTS), 1)
    ends = first < CONTEXTS
    token = tl.load(following_ptr + first * following_seq, mask=ends, other=0).to(tl.int64)
    if next_prompt_ptr is not None:
        known = tl.load(next_prompt_ptr + first, mask=ends, other=-1).to(tl.int64)
        token = tl.where(known >= 0, known, token)
    after = tl.load(id_ptr + (row + 1) % num_rows, mask=is_row, other=0)
    token = tl.where(ends, token, after.to(tl.int64))
    tl.store(out_ptr + row, token.to(out_ptr.dtype.element_ty), mask=is_row)


def to_target_ids(tokens: Tensor, d2t: Tensor) -> Tensor:
    """Adds each token's offset to it."""
    count = tokens.shape[0]
    out = ints(tokens, count, dtype=torch.int32)
    _target_ids_kernel[(triton.cdiv(count, BLOCK),)](
        tokens,
        d2t,
        out,
        count,
        BLOCK=BLOCK,
        **dependent_launch(tokens),
    )
    return out


@triton.jit
def _target_ids_kernel(token_ptr, d2t_ptr, out_ptr, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + row, mask=row < count, other=0).to(tl.int64)
    offset = tl.load(d2t_ptr + token, mask=row < count, other=0)
    tl.store(out_ptr + row, (token + offset).to(tl.int32), mask=row < count)


def limit_drafts(
    proposals: tuple[Tensor, ...], positions: Tensor, max_seq_len: int, max_draft_len: int
) -> Tensor:
    """Stacks proposals, up to the maximum length."""
    return _limited(None, proposals, positions, max_seq_len, max_draft_len)


def limit_and_lead(
    accepted: Tensor,
    lens: Tensor,
    proposals: tuple[Tensor, ...],
    positions: Tensor,
    max_seq_len: int,
    max_draft_len: int,
) -> Tensor:
    """Stacks proposals behind each request's last accepted token."""
    before = AcceptedTokens.of(accepted, lens)
    return _limited(before, proposals, positions, max_seq_len, max_draft_len)


def _limited(
    accepted: AcceptedTokens | None,
    proposals: tuple[Tensor, ...],
    positions: Tensor,
    max_seq_len: int,
    max_draft_len: int,
) -> Tensor:
    num_seqs, columns = positions.shape[0], max_draft_len + (accepted is not None)
    out = ints(positions, num_seqs, columns, dtype=torch.int32)
    _limit_kernel[(triton.cdiv(num_seqs, BLOCK),)](
        accepted,
        proposals,
        positions,
        positions.stride(0),
        out,
        num_seqs,
        max_seq_len,
        columns,
        DRAFTS=max_draft_len,
        BLOCK=BLOCK,
        **dependent_launch(positions),
    )
    return out


@triton.jit
def _limit_kernel(
    accepted,
    proposal_ptrs,
    position_ptr,
    position_seq,
    out_ptr,
    num_seqs,
    max_seq_len,
    columns,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = seq < num_seqs
    room = max_seq_len - 1 - tl.load(position_ptr + seq * position_seq, mask=mask, other=0)
    row_ptr = out_ptr + seq * columns
    if accepted is not None:
        length = tl.load(accepted.lens + seq, mask=mask, other=1)
        entry = accepted.tokens + seq.to(tl.int64) * accepted.stride + length - 1
        tl.store(row_ptr, tl.load(entry, mask=mask, other=0).to(tl.int32), mask=mask)
        row_ptr += 1
    for i in tl.static_range(DRAFTS):
        draft = tl.full([BLOCK], -1, tl.int32)
        if i < len(proposal_ptrs):
            proposal = tl.load(proposal_ptrs[i] + seq, mask=mask & (i < room), other=-1)
            draft = proposal.to(tl.int32)
        tl.store(row_ptr + i, draft, mask=mask)


def next_new_tokens(accepted: Tensor, lens: Tensor, drafts: Tensor, max_draft_len: int) -> Tensor:
    """Puts each request's last accepted token before its drafts, and -1 behind them."""
    num_seqs, num_drafts = drafts.shape
    columns = max(max_draft_len, num_drafts) + 1
    out = ints(accepted, num_seqs, columns, dtype=torch.int32)
    _next_new_kernel[(num_seqs,)](
        AcceptedTokens.of(accepted, lens),
        Grid.of(drafts),
        num_drafts,
        out,
        columns,
        BLOCK=triton.next_power_of_2(columns),
        num_warps=1,
        **dependent_launch(accepted),
    )
    return out


@triton.jit
def _next_new_kernel(
    accepted, drafts, num_drafts, out_ptr, columns, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    after_previous(PDL)
    seq = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    length = tl.load(accepted.lens + seq)
    last = tl.load(accepted.tokens + seq * accepted.stride + length - 1).to(tl.int32)
    entry = drafts.x + seq * drafts.seq_stride + (column - 1) * drafts.row_stride
    is_draft = (column > 0) & (column <= num_drafts)
    draft = tl.load(entry, mask=is_draft, other=-1).to(tl.int32)
    tl.store(out_ptr + seq * columns + column, tl.where(column > 0, draft, last), mask=mask)
