"""The embedding layer, and embeddings of rows that may come from elsewhere."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..metadata.embeds import RowEmbeds
from ..ops.layer.embedding import lookup


class Embedding(nn.Module):
    """Token ids [T] -> embeddings [T, D]; `weight` is [V, D]."""

    def __init__(self, vocab_size: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, size), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return lookup(ids, self.weight)


class Embedded(NamedTuple):
    """Embeddings that are still to be looked up. A product may do it by itself (`fused.py`)."""

    ids: Tensor  # [T] int
    table: Tensor  # [V, D]

    def rows(self) -> Tensor:
        """Looks them up, [T, D]."""
        return lookup(self.ids, self.table)


def embed_later(
    ids: Tensor,
    table: Any,
    vocab_size: int,
    scale: float | None = None,
    merged: RowEmbeds | None = None,
) -> Tensor | Embedded:
    """Returns what `embed` does, or what looks it up if nothing is done to the table's rows."""
    if merged is None and scale is None and type(table) in (Embedding, nn.Embedding):
        return Embedded(ids, table.weight)
    return embed(ids, table, vocab_size, scale, merged)


def embed(
    ids: Tensor,
    table: Any,
    vocab_size: int,
    scale: float | None = None,
    merged: RowEmbeds | None = None,
) -> Tensor:
    """Returns the embeddings of ids [T] int, [T, D].

    Args:
        ids: one outside the vocabulary is read as its nearest end, as `lookup` does.
        table: an embedding layer, or any module that maps ids to embeddings.
        scale: of the embeddings; it is rounded to their dtype first, as transformers does.
        merged: rows that do not come from the table, and are not scaled.
    """
    if merged is not None:
        return merged.merged_into(embed(ids, table, vocab_size, scale))
    if type(table) in (Embedding, nn.Embedding):
        return lookup(ids, table.weight, _rounded(scale, table.weight.dtype))
    embeddings = table(ids.clamp(0, vocab_size - 1))
    return embeddings if scale is None else embeddings * _rounded(scale, embeddings.dtype)


@cache
def _rounded(scale: float | None, dtype: torch.dtype) -> float:
    return 1.0 if scale is None else torch.tensor(scale, dtype=dtype, device="cpu").item()
