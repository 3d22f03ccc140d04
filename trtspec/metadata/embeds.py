"""Vectors that stand where a pass would look up a token's embedding: images in a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowEmbeds:
    """Of one pass over T rows."""

    rows: Tensor  # [m] int64, different ones of the pass
    values: Tensor  # [m, D]

    def merged_into(self, embeddings: Tensor) -> Tensor:
        """[T, D'] embeddings, in their memory with these rows in place. A drafter whose embedding
        has another width keeps that of the placeholder tokens."""
        if embeddings.shape[1] != self.values.shape[1]:
            return embeddings
        return embeddings.index_copy_(0, self.rows, self.values.to(embeddings.dtype))


@dataclass(frozen=True)
class RereadEmbeds:
    """Of contexts in a pass that computes K-1 rows before each of them again (vanilla MTP), or all
    there are. Rows count these too."""

    of_depths: tuple[RowEmbeds | None, ...]  # K: rows whose token depth + 1 places on is a vector
    rope_positions: Tensor | None  # [3, rows] int64, as AttentionMetadata.rope_position_ids
