"""A step's operations between its networks, one launch each on CUDA (kernels in `triton_*.py`).

Nothing reads a value on the host and no shape depends on data, so all of it can be captured. The
number of accepted tokens names the accepted rows, by the contract of `metadata/accepted_path.py`.

Sizes: B requests, R rows of each in a pass, K drafts, G requests that generate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...metadata.accepted_path import AcceptedPath, certain_rows
from ...metadata.attention import NULL_BLOCK, AttentionMetadata
from ...metadata.sampling import SlotSampling
from ..launch.dispatch import twin
from ..tokens.accept import last_accepted
from .slots import draft_step_metadata, guard_positions, slot_mapping

_KERNELS, _DRAFT_KERNELS = "step.triton_rows", "step.triton_drafts"


class StepRows(NamedTuple):
    """What a pass reads, by row: of all T rows, or of its generations' rows."""

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, guarded
    slot_mappings: tuple[Tensor, ...]  # per KV group [T] int64
    kv_lens: Tensor  # [B] int32
    gather_ids: Tensor  # [L] int64, rows of the pass that get logits
    next_positions: Tensor  # [L] int64, the position after each of those
    sampling: SlotSampling  # [L] rows

    def followed_by(self, others: StepRows) -> StepRows:
        """Returns these rows and others behind them."""
        slots = zip(self.slot_mappings, others.slot_mappings, strict=True)
        return StepRows(
            input_ids=torch.cat([self.input_ids, others.input_ids]),
            position_ids=torch.cat([self.position_ids, others.position_ids]),
            slot_mappings=tuple(torch.cat(pair) for pair in slots),
            kv_lens=torch.cat([self.kv_lens, others.kv_lens]),
            gather_ids=torch.cat([self.gather_ids, others.gather_ids]),
            next_positions=torch.cat([self.next_positions, others.next_positions]),
            sampling=self.sampling.followed_by(others.sampling),
        )


@twin(_KERNELS)
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
    """Gathers the rows of G generations, R each, from their slots.

    Args:
        slot_ids: [G] int64.
        next_tokens: [S, K+1] int32; past_lens: [S] int64; sampling: S slots.
        block_tables: per KV group [G, M] int32.
        rows: R <= K+1.
        first_row: the row of the pass at which they begin.

    Returns:
        (the rows, all of which get logits; their drafts [G, R-1] int32).
    """
    tokens = next_tokens[slot_ids, :rows]
    past = past_lens[slot_ids]
    guarded, inside = guard_positions(
        past[:, None] + torch.arange(rows, device=slot_ids.device), max_seq_len
    )
    slot_of_row = slot_ids.repeat_interleave(rows)
    positions = guarded.flatten()
    return StepRows(
        input_ids=tokens.flatten().to(torch.int64),
        position_ids=positions,
        slot_mappings=tuple(
            slot_mapping(table, guarded, inside, page_size).flatten() for table in block_tables
        ),
        kv_lens=(past + rows).clamp(max=max_seq_len).to(torch.int32),
        gather_ids=torch.arange(
            first_row, first_row + slot_of_row.shape[0], device=slot_ids.device
        ),
        next_positions=positions + 1,
        sampling=sampling.rows(slot_of_row),
    ), tokens[:, 1:]


class ContextLayout(NamedTuple):
    """The T rows of C contexts."""

    positions: Tensor  # [T] int64
    owners: Tensor  # [T] int64, the context of each row; -1: it belongs to none
    ends: Tensor  # [C] int64, position after each context's last row
    last_rows: Tensor  # [C] int64


class GatheredContexts(NamedTuple):
    """What a pass reads of C contexts beside their tokens."""

    slot_mappings: tuple[Tensor, ...]  # per KV group [T] int64, -1: written nowhere
    kv_lens: Tensor  # [C] int32
    next_positions: Tensor  # [C] int64, the position after each one's last row
    sampling: SlotSampling  # [C] rows


@twin(_KERNELS)
def gather_context_inputs(
    slot_ids: Tensor,
    layout: ContextLayout,
    sampling: SlotSampling,
    block_tables: Sequence[Tensor],
    page_size: int,
    max_seq_len: int,
) -> GatheredContexts:
    """Gathers what a pass reads of contexts from their slots and block tables.

    Args:
        slot_ids: [C] int64. sampling: S slots. block_tables: per KV group, C rows or more, int32.
    """
    positions, owners = layout.positions, layout.owners
    slot_mappings = []
    for table in block_tables:
        block = table[owners, positions // page_size].to(torch.int64)
        slots = block * page_size + positions % page_size
        slot_mappings.append(torch.where((owners < 0) | (block == NULL_BLOCK), -1, slots))
    return GatheredContexts(
        slot_mappings=tuple(slot_mappings),
        kv_lens=layout.ends.clamp(max=max_seq_len).to(torch.int32),
        next_positions=positions[layout.last_rows] + 1,
        sampling=sampling.rows(slot_ids),
    )


@twin(_DRAFT_KERNELS)
def shift_contexts(
    input_ids: Tensor, following: Tensor, next_prompt_tokens: Tensor | None, last_rows: Tensor
) -> Tensor:
    """Shifts contexts' ids left by one, [T] -> [T].

    Args:
        following: [C] int32, any stride, the token after each context.
        next_prompt_tokens: [C] int32, in its place where it is not -1; None: nowhere.
        last_rows: [C] int64, ascending. Of contexts that end at one row the first counts.
    """
    if next_prompt_tokens is not None:
        following = torch.where(next_prompt_tokens >= 0, next_prompt_tokens, following)
    shifted = torch.roll(input_ids, -1)
    # What is written to a row is the same for all contexts that end there.
    following = following[torch.searchsorted(last_rows, last_rows)]
    shifted[last_rows] = following.to(shifted.dtype)
    return shifted


@twin(_DRAFT_KERNELS)
def shift_for_drafting(
    accepted: Tensor, lens: Tensor, position_ids: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Finds what a head reads after a pass of generations alone, and the row that proposes.

    Args:
        accepted: [G, K+1] int32, -1 past the length; lens: [G] int32 in 1 … R.
        position_ids: [G*R] int64. rows: R <= K+1.

    Returns:
        (the token after each row [G*R] int64; the row whose next token is the last accepted one
        [G] int64; that token's position, the row's plus one [G] int64).
    """
    first = rows * torch.arange(accepted.shape[0], device=accepted.device)
    ids = accepted[:, :rows].flatten().to(torch.int64)
    return ids, first + lens - 1, position_ids[first] + lens


class ChainStart(NamedTuple):
    """What a head reads after a pass of generations alone, and the passes that follow."""

    ids: Tensor  # [G*R] int64, the token after each row
    proposing: Tensor  # [G] int64, the row whose next token is the last accepted one
    positions: Tensor  # [G] int64, that token's position
    passes: tuple[AttentionMetadata, ...]
    """Of one row per request: first of the rows that propose, then of each pass after that."""


@twin(_DRAFT_KERNELS)
def start_chain(
    meta: AttentionMetadata, accepted: Tensor, lens: Tensor, extra_kv: int, count: int
) -> ChainStart:
    """Does `shift_for_drafting`, and prepares the draft passes.

    Args:
        meta: of G generations, R rows each.
        accepted: [G, K+1] int32, -1 past the length; lens: [G] int32 in 1 … R.
        extra_kv: how far a row may lie beyond `meta.max_kv_len` at most.
        count: of `passes`, at least 1.
    """
    ids, proposing, positions = shift_for_drafting(
        accepted, lens, meta.position_ids, meta.rows_per_generation
    )
    return ChainStart(ids, proposing, positions, draft_steps(meta, positions - 1, extra_kv, count))


@twin(_DRAFT_KERNELS)
def last_two_tokens(
    input_ids: Tensor, position_ids: Tensor, accepted: Tensor, lens: Tensor, certain: Tensor
) -> tuple[Tensor, Tensor]:
    """Finds the bonus and the token before it: an accepted draft, or the step's first token.

    Args:
        input_ids, position_ids: [T], as the target read them.
        accepted: [B, K+1] int32; lens: [B] int32.
        certain: [B] int64, rows as in `accepted_path.py`.

    Returns:
        (tokens [B, 2] int32, their positions [B, 2] int64, not guarded).
    """
    read = input_ids[certain].to(accepted.dtype)
    before = accepted.gather(1, (lens.to(torch.int64) - 2).clamp_min(0)[:, None])[:, 0]
    tokens = [torch.where(lens > 1, before, read), last_accepted(accepted, lens)]
    last = position_ids[certain] + lens
    return torch.stack(tokens, dim=1), torch.stack([last - 1, last], dim=1)


class MaskedRows(NamedTuple):
    """Rows of a masked drafter's pass, which proposes P tokens: R per request, B * R in all."""

    tokens: Tensor  # [B, R] int32
    positions: Tensor  # [B, R] int64, consecutive, not guarded
    sources: Tensor  # [B * R] int64, row of the target's pass that a row continues, T for a mask
    proposing: Tensor  # [P * B] int64, rows of this pass, by proposal and then by request
    last_positions: Tensor  # [B] int64, of the last accepted tokens


@twin(_DRAFT_KERNELS)
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
    """Builds a masked drafter's rows: each request's accepted tokens, then mask tokens.

    Row j of a request reads accepted token j < n, else the mask. Rows n-1 … n+P-2 propose. Rows
    past these exist because the host does not know n. No proposing row attends to them.

    Args:
        accepted: [B, K+1] int32; lens: [B] int32, n >= 1.
        position_ids: [T] int64, as the target read them.
        certain: [B] int64, rows as in `accepted_path.py`.
        num_rows: R >= max(n) + P - 1.
        num_proposals: P >= 1.
        offset: position of the first row, less that of `certain`. It is 0 where a row reads the
            token after its position (a head), 1 where it reads the one at it (a language model).
    """
    num_seqs, device = accepted.shape[0], accepted.device
    row = torch.arange(num_rows, device=device)
    is_known = row < lens[:, None]  # [B, R]
    known = accepted.gather(1, row.clamp(max=accepted.shape[1] - 1).expand(num_seqs, -1))
    start = position_ids[certain]
    first = num_rows * torch.arange(num_seqs, device=device) + lens - 1
    return MaskedRows(
        tokens=torch.where(is_known, known, mask_token).to(torch.int32),
        positions=start[:, None] + offset + row,
        sources=torch.where(is_known, certain[:, None] + row, position_ids.shape[0]).flatten(),
        proposing=(first + torch.arange(num_proposals, device=device)[:, None]).flatten(),
        last_positions=start + lens,
    )


class BlockShape(NamedTuple):
    """Of a block drafter's pass: a request's last accepted token, then mask tokens."""

    num_rows: int  # R, P or one more
    num_proposals: int  # P >= 1, made by the last rows
    mask_token: int


class BlockStart(NamedTuple):
    """What a block drafter's pass reads: R rows per request, B * R in all."""

    tokens: Tensor  # [B, R] int32
    ids: Tensor  # [B * R] int64, the same
    proposing: Tensor  # [P * B] int64, rows of this pass, by proposal and then by request
    last_positions: Tensor  # [B] int64, of the last accepted tokens
    meta: AttentionMetadata  # of the pass, whose rows follow from these positions on


@twin(_DRAFT_KERNELS)
def start_block(
    meta: AttentionMetadata, accepted: Tensor, lens: Tensor, block: BlockShape, extra_kv: int
) -> BlockStart:
    """Prepares a block drafter's pass.

    Args:
        meta: of the target's pass.
        accepted: [B, K+1] int32; lens: [B] int32, n >= 1.
        extra_kv: how far the rows may lie beyond `meta.max_kv_len` at most.
    """
    rows, proposals, mask_token = block
    last, device = meta.position_ids[certain_rows(meta)] + lens, lens.device
    tokens = torch.full((len(last), rows), mask_token, dtype=torch.int32, device=device)
    tokens[:, 0] = last_accepted(accepted, lens)
    row = torch.arange(rows, device=device)
    first = rows * torch.arange(len(last), device=device)
    return BlockStart(
        tokens=tokens,
        ids=tokens.flatten().to(torch.int64),
        proposing=(first + row[rows - proposals :, None]).flatten(),
        last_positions=last,
        meta=draft_step_metadata(meta, last[:, None] + row, extra_kv),
    )


@twin(_KERNELS)
def draft_step(
    meta: AttentionMetadata, tokens: Tensor, positions: Tensor, extra_kv: int, advance: int = 0
) -> tuple[Tensor, AttentionMetadata]:
    """Prepares a draft pass over the same number of rows for every request.

    Args:
        tokens: [B, R] int, what it reads. positions: [B, R] int64 (any, guarded here).
        extra_kv: how far the rows may lie beyond `meta.max_kv_len` at most.
        advance: added to `positions`.

    Returns:
        (ids [B*R] int64, the pass's metadata).
    """
    ids = tokens.flatten().to(torch.int64)
    return ids, draft_step_metadata(meta, positions + advance, extra_kv)


@twin(_KERNELS)
def draft_steps(
    meta: AttentionMetadata, positions: Tensor, extra_kv: int, count: int
) -> tuple[AttentionMetadata, ...]:
    """Prepares draft passes of one row per request, which follow one another.

    Args:
        positions: [B] int64, of the first pass (any, guarded here). Each further one is one on.
        extra_kv: how far the rows may lie beyond `meta.max_kv_len` at most.
        count: of passes, at least 1.
    """
    passes = range(count)
    return tuple(draft_step_metadata(meta, positions[:, None] + i, extra_kv) for i in passes)


def gather_rows(rows: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    """Gathers rows [G] int64 of each of states [T, H], whose rows are contiguous: [G, H] each.

    A tensor that is passed twice is gathered once: many heads propose from their feedback.
    """
    distinct = {id(state): state for state in states}
    gathered = gather_distinct(rows, tuple(distinct.values()))
    gathered_of = dict(zip(distinct, gathered, strict=True))
    return tuple(gathered_of[id(state)] for state in states)


@twin(_DRAFT_KERNELS)
def gather_distinct(rows: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gathers rows [G] int64 of each of these different states [T, H]: [G, H] each."""
    return tuple(state[rows] for state in states)


@twin(_DRAFT_KERNELS)
def to_target_ids(tokens: Tensor, d2t: Tensor) -> Tensor:
    """Maps draft ids to target ids: tokens [R] int32, offsets d2t [Vd] int64 -> [R] int32."""
    return (tokens + d2t[tokens.to(torch.int64)]).to(torch.int32)


class NextTokens(NamedTuple):
    """The next step's input: each request's last accepted token, then its drafts."""

    tokens: Tensor  # [B, K+1] int32, -1 where there is no draft
    drafts: Tensor  # [B, K], in the same memory


def next_tokens(
    path: AcceptedPath,
    proposals: Sequence[Tensor],
    positions: Tensor,
    max_seq_len: int,
    max_draft_len: int,
) -> NextTokens:
    """Builds the next step's input of proposals; further arguments as of `finish_drafts`."""
    if proposals:
        ends = positions, max_seq_len, max_draft_len
        tokens = limit_and_lead(path.tokens, path.lens, tuple(proposals), *ends)
    else:
        tokens = next_new_tokens(path.tokens, path.lens, path.tokens[:, :0], max_draft_len)
    return NextTokens(tokens, tokens[:, 1:])


@twin(_DRAFT_KERNELS)
def limit_and_lead(
    accepted: Tensor,
    lens: Tensor,
    proposals: tuple[Tensor, ...],
    positions: Tensor,
    max_seq_len: int,
    max_draft_len: int,
) -> Tensor:
    """Puts each last accepted token before what `limit_drafts` returns: [B, K+1] int32."""
    drafts = limit_drafts(proposals, positions, max_seq_len, max_draft_len)
    return next_new_tokens(accepted, lens, drafts, max_draft_len)


def finish_drafts(
    proposals: Sequence[Tensor], positions: Tensor, max_seq_len: int, max_draft_len: int
) -> Tensor:
    """Stacks proposals; -1 where one would be at or past the maximum length.

    Args:
        proposals: at most K, each [B] int.
        positions: [B] int64, of the last accepted token, which the first proposal follows.

    Returns:
        [B, K] int32, -1 for none.
    """
    if not proposals:
        shape = positions.shape[0], max_draft_len
        return torch.full(shape, -1, dtype=torch.int32, device=positions.device)
    return limit_drafts(tuple(proposals), positions, max_seq_len, max_draft_len)


@twin(_DRAFT_KERNELS)
def limit_drafts(
    proposals: tuple[Tensor, ...], positions: Tensor, max_seq_len: int, max_draft_len: int
) -> Tensor:
    """Does what `finish_drafts` does for at least one proposal."""
    proposed = torch.stack(proposals, dim=1)
    step = torch.arange(proposed.shape[1], device=proposed.device)
    room = max_seq_len - 1 - positions
    drafts = torch.where(step < room[:, None], proposed, -1)
    unused = max_draft_len - drafts.shape[1]
    return torch.nn.functional.pad(drafts, (0, unused), value=-1).to(torch.int32)


@twin(_DRAFT_KERNELS)
def next_new_tokens(accepted: Tensor, lens: Tensor, drafts: Tensor, max_draft_len: int) -> Tensor:
    """Builds the next step's input: each request's last accepted token, then its drafts.

    Args:
        accepted: [B, K'+1] int32; lens: [B] int32.
        drafts: [B, n] int.
        max_draft_len: K.

    Returns:
        [B, max(K, n) + 1] int32, -1 behind the drafts.
    """
    last, missing = last_accepted(accepted, lens), max_draft_len - drafts.shape[1]
    tokens = torch.cat([last[:, None], drafts], dim=1).to(torch.int32)
    return nn.functional.pad(tokens, (0, missing), value=-1) if missing > 0 else tokens


@twin(_KERNELS)
def save_step(
    slot_ids: Tensor,
    position_ids: Tensor,
    lens: Tensor,
    new_tokens: Tensor,
    past_lens: Tensor,
    next_tokens: Tensor,
) -> None:
    """Writes the next step's inputs of G generations to their slots.

    Args:
        slot_ids: [G] int64. position_ids: [G*R] int64 of this step's rows. lens: [G] int32.
        new_tokens: [G, K+1] int32.
        past_lens: [S+1] int64, next_tokens: [S+1, K+1] int32: written. The last slot is scratch,
            whose length stays 0: else rows that fill a graph up would attend to more each step.
    """
    rows = position_ids.shape[0] // max(slot_ids.shape[0], 1)
    past = position_ids[:: max(rows, 1)] + lens
    past_lens[slot_ids] = torch.where(slot_ids == past_lens.shape[0] - 1, 0, past)
    next_tokens[slot_ids] = new_tokens
