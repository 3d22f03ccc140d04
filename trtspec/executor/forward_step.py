"""The step: target forward -> logits -> accept -> draft -> slot state. One function of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.slots import SlotState
from ..models.decoder import Decoder
from ..workers.base import SpecWorkerBase
from .inputs import StepTensors


@dataclass(frozen=True)
class StepOutputs:
    """What the host reads, one step late under overlap."""

    new_tokens: Tensor  # [B, K+1] int32, -1 past the length
    new_tokens_lens: Tensor  # [B] int32
    bad_requests: Tensor  # [B] bool, the request's logits held NaN


@torch.inference_mode()
def forward_step(
    target: Decoder,
    worker: SpecWorkerBase,
    draft_model: Decoder | None,
    tensors: StepTensors,
    state: SlotState,
) -> StepOutputs:
    """Runs one pass and leaves the next step's inputs in the slots. No host synchronisation."""
    meta, spec = tensors.attn_metadata, tensors.spec_metadata
    spec.prepare()
    hidden = target(tensors.input_ids, meta.position_ids, meta)
    assert spec.gather_ids is not None and spec.slot_ids is not None
    logits = target.compute_logits(hidden[spec.gather_ids])
    outputs = worker(tensors.input_ids, meta.position_ids, hidden, logits, meta, spec, draft_model)
    lens = outputs["new_tokens_lens"]
    # A context's KV now ends with this chunk; a generation's with its last accepted token but
    # the bonus, which is the next step's input. A chunk inside the prompt leaves a next token
    # that nobody reads: the following chunk overwrites it.
    contexts, rows = meta.num_contexts, meta.rows_per_generation
    past = meta.position_ids[spec.gather_ids[:contexts]] + 1
    first_rows = meta.position_ids[meta.num_context_tokens :: rows]
    past = torch.cat([past, first_rows + lens[contexts:]])
    state.past_lens[spec.slot_ids] = past
    state.next_tokens[spec.slot_ids] = outputs["next_new_tokens"]
    assert spec.bad_requests is not None
    return StepOutputs(outputs["new_tokens"], lens, spec.bad_requests)
