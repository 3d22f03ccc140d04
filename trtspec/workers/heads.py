"""Selects what a draft head reads of the target's pass."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ..errors import ConfigError
from ..metadata.attention import AttentionMetadata
from ..metadata.embeds import RowEmbeds
from ..ops.step.missed import keep_missed
from .base import SpecWorkerBase
from .protocols import DraftInputs, DraftModel, LanguageModel, OneLayerDraftModel


def draft_source(inputs: DraftInputs) -> tuple[DraftModel, AttentionMetadata, Tensor]:
    """Returns the head, the target's metadata and the hidden states it reads [T, n * D].

    Raises:
        ConfigError: one of them is not set.
    """
    network, meta = draft_network(inputs)
    model = cast(DraftModel, network)
    layers = model.layers_to_capture
    if layers:
        return model, meta, inputs.spec_metadata.captured_rows(meta.num_tokens, layers)
    if inputs.hidden_states is None:
        raise ConfigError("The head reads the target's final hidden states: pass hidden_states.")
    return model, meta, inputs.hidden_states


def best_tokens(model: DraftModel, hidden: Tensor, step: int) -> Tensor | None:
    """Returns each row's best token without its logits, [R] int32 target ids, if the model can."""
    choose = getattr(model, "best_tokens", None)
    return None if choose is None else cast(Tensor | None, choose(hidden, step))


def one_layer(model: DraftModel) -> OneLayerDraftModel | None:
    """Returns a head whose keys and values can be written alone, else None."""
    writes_alone = getattr(model, "writes_kv_alone", False) and hasattr(
        model, "write_kv_of_projected"
    )
    return cast(OneLayerDraftModel, model) if writes_alone else None


def read_undrafted(worker: SpecWorkerBase, inputs: DraftInputs) -> None:
    """Lets the head's keys and values follow a step that drafts nothing, or keeps its rows for
    later.

    A head without `write_kv` runs its pass.
    """
    model, meta, hidden_states = draft_source(inputs)
    missed = inputs.step.missed
    if missed is not None:
        kept = inputs.step.slot_ids, meta.position_ids
        kv_slots = meta.slot_mappings[model.kv_group_of_layer(0)]
        keep_missed(*kept, kv_slots, hidden_states, inputs.accepted_tokens[:, 0], missed)
        return
    ids, embeds = shifted_input_ids(worker, inputs, meta), merged_embeds(inputs)
    write = getattr(model, "write_kv", None)
    if write is not None:
        write(ids, meta.position_ids, hidden_states, meta, **embeds)
    else:
        projected = model.project_target_hidden(hidden_states)
        model(ids, meta.position_ids, projected, meta, step=0, **embeds)


def nothing_drafted(inputs: DraftInputs) -> Tensor:
    """Returns [B, 0] int32: the drafts of a step that proposes none."""
    return inputs.accepted_tokens[:, :0]


def draft_model_behind_prompts(inputs: DraftInputs) -> tuple[LanguageModel, AttentionMetadata]:
    """Lets the draft model read the step's prompts, as the target did. Returns it.

    Raises:
        ConfigError: as `draft_network`.
    """
    network, meta = draft_network(inputs)
    model, count = cast(LanguageModel, network), meta.num_context_tokens
    if count:
        model(inputs.input_ids[:count], inputs.position_ids[:count], meta.contexts_only())
    return model, meta


def draft_network(inputs: DraftInputs) -> tuple[DraftModel | LanguageModel, AttentionMetadata]:
    """Returns the drafting network and the target's metadata.

    Raises:
        ConfigError: one of them is not set.
    """
    model, meta = inputs.draft_model, inputs.attn_metadata
    if model is None or not isinstance(meta, AttentionMetadata):
        raise ConfigError(
            "Drafting with a network needs draft_model and attn_metadata, whose KV groups hold its "
            f"keys and values. Given are {type(model).__name__} and {type(meta).__name__}: pass a "
            "network and an AttentionMetadata to the worker."
        )
    if not isinstance(inputs.input_ids, Tensor):
        given = type(inputs.input_ids).__name__
        raise ConfigError(f"input_ids is {given}: give the ids that the target read, [T].")
    return model, meta


def merged_embeds(inputs: DraftInputs) -> dict[str, RowEmbeds]:
    """Returns the head's argument for prompts that hold embeddings. Without such prompts it is left
    out, so that a head need not take it."""
    embeds = inputs.step.next_inputs_embeds
    return {} if embeds is None else {"inputs_embeds": embeds}


def shifted_input_ids(
    worker: SpecWorkerBase, inputs: DraftInputs, meta: AttentionMetadata
) -> Tensor:
    """Returns the token after each row, [T] int64: prompts shifted left, then accepted tokens.

    At a chunk's end inside the prompt it is the next prompt token. What rows of rejected drafts get
    does not matter.
    """
    tokens, contexts = meta.num_context_tokens, meta.num_contexts
    generations = slice(contexts, None)
    following = inputs.path.tokens_after_rows(generations, meta.rows_per_generation)
    following = following.to(torch.int64)
    if not contexts:
        return following
    last_rows = {} if meta.last_context_rows is None else {"last_rows": meta.last_context_rows}
    ids = worker.prepare_context_input_ids(
        inputs.input_ids[:tokens],
        inputs.accepted_tokens[:contexts],
        meta.context_lens,
        inputs.step.next_prompt_tokens,
        **last_rows,
    ).to(torch.int64)
    return torch.cat([ids, following]) if meta.num_generations else ids


def skip_kv_of_first_rows(
    step: AttentionMetadata, meta: AttentionMetadata, inputs: DraftInputs
) -> AttentionMetadata:
    """Returns the draft pass without the KV writes of each context's first row.

    That row is the prompt's last one, which the drafter has read already. It read the row's
    embedding and rotary position, while this pass reads a token's. The two differ where a prompt
    holds embeddings; otherwise the pass is returned unchanged.

    Args:
        step: the draft pass. meta: of the target's pass.
    """
    if not meta.num_contexts or has_text_alone(meta, inputs):
        return step
    mappings = []
    for slots in step.slot_mappings:
        rows = slots.view(step.num_seqs, -1).clone()
        rows[: meta.num_contexts, 0] = -1
        mappings.append(rows.flatten())
    return replace(step, slot_mappings=tuple(mappings), derived={})


def has_text_alone(meta: AttentionMetadata, inputs: DraftInputs) -> bool:
    """Whether rows of the target's pass have an embedding and one rotary position by their token
    and their position alone."""
    rotary = meta.rope_position_ids
    return inputs.step.next_inputs_embeds is None and (rotary is None or rotary.dim() == 1)
