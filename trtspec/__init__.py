"""trtspec: one-model speculative decoding workers, and an executor to run them.

Names are loaded when first used, so that `import trtspec.workers` brings no model code and the
command line starts quickly.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ._moved import MovedModules

if TYPE_CHECKING:
    from .api.embeds_prompt import EmbedsPrompt
    from .api.outputs import CompletionOutput, EngineStats, Logprob, RequestOutput, SpecStats
    from .api.sampling_params import SamplingParams
    from .config import (
        AutoDecodingConfig,
        CudaGraphConfig,
        DecodingBaseConfig,
        Drafter,
        DraftTargetDecodingConfig,
        EagleDecodingConfig,
        KvCacheConfig,
        MTPDecodingConfig,
        NGramDecodingConfig,
        SaveHiddenStatesDecodingConfig,
        UserProvidedDecodingConfig,
    )
    from .errors import CheckpointError, ConfigError, DrafterError, RequestError, TrtspecError
    from .executor.py_executor import PyExecutor
    from .llm import LLM
    from .metadata.mode import SpeculativeDecodingMode
    from .metadata.spec import SpecMetadata

__version__ = "0.1.0"

sys.meta_path.append(MovedModules())

_HOMES = {
    "config": (
        "AutoDecodingConfig",
        "CudaGraphConfig",
        "DecodingBaseConfig",
        "DraftTargetDecodingConfig",
        "Drafter",
        "EagleDecodingConfig",
        "KvCacheConfig",
        "MTPDecodingConfig",
        "NGramDecodingConfig",
        "SaveHiddenStatesDecodingConfig",
        "UserProvidedDecodingConfig",
    ),
    "errors": ("CheckpointError", "ConfigError", "DrafterError", "RequestError", "TrtspecError"),
    "executor.py_executor": ("PyExecutor",),
    "llm": ("LLM",),
    "metadata.mode": ("SpeculativeDecodingMode",),
    "metadata.spec": ("SpecMetadata",),
    "api.embeds_prompt": ("EmbedsPrompt",),
    "api.outputs": ("CompletionOutput", "EngineStats", "Logprob", "RequestOutput", "SpecStats"),
    "api.sampling_params": ("SamplingParams",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "AutoDecodingConfig",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "CudaGraphConfig",
    "DecodingBaseConfig",
    "DraftTargetDecodingConfig",
    "Drafter",
    "DrafterError",
    "EagleDecodingConfig",
    "EmbedsPrompt",
    "EngineStats",
    "KvCacheConfig",
    "Logprob",
    "MTPDecodingConfig",
    "NGramDecodingConfig",
    "PyExecutor",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SaveHiddenStatesDecodingConfig",
    "SpecMetadata",
    "SpecStats",
    "SpeculativeDecodingMode",
    "TrtspecError",
    "UserProvidedDecodingConfig",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'trtspec' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
