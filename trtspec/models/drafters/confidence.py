"""DSpark's confidence head: how likely a draft is to be accepted, before it is drawn.

    chance = sigmoid(w [h, e] + b)    h = the row's output of the block's pass
                                      e = W1[token before], the Markov head's; some read h alone

Source: DSpark, as the speculators package trains it (`speculators/models/dspark`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...layers.fused import linear
from ...layers.linear import Linear


class ConfidenceHead(nn.Module):
    """One output for each row.

    Args:
        size: of what it reads: h, or h and e.
    """

    def __init__(self, size: int, bias: bool):
        super().__init__()
        self.confidence_proj = Linear(size, 1, bias)

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Returns the logit of each row's chance, [R] float32; differentiable.

        Args:
            hidden: [R, H]. embeddings: [R, rank], read where the head was trained to.
        """
        reads_both = self.confidence_proj.in_features > hidden.shape[-1]
        read = torch.cat([hidden, embeddings], dim=-1) if reads_both else hidden
        return linear((read,), self.confidence_proj)[:, 0].float()
