"""A second, smaller model drafts inside the target's step, with a KV group of its own.

The draft model's KV at position i is valid once it has read token i. After a step that accepted
everything, the last draft has never been read, so the first draft pass reads the last *two*
tokens of every request; re-reading the first of them rewrites the same values. Rows (t = new
tokens, n = their number, p = tokens with target KV before the step):

    pass 0      (t[n-2], t[n-1]) at (p+n-1, p+n)    -> proposal 1   (t[-1] is the step's input)
    pass i >= 1  proposal i      at  p+n+i          -> proposal i+1
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..metadata.attention import AttentionMetadata
from ..ops.accept import last_accepted
from ..ops.slots import draft_step_metadata
from .base import SpecWorkerBase, certain_rows
from .protocols import DraftInputs, LanguageModel


class DraftTargetWorker(SpecWorkerBase):
    """Mode DRAFT_TARGET."""

    @property
    def num_extra_kv_tokens(self) -> int:
        return self.max_draft_len

    def draft(self, inputs: DraftInputs) -> Tensor:
        meta, model = inputs.attn_metadata, cast(LanguageModel, inputs.draft_model)
        assert meta is not None and model is not None
        num_tokens = meta.num_context_tokens
        if num_tokens:  # the draft model reads the prompt as the target did
            model(inputs.input_ids[:num_tokens], inputs.position_ids[:num_tokens],
                  meta.contexts_only())  # fmt: skip

        rows = certain_rows(meta)
        tokens = _last_two_tokens(inputs, rows)  # [B, 2]
        last_position = inputs.position_ids[rows] + inputs.num_accepted_tokens  # of the bonus
        positions = torch.stack([last_position - 1, last_position], dim=1)  # [B, 2]
        # Proposal i sits at last_position + i + 1: past the maximum length there is none.
        room = meta.max_seq_len - 1 - last_position  # [B]
        drafts = []
        for i in range(self.max_draft_len):
            logits = self._run(model, tokens, positions, meta, extra_kv=self.max_draft_len)
            proposal = self.draft_sampler_greedy(logits)
            drafts.append(torch.where(room > i, proposal, -1))
            tokens, positions = proposal[:, None], positions[:, -1:] + 1
        return torch.stack(drafts, dim=1).to(torch.int32)

    @staticmethod
    def _run(
        model: LanguageModel,
        tokens: Tensor,
        positions: Tensor,
        meta: AttentionMetadata,
        extra_kv: int,
    ) -> Tensor:
        """tokens, positions [B, R] -> the logits after each request's last row, [B, V]."""
        step = draft_step_metadata(meta, positions, extra_kv + 1)
        hidden = model(tokens.reshape(-1), step.position_ids, step)
        return model.compute_logits(hidden[tokens.shape[1] - 1 :: tokens.shape[1]])


def _last_two_tokens(inputs: DraftInputs, rows: Tensor) -> Tensor:
    """[B, 2]: the token before the bonus (an accepted draft or the step's input), and the bonus."""
    lens, accepted = inputs.num_accepted_tokens, inputs.accepted_tokens
    read = inputs.input_ids[rows].to(accepted.dtype)  # [B]
    before = accepted.gather(1, (lens.to(torch.int64) - 2).clamp_min(0)[:, None])[:, 0]
    return torch.stack([torch.where(lens > 1, before, read), last_accepted(accepted, lens)], dim=1)
