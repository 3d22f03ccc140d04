"""A second, smaller model drafts inside the target's step, with its KV in a separate group.

The draft model's KV at position i is valid once it has read token i. After a step that accepted
everything, it has never read the last draft. So the first draft pass reads the last *two* tokens of
every request; reading the first of them again rewrites the same values. Rows (t = new tokens, n =
their number, p = tokens with target KV before the step):

    pass 0      (t[n-2], t[n-1]) at (p+n-1, p+n)    -> proposal 1   (t[-1] is the step's input)
    pass i >= 1  proposal i      at  p+n+i          -> proposal i+1

Beside a lookup the accepted drafts may be others than the model's own. Then pass 0 reads all new
tokens, as a PARD model does (`masked.py`), and row n-1 proposes.
"""

from __future__ import annotations

from torch import Tensor

from ..metadata.accepted_path import certain_rows
from ..metadata.attention import AttentionMetadata
from ..ops.step.rows import (
    MaskedRows,
    draft_step,
    gather_rows,
    last_two_tokens,
    masked_rows,
)
from .base import SpecWorkerBase
from .heads import draft_model_behind_prompts, skip_kv_of_first_rows
from .protocols import DraftInputs


class DraftTargetWorker(SpecWorkerBase):
    """Mode DRAFT_TARGET."""

    drafts_with_network = True

    @property
    def num_extra_kv_tokens(self) -> int:
        return self.max_draft_len

    @property
    def num_tokens_ahead(self) -> int:
        return 0

    def draft(self, inputs: DraftInputs) -> Tensor:
        model, meta = draft_model_behind_prompts(inputs)
        new = None if self.lookup is None else _new_tokens(inputs, meta)
        if new is None:
            tokens, positions = last_two_tokens(
                inputs.input_ids,
                inputs.position_ids,
                inputs.accepted_tokens,
                inputs.num_accepted_tokens,
                certain_rows(meta),
            )
            last = positions[:, -1:]  # [B, 1], of the bonus
        else:
            tokens, positions, last = new.tokens, new.positions, new.last_positions[:, None]
        proposals: list[Tensor] = []
        sampler = self.draft_sampler(inputs)
        # The first pass always runs: it writes the last two tokens' keys and values.
        for i in range(max(1, inputs.step.draft_len)):
            ids, step = draft_step(meta, tokens, positions, self.max_draft_len + 1, advance=i)
            if i == 0 and new is None:
                step = skip_kv_of_first_rows(step, meta, inputs)
            hidden = model(ids, step.position_ids, step)
            if i == 0 and new is not None:
                (hidden,) = gather_rows(new.proposing, hidden)
            else:
                rows = step.rows_per_generation  # each request's last one proposes
                hidden = hidden[rows - 1 :: rows]
            logits = model.compute_logits(hidden)
            proposals.append(self.propose(logits, None, sampler, last[:, 0], i))
            tokens, positions = proposals[-1][:, None], last
        return self.finish_drafts(inputs, proposals, last[:, 0], meta.max_seq_len)


def _new_tokens(inputs: DraftInputs, meta: AttentionMetadata) -> MaskedRows:
    """Returns rows of all accepted tokens. Those past a request's last one read token 0, and the
    passes to come write at their positions before a row attends to them."""
    return masked_rows(
        inputs.accepted_tokens,
        inputs.num_accepted_tokens,
        inputs.position_ids,
        certain_rows(meta),
        num_rows=meta.rows_per_generation if meta.num_generations else 1,
        num_proposals=1,
        mask_token=0,
        offset=1,
    )
