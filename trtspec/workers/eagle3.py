"""EAGLE-3: one head, used K times inside the target's step.

Rows of one request (p = position of the step's first row, n = tokens accepted, K drafts):

    pass 0      all rows of the target's pass, at p …     token = the one after each row, hidden =
                                                          the target's at the row
                row n-1 proposes; rows past it are of rejected drafts, overwritten next time
    pass i >= 1 one row, at p + n - 1 + i                 token = proposal i, hidden = pass i-1's

Pass 0 rewrites what earlier drafting guessed: the head's KV at a position is always computed from
the target's own hidden state once that is known (docs/architecture.md has a worked trace).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from ..errors import ConfigError
from ..metadata.attention import AttentionMetadata
from ..ops.slots import draft_step_metadata
from .base import SpecWorkerBase, certain_rows
from .protocols import DraftInputs, DraftModel


@dataclass(frozen=True)
class DraftChain:
    """Drafting between two passes."""

    model: DraftModel
    meta: AttentionMetadata  # of the target's pass
    room: Tensor  # [B] int64: proposals that fit below the maximum length
    positions: Tensor  # [B] int64, of the row that proposed last
    hidden: Tensor  # [B, H], fed on to the next pass
    proposals: tuple[Tensor, ...]  # each [B] int32

    def draft_tokens(self, max_draft_len: int) -> Tensor:
        """[B, K] int32, -1 past the maximum length and where no pass was run."""
        proposed = torch.stack(self.proposals, dim=1)
        step = torch.arange(proposed.shape[1], device=proposed.device)
        drafts = torch.where(step < self.room[:, None], proposed, -1)
        unused = max_draft_len - drafts.shape[1]
        return torch.nn.functional.pad(drafts, (0, unused), value=-1).to(torch.int32)


class Eagle3OneModelWorker(SpecWorkerBase):
    """Modes EAGLE3_ONE_MODEL and, its passes driven one by one by the executor, EAGLE3."""

    @property
    def num_extra_kv_tokens(self) -> int:
        return self.max_draft_len - 1

    def draft(self, inputs: DraftInputs) -> Tensor:
        chain = self.first_pass(inputs)
        for _ in range(1, self.num_passes(inputs)):
            chain = self.next_pass(chain)
        return chain.draft_tokens(self.max_draft_len)

    def num_passes(self, inputs: DraftInputs) -> int:
        """Draft passes of this step. The first is always run: it keeps the head's KV whole."""
        runtime = inputs.spec_metadata.runtime_draft_len
        return max(1, self.max_draft_len if runtime is None else runtime)

    def first_pass(self, inputs: DraftInputs) -> DraftChain:
        """Reads every row of the target's pass; the last accepted one proposes."""
        model, meta, hidden_states = draft_source(inputs)
        rows = certain_rows(meta)
        last = inputs.num_accepted_tokens.to(torch.int64) - 1  # [B] rows past the certain one
        out, fed_on = model(
            shifted_input_ids(self, inputs, meta),
            meta.position_ids,
            model.project_target_hidden(hidden_states),
            meta,
            step=0,
        )
        positions = meta.position_ids[rows] + last
        chain = DraftChain(
            model=model,
            meta=meta,
            # Proposal i has position `positions` + 2 + i: the row's own token, and the next.
            room=meta.max_seq_len - 2 - positions,
            positions=positions,
            hidden=fed_on[rows + last],
            proposals=(),
        )
        return self._propose(chain, out[rows + last])

    def next_pass(self, chain: DraftChain) -> DraftChain:
        """One row per request: the last proposal with what the last pass fed on."""
        positions = chain.positions + 1
        step = draft_step_metadata(chain.meta, positions[:, None], self.max_draft_len)
        out, fed_on = chain.model(
            chain.proposals[-1].to(torch.int64),
            step.position_ids,
            chain.hidden,
            step,
            step=len(chain.proposals),
        )
        return self._propose(replace(chain, positions=positions, hidden=fed_on), out)

    def _propose(self, chain: DraftChain, hidden: Tensor) -> DraftChain:
        """hidden [B, H] -> the chain with one more proposal."""
        logits = chain.model.compute_logits(hidden, len(chain.proposals))
        proposal = self.draft_sampler_greedy(logits, chain.model.d2t)
        return replace(chain, proposals=(*chain.proposals, proposal))


def draft_source(inputs: DraftInputs) -> tuple[DraftModel, AttentionMetadata, Tensor]:
    """The head, the target's metadata and the hidden states that the head reads, [T, n * D].

    Raises:
        ConfigError: one of them was not given.
    """
    model, meta = cast(DraftModel | None, inputs.draft_model), inputs.attn_metadata
    spec = inputs.spec_metadata
    if model is None or meta is None:
        raise ConfigError(
            "Drafting with a head needs draft_model and attn_metadata, whose KV groups hold the "
            "head's keys and values: pass both to the worker."
        )
    if model.layers_to_capture and spec.captured is None:
        raise ConfigError(
            f"The head reads target layers {list(model.layers_to_capture)}: set "
            "spec_metadata.captured to a CapturedHiddenStates with these layers before the "
            "target's forward, and call maybe_capture_hidden_states after each layer."
        )
    hidden = inputs.hidden_states
    if model.layers_to_capture:
        hidden = spec.draft_hidden_states(hidden, meta.num_tokens)
    if hidden is None:
        raise ConfigError("The head reads the target's final hidden states: pass hidden_states.")
    return model, meta, hidden


def shifted_input_ids(
    worker: SpecWorkerBase, inputs: DraftInputs, meta: AttentionMetadata
) -> Tensor:
    """[T] int64, the token after each row: prompts shifted left, then the accepted tokens.

    At a chunk's end inside the prompt it is the true next prompt token. Rows past a generation's
    last accepted one get no token of interest.
    """
    tokens = meta.num_context_tokens
    accepted, contexts = inputs.accepted_tokens, meta.num_contexts
    ids = worker.prepare_context_input_ids(
        inputs.input_ids[:tokens], accepted[:contexts], meta.context_lens,
        inputs.spec_metadata.next_prompt_tokens,
    )  # fmt: skip
    following = accepted[contexts:, : meta.rows_per_generation].flatten()
    return torch.cat([ids.to(torch.int64), following.to(torch.int64)])
