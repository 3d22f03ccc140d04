"""From a scheduled batch to the tensors of a pass.

Two halves. `build_inputs` is host work: it turns what the host knows (slots, block tables, prompt
tokens) into a few small copies. `assemble` is device work: it gathers what only the device knows
(last tokens, drafts, lengths) from the slots. The host never needs an accepted count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.manager import KVCacheManager
from ..cache.slots import SlotState
from ..metadata.attention import AttentionMetadata
from ..metadata.mode import SpeculativeDecodingMode
from ..metadata.sampling import SamplingMetadata, rows_to_tensor, to_device
from ..metadata.spec import SpecMetadata
from ..ops.slots import guard_positions, slot_mapping
from .request import ScheduledBatch


@dataclass(frozen=True)
class StepInputs:
    """What the host sends for one step: C contexts, G generations, K' drafts verified."""

    slot_ids: Tensor  # [B] int64
    block_tables: tuple[Tensor, ...]  # per KV group [B, M] int32
    context_ids: Tensor  # [T_ctx] int64
    context_positions: Tensor  # [T_ctx] int64
    context_rows: Tensor  # [T_ctx] int64, the request (row of the batch) of each token
    context_ends: Tensor  # [C] int64, KV length after this pass
    next_prompt_tokens: Tensor | None  # [C] int32, None without contexts
    context_lens: tuple[int, ...]
    context_starts: tuple[int, ...]
    num_generations: int
    num_drafts: int  # K'
    max_kv_len: int
    request_ids: list[int]
    all_greedy: bool
    has_filters: bool


def build_inputs(
    batch: ScheduledBatch, kv_cache: KVCacheManager, num_drafts: int, device: torch.device
) -> StepInputs:
    """Host half. `num_drafts` is K', the drafts verified per generation request in this step."""
    chunks, requests = batch.contexts, batch.requests
    lens = tuple(chunk.end - chunk.start for chunk in chunks)
    bounds = [c.end for c in chunks] + [r.past_upper + num_drafts + 1 for r in batch.generations]
    greedy = all(r.sampling_params.is_greedy for r in requests)

    def ints(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return rows_to_tensor(values, dtype, device)

    return StepInputs(
        slot_ids=ints([r.slot for r in requests]),
        block_tables=tuple(
            to_device(table, device)
            for table in kv_cache.block_tables([r.request_id for r in requests])
        ),
        context_ids=ints([token for c in chunks for token in c.token_ids]),
        context_positions=ints([p for c in chunks for p in range(c.start, c.end)]),
        context_rows=ints([i for i, n in enumerate(lens) for _ in range(n)]),
        context_ends=ints([c.end for c in chunks]),
        next_prompt_tokens=ints([c.next_prompt_token for c in chunks], torch.int32)
        if chunks
        else None,
        context_lens=lens,
        context_starts=tuple(chunk.start for chunk in chunks),
        num_generations=len(batch.generations),
        num_drafts=num_drafts,
        max_kv_len=max(bounds),
        request_ids=[r.request_id for r in requests],
        all_greedy=greedy,
        has_filters=any(r.sampling_params.has_filters for r in requests),
    )


@dataclass(frozen=True)
class StepTensors:
    """What one pass reads."""

    input_ids: Tensor  # [T] int64
    attn_metadata: AttentionMetadata
    spec_metadata: SpecMetadata


def assemble(
    inputs: StepInputs,
    state: SlotState,
    kv_cache: KVCacheManager,
    mode: SpeculativeDecodingMode,
    max_draft_len: int,
    max_seq_len: int,
    runtime_draft_len: int | None = None,
) -> StepTensors:
    """Device half: gathers the generations' tokens and positions from their slots.

    Args:
        runtime_draft_len: drafts to propose for the next step, None is K.
    """
    contexts, rows = len(inputs.context_lens), inputs.num_drafts + 1
    slots = inputs.slot_ids[contexts:]
    device = slots.device
    tokens = state.next_tokens[slots, :rows]  # [G, K'+1]
    past = state.past_lens[slots]  # [G]
    positions = past[:, None] + torch.arange(rows, device=device)
    guarded, inside = guard_positions(positions, max_seq_len)
    page_size = kv_cache.page_size
    position_ids = torch.cat([inputs.context_positions, guarded.flatten()])
    slot_mappings = tuple(
        torch.cat([
            _context_slots(table, inputs, page_size),
            slot_mapping(table[contexts:], guarded, inside, page_size).flatten(),
        ])
        for table in inputs.block_tables
    )  # fmt: skip
    attn_metadata = AttentionMetadata(
        context_lens=inputs.context_lens,
        context_starts=inputs.context_starts,
        num_generations=inputs.num_generations,
        rows_per_generation=rows,
        position_ids=position_ids,
        kv_lens=torch.cat([inputs.context_ends, past + rows])
        .clamp(max=max_seq_len)
        .to(torch.int32),
        max_kv_len=min(inputs.max_kv_len, max_seq_len),
        kv_groups=kv_cache.groups,
        block_tables=inputs.block_tables,
        slot_mappings=slot_mappings,
        max_seq_len=max_seq_len,
    )
    gather_ids = _gather_ids(inputs, rows, device)
    spec_metadata = SpecMetadata(
        max_num_requests=state.seeds.shape[0] - 1,
        max_draft_len=max_draft_len,
        max_total_draft_tokens=max_draft_len,
        spec_dec_mode=mode,
        num_generations=inputs.num_generations,
        num_tokens=position_ids.shape[0],
        request_ids=inputs.request_ids,
        seq_lens=[*inputs.context_lens, *([rows] * inputs.num_generations)],
        draft_tokens=tokens[:, 1:],
        gather_ids=gather_ids,
        slot_ids=inputs.slot_ids,
        next_prompt_tokens=inputs.next_prompt_tokens,
        sampling=_sampling_rows(inputs, state, position_ids[gather_ids] + 1, rows),
        captured=state.captured,
        runtime_draft_len=runtime_draft_len,
        state=state.worker,
        device=device,
    )
    input_ids = torch.cat([inputs.context_ids, tokens.flatten().to(torch.int64)])
    return StepTensors(input_ids, attn_metadata, spec_metadata)


def _context_slots(table: Tensor, inputs: StepInputs, page_size: int) -> Tensor:
    """[T_ctx] int64. Context positions are inside the maximum and reserved; the host saw to it."""
    block = table[inputs.context_rows, inputs.context_positions // page_size].to(torch.int64)
    return block * page_size + inputs.context_positions % page_size


def _gather_ids(inputs: StepInputs, rows: int, device: torch.device) -> Tensor:
    """Rows of the pass that get logits: each context's last, all of each generation."""
    ends, total = [], 0
    for n in inputs.context_lens:
        total += n
        ends.append(total - 1)
    generations = torch.arange(total, total + inputs.num_generations * rows, device=device)
    if not ends:
        return generations
    return torch.cat([rows_to_tensor(ends, torch.int64, device), generations])


def _sampling_rows(
    inputs: StepInputs, state: SlotState, positions: Tensor, rows: int
) -> SamplingMetadata:
    """Per-slot parameters spread over logits rows: 1 per context, K'+1 per generation."""
    contexts = len(inputs.context_lens)
    generations = inputs.slot_ids[contexts:].repeat_interleave(rows)
    slots = torch.cat([inputs.slot_ids[:contexts], generations])
    return SamplingMetadata(
        temperatures=state.temperatures[slots],
        top_ks=state.top_ks[slots],
        top_ps=state.top_ps[slots],
        seeds=state.seeds[slots],
        positions=positions,
        all_greedy=inputs.all_greedy,
        has_filters=inputs.has_filters,
    )
