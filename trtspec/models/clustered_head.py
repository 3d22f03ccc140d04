"""The lm_head of small Gemma-4 assistants: logits of a few clusters of tokens alone.

    clusters = the k of C whose centroids have the highest products with the state
    logits   = the state times the weights of their tokens; the others' are LOWEST

Each of the C clusters has V / C tokens, listed in `token_ordering` one cluster after the other. Of
V = 262,144 rows a state reads k * V / C, that is 4,096 with 32 of 2,048. Source: transformers'
`gemma4_assistant` (`use_ordered_embeddings`), where the others are one below the lowest logit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..ops.linear import Linear
from .checkpoint import TensorSource
from .placement import Placement

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
        """Checkpoint name -> its place."""
        centroids = self.centroids.out_features, self.centroids.in_features
        return {
            f"{name}.weight": Placement(name, "weight", 0, tuple(self.weight.shape)),
            "masked_embedding.centroids.weight": Placement(
                f"{name}.centroids", "weight", 0, centroids
            ),
        }


def cluster_counts(raw: dict[str, Any], vocab_size: int, where: Any) -> tuple[int, int]:
    """(clusters, those of which logits are computed), (0, 0) without clusters.

    Raises:
        CheckpointError: they are not numbers that fit the vocabulary.
    """
    if not raw.get("use_ordered_embeddings"):
        return 0, 0
    count, active = raw.get("num_centroids", 2048), raw.get("centroid_intermediate_top_k", 32)
    for name, value, most in (
        ("num_centroids", count, vocab_size), ("centroid_intermediate_top_k", active, count),
    ):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise CheckpointError(
                f"{where}: {name}={value!r}; it must be an int in 1 … {most}. Copy the file again "
                "from the assistant's source."
            )
    if vocab_size % count:
        raise CheckpointError(
            f"{where}: num_centroids={count} does not divide vocab_size={vocab_size}: clusters are "
            "of one size. Copy the file again from the assistant's source."
        )
    return count, active


def read_clusters(source: TensorSource | None, num_clusters: int, vocab_size: int) -> Tensor | str:
    """`token_ordering` as [C, V / C] int64; or what is wrong with it, and the cure."""
    if source is None:
        return f"{ORDERING} is missing. Copy the assistant again from its source."
    if source.shape != (vocab_size,) or source.dtype not in ("I64", "I32"):
        return (
            f"{source.name} has shape {list(source.shape)} and dtype {source.dtype}; it must be "
            f"[{vocab_size}] (vocab_size) of I64. Copy the assistant again from its source."
        )
    ordering = source.read().to(torch.int64)
    if not torch.equal(ordering.sort().values, torch.arange(vocab_size)):
        return (
            f"{source.name} does not hold each token of 0 … {vocab_size - 1} once. Copy the "
            "assistant again from its source."
        )
    return ordering.view(num_clusters, -1)
