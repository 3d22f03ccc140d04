"""`forward_step`: target forward -> logits -> accept -> draft -> slots. One function of tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..distributed.logits import ShardedLogits, gather_logits
from ..metadata.attention import PackedRows
from ..metadata.spec import SpecMetadata
from ..models.decoder import Decoder
from ..ops.step.rows import gather_rows, save_step
from ..ops.tokens.logprobs import TokenLogprobs, logprobs_of, token_logprobs
from ..state.slots import SlotState
from ..workers.base import SpecWorkerBase
from ..workers.protocols import DraftInputs, DraftModel, LanguageModel
from .inputs import PromptRows, StepTensors
from .pinned import Piece

FEWEST_ROWS = 512
"""A pass over prompts of this many rows or more computes its last layer for the rows with logits
alone. With fewer, reading weights takes the time, whatever the rows."""
MOST_LOGITS = 1 << 26
"""How many are computed at once for log probabilities of prompts: 512 rows of a vocabulary of
128 Ki tokens."""


@dataclass(frozen=True)
class StepOutputs:
    """Tensors that the host reads, one step late under overlap."""

    new_tokens: Tensor  # [B, K+1] int32, -1 past the length
    new_tokens_lens: Tensor  # [B] int32
    bad_requests: Tensor  # [B] bool, whether the request's logits held NaN
    hidden_states: Tensor | None = None  # [T, (n+1) * D] captured layers and final, to be saved
    draft_inputs: DraftInputs | None = None  # for a drafter outside the step
    logprobs: TokenLogprobs | None = None  # 1 row per context, K'+1 per generation
    drafts: Tensor | None = None  # [B, K] int32, for the next step; None: in the slots alone
    prompt_logprobs: TokenLogprobs | None = None  # of `StepTensors.prompt_rows`
    num_verified: Tensor | None = None  # [G] int32, drafts of each generation; None: all K'

    @cached_property
    def piece(self) -> Piece | None:
        """The memory that tokens, lengths and marks are parts of, if it is one."""
        return Piece.of(self.new_tokens, self.new_tokens_lens, self.bad_requests)

    def first_rows(self, count: int, rows: int) -> StepOutputs:
        """Returns those of the first `count` requests, of `rows` logits each, without padding."""
        hidden, logprobs, drafts = self.hidden_states, self.logprobs, self.drafts
        num_verified = self.num_verified
        return StepOutputs(
            new_tokens=self.new_tokens[:count],
            new_tokens_lens=self.new_tokens_lens[:count],
            bad_requests=self.bad_requests[:count],
            hidden_states=None if hidden is None else hidden[:count],
            logprobs=None if logprobs is None else logprobs.rows(count * rows),
            drafts=None if drafts is None else drafts[:count],
            num_verified=None if num_verified is None else num_verified[:count],
        )


@torch.inference_mode()
def forward_step(
    target: Decoder,
    worker: SpecWorkerBase,
    draft_model: DraftModel | LanguageModel | None,
    tensors: StepTensors,
    state: SlotState,
) -> StepOutputs:
    """Runs one step and writes the next step's inputs to the slots. The host does not wait."""
    meta, spec = tensors.attn_metadata, tensors.spec_metadata
    packed, mode = tensors.target.attn_metadata.packed, spec.spec_dec_mode
    spec.prepare()
    hidden, logits = _run_target(target, worker, tensors)
    arguments = tensors.input_ids, meta.position_ids, hidden, logits, meta, spec, draft_model
    draft_inputs = None
    if mode.drafts_in_passes():  # the executor launches the drafter after this
        draft_inputs = worker.verify(*arguments)
        outputs = worker.outputs(logits, draft_inputs, worker.no_drafts(draft_inputs))
    else:
        outputs = worker(*arguments)
        worker.save_chances(tensors.slot_ids, state.chances)
    lens, next_tokens = outputs["new_tokens_lens"], outputs["next_new_tokens"]
    _save(tensors, lens, next_tokens, state)
    saved = logprobs = prompt_logprobs = None
    if mode.is_save_hidden_states():
        assert hidden is not None
        saved = torch.cat([spec.captured_rows(meta.num_tokens), hidden], dim=-1)
    if tensors.num_logprobs is not None:
        logprobs = token_logprobs(
            gather_logits(logits), outputs["new_tokens"], meta.num_contexts, tensors.num_logprobs
        )
    if tensors.prompt_rows is not None:
        assert hidden is not None
        prompt_logprobs = _prompt_logprobs(target, hidden, tensors.prompt_rows)
    return StepOutputs(
        new_tokens=outputs["new_tokens"],
        new_tokens_lens=lens,
        bad_requests=spec.marked_requests(),
        hidden_states=saved,
        draft_inputs=draft_inputs,
        logprobs=logprobs,
        drafts=next_tokens[:, 1:] if draft_inputs is None else None,
        num_verified=None if packed is None else packed.starts.diff() - 1,
        prompt_logprobs=prompt_logprobs,
    )


def _run_target(
    target: Decoder, worker: SpecWorkerBase, tensors: StepTensors
) -> tuple[Tensor | None, Tensor | ShardedLogits]:
    """Returns the target's final hidden states [T, D], and the logits of rows `gather_ids`.

    The states are None where the last layer was computed for the rows with logits alone.
    """
    (ids, meta), spec = tensors.target, tensors.spec_metadata
    skips_rows = _last_layer_skips_rows(target, worker, tensors)
    hidden = target(
        ids,
        meta.position_ids,
        meta,
        capture=spec,
        inputs_embeds=spec.inputs_embeds,
        last_rows=tensors.gather_ids if skips_rows else None,
    )
    if skips_rows:
        return None, target.compute_logits(hidden)
    # A step without contexts has logits at every row: nothing to gather.
    logits = target.compute_logits(hidden[tensors.gather_ids] if meta.num_contexts else hidden)
    if meta.packed is not None:
        return _unpacked(hidden, logits, meta.packed, spec)
    return hidden, logits


def _save(tensors: StepTensors, lens: Tensor, next_tokens: Tensor, state: SlotState) -> None:
    """Writes lengths and the next step's input to the slots.

    A context's KV now ends with this chunk; a generation's with the last row of its accepted path
    (`metadata/accepted_path.py`): the bonus is the next step's input. The next token after a chunk
    inside the prompt is never read: the following chunk overwrites it.
    """
    meta = tensors.attn_metadata
    contexts, positions = meta.num_contexts, meta.position_ids

    def save(requests: slice, row_positions: Tensor) -> None:
        slots, tokens = tensors.slot_ids[requests], next_tokens[requests]
        save_step(slots, row_positions, lens[requests], tokens, state.past_lens, state.next_tokens)

    save(slice(contexts, None), positions[meta.num_context_tokens :])
    if contexts:
        save(slice(contexts), positions[tensors.gather_ids[:contexts]])


def _last_layer_skips_rows(target: Decoder, worker: SpecWorkerBase, tensors: StepTensors) -> bool:
    """Whether nothing reads what the last layer makes of rows without logits."""
    meta, spec = tensors.attn_metadata, tensors.spec_metadata
    if not target.ends_by_rows or meta.num_generations or meta.num_context_tokens < FEWEST_ROWS:
        return False
    if tensors.prompt_rows is not None or meta.rope_position_ids is not None or meta.images:
        return False
    # NaN in codes of earlier rows is found by the attention of contexts, not of generations.
    if any(group.k_scales is not None for group in meta.kv_groups):
        return False
    if worker.reads_final_states:
        return False
    if spec.captured is None:
        return not worker.drafts_with_network
    return len(target.layers) - 1 not in spec.captured.layers


def _unpacked(
    hidden: Tensor, logits: Tensor | ShardedLogits, packed: PackedRows, spec: SpecMetadata
) -> tuple[Tensor, Tensor | ShardedLogits]:
    """Returns hidden states and logits of all rows, [G * (K'+1), …], and captures those layers.

    A row that was not verified has what its request's last one has. Nothing reads it: its draft is
    -1, which no rule accepts.
    """
    states = [hidden, logits.part if isinstance(logits, ShardedLogits) else logits]
    if spec.captured is not None:
        states.append(spec.captured_rows(hidden.shape[0]))
    hidden, of_rows, *captured = gather_rows(packed.places, *states)
    if spec.captured is not None:
        spec.captured = replace(spec.captured, buffer=captured[0])
    return hidden, replace(logits, part=of_rows) if isinstance(logits, ShardedLogits) else of_rows


def _prompt_logprobs(target: Decoder, hidden: Tensor, asked: PromptRows) -> TokenLogprobs:
    """Returns the log probabilities of prompts' tokens. Memory bounds the rows at a time."""
    size = max(1, MOST_LOGITS // target.config.vocab_size)
    parts = []
    for rows, tokens in zip(asked.rows.split(size), asked.tokens.split(size), strict=True):
        part = logprobs_of(
            gather_logits(target.compute_logits(hidden[rows])), tokens, asked.num_top
        )
        part.ranks.masked_fill_(tokens < 0, 0)
        parts.append(part)
    return TokenLogprobs.joined(parts)
