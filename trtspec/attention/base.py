"""The interface between a model and the attention kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ..metadata.attention import SCRATCH_BLOCK, AttentionMetadata


class AttentionBackend(ABC):
    """Attends over the paged cache; lengths come from device tensors."""

    name: ClassVar[str]
    supports_multi_token_generation: ClassVar[bool]
    """Generation requests may have several rows each, verified in one call."""

    lengths_on_device: ClassVar[bool] = False
    """Generation rows depend on no length of the host's, so that a captured graph stays right."""

    contexts_on_device: ClassVar[bool] = False
    """The same of contexts, with `AttentionMetadata.last_context_rows`."""

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        meta: AttentionMetadata,
        *,
        kv_group: int,
        layer: int,
        window: int | None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """q [T, Hq, D] -> [T, Hq, Dv], over the cache, which holds this pass's K [.., D] and V
        [.., Dv] already; Dv is D, or less in a group of latent attention.

        Args:
            layer: its index in the KV group.
            scale: of the scores, None is 1 / sqrt(D).
            softcap: scaled scores s become softcap * tanh(s / softcap).

        A row sees the positions of its own request up to and including its own, and with
        `window` only the last `window` of those.
        """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        meta: AttentionMetadata,
        *,
        kv_group: int,
        layer: int,
        window: int | None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """`attend` for callers that have not written k and v [T, Hkv, D] to the cache yet."""
        group, slots = meta.kv_groups[kv_group], meta.slot_mappings[kv_group]
        slots = torch.where(slots < 0, SCRATCH_BLOCK * group.page_size, slots)
        k_slots, v_slots = group.layer_slots[layer]
        k_slots.index_copy_(0, slots, k)
        v_slots.index_copy_(0, slots, v)
        return self.attend(
            q, meta, kv_group=kv_group, layer=layer, window=window, scale=scale, softcap=softcap
        )
