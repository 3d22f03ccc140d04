"""Looking up embeddings of token ids."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..launch.dispatch import kernels


def lookup(ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """Returns the embeddings of ids [T] int, times scale: [T, D].

    Args:
        ids: one outside the table (-1, "no draft here") is read as its nearest end. Such rows are
            never accepted, so what they compute does not matter.
        weight: [V, D].
    """
    triton = kernels("layer.triton_embedding", weight)
    if triton is not None:
        return triton.lookup(ids, weight, scale)
    embeddings = F.embedding(ids.clamp(0, weight.shape[0] - 1), weight)
    return embeddings if scale == 1.0 else embeddings * scale
