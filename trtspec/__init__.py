"""trtspec: one-model speculative decoding workers, and an executor to run them.

Names are loaded when first used, so that `import trtspec.workers` brings no model code and the
command line starts quickly. A public name stands twice here: for type checkers, and by its home.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ._lazy import lazy_names
from ._moved import MovedModules

if TYPE_CHECKING:
    from .api.embeds_prompt import EmbedsPrompt as EmbedsPrompt
    from .api.guided_decoding import GuidedDecodingParams as GuidedDecodingParams
    from .api.outputs import CompletionOutput as CompletionOutput
    from .api.outputs import EngineStats as EngineStats
    from .api.outputs import Logprob as Logprob
    from .api.outputs import RequestOutput as RequestOutput
    from .api.outputs import SpecStats as SpecStats
    from .api.sampling_params import SamplingParams as SamplingParams
    from .async_llm import AsyncLLM as AsyncLLM
    from .config import AutoDecodingConfig as AutoDecodingConfig
    from .config import CudaGraphConfig as CudaGraphConfig
    from .config import DecodingBaseConfig as DecodingBaseConfig
    from .config import DFlashDecodingConfig as DFlashDecodingConfig
    from .config import Drafter as Drafter
    from .config import DraftTargetDecodingConfig as DraftTargetDecodingConfig
    from .config import DSparkDecodingConfig as DSparkDecodingConfig
    from .config import Eagle3DecodingConfig as Eagle3DecodingConfig
    from .config import EagleDecodingConfig as EagleDecodingConfig
    from .config import KvCacheConfig as KvCacheConfig
    from .config import MTPDecodingConfig as MTPDecodingConfig
    from .config import NGramDecodingConfig as NGramDecodingConfig
    from .config import SADecodingConfig as SADecodingConfig
    from .config import SAEnhancerConfig as SAEnhancerConfig
    from .config import SaveHiddenStatesDecodingConfig as SaveHiddenStatesDecodingConfig
    from .config import UserProvidedDecodingConfig as UserProvidedDecodingConfig
    from .errors import CheckpointError as CheckpointError
    from .errors import ConfigError as ConfigError
    from .errors import DrafterError as DrafterError
    from .errors import EngineError as EngineError
    from .errors import QueueFullError as QueueFullError
    from .errors import RequestError as RequestError
    from .errors import TrtspecError as TrtspecError
    from .executor.py_executor import PyExecutor as PyExecutor
    from .llm import LLM as LLM
    from .metadata.mode import SpeculativeDecodingMode as SpeculativeDecodingMode
    from .metadata.spec import SpecMetadata as SpecMetadata
    from .workers import DFlashWorker as DFlashWorker
    from .workers import DraftTargetWorker as DraftTargetWorker
    from .workers import Eagle3OneModelWorker as Eagle3OneModelWorker
    from .workers import MTPEagleWorker as MTPEagleWorker
    from .workers import MTPWorker as MTPWorker
    from .workers import NGramWorker as NGramWorker
    from .workers import SAWorker as SAWorker
    from .workers import SpecWorkerBase as SpecWorkerBase
    from .workers import create_worker as create_worker

__version__ = "0.1.0"

sys.meta_path.append(MovedModules())

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "api.embeds_prompt": ("EmbedsPrompt",),
        "api.outputs": ("CompletionOutput", "EngineStats", "Logprob", "RequestOutput", "SpecStats"),
        "api.guided_decoding": ("GuidedDecodingParams",),
        "api.sampling_params": ("SamplingParams",),
        "async_llm": ("AsyncLLM",),
        "config": (
            "AutoDecodingConfig",
            "CudaGraphConfig",
            "DecodingBaseConfig",
            "DFlashDecodingConfig",
            "DSparkDecodingConfig",
            "DraftTargetDecodingConfig",
            "Drafter",
            "Eagle3DecodingConfig",
            "EagleDecodingConfig",
            "KvCacheConfig",
            "MTPDecodingConfig",
            "NGramDecodingConfig",
            "SADecodingConfig",
            "SAEnhancerConfig",
            "SaveHiddenStatesDecodingConfig",
            "UserProvidedDecodingConfig",
        ),
        "errors": (
            "CheckpointError",
            "ConfigError",
            "DrafterError",
            "EngineError",
            "QueueFullError",
            "RequestError",
            "TrtspecError",
        ),
        "executor.py_executor": ("PyExecutor",),
        "llm": ("LLM",),
        "metadata.mode": ("SpeculativeDecodingMode",),
        "metadata.spec": ("SpecMetadata",),
        "workers": (
            "DFlashWorker",
            "DraftTargetWorker",
            "Eagle3OneModelWorker",
            "MTPEagleWorker",
            "MTPWorker",
            "NGramWorker",
            "SAWorker",
            "SpecWorkerBase",
            "create_worker",
        ),
    },
)
