"""Selects what a draft head reads of the target's pass."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..errors import ConfigError
from ..metadata.attention import AttentionMetadata
from ..metadata.embeds import RowEmbeds
from .base import SpecWorkerBase
from .protocols import DraftInputs, DraftModel, LanguageModel


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


def draft_network(inputs: DraftInputs) -> tuple[DraftModel | LanguageModel, AttentionMetadata]:
    """Returns the drafting network and the target's metadata.

    Raises:
        ConfigError: one of them is not set.
    """
    if inputs.draft_model is None or inputs.attn_metadata is None:
        raise ConfigError(
            "Drafting with a network needs draft_model and attn_metadata, whose KV groups hold its "
            "keys and values: pass both to the worker."
        )
    return inputs.draft_model, inputs.attn_metadata


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
    if not contexts:
        return following
    last_rows = {} if meta.last_context_rows is None else {"last_rows": meta.last_context_rows}
    ids = worker.prepare_context_input_ids(
        inputs.input_ids[:tokens],
        inputs.accepted_tokens[:contexts],
        meta.context_lens,
        inputs.step.next_prompt_tokens,
        **last_rows,
    )
    return torch.cat([ids.to(torch.int64), following])
