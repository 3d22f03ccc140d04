"""Attention of whole sequences at once, without a cache, differentiable.

It serves training and the examination of a head along a text. It is not a serving backend.

A drafter that is used several times reads, at its use s, what its earlier uses left. Row t of use s
stands at position t + s. It sees the keys of use 0 up to row t, and of uses 1 … s only those of row
t (EAGLE-3's "training-time test", arXiv:2503.01840, section 3.2).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from .torch_sdpa import masked_attention

Keys = tuple[Tensor, Tensor]


class DensePass:
    """The sequences of a batch, in the place of serving's `AttentionMetadata`.

    Args:
        document_ids: [N, L] int; a row sees rows of its document alone.
    """

    def __init__(self, document_ids: Tensor):
        self.num_sequences, self.length = document_ids.shape
        self._document_ids = document_ids
        same = document_ids[:, :, None] == document_ids[:, None, :]
        rows = torch.arange(self.length, device=document_ids.device)
        self._distance = rows[:, None] - rows[None, :]  # [L, L]
        self._seen = (same & (self._distance >= 0))[:, None]  # [N, 1, L, L]
        self._uses: dict[int, list[Keys]] = {}  # by layer

    @cached_property
    def documents(self) -> tuple[Tensor, Tensor]:
        """Returns each document's last row and each row's position in its document, int64."""
        ids = self._document_ids
        ends = torch.ones_like(ids, dtype=torch.bool)
        ends[:, :-1] = ids[:, 1:] != ids[:, :-1]
        last_rows = ends.flatten().nonzero().flatten()
        starts = torch.cat([last_rows.new_zeros(1), last_rows[:-1] + 1])
        lengths = last_rows - starts + 1
        rows = torch.arange(ids.numel(), device=ids.device)
        return last_rows, rows - starts.repeat_interleave(lengths)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        window: int | None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attends: q [N*L, Hq, D], k [N*L, Hkv, D], v [N*L, Hkv, Dv] -> [N*L, Hq, Dv].

        Each call for a layer is one more use of it. scale, softcap, sinks are as of `CachedLayer`.
        """
        self._uses.setdefault(layer, []).append((self._by_head(k), self._by_head(v)))
        return self.attend_again(q, layer, window, scale, softcap, sinks)

    def attend_again(
        self,
        q: Tensor,
        layer: int,
        window: int | None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As `attend`, over the keys and values that `layer` has left; no further use of it."""
        uses = self._uses[layer]
        # Widened: kernels that take a mask take no GQA.
        groups = q.shape[1] // uses[0][0].shape[1]
        keys, values = (
            (side[0] if len(side) == 1 else torch.cat(side, dim=2)).repeat_interleave(groups, dim=1)
            for side in zip(*uses, strict=True)
        )
        mask = self._mask(len(uses) - 1, window)
        out = masked_attention(self._by_head(q), keys, values, mask, scale, softcap, sinks)
        return out.transpose(1, 2).flatten(0, 1)

    def _mask(self, use: int, window: int | None) -> Tensor:
        """Returns which keys a row of `use` sees, [N, 1, L, (use + 1) * L] bool.

        The many keys that no row sees cost less than a second kind of attention would.
        """
        seen = self._seen
        if window is not None:
            seen = seen & (self._distance + use < window)
        if not use:
            return seen
        parts, same_row = [seen], self._distance == 0
        for earlier in range(1, use + 1):
            is_seen = window is None or use - earlier < window
            part = same_row if is_seen else torch.zeros_like(same_row)
            parts.append(part.expand_as(seen))
        return torch.cat(parts, dim=-1)

    def _by_head(self, x: Tensor) -> Tensor:
        """[N*L, H, D] -> [N, H, L, D]."""
        return x.view(self.num_sequences, self.length, *x.shape[1:]).transpose(1, 2)
