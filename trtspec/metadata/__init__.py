"""Modes, and records over tensors that a pass and a step read.

Names are loaded when first used, so that modes and configs need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy_names

if TYPE_CHECKING:
    from .attention import AttentionMetadata as AttentionMetadata
    from .attention import KVGroup as KVGroup
    from .mode import ModeTraits as ModeTraits
    from .mode import SpeculativeDecodingMode as SpeculativeDecodingMode
    from .sampling import SamplingMetadata as SamplingMetadata
    from .spec import CapturedHiddenStates as CapturedHiddenStates
    from .spec import SpecMetadata as SpecMetadata

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "attention": ("AttentionMetadata", "KVGroup"),
        "mode": ("ModeTraits", "SpeculativeDecodingMode"),
        "sampling": ("SamplingMetadata",),
        "spec": ("CapturedHiddenStates", "SpecMetadata"),
    },
)
