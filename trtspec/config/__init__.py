"""Configs: how an engine drafts (`decoding`), and what it is made from (`engine`).

Names are loaded when first used: the command line reads `engine` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy_names

if TYPE_CHECKING:
    from .decoding import ACCEPTANCE_RULES as ACCEPTANCE_RULES
    from .decoding import CONFIG_OF_MODE as CONFIG_OF_MODE
    from .decoding import MAX_DRAFT_LEN as MAX_DRAFT_LEN
    from .decoding import AutoDecodingConfig as AutoDecodingConfig
    from .decoding import DecodingBaseConfig as DecodingBaseConfig
    from .decoding import DFlashDecodingConfig as DFlashDecodingConfig
    from .decoding import Drafter as Drafter
    from .decoding import DraftTargetDecodingConfig as DraftTargetDecodingConfig
    from .decoding import DSparkDecodingConfig as DSparkDecodingConfig
    from .decoding import Eagle3DecodingConfig as Eagle3DecodingConfig
    from .decoding import EagleDecodingConfig as EagleDecodingConfig
    from .decoding import HeadDecodingConfig as HeadDecodingConfig
    from .decoding import MTPDecodingConfig as MTPDecodingConfig
    from .decoding import NGramDecodingConfig as NGramDecodingConfig
    from .decoding import SADecodingConfig as SADecodingConfig
    from .decoding import SaveHiddenStatesDecodingConfig as SaveHiddenStatesDecodingConfig
    from .decoding import UserProvidedDecodingConfig as UserProvidedDecodingConfig
    from .decoding import resolve_speculative_config as resolve_speculative_config
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
    from .suffix import SAEnhancerConfig as SAEnhancerConfig
    from .suffix import SuffixSearchConfig as SuffixSearchConfig

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "decoding": (
            "ACCEPTANCE_RULES",
            "AutoDecodingConfig",
            "CONFIG_OF_MODE",
            "DecodingBaseConfig",
            "DFlashDecodingConfig",
            "DSparkDecodingConfig",
            "DraftTargetDecodingConfig",
            "Drafter",
            "Eagle3DecodingConfig",
            "EagleDecodingConfig",
            "HeadDecodingConfig",
            "MAX_DRAFT_LEN",
            "MTPDecodingConfig",
            "NGramDecodingConfig",
            "SADecodingConfig",
            "SaveHiddenStatesDecodingConfig",
            "UserProvidedDecodingConfig",
            "resolve_speculative_config",
        ),
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
        "suffix": ("SAEnhancerConfig", "SuffixSearchConfig"),
    },
)
