"""Attention of whole texts at once, without a cache, differentiable: for training and for judging a
head along a text. Not a serving backend.

A drafter that is used several times reads, at its use s, what its own earlier uses left: row t of
use s stands at position t + s and sees the keys of use 0 up to row t, and of uses 1 … s only those
of its own row (EAGLE-3's "training-time test", arXiv:2503.01840, section 3.2).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Keys = tuple[Tensor, Tensor]


class DensePass:
    """The texts of a batch. Stands where serving has an `AttentionMetadata`.

    Args:
        document_ids: [N, L] int; a row sees rows of its own document alone.
    """

    def __init__(self, document_ids: Tensor):
        self.num_texts, self.length = document_ids.shape
        same = document_ids[:, :, None] == document_ids[:, None, :]
        rows = torch.arange(self.length, device=document_ids.device)
        self._distance = rows[:, None] - rows[None, :]  # [L, L]
        self._seen = (same & (self._distance >= 0))[:, None]  # [N, 1, L, L]
        self._uses: dict[int, list[Keys]] = {}  # by layer

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None) -> Tensor:
        """q [N*L, Hq, D], k and v [N*L, Hkv, D] -> [N*L, Hq, D].

        Each call for a layer is one more use of it.
        """
        uses = self._uses.setdefault(layer, [])
        q, k, v = (self._by_head(x) for x in (q, k, v))
        uses.append((k, v))
        (first_k, first_v), later = uses[0], uses[1:]
        seen = self._seen
        if window is not None:
            seen = seen & (self._distance + len(later) < window)
        if later:
            out = self._with_own_rows(q, first_k, first_v, later, seen)
        else:
            groups = q.shape[1] // k.shape[1]  # widened: kernels that take a mask take no GQA
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return out.transpose(1, 2).flatten(0, 1)

    def _with_own_rows(
        self, q: Tensor, first_k: Tensor, first_v: Tensor, later: list[Keys], seen: Tensor
    ) -> Tensor:
        """q [N, Hq, L, D]; the keys of the first use by `seen`, of later ones the row's own."""
        groups = q.shape[1] // first_k.shape[1]

        def widen(x: Tensor) -> Tensor:
            return x.repeat_interleave(groups, dim=1)

        scale = q.shape[-1] ** -0.5
        scores = (q @ widen(first_k).transpose(-1, -2)).float() * scale
        scores = scores.masked_fill(~seen, float("-inf"))
        own = [(q * widen(k)).sum(-1, keepdim=True).float() * scale for k, _ in later]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(q.dtype)
        out = weights[..., : self.length] @ widen(first_v)
        for i, (_, v) in enumerate(later):
            out = out + weights[..., self.length + i, None] * widen(v)
        return out

    def _by_head(self, x: Tensor) -> Tensor:
        """[N*L, H, D] -> [N, H, L, D]."""
        return x.view(self.num_texts, self.length, *x.shape[1:]).transpose(1, 2)
