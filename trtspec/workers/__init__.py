"""Workers, one file per drafter, and the table from mode to worker."""

from __future__ import annotations

from ..acceptance.forced import (
    FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR,
    get_force_num_accepted_tokens,
)
from ..config import DecodingBaseConfig, resolve_speculative_config
from ..metadata.mode import SpeculativeDecodingMode
from .base import DraftInputs, DraftModel, GuidedDecoder, SpecWorkerBase
from .draft_target import DraftTargetWorker
from .ngram import NGramWorker
from .plain import PlainWorker
from .user_provided import UserProvidedWorker

WORKER_OF_MODE: dict[SpeculativeDecodingMode, type[SpecWorkerBase]] = {
    SpeculativeDecodingMode.NONE: PlainWorker,
    SpeculativeDecodingMode.NGRAM: NGramWorker,
    SpeculativeDecodingMode.DRAFT_TARGET: DraftTargetWorker,
    SpeculativeDecodingMode.USER_PROVIDED: UserProvidedWorker,
}


def create_worker(config: DecodingBaseConfig | None) -> SpecWorkerBase:
    """The worker of a decoding config; `None` is plain decoding.

    Raises:
        ConfigError, NotImplementedError: as `resolve_speculative_config`.
    """
    config = resolve_speculative_config(config)
    mode = config.spec_dec_mode if config is not None else SpeculativeDecodingMode.NONE
    return WORKER_OF_MODE[mode](config)


__all__ = [
    "FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR",
    "WORKER_OF_MODE",
    "DraftInputs",
    "DraftModel",
    "DraftTargetWorker",
    "GuidedDecoder",
    "NGramWorker",
    "PlainWorker",
    "SpecWorkerBase",
    "UserProvidedWorker",
    "create_worker",
    "get_force_num_accepted_tokens",
]
