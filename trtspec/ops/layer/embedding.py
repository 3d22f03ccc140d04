"""Token ids to vectors."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...metadata.embeds import RowEmbeds
from ..launch.dispatch import triton_kernels


def embed(
    ids: Tensor, table: Any, vocab_size: int, scale: float | None = None,
    merged: RowEmbeds | None = None,
) -> Tensor:  # fmt: skip
    """[T] int -> [T, D].

    Args:
        ids: one outside the vocabulary (-1, "no draft here") is read as its nearest end; such
            rows are never accepted, so what they compute does not matter.
        table: an `nn.Embedding`, or any module that maps ids to vectors.
        scale: of the vectors; it is rounded to their dtype first, as transformers does.
        merged: rows that do not come from the table, and are not scaled.
    """
    if merged is not None:
        return merged.merged_into(embed(ids, table, vocab_size, scale))
    if type(table) is nn.Embedding:
        kernels = triton_kernels(table.weight)
        if kernels is not None:
            return kernels.embed(ids, table.weight, _rounded(scale, table.weight.dtype))
    vectors = table(ids.clamp(0, vocab_size - 1))
    return vectors if scale is None else vectors * _rounded(scale, vectors.dtype)


@cache
def _rounded(scale: float | None, dtype: torch.dtype) -> float:
    return 1.0 if scale is None else torch.tensor(scale, dtype=dtype, device="cpu").item()
