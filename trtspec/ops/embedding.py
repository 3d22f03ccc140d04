"""Token ids to vectors."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .dispatch import triton_kernels


def embed(ids: Tensor, table: Any, vocab_size: int, scale: float | None = None) -> Tensor:
    """[T] int -> [T, D].

    Args:
        ids: one outside the vocabulary (-1, "no draft here") is read as its nearest end; such
            rows are never accepted, so what they compute does not matter.
        table: an `nn.Embedding`, or any module that maps ids to vectors.
        scale: of the vectors; it is rounded to their dtype first, as transformers does.
    """
    if type(table) is nn.Embedding:
        kernels = triton_kernels(table.weight)
        if kernels is not None:
            return kernels.embed(ids, table.weight, _rounded(scale, table.weight.dtype))
    vectors = table(ids.clamp(0, vocab_size - 1))
    return vectors if scale is None else vectors * _rounded(scale, vectors.dtype)


@cache
def _rounded(scale: float | None, dtype: torch.dtype) -> float:
    return 1.0 if scale is None else torch.tensor(scale, dtype=dtype, device="cpu").item()
