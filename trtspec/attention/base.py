"""The interface between a model and the attention kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from ..metadata.attention import AttentionMetadata


class AttentionBackend(ABC):
    """Writes this pass's K and V to the cache and attends; lengths come from device tensors."""

    name: ClassVar[str]
    supports_multi_token_generation: ClassVar[bool]
    """Generation requests may have several rows each, verified in one call."""

    lengths_on_device: ClassVar[bool] = False
    """Generation rows depend on no length of the host's, so that a captured graph stays right."""

    @abstractmethod
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
    ) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D].

        A row sees the positions of its own request up to and including its own, and with
        `window` only the last `window` of those.
        """
