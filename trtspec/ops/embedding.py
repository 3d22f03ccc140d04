"""Token ids to vectors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..metadata.embeds import RowEmbeds
from .dispatch import triton_kernels


def embed(ids: Tensor, table: Any, vocab_size: int, merged: RowEmbeds | None = None) -> Tensor:
    """[T] int -> [T, D].

    Args:
        ids: one outside the vocabulary (-1, "no draft here") is read as its nearest end; such
            rows are never accepted, so what they compute does not matter.
        table: an `nn.Embedding`, or any module that maps ids to vectors.
        merged: rows that do not come from the table.
    """
    if merged is not None:
        return merged.merged_into(embed(ids, table, vocab_size))
    if type(table) is nn.Embedding:
        kernels = triton_kernels(table.weight)
        if kernels is not None:
            return kernels.embed(ids, table.weight)
    return table(ids.clamp(0, vocab_size - 1))
