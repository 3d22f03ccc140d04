"""Makes the tensors of a pass from a scheduled batch.

It has two halves. `build_inputs` is host work: it sends what the host knows (slots, block tables,
prompt tokens) in a few small copies. `assemble` is device work: it gathers what only the device
knows (last tokens, drafts, lengths) from the slots. The host never needs an accepted count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..metadata.attention import AttentionMetadata, ImageRows, PackedRows
from ..metadata.embeds import RereadEmbeds, RowEmbeds
from ..metadata.guided import GuidedStep
from ..metadata.mode import SpeculativeDecodingMode
from ..metadata.recurrent import RecurrentPass
from ..metadata.sampling import SamplingMetadata
from ..metadata.spec import SpecMetadata
from ..ops.step.packing import PassRows, pack_rows
from ..ops.step.rows import ContextLayout, StepRows, gather_context_inputs, gather_step_inputs
from ..state.kv_cache import KVCacheManager
from ..state.slots import SlotState
from ..utils import rows_to_tensor, to_device
from .embeds import context_rope_positions, image_rows, reread_embeds, row_embeds
from .request import ContextChunk, ScheduledBatch


@dataclass(frozen=True)
class ContextRows:
    """The part of a pass that reads prompts: T_ctx rows of C contexts."""

    ids: Tensor  # [T_ctx] int64
    positions: Tensor  # [T_ctx] int64
    owners: Tensor  # [T_ctx] int64, the context (row of the batch) of each token, -1 padding
    ends: Tensor  # [C] int64, KV length after this pass
    last_rows: Tensor  # [C] int64, each context's last row
    next_prompt_tokens: Tensor  # [C] int32, -1 at the prompt's end
    lens: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    firsts: tuple[int, ...] = ()  # as context_firsts in AttentionMetadata
    is_padded: bool = False  # True: only the number and the sum of `lens` hold
    inputs_embeds: RowEmbeds | None = None  # as in SpecMetadata
    next_inputs_embeds: RowEmbeds | None = None
    reread_embeds: RereadEmbeds | None = None
    rope_positions: Tensor | None = None  # [3, T_ctx] int64; None is positions
    images: tuple[ImageRows, ...] = ()  # as in AttentionMetadata

    @staticmethod
    def none(device: torch.device) -> ContextRows:
        """Returns the empty part of a pass over generations alone."""
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return ContextRows(
            ids=empty,
            positions=empty,
            owners=empty,
            ends=empty,
            last_rows=empty,
            next_prompt_tokens=empty,
        )

    @property
    def num_tokens(self) -> int:
        """T_ctx."""
        return sum(self.lens)


@dataclass(frozen=True)
class PromptRows:
    """Rows of a pass whose next token is a prompt's, of prompts whose log probabilities are asked
    for."""

    rows: Tensor  # [R] int64, rows of the pass
    tokens: Tensor  # [R] int64, the token after each; -1 where an embedding stands
    num_top: int  # alternatives


@dataclass(frozen=True)
class StepInputs:
    """What the host sends for one step: C contexts, G generations, K' drafts verified."""

    slot_ids: Tensor  # [B] int64
    block_tables: tuple[Tensor, ...]  # per KV group [B, M] int32
    contexts: ContextRows
    num_generations: int
    num_drafts: int  # K'
    max_kv_len: int
    request_ids: list[int]
    all_greedy: bool
    has_filters: bool
    num_logprobs: int | None = None  # alternatives to return with each token; None: nothing
    shapes_logits: bool = False
    is_cuda_graph: bool = False
    guided: GuidedStep | None = None  # where a request has a grammar
    prompt_rows: PromptRows | None = None  # where log probabilities of a prompt are asked for
    mean_verified: int | None = None  # drafts of each request; None: by `EngineShape`

    def drafts_nothing(self, draft_len: int) -> bool:
        """Whether it neither verifies nor proposes drafts, and reads no prompt (`StepPlan`)."""
        return not (self.contexts.lens or self.num_drafts or draft_len)

    def followed_by(self, generations: StepInputs) -> StepInputs:
        """Returns the inputs of one pass over these contexts and those generations."""
        pairs = zip(self.block_tables, generations.block_tables, strict=True)
        return replace(
            self,
            slot_ids=torch.cat([self.slot_ids, generations.slot_ids]),
            block_tables=tuple(torch.cat(pair) for pair in pairs),
            num_generations=generations.num_generations,
            num_drafts=generations.num_drafts,
            request_ids=[*self.request_ids, *generations.request_ids],
        )


@dataclass(frozen=True)
class EngineShape:
    """Sizes that all steps of an engine share."""

    mode: SpeculativeDecodingMode
    max_draft_len: int  # K
    max_seq_len: int
    num_layers: int  # of the target
    num_extra_kv_tokens: int  # the worker's
    max_verified_drafts: int | None = None  # of all requests in a step; None: all drafts are
    attention_dp_size: int = 1  # ranks that keep keys and values of different requests

    def of_all_ranks(self, count: int) -> list[int] | None:
        """Returns one count for each such rank: all run the same pass. None: there is one."""
        return [count] * self.attention_dp_size if self.attention_dp_size > 1 else None


def build_inputs(
    batch: ScheduledBatch,
    kv_cache: KVCacheManager,
    num_drafts: int,
    device: torch.device,
    num_rewritten: int = 0,
) -> StepInputs:
    """Sends what the host knows of a step.

    Args:
        num_drafts: K', the drafts verified per generation request in this step.
        num_rewritten: the worker's `num_rewritten_tokens`.
    """
    chunks, requests = batch.contexts, batch.requests
    bounds = [c.end for c in chunks] + [r.past_upper + num_drafts + 1 for r in batch.generations]
    contexts = ContextRows.none(device)
    if chunks:
        contexts = _context_rows(chunks, num_rewritten, device)
    return StepInputs(
        slot_ids=rows_to_tensor([r.slot for r in requests], torch.int64, device),
        block_tables=tuple(
            to_device(table, device)
            for table in kv_cache.block_tables([r.request_id for r in requests])
        ),
        contexts=contexts,
        num_generations=len(batch.generations),
        num_drafts=num_drafts,
        max_kv_len=max(bounds),
        request_ids=[r.request_id for r in requests],
        all_greedy=batch.all_greedy,
        has_filters=batch.has_filters,
        num_logprobs=batch.num_logprobs,
        shapes_logits=batch.shapes_logits,
        prompt_rows=_prompt_rows(chunks, device),
    )


def _prompt_rows(chunks: list[ContextChunk], device: torch.device) -> PromptRows | None:
    rows: list[int] = []
    tokens: list[int] = []
    first, num_top = 0, 0
    for chunk in chunks:
        if count := chunk.num_prompt_logprobs:
            rows += range(first, first + count)
            tokens += chunk.next_prompt_ids(count)
            num_top = max(num_top, chunk.request.sampling_params.prompt_logprobs or 0)
        first += chunk.num_tokens
    if not rows:
        return None
    return PromptRows(
        rows_to_tensor(rows, torch.int64, device),
        rows_to_tensor(tokens, torch.int64, device),
        num_top,
    )


def _context_rows(
    chunks: list[ContextChunk], num_rewritten: int, device: torch.device
) -> ContextRows:
    lens = tuple(chunk.num_tokens for chunk in chunks)

    def ints(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return rows_to_tensor(values, dtype, device)

    return ContextRows(
        ids=ints([token for c in chunks for token in c.token_ids]),
        positions=ints([p for c in chunks for p in range(c.start, c.end)]),
        owners=ints([i for i, n in enumerate(lens) for _ in range(n)]),
        ends=ints([c.end for c in chunks]),
        last_rows=ints([end - 1 for end in accumulate(lens)]),
        next_prompt_tokens=ints([c.next_prompt_token for c in chunks], torch.int32),
        lens=lens,
        starts=tuple(chunk.start for chunk in chunks),
        firsts=tuple(chunk.request.num_reused for chunk in chunks),
        inputs_embeds=row_embeds(chunks, 0, device),
        next_inputs_embeds=row_embeds(chunks, 1, device),
        reread_embeds=reread_embeds(chunks, num_rewritten, device),
        rope_positions=context_rope_positions(chunks, device),
        images=image_rows(chunks),
    )


class TargetPass(NamedTuple):
    """What the target reads: rows that are verified."""

    input_ids: Tensor  # [T] int64
    attn_metadata: AttentionMetadata


@dataclass(frozen=True)
class StepTensors:
    """Tensors and metadata that one step reads."""

    input_ids: Tensor  # [T] int64
    slot_ids: Tensor  # [B] int64
    gather_ids: Tensor  # [C + G*(K'+1)] int64, the rows that get logits
    attn_metadata: AttentionMetadata
    spec_metadata: SpecMetadata
    target: TargetPass  # the same rows, or fewer of them (`AttentionMetadata.packed`)
    num_logprobs: int | None  # as in StepInputs
    prompt_rows: PromptRows | None


def assemble(
    inputs: StepInputs,
    state: SlotState,
    kv_cache: KVCacheManager,
    engine: EngineShape,
    draft_len: int,
) -> StepTensors:
    """Gathers the generations' tokens and positions from their slots, on the device.

    Args:
        draft_len: drafts to propose for the next step.
    """
    contexts = len(inputs.contexts.lens)
    step, drafts = gather_step_inputs(
        inputs.slot_ids[contexts:],
        state.next_tokens,
        state.past_lens,
        state.sampling,
        [table[contexts:] for table in inputs.block_tables],
        kv_cache.page_size,
        inputs.num_drafts + 1,
        engine.max_seq_len,
        first_row=inputs.contexts.num_tokens,
    )
    if contexts:
        step = _with_contexts(step, inputs, state, kv_cache, engine.max_seq_len)
    attn_metadata = _attn_metadata(step, inputs, state, kv_cache, engine.max_seq_len)
    target = TargetPass(step.input_ids, attn_metadata)
    most, mean = engine.max_verified_drafts, inputs.mean_verified
    if mean is not None:
        most = mean * inputs.num_generations
    if most is not None and not contexts and drafts.numel() > most:
        target, drafts = _packed(step, drafts, attn_metadata, state, inputs.slot_ids, most)
    return StepTensors(
        input_ids=step.input_ids,
        slot_ids=inputs.slot_ids,
        gather_ids=step.gather_ids,
        attn_metadata=attn_metadata,
        spec_metadata=_spec_metadata(step, drafts, inputs, state, engine, draft_len),
        target=target,
        num_logprobs=inputs.num_logprobs,
        prompt_rows=inputs.prompt_rows,
    )


def _attn_metadata(
    step: StepRows,
    inputs: StepInputs,
    state: SlotState,
    kv_cache: KVCacheManager,
    max_seq_len: int,
) -> AttentionMetadata:
    prompts = inputs.contexts
    deltas = None if state.rope_deltas is None else state.rope_deltas[inputs.slot_ids]
    return AttentionMetadata(
        context_lens=prompts.lens,
        context_starts=prompts.starts,
        context_firsts=prompts.firsts,
        last_context_rows=prompts.last_rows if prompts.is_padded else None,
        num_generations=inputs.num_generations,
        rows_per_generation=inputs.num_drafts + 1,
        position_ids=step.position_ids,
        rope_position_ids=_rope_positions(step, inputs, deltas),
        rope_deltas=deltas,
        images=prompts.images,
        recurrent=_recurrent(step, inputs, state),
        kv_lens=step.kv_lens,
        max_kv_len=min(inputs.max_kv_len, max_seq_len),
        kv_groups=kv_cache.groups,
        block_tables=inputs.block_tables,
        slot_mappings=step.slot_mappings,
        max_seq_len=max_seq_len,
    )


def _recurrent(step: StepRows, inputs: StepInputs, state: SlotState) -> RecurrentPass | None:
    if state.recurrent is None:
        return None
    firsts = step.position_ids[inputs.contexts.num_tokens :: inputs.num_drafts + 1]
    return state.recurrent.begin_pass(inputs.slot_ids, inputs.contexts.ends, firsts)


def _spec_metadata(
    step: StepRows,
    drafts: Tensor,
    inputs: StepInputs,
    state: SlotState,
    engine: EngineShape,
    draft_len: int,
) -> SpecMetadata:
    prompts, num_rows = inputs.contexts, step.position_ids.shape[0]
    return SpecMetadata(
        max_num_requests=state.past_lens.shape[0] - 1,
        max_draft_len=engine.max_draft_len,
        max_total_draft_tokens=engine.max_draft_len,
        is_cuda_graph=inputs.is_cuda_graph,
        spec_dec_mode=engine.mode,
        num_extra_kv_tokens=engine.num_extra_kv_tokens,
        num_layers=engine.num_layers,
        num_generations=inputs.num_generations,
        num_tokens=num_rows,
        all_rank_num_seqs=engine.of_all_ranks(len(inputs.request_ids)),
        all_rank_num_tokens=engine.of_all_ranks(num_rows),
        request_ids=inputs.request_ids,
        seq_lens=[*prompts.lens, *([inputs.num_drafts + 1] * inputs.num_generations)],
        draft_tokens=drafts,
        gather_ids=step.gather_ids,
        slot_ids=inputs.slot_ids,
        next_prompt_tokens=prompts.next_prompt_tokens if prompts.lens else None,
        inputs_embeds=prompts.inputs_embeds,
        next_inputs_embeds=prompts.next_inputs_embeds,
        reread_embeds=prompts.reread_embeds,
        sampling=SamplingMetadata(
            **step.sampling._asdict(),
            positions=step.next_positions,
            all_greedy=inputs.all_greedy,
            has_filters=inputs.has_filters,
        ),
        captured=state.captured,
        logits_state=state.logits if inputs.shapes_logits else None,
        guided=inputs.guided,
        missed=state.missed if inputs.drafts_nothing(draft_len) else None,
        runtime_draft_len=draft_len,
        state=state.worker,
        device=inputs.slot_ids.device,
    )


def _packed(
    step: StepRows,
    drafts: Tensor,
    meta: AttentionMetadata,
    state: SlotState,
    slot_ids: Tensor,
    num_verified: int,
) -> tuple[TargetPass, Tensor]:
    """Returns the target's pass, and the `num_verified` drafts of it: [G, K'], -1 for others."""
    assert state.chances is not None
    rows = PassRows(step.input_ids, step.position_ids, step.slot_mappings)
    packing = pack_rows(slot_ids, drafts, state.chances, rows, num_verified)
    packed = PackedRows(packing.starts, packing.indices, packing.places, meta)
    ids, positions, slots = packing.rows
    return TargetPass(ids, meta.pack(packed, positions, slots)), packing.drafts


def _rope_positions(step: StepRows, inputs: StepInputs, deltas: Tensor | None) -> Tensor | None:
    """Returns rotary positions [T] int64, or [3, T] with prompts that have axes (M-RoPE).

    None: the model has no M-RoPE, so they are `position_ids`.
    """
    if deltas is None:
        return None
    tokens, contexts = inputs.contexts.num_tokens, len(inputs.contexts.lens)
    rows = step.position_ids[tokens:].view(-1, inputs.num_drafts + 1) + deltas[contexts:, None]
    generations, prompts = rows.clamp_min(0).flatten(), inputs.contexts.rope_positions
    if prompts is None:
        return torch.cat([step.position_ids[:tokens], generations])
    return torch.cat([prompts, generations.expand(3, -1)], dim=1)


def _with_contexts(
    step: StepRows,
    inputs: StepInputs,
    state: SlotState,
    kv_cache: KVCacheManager,
    max_seq_len: int,
) -> StepRows:
    """Puts the contexts' rows in front of the generations'. A context has logits at its last
    row."""
    contexts = inputs.contexts
    layout = ContextLayout(contexts.positions, contexts.owners, contexts.ends, contexts.last_rows)
    gathered = gather_context_inputs(
        inputs.slot_ids[: len(contexts.lens)],
        layout,
        state.sampling,
        inputs.block_tables,
        kv_cache.page_size,
        max_seq_len,
    )
    prompts = StepRows(
        contexts.ids, contexts.positions, gather_ids=contexts.last_rows, **gathered._asdict()
    )
    return prompts.followed_by(step) if inputs.num_generations else prompts
