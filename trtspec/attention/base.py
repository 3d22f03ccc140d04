"""The interface between a model and the attention kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from torch import Tensor

from ..metadata.attention import AttentionMetadata


class CachedLayer(NamedTuple):
    """A layer's keys and values in the paged cache, and how its queries see them."""

    k_slots: Tensor  # [slots, Hkv, D], a position's is block * page_size + offset
    v_slots: Tensor  # [slots, Hkv, Dv]
    page_size: int
    kv_group: int = 0
    window: int | None = None  # how many of the last keys up to its own a row sees; None is all
    scale: float | None = None  # of the scores; None is 1 / sqrt(D)
    softcap: float | None = None  # scaled scores s become softcap * tanh(s / softcap)
    k_scales: Tensor | None = None  # [Hkv] float32, of codes in FP8; None is floats
    v_scales: Tensor | None = None
    sinks: Tensor | None = None
    """[Hq], a logit of each query head. It is one more term of the softmax's sum, without a value,
    and is neither scaled nor capped (gpt-oss, MiMo-V2)."""

    @classmethod
    def of(
        cls,
        meta: AttentionMetadata,
        kv_group: int,
        layer: int,
        window: int | None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> CachedLayer:
        """Finds the cache of a KV group's layer of this index; the rest are fields."""
        group = meta.kv_groups[kv_group]
        k_slots, v_slots = group.layer_slots[layer]
        k_scales, v_scales = group.layer_scales[layer]
        return cls(
            k_slots=k_slots,
            v_slots=v_slots,
            page_size=group.page_size,
            kv_group=kv_group,
            window=window,
            scale=scale,
            softcap=softcap,
            k_scales=k_scales,
            v_scales=v_scales,
            sinks=sinks,
        )

    @property
    def kv_heads(self) -> int:
        return self.k_slots.shape[1]

    @property
    def is_latent(self) -> bool:
        """Values are the first numbers of keys."""
        return self.v_slots.shape[2] != self.k_slots.shape[2]


class AttentionBackend(ABC):
    """Attends over the paged cache; lengths come from device tensors."""

    name: ClassVar[str]
    supports_multi_token_generation: ClassVar[bool]
    """Generation requests may have several rows each, verified in one call."""

    lengths_on_device: ClassVar[bool] = False
    """Generation rows depend on no length of the host's, so that a captured graph stays right."""

    contexts_on_device: ClassVar[bool] = False
    """The same of contexts, with `AttentionMetadata.last_context_rows`."""

    reads_fp8: ClassVar[bool] = True
    """Keys and values may be in FP8."""

    @abstractmethod
    def attend(self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer) -> Tensor:
        """Returns the attention of q [T, Hq, D] over the cache, [T, Hq, Dv].

        The cache holds this pass's K [.., D] and V [.., Dv] already. Dv is D, or less in a group of
        latent attention. A row sees the positions of its request up to and including its own.
        """
