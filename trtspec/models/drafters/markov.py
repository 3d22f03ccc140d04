"""DSpark's bias of a draft's logits by the token before it, of low rank.

    vanilla   bias = W2 e                         e = W1[token before]
    gated     bias = W2 (sigmoid(G [h, e]) * e)   h = the row's output of the block's pass
    rnn       g, c, o = J [s, e, h];  s = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)
              bias = W2 tanh(o)                   s begins as zeros

So drafts are chosen one after the other, though the block's pass is one. Source: DSpark, as the
speculators package trains it (`speculators/models/dspark`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...distributed.logits import ShardedLogits
from ...distributed.parallel import Parallel
from ...layers.embedding import Embedding
from ...layers.fused import linear
from ...layers.linear import Linear
from ...layers.vocabulary import sharded, vocabulary_head
from ...ops.tokens.markov_walk import MarkovTables

MARKOV_TYPES = ("vanilla", "gated", "rnn")


class MarkovHead(nn.Module):
    """The bias.

    Args:
        kind: one of `MARKOV_TYPES`.
        sizes: of the target's vocabulary, of the draft vocabulary, of the rank, of the head's rows.
    """

    def __init__(self, kind: str, sizes: tuple[int, int, int, int], parallel: Parallel):
        super().__init__()
        vocab, draft_vocab, rank, hidden = sizes
        self.kind, self.rank, self.parallel = kind, rank, parallel
        self.markov_w1 = Embedding(vocab, rank)
        self.markov_w2 = vocabulary_head(rank, draft_vocab, parallel)
        self.gate_proj = Linear(hidden + rank, rank, bias=True) if kind == "gated" else None
        self.joint_proj = Linear(2 * rank + hidden, 3 * rank, bias=True) if kind == "rnn" else None

    def tables(self, d2t: Tensor | None) -> MarkovTables | None:
        """Returns what a walk without states reads; None of other kinds, or of several ranks.

        Args:
            d2t: [Vd] int64 offsets of the drafts' ids.
        """
        weight = self.markov_w2.weight
        if self.kind != "vanilla" or weight is None or self.parallel.size > 1:
            return None
        return MarkovTables(self.markov_w1.weight, weight, d2t)

    def embeddings(self, before: Tensor) -> Tensor:
        """Returns W1's rows of target ids, [R, rank]; differentiable. before: [R] int."""
        return torch.nn.functional.embedding(before.to(torch.int64), self.markov_w1.weight)

    def first_state(self, hidden: Tensor) -> Tensor:
        """Returns the state before the first row, [B, rank]; hidden [B, H]."""
        return hidden.new_zeros(hidden.shape[0], self.rank)

    def features(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (what W2 reads [B, rank], the next state [B, rank]); differentiable.

        Args:
            before: [B] int, target ids of the tokens before. hidden: [B, H].
        """
        e = self.embeddings(before)
        if self.gate_proj is not None:
            e = linear((torch.cat([hidden, e], dim=-1),), self.gate_proj).sigmoid() * e
        elif self.joint_proj is not None:
            joint = linear((torch.cat([state, e, hidden], dim=-1),), self.joint_proj)
            gate, candidate, out = joint.chunk(3, dim=-1)
            gate = gate.sigmoid()
            state = gate * state + (1 - gate) * candidate.tanh()
            e = out.tanh()
        return e, state

    def bias(self, features: Tensor) -> Tensor | ShardedLogits:
        """Returns W2 of features [B, rank], [B, Vd]."""
        return sharded(linear((features,), self.markov_w2), self.markov_w2, self.parallel)

    def forward(
        self, before: Tensor, hidden: Tensor, state: Tensor
    ) -> tuple[Tensor | ShardedLogits, Tensor]:
        """Returns (the bias [B, Vd], the next state [B, rank]); arguments as `features`."""
        features, state = self.features(before, hidden, state)
        return self.bias(features), state
