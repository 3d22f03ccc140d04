"""Configs: how an engine drafts, and what it is made from (`engine.py`).

Each way of drafting has its class, in `lookups.py`, `networks.py` or `modes.py`. What they share is
in `base.py`. Names are loaded when first used: the command line reads `engine.py` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy_names

if TYPE_CHECKING:
    from .base import ACCEPTANCE_RULES as ACCEPTANCE_RULES
    from .base import MAX_DRAFT_LEN as MAX_DRAFT_LEN
    from .base import DecodingBaseConfig as DecodingBaseConfig
    from .engine import ATTENTION_BACKENDS as ATTENTION_BACKENDS
    from .engine import DEFAULT_CUDA_GRAPHS as DEFAULT_CUDA_GRAPHS
    from .engine import ENGINE_ARGUMENTS as ENGINE_ARGUMENTS
    from .engine import MAX_BATCH_SIZE as MAX_BATCH_SIZE
    from .engine import CudaGraphConfig as CudaGraphConfig
    from .engine import EngineConfig as EngineConfig
    from .engine import ExecutorConfig as ExecutorConfig
    from .engine import KvCacheConfig as KvCacheConfig
    from .engine import takes_fields_of as takes_fields_of
    from .fields import require_int as require_int
    from .lookups import NGramDecodingConfig as NGramDecodingConfig
    from .lookups import SADecodingConfig as SADecodingConfig
    from .modes import CONFIG_OF_MODE as CONFIG_OF_MODE
    from .modes import AutoDecodingConfig as AutoDecodingConfig
    from .modes import Drafter as Drafter
    from .modes import SaveHiddenStatesDecodingConfig as SaveHiddenStatesDecodingConfig
    from .modes import UserProvidedDecodingConfig as UserProvidedDecodingConfig
    from .modes import resolve_speculative_config as resolve_speculative_config
    from .networks import DFlashDecodingConfig as DFlashDecodingConfig
    from .networks import DraftTargetDecodingConfig as DraftTargetDecodingConfig
    from .networks import DSparkDecodingConfig as DSparkDecodingConfig
    from .networks import Eagle3DecodingConfig as Eagle3DecodingConfig
    from .networks import EagleDecodingConfig as EagleDecodingConfig
    from .networks import HeadDecodingConfig as HeadDecodingConfig
    from .networks import MTPDecodingConfig as MTPDecodingConfig
    from .suffix import SAEnhancerConfig as SAEnhancerConfig
    from .suffix import SuffixSearchConfig as SuffixSearchConfig

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "base": ("ACCEPTANCE_RULES", "DecodingBaseConfig", "MAX_DRAFT_LEN"),
        "engine": (
            "ATTENTION_BACKENDS",
            "CudaGraphConfig",
            "DEFAULT_CUDA_GRAPHS",
            "ENGINE_ARGUMENTS",
            "EngineConfig",
            "ExecutorConfig",
            "KvCacheConfig",
            "MAX_BATCH_SIZE",
            "takes_fields_of",
        ),
        "fields": ("require_int",),
        "lookups": ("NGramDecodingConfig", "SADecodingConfig"),
        "modes": (
            "AutoDecodingConfig",
            "CONFIG_OF_MODE",
            "Drafter",
            "SaveHiddenStatesDecodingConfig",
            "UserProvidedDecodingConfig",
            "resolve_speculative_config",
        ),
        "networks": (
            "DFlashDecodingConfig",
            "DSparkDecodingConfig",
            "DraftTargetDecodingConfig",
            "Eagle3DecodingConfig",
            "EagleDecodingConfig",
            "HeadDecodingConfig",
            "MTPDecodingConfig",
        ),
        "suffix": ("SAEnhancerConfig", "SuffixSearchConfig"),
    },
)
