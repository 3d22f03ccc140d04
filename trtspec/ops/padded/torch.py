"""The operations of vLLM's drafting kernels: padded acceptance, length guard, masked drafting.

trtspec's workers use `ops/step`; these are for loops that work as vLLM's does. Nothing reads a
value on the host and no shape depends on data, so all of it can be captured. The kernels:
`triton.py`.

Sizes: B requests, K drafts, T rows of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..launch.dispatch import twin
from ..step.slots import guard_positions, slot_mapping

PADDING_TOKEN = 0
"""What a padding row of a pass reads: any id that every embedding has."""
_KERNELS = "padded.triton"


@twin(_KERNELS)
def next_tokens_padded(
    sampled: Tensor, backup: Tensor, discard: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Counts each request's tokens and finds the last of them.

    Args:
        sampled: [B, K+1] int32. Tokens outside 0 … vocab_size - 1, such as -1, do not count.
        backup: [B] int32, the token of a request that got none or is discarded.
        discard: [B] bool or int (not 0), requests whose sample is not wanted (a chunk inside the
            prompt).

    Returns:
        (count [B] int32, 0 where discarded; token [B] int32).
    """
    valid = (sampled >= 0) & (sampled < vocab_size) & (discard[:, None] == 0)
    columns = torch.arange(sampled.shape[1], device=sampled.device)
    last = torch.where(valid, columns, -1).amax(1)  # [B]
    token = sampled.gather(1, last.clamp_min(0)[:, None])[:, 0]
    return valid.sum(1, dtype=torch.int32), torch.where(last >= 0, token, backup).to(torch.int32)


@twin(_KERNELS)
def inputs_padded(
    query_starts: Tensor, num_drafts: Tensor, num_valid: Tensor
) -> tuple[Tensor, Tensor]:
    """Finds each request's proposing row if rejected rows stay in the pass as padding.

    Args:
        query_starts: [B+1] int32, cumulative rows.
        num_drafts: [B] int32, drafts verified; 0 for a context, whose rows are all certain.
        num_valid: [B] int32, as `next_tokens_padded` counts.

    Returns:
        (row [B] int64, rejected [B] int32). Of a request that has drafts and got no token, all
        rows are rejected and `row` is the one before its first (-1 at the batch's start). Such a
        request is discarded: its proposals mean nothing.
    """
    rejected = torch.where(num_drafts > 0, num_drafts + 1 - num_valid, 0).to(torch.int32)
    return query_starts[1:].to(torch.int64) - 1 - rejected, rejected


@twin(_KERNELS)
def compact_rejected(
    query_starts: Tensor, num_rejected: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """Removes rejected rows, each request's last, from the pass (vLLM's `prepare_inputs`).

    trtspec's workers leave them in as padding.

    Args:
        query_starts: [B+1] int32, cumulative rows; num_rejected: [B] int32, of `inputs_padded`.
        num_rows: T, rows of the pass.

    Returns:
        (cumulative rows left [B+1] int32, the row of the pass that each of them was [T] int64, -1
        after the last).
    """
    left = (query_starts.diff() - num_rejected).clamp_min(0)
    starts = torch.nn.functional.pad(left.cumsum(0), (1, 0))  # [B+1] int64
    rows = torch.arange(num_rows, device=starts.device)
    removed = query_starts[:-1] - starts[:-1]  # [B], before each request
    seq = torch.searchsorted(starts[1:], rows, right=True)  # B behind the last
    old = rows + torch.nn.functional.pad(removed, (0, 1))[seq]
    return starts.to(torch.int32), torch.where(rows < starts[-1], old, -1)


@twin(_KERNELS)
def step_slots_and_lens(
    positions: Tensor,
    seq_lens: Tensor,
    block_tables: Sequence[Tensor],
    page_sizes: Sequence[int],
    max_seq_len: int,
    num_rows: int | None = None,
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Advances each request by one row: its position, KV slots and KV length.

    Args:
        positions: [B] int of the rows before, not guarded.
        seq_lens: [B] int32, KV lengths before.
        block_tables: per KV group [B, M] int32; page_sizes: of each group.
        num_rows: N >= B rows of the pass (a graph's bucket); None is B.

    Returns:
        (positions [N] int64, 0 at or past the maximum; per KV group slots [N] int64, -1 there and
        where no block is allocated; lengths [N] int32, 1 there and at most `max_seq_len`). Rows
        beyond the batch are at position 0 with slot -1 and length 1.
    """
    num_rows = positions.shape[0] if num_rows is None else num_rows
    padding = 0, num_rows - positions.shape[0]
    guarded, inside = guard_positions(positions[:, None] + 1, max_seq_len)
    lens = torch.where(inside[:, 0], seq_lens + 1, 1).clamp(max=max_seq_len).to(torch.int32)

    def pad(rows: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(rows, padding, value=value)

    slots = tuple(
        pad(slot_mapping(table, guarded, inside, page_size)[:, 0], -1)
        for table, page_size in zip(block_tables, page_sizes, strict=True)
    )
    return pad(guarded[:, 0], 0), slots, pad(lens, 1)


class ParallelRows(NamedTuple):
    """Rows of a masked drafter's pass; T' of them, requests in order."""

    input_ids: Tensor  # [T'] int64
    position_ids: Tensor  # [T'] int64, not guarded; 0 for padding
    is_rejected: Tensor  # [T'] bool, padding: must write nowhere
    is_masked: Tensor  # [T'] bool, reads the mask token
    rows_to_sample: Tensor  # [B, P] int64, row i proposes token i
    hidden_rows: Tensor  # [T'] int64, row of the target's pass whose state it reads, -1 none


def expand_for_parallel_drafting(
    input_ids: Tensor,
    position_ids: Tensor,
    next_tokens: Tensor,
    num_rejected: Tensor,
    query_starts: Tensor,
    num_proposals: int,
    mask_token: int,
    *,
    shift: bool,
    padding_token: int = PADDING_TOKEN,
) -> ParallelRows:
    """Builds a masked drafter's pass: mask tokens in place of its earlier proposals.

    Request b has n rows in the target's pass, v of them valid (all but the rejected; at least
    one). It gets n' rows at consecutive positions, from row `query_starts[b] + b * (n' - n)` on:

        shift (P-EAGLE: a row reads the *next* token)   n' = n + P - 1
            t[1] … t[v-1], bonus, P - 1 masks, n - v padding      states of rows 0 … v-1, then none
        no shift (PARD: a language model)               n' = n + P
            t[0] … t[v-1], bonus, P - 1 masks, n - v padding      states of rows 0 … v-1, then none

    A request without rows (a bucket's) gets padding, and its `rows_to_sample` mean nothing. The
    bonus and the masks propose. T' = T + B * (n' - n) is known on the host. With R rows for each of
    G generations this is again `AttentionMetadata`'s layout, of n' rows. Slots come from
    `guard_positions` and `slot_mapping`, with `is_rejected` rows not inside.

    Args:
        input_ids, position_ids: [T] int, as the target read them. Rows past `query_starts[B]`
            (a bucket's) become padding at the end.
        next_tokens: [B] int, the bonus. num_rejected: [B] int32, of `inputs_padded`.
        query_starts: [B+1] int32, cumulative rows.
        num_proposals: P >= 1.
        mask_token: what the drafter was trained to read where a token is unknown.
        padding_token: what padding rows read (vLLM's `padding_token_id`).
    """
    num_seqs = next_tokens.shape[0]
    extra = num_proposals - 1 if shift else num_proposals
    if not num_seqs or not len(input_ids):  # all is padding
        total = input_ids.shape[0] + extra * num_seqs
        nothing = torch.zeros(total, dtype=torch.int64, device=input_ids.device)
        return ParallelRows(
            input_ids=nothing + padding_token,
            position_ids=nothing,
            is_rejected=nothing == 0,
            is_masked=nothing != 0,
            rows_to_sample=nothing.new_zeros((num_seqs, num_proposals)),
            hidden_rows=nothing - 1,
        )
    target = TargetRows(input_ids, position_ids, next_tokens, num_rejected, query_starts)
    return expand_rows(target, num_proposals, extra, mask_token, padding_token)


class TargetRows(NamedTuple):
    """Inputs of a masked drafter's pass; see `expand_for_parallel_drafting`."""

    input_ids: Tensor  # [T] int
    position_ids: Tensor  # [T] int
    next_tokens: Tensor  # [B] int
    num_rejected: Tensor  # [B] int32
    query_starts: Tensor  # [B+1] int32


@twin(_KERNELS)
def expand_rows(
    target: TargetRows, num_proposals: int, extra: int, mask_token: int, padding_token: int
) -> ParallelRows:
    """Does what `expand_for_parallel_drafting` does for at least one row.

    Args:
        extra: rows more than the target's for each request, P - 1 where rows shift, else P.
    """
    input_ids, position_ids, next_tokens, num_rejected, query_starts = target
    device, num_seqs, shift = input_ids.device, next_tokens.shape[0], extra < num_proposals
    total = input_ids.shape[0] + extra * num_seqs
    starts = query_starts.to(torch.int64)
    new_starts = starts + extra * torch.arange(num_seqs + 1, device=device)
    counts = starts.diff()
    valid = (counts - num_rejected).clamp_min(1).minimum(counts)  # [B]
    bonus = valid - 1 if shift else valid  # [B], its index in the request

    rows = torch.arange(total, device=device)
    # Rows past the last request count as its rows: far past its masks, so they are padding.
    seq = torch.searchsorted(new_starts[1:], rows, right=True).clamp(max=num_seqs - 1)
    index = rows - new_starts[seq]
    source = starts[seq] + index
    past_bonus = index - bonus[seq]
    is_rejected = (past_bonus >= num_proposals) | (counts == 0)[seq]
    is_masked = (past_bonus > 0) & ~is_rejected
    read = (source + 1 if shift else source).clamp(max=input_ids.shape[0] - 1)
    ids = torch.where(past_bonus < 0, input_ids[read], next_tokens[seq])
    ids = ids.to(torch.int64).masked_fill(is_masked, mask_token)
    first = position_ids[starts[seq].clamp(max=input_ids.shape[0] - 1)].to(torch.int64)
    samples = (new_starts[:-1] + bonus)[:, None] + torch.arange(num_proposals, device=device)
    return ParallelRows(
        input_ids=ids.masked_fill(is_rejected, padding_token),
        position_ids=torch.where(is_rejected, 0, first + index),
        is_rejected=is_rejected,
        is_masked=is_masked,
        rows_to_sample=samples.clamp(0, total - 1),
        hidden_rows=torch.where(index < valid[seq], source, -1),
    )


@dataclass(frozen=True)
class Queries:
    """Rows of a pass, request by request."""

    query_starts: Tensor  # [B+1] int32, cumulative
    seq_lens: Tensor  # [B] int32, KV lengths including these rows
    num_tokens: int
    max_query_len: int
    max_seq_len: int  # upper bound of seq_lens


def extend_queries(queries: Queries, num_rows: int) -> Queries:
    """Adds `num_rows` rows to every request."""
    starts, lens = extend_starts(queries.query_starts, queries.seq_lens, num_rows)
    return Queries(
        query_starts=starts,
        seq_lens=lens,
        num_tokens=queries.num_tokens + num_rows * lens.shape[0],
        max_query_len=queries.max_query_len + num_rows,
        max_seq_len=queries.max_seq_len + num_rows,
    )


@twin(_KERNELS)
def extend_starts(starts: Tensor, lens: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Adds `num_rows` rows to every request: (cumulative rows [B+1], KV lengths [B])."""
    seqs = torch.arange(starts.shape[0], dtype=starts.dtype, device=starts.device)
    return starts + num_rows * seqs, lens + num_rows
