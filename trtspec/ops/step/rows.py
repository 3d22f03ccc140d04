"""What a step does between its networks, one launch each on CUDA.

First the operations of vLLM's drafting kernels (padded acceptance, length guard, parallel
drafting), then those of our own workers' generation step. The code in each function is the torch
twin: the CPU path, and the oracle of the kernel in `triton.py`. Nothing reads a value on
the host and no shape depends on data, so all of it can be captured. Counts of accepted tokens stand
for rows by the contract of `metadata/accepted_path.py`.

Sizes: B requests, R rows of each in a pass, K drafts, G requests that generate.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...metadata.attention import AttentionMetadata
from ...metadata.sampling import SlotSampling
from ..tokens.accept import last_accepted
from .slots import draft_step_metadata, guard_positions, slot_mapping

logger = logging.getLogger(__name__)

PADDING_TOKEN = 0
"""What a padding row of a pass reads: any id that every embedding has."""


def _kernels(x: Tensor) -> Any:
    """The module `ops/step/triton.py` for a CUDA tensor, None where the torch twin is to run."""
    return _module() if x.is_cuda else None


@cache
def _module() -> ModuleType | None:
    try:
        return importlib.import_module(".triton", __package__)
    except ImportError as error:
        logger.warning("triton is not installed (%s): drafting's bookkeeping runs in torch.", error)
        return None


# -- vLLM's drafting kernels -------------------------------------------------------------------
def next_tokens_padded(
    sampled: Tensor, backup: Tensor, discard: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """How many tokens each request got, and the last of them.

    Args:
        sampled: [B, K+1] int32; a token outside 0 … vocab_size - 1 (-1 above all) is none.
        backup: [B] int32, the token of a request that got none or is discarded.
        discard: [B] bool or int (not 0), requests whose sample is not wanted (a chunk inside the
            prompt).

    Returns:
        (count [B] int32, 0 where discarded; token [B] int32).
    """
    kernels = _kernels(sampled)
    if kernels is not None:
        return kernels.next_tokens_padded(sampled, backup, discard, vocab_size)
    valid = (sampled >= 0) & (sampled < vocab_size) & (discard[:, None] == 0)
    columns = torch.arange(sampled.shape[1], device=sampled.device)
    last = torch.where(valid, columns, -1).amax(1)  # [B]
    token = sampled.gather(1, last.clamp_min(0)[:, None])[:, 0]
    return valid.sum(1, dtype=torch.int32), torch.where(last >= 0, token, backup).to(torch.int32)


def inputs_padded(
    query_starts: Tensor, num_drafts: Tensor, num_valid: Tensor
) -> tuple[Tensor, Tensor]:
    """Which row of each request proposes when the rejected rows stay in the pass as padding.

    Args:
        query_starts: [B+1] int32, cumulative rows.
        num_drafts: [B] int32, drafts verified; 0 for a context, whose rows are all certain.
        num_valid: [B] int32, as `next_tokens_padded` counts.

    Returns:
        (row [B] int64, rejected [B] int32). Of a request that has drafts and got no token, all
        rows are rejected and `row` is the one before its first (-1 at the batch's start): such a
        request is discarded, and nobody may use what it proposes.
    """
    kernels = _kernels(query_starts)
    if kernels is not None:
        return kernels.inputs_padded(query_starts, num_drafts, num_valid)
    rejected = torch.where(num_drafts > 0, num_drafts + 1 - num_valid, 0).to(torch.int32)
    return query_starts[1:].to(torch.int64) - 1 - rejected, rejected


def compact_rejected(
    query_starts: Tensor, num_rejected: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """The rows left when the rejected ones, each request's last, leave the pass (vLLM's
    `prepare_inputs`). Our own workers keep them as padding: this is for loops that do not.

    Args:
        query_starts: [B+1] int32, cumulative rows; num_rejected: [B] int32, of `inputs_padded`.
        num_rows: T, rows of the pass.

    Returns:
        (cumulative rows left [B+1] int32, the row of the pass that each of them was [T] int64, -1
        after the last).
    """
    kernels = _kernels(query_starts)
    if kernels is not None:
        return kernels.compact_rejected(query_starts, num_rejected, num_rows)
    kept = (query_starts.diff() - num_rejected).clamp_min(0)
    starts = torch.nn.functional.pad(kept.cumsum(0), (1, 0))  # [B+1] int64
    rows = torch.arange(num_rows, device=starts.device)
    removed = query_starts[:-1] - starts[:-1]  # [B], before each request
    seq = torch.searchsorted(starts[1:], rows, right=True)  # B behind the last
    old = rows + torch.nn.functional.pad(removed, (0, 1))[seq]
    return starts.to(torch.int32), torch.where(rows < starts[-1], old, -1)


def step_slots_and_lens(
    positions: Tensor,
    seq_lens: Tensor,
    block_tables: Sequence[Tensor],
    page_sizes: Sequence[int],
    max_seq_len: int,
    num_rows: int | None = None,
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """One row per request, one token on: where it stands, is written, and how long its text is.

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
    kernels = _kernels(positions)
    if kernels is not None:
        guarded, slots, lens, _ = kernels.step(
            positions[:, None], tuple(block_tables), tuple(page_sizes), max_seq_len,
            advance=1, seq_lens=seq_lens, num_rows=num_rows,
        )  # fmt: skip
        return guarded, slots, lens
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


@dataclass(frozen=True)
class ParallelRows:
    """Rows of a pass that proposes all its tokens at once; T' of them, requests in order."""

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
    """The pass of a drafter that reads mask tokens where its earlier proposals would stand.

    Request b has n rows in the target's pass, v of them valid (all but the rejected; at least
    one). It gets, from row `query_starts[b] + b * (n' - n)` on, n' rows at consecutive positions:

        shift (P-EAGLE: a row reads the *next* token)   n' = n + P - 1
            t[1] … t[v-1], bonus, P - 1 masks, n - v padding      states of rows 0 … v-1, then none
        no shift (PARD: a language model)               n' = n + P
            t[0] … t[v-1], bonus, P - 1 masks, n - v padding      states of rows 0 … v-1, then none

    A request without rows (a bucket's) gets padding, and in `rows_to_sample` what nobody may use.
    The bonus and the masks propose. T' = T + B * (n' - n) is known on the host, and with R rows
    for each of G generations this is again `AttentionMetadata`'s layout, of n' rows. Slots come
    from `guard_positions` and `slot_mapping`, with `is_rejected` rows not inside.

    Args:
        input_ids, position_ids: [T] int, as the target read them. Rows past `query_starts[B]`
            (a bucket's) become padding at the end.
        next_tokens: [B] int, the bonus. num_rejected: [B] int32, of `inputs_padded`.
        query_starts: [B+1] int32, cumulative rows.
        num_proposals: P >= 1.
        mask_token: what the drafter was trained to read where a token is unknown.
        padding_token: what padding rows read (vLLM's `padding_token_id`).
    """
    device, num_seqs = input_ids.device, next_tokens.shape[0]
    extra = num_proposals - 1 if shift else num_proposals
    total = input_ids.shape[0] + extra * num_seqs
    if not num_seqs or not len(input_ids):  # all is padding
        nothing = torch.zeros(total, dtype=torch.int64, device=device)
        return ParallelRows(
            nothing + padding_token, nothing, nothing == 0, nothing != 0,
            nothing.new_zeros((num_seqs, num_proposals)), nothing - 1,
        )  # fmt: skip
    kernels = _kernels(input_ids)
    if kernels is not None:
        return ParallelRows(*kernels.expand_for_parallel_drafting(
            input_ids, position_ids, next_tokens, num_rejected, query_starts, num_proposals,
            mask_token, padding_token, shift,
        ))  # fmt: skip
    starts = query_starts.to(torch.int64)
    new_starts = starts + extra * torch.arange(num_seqs + 1, device=device)
    counts = starts.diff()
    valid = (counts - num_rejected).clamp_min(1).minimum(counts)  # [B]
    bonus = valid - 1 if shift else valid  # [B], its place in the request

    rows = torch.arange(total, device=device)
    # Rows past the last request count as its own: far past its masks, so they are padding.
    seq = torch.searchsorted(new_starts[1:], rows, right=True).clamp(max=num_seqs - 1)
    place = rows - new_starts[seq]
    source = starts[seq] + place
    past_bonus = place - bonus[seq]
    is_rejected = (past_bonus >= num_proposals) | (counts == 0)[seq]
    is_masked = (past_bonus > 0) & ~is_rejected
    read = (source + 1 if shift else source).clamp(max=input_ids.shape[0] - 1)
    ids = torch.where(past_bonus < 0, input_ids[read], next_tokens[seq])
    ids = ids.to(torch.int64).masked_fill(is_masked, mask_token)
    first = position_ids[starts[seq].clamp(max=input_ids.shape[0] - 1)].to(torch.int64)
    samples = (new_starts[:-1] + bonus)[:, None] + torch.arange(num_proposals, device=device)
    return ParallelRows(
        input_ids=ids.masked_fill(is_rejected, padding_token),
        position_ids=torch.where(is_rejected, 0, first + place),
        is_rejected=is_rejected,
        is_masked=is_masked,
        rows_to_sample=samples.clamp(0, total - 1),
        hidden_rows=torch.where(place < valid[seq], source, -1),
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
    """`num_rows` more rows for every request."""
    starts, lens = queries.query_starts, queries.seq_lens
    kernels = _kernels(starts)
    if kernels is not None:
        starts, lens = kernels.extend_queries(starts, lens, num_rows)
    else:
        seqs = torch.arange(starts.shape[0], dtype=starts.dtype, device=starts.device)
        starts, lens = starts + num_rows * seqs, lens + num_rows
    return Queries(
        query_starts=starts,
        seq_lens=lens,
        num_tokens=queries.num_tokens + num_rows * lens.shape[0],
        max_query_len=queries.max_query_len + num_rows,
        max_seq_len=queries.max_seq_len + num_rows,
    )


# -- our generation step -----------------------------------------------------------------------
@dataclass(frozen=True)
class StepRows:
    """What a pass reads of its rows: all T of them, or those of its generations."""

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, guarded
    slot_mappings: tuple[Tensor, ...]  # per KV group [T] int64
    kv_lens: Tensor  # [B] int32
    gather_ids: Tensor  # [L] int64, rows of the pass that get logits
    next_positions: Tensor  # [L] int64, the position after each of those
    sampling: SlotSampling  # [L] rows


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
    """The rows of G generations, R each, from their slots.

    Args:
        slot_ids: [G] int64.
        next_tokens: [S, K+1] int32; past_lens: [S] int64; sampling: S slots.
        block_tables: per KV group [G, M] int32.
        rows: R <= K+1.
        first_row: the row of the pass at which they begin.

    Returns:
        (the rows, all of which get logits; their drafts, [G, R-1] int32).
    """
    kernels = _kernels(slot_ids)
    if kernels is not None:
        tokens, *fields = kernels.gather_step_inputs(
            slot_ids, next_tokens, past_lens, sampling, tuple(block_tables), page_size, rows,
            max_seq_len, first_row,
        )  # fmt: skip
        return StepRows(*fields), tokens[:, 1:]
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


def shift_for_drafting(
    accepted: Tensor, lens: Tensor, position_ids: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What a head reads after a pass of generations alone, and the row that proposes.

    Args:
        accepted: [G, K+1] int32, -1 past the length; lens: [G] int32 in 1 … R.
        position_ids: [G*R] int64. rows: R <= K+1.

    Returns:
        (the token after each row [G*R] int64; the row of the pass that reads the last accepted
        token [G] int64, and that token's own position, one further on [G] int64).
    """
    kernels = _kernels(accepted)
    if kernels is not None:
        return kernels.shift_for_drafting(accepted, lens, position_ids, rows)
    first = rows * torch.arange(accepted.shape[0], device=accepted.device)
    ids = accepted[:, :rows].flatten().to(torch.int64)
    return ids, first + lens - 1, position_ids[first] + lens


def last_two_tokens(
    input_ids: Tensor, position_ids: Tensor, accepted: Tensor, lens: Tensor, certain: Tensor
) -> tuple[Tensor, Tensor]:
    """The bonus and the token before it, an accepted draft or the step's own input.

    Args:
        input_ids, position_ids: [T], as the target read them.
        accepted: [B, K+1] int32; lens: [B] int32.
        certain: [B] int64, the row of the last token before this step's choice.

    Returns:
        (tokens [B, 2] int32, their positions [B, 2] int64, not guarded).
    """
    kernels = _kernels(accepted)
    if kernels is not None:
        return kernels.last_two_tokens(input_ids, position_ids, accepted, lens, certain)
    read = input_ids[certain].to(accepted.dtype)
    before = accepted.gather(1, (lens.to(torch.int64) - 2).clamp_min(0)[:, None])[:, 0]
    tokens = [torch.where(lens > 1, before, read), last_accepted(accepted, lens)]
    last = position_ids[certain] + lens
    return torch.stack(tokens, dim=1), torch.stack([last - 1, last], dim=1)


@dataclass(frozen=True)
class MaskedRows:
    """Rows of the draft pass that proposes P tokens at once: R of each request, B * R in all."""

    tokens: Tensor  # [B, R] int32
    positions: Tensor  # [B, R] int64, consecutive, not guarded
    sources: Tensor  # [B * R] int64, row of the target's pass that a row continues, T for a mask
    proposing: Tensor  # [P * B] int64, rows of this pass, by proposal and then by request
    last_positions: Tensor  # [B] int64, of the last accepted tokens


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
    """The accepted tokens of each request, then mask tokens to the end of its rows.

    Row j of a request reads accepted token j < n, else the mask; row n-1 and those after it
    propose. The rows past n + P - 2 are there because n is not known to the host: what they read
    and write is past everything that a row before them attends to.

    Args:
        accepted: [B, K+1] int32; lens: [B] int32, n >= 1.
        position_ids: [T] int64, as the target read them.
        certain: [B] int64, the row of the last token before this step's choice.
        num_rows: R >= max(n) + P - 1.
        num_proposals: P >= 1.
        offset: position of the first row, from that of `certain`: 0 where a row reads the token
            after its own (a head), 1 where it reads its own (a language model).
    """
    kernels = _kernels(accepted)
    if kernels is not None:
        return MaskedRows(*kernels.masked_rows(
            accepted, lens, position_ids, certain, num_rows, num_proposals, mask_token, offset
        ))  # fmt: skip
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


def draft_step(
    meta: AttentionMetadata, tokens: Tensor, positions: Tensor, extra_kv: int, advance: int = 0
) -> tuple[Tensor, AttentionMetadata]:
    """A draft pass over the same number of rows for every request.

    Args:
        tokens: [B, R] int, what it reads. positions: [B, R] int64 (any, guarded here).
        extra_kv: how far the rows may lie beyond `meta.max_kv_len` at most.
        advance: the rows stand this much further on than `positions`.

    Returns:
        (ids [B*R] int64, the pass's metadata).
    """
    kernels = _kernels(positions)
    if kernels is None:
        ids = tokens.flatten().to(torch.int64)
        return ids, draft_step_metadata(meta, positions + advance, extra_kv)
    page_sizes = tuple(group.page_size for group in meta.kv_groups)
    guarded, slots, lens, ids = kernels.step(
        positions, meta.block_tables, page_sizes, meta.max_seq_len, advance=advance, tokens=tokens
    )
    # As `AttentionMetadata.for_rows`, which would compute the lengths once more.
    return ids, replace(
        meta,
        context_lens=(),
        context_starts=(),
        last_context_rows=None,
        images=(),
        num_generations=positions.shape[0],
        rows_per_generation=positions.shape[1],
        position_ids=guarded,
        rope_position_ids=meta.rope_positions_of_rows(guarded),
        kv_lens=lens,
        max_kv_len=min(meta.max_kv_len + extra_kv, meta.max_seq_len),
        slot_mappings=slots,
        derived={},
    )


def gather_rows(rows: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    """rows [G] int64 of each of states [T, H], whose rows are contiguous -> [G, H] each. A tensor
    given twice is gathered once, for heads that propose from the very state they feed on."""
    distinct = {id(state): state for state in states}
    kernels = _kernels(rows)
    if kernels is not None:
        gathered = kernels.gather_rows(rows, tuple(distinct.values()))
    else:
        gathered = tuple(state[rows] for state in distinct.values())
    places = dict(zip(distinct, gathered, strict=True))
    return tuple(places[id(state)] for state in states)


def to_target_ids(tokens: Tensor, d2t: Tensor) -> Tensor:
    """tokens [R] int32 in the draft vocabulary, d2t [Vd] int64 offsets -> [R] int32."""
    kernels = _kernels(tokens)
    if kernels is not None:
        return kernels.to_target_ids(tokens, d2t)
    return (tokens + d2t[tokens.to(torch.int64)]).to(torch.int32)


def finish_drafts(
    proposals: Sequence[Tensor], positions: Tensor, max_seq_len: int, max_draft_len: int
) -> Tensor:
    """Proposals side by side; none where it would stand at or past the maximum length.

    Args:
        proposals: at most K, each [B] int.
        positions: [B] int64, of the last accepted token, which the first proposal follows.

    Returns:
        [B, K] int32, -1 for none.
    """
    if not proposals:
        shape = positions.shape[0], max_draft_len
        return torch.full(shape, -1, dtype=torch.int32, device=positions.device)
    kernels = _kernels(positions)
    if kernels is not None:
        return kernels.finish_drafts(tuple(proposals), positions, max_seq_len, max_draft_len)
    proposed = torch.stack(tuple(proposals), dim=1)
    step = torch.arange(proposed.shape[1], device=proposed.device)
    room = max_seq_len - 1 - positions
    drafts = torch.where(step < room[:, None], proposed, -1)
    unused = max_draft_len - drafts.shape[1]
    return torch.nn.functional.pad(drafts, (0, unused), value=-1).to(torch.int32)


def next_new_tokens(accepted: Tensor, lens: Tensor, drafts: Tensor) -> Tensor:
    """accepted [B, K+1] int32, lens [B] int32, drafts [B, K] -> [last accepted, drafts] int32."""
    kernels = _kernels(accepted)
    if kernels is not None:
        return kernels.next_new_tokens(accepted, lens, drafts)
    last = last_accepted(accepted, lens)
    return torch.cat([last[:, None], drafts], dim=1).to(torch.int32)


def save_step(
    slot_ids: Tensor, position_ids: Tensor, lens: Tensor, new_tokens: Tensor,
    past_lens: Tensor, next_tokens: Tensor,
) -> None:  # fmt: skip
    """Leaves the next step's inputs of G generations in their slots.

    Args:
        slot_ids: [G] int64. position_ids: [G*R] int64 of this step's rows. lens: [G] int32.
        new_tokens: [G, K+1] int32.
        past_lens: [S] int64, next_tokens: [S, K+1] int32: written.
    """
    kernels = _kernels(slot_ids)
    if kernels is not None:
        kernels.save_step(slot_ids, position_ids, lens, new_tokens, past_lens, next_tokens)
        return
    rows = position_ids.shape[0] // max(slot_ids.shape[0], 1)
    past_lens[slot_ids] = position_ids[:: max(rows, 1)] + lens
    next_tokens[slot_ids] = new_tokens
