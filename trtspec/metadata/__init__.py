"""What a pass and a step are told: modes, and metadata over tensors."""

from .attention import AttentionMetadata, KVGroup
from .mode import ModeTraits, SpeculativeDecodingMode
from .sampling import SamplingMetadata
from .spec import CapturedHiddenStates, SpecMetadata

__all__ = [
    "AttentionMetadata",
    "CapturedHiddenStates",
    "KVGroup",
    "ModeTraits",
    "SamplingMetadata",
    "SpecMetadata",
    "SpeculativeDecodingMode",
]
