"""`AcceptedPath`: which rows of a pass were accepted, in the order of the sequence.

A request's *certain* row reads the last token that was accepted before the step. It is a context's
last row and a generation's first. From there the rule accepts a path of n rows: the certain one and
one row for each accepted draft. Row i of the path chose the path's token i. The token that its last
row chose is the bonus. The rows after the path were rejected.

Drafts are a chain, so a path needs no list of rows. That is the contract:

    rows        certain, certain + 1, … certain + n - 1
    positions   those of these rows: consecutive too
    stored as   n alone, `lens` [B]

Code that relies on it, and what a tree of drafts would change:

| reader | takes from the contract | with a tree |
|---|---|---|
| a head's proposing row, its position (`workers/`) | this record | this record |
| the same in kernels (`ops/step/`: shift, masks, two tokens) | row + n | rows of the path |
| tokens after rows (`workers/heads.py`) | row i reads token i+1 | the next one on the path |
| windows of vanilla MTP (`ops/step/`: update_window) | rows before the last | rows of the path |
| next step's lengths (`ops/step/`: save_step) | certain position + n | the same |
| the KV cache's ledger (`state/kv_cache.py`) | the path's KV is in place | it moves first |
| acceptance (`acceptance/`, `ops/tokens/`) | row i judges draft i+1 | a draft's parent judges it |
| attention of a pass (`attention/`) | a row sees those before it | it sees its ancestors |
| linear attention (`ops/layer/delta_rule.py`) | between certain rows is the path | its rows |
| rows not verified (`executor/forward_step.py`) | none past the path is read | the same |

KV can be moved along a path in place, in ascending order: the path's row i is never before row i of
the request. The output (`new_tokens` [B, K+1], `lens`) is in the order of the sequence and ends at
its length, for a chain as for a tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import AttentionMetadata


@dataclass(frozen=True)
class AcceptedPath:
    """The accepted paths of B requests; K drafts at most, K' in this pass."""

    tokens: Tensor  # [B, K+1] int32, chosen by the path's rows: drafts, then bonus; -1 after them
    lens: Tensor  # [B] int32, n: 1 … K'+1

    def last_rows(self, certain: Tensor) -> Tensor:
        """Returns the row that chose the bonus and proposes the first draft: certain [B] int64 ->
        [B] int64."""
        return certain + self.lens - 1

    def next_positions(self, certain_positions: Tensor) -> Tensor:
        """Returns the bonus tokens' positions [B] int64, from the certain rows'. A bonus has no KV
        yet."""
        return certain_positions + self.lens

    def tokens_after_rows(self, requests: slice, rows_per_request: int) -> Tensor:
        """Returns the token after each row of these requests, [G * R] int32, -1 after rejected
        rows. They may be in the path's memory: do not write there."""
        return self.tokens[requests, :rows_per_request].flatten()


def certain_rows(meta: AttentionMetadata) -> Tensor:
    """Returns the certain row of each request [B] int64: a context's last, a generation's first."""
    if not meta.context_lens:  # arange on the device: nothing to send
        end, device = meta.num_generations * meta.rows_per_generation, meta.position_ids.device
        return torch.arange(0, end, meta.rows_per_generation, device=device)
    ends = meta.ends_of_contexts()
    if not meta.num_generations:
        return ends
    firsts = torch.arange(meta.num_generations, device=ends.device) * meta.rows_per_generation
    return torch.cat([ends, firsts + meta.num_context_tokens])
