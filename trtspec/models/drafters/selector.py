"""DFlash2's choice among the best tokens of each row, by the token before (`ops/tokens/walk.py`).

    states = W h                    of all rows at once
    score of b behind a             its logit + <A[a] * states, B[b]>

Source: DFlash2 (z-lab), https://github.com/z-lab/dflash.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...distributed.logits import ShardedLogits, top_tokens
from ...layers.fused import linear
from ...layers.linear import Linear
from ...ops.tokens.walk import Codebooks, PathCandidates


class CandidateSelector(nn.Module):
    """The tables of a DFlash2 head.

    Args:
        vocab_size: of the target. size: of the head's rows. rank: of the products.
        count: candidates of a draft.
    """

    def __init__(self, vocab_size: int, size: int, rank: int, count: int):
        super().__init__()
        self.count = count
        shape = vocab_size, rank
        self.predecessor_codebook = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.successor_codebook = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.hidden_projection = Linear(size, rank, bias=False)

    @property
    def books(self) -> Codebooks:
        """The tables A and B."""
        return Codebooks(self.predecessor_codebook, self.successor_codebook)

    def candidates(
        self, logits: Tensor | ShardedLogits, hidden: Tensor, batch: int
    ) -> PathCandidates:
        """Returns the best tokens of rows [P * B], by draft and then by request.

        Args:
            logits: [P * B, V]. hidden: [P * B, H]. batch: B.
        """
        unary, ids = top_tokens(logits, self.count)
        found = PathCandidates(ids, unary, linear((hidden,), self.hidden_projection))
        return PathCandidates(*(tensor.view(-1, batch, tensor.shape[1]) for tensor in found))
