"""The lm_head of small Gemma-4 assistants: logits of a few clusters of tokens alone.

    clusters = the k of C whose centroids have the highest products with the state
    logits   = the state times the weights of their tokens; the others' are LOWEST

Each of the C clusters has V / C tokens, listed in `token_ordering` one cluster after the other. Of
V = 262,144 rows a state reads k * V / C, that is 4,096 with 32 of 2,048. Source: transformers'
`gemma4_assistant` (`use_ordered_embeddings`), where the others are one below the lowest logit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...layers.linear import Linear
from ..placement import Placement

LOWEST = -1e4
"""A finite logit in every dtype whose token no softmax chooses beside an ordinary one."""
ORDERING = "masked_embedding.token_ordering"


class ClusteredHead(nn.Module):
    """[R, H] -> [R, V], model dtype."""

    def __init__(self, size: int, vocab_size: int, num_clusters: int, num_active: int):
        super().__init__()
        self.num_active = num_active
        self.weight = nn.Parameter(torch.empty(vocab_size, size), requires_grad=False)
        self.centroids = Linear(size, num_clusters, bias=False)
        self.register_buffer("clusters", None, persistent=False)
        self.clusters: Tensor | None  # [C, V / C] int64, their tokens

    def forward(self, hidden: Tensor) -> Tensor:
        assert self.clusters is not None
        active = self.centroids(hidden).topk(self.num_active, dim=-1).indices  # [R, k]
        tokens = self.clusters[active].flatten(1)  # [R, k * V / C]
        logits = (self.weight[tokens] @ hidden[:, :, None])[..., 0]
        others = logits.new_full((len(hidden), len(self.weight)), LOWEST)
        return others.scatter_(1, tokens, logits)

    def placements(self, name: str) -> dict[str, Placement]:
        centroids = self.centroids.out_features, self.centroids.in_features
        of_centroids = Placement(f"{name}.centroids", "weight", 0, centroids)
        return {
            f"{name}.weight": Placement(name, "weight", 0, tuple(self.weight.shape)),
            "masked_embedding.centroids.weight": of_centroids,
        }
