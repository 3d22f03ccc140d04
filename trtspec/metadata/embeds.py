"""Embeddings that a pass reads in place of tokens': images in a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowEmbeds:
    """Embeddings of some rows of a pass over T rows."""

    rows: Tensor  # [m] int64, no row twice
    values: Tensor  # [m, D]

    def merged_into(self, embeddings: Tensor) -> Tensor:
        """Writes these rows into embeddings [T, D'], in place, and returns them.

        If D' is not D, as in some drafters, the placeholder tokens' embeddings stay.
        """
        if embeddings.shape[1] != self.values.shape[1]:
            return embeddings
        return embeddings.index_copy_(0, self.rows, self.values.to(embeddings.dtype))


@dataclass(frozen=True)
class RereadEmbeds:
    """Embeddings for vanilla MTP, which computes up to K-1 rows before each context again.

    Row indices count these rows too.
    """

    of_depths: tuple[RowEmbeds | None, ...]  # K: rows whose (depth + 1)-th next token has one
    rope_positions: Tensor | None  # [3, rows] int64, as AttentionMetadata.rope_position_ids
