"""Workers, one file per drafter, and the table from mode to worker."""

from __future__ import annotations

from ..acceptance.forced import (
    FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR,
    get_force_num_accepted_tokens,
)
from ..config import DecodingBaseConfig, HeadDecodingConfig, resolve_speculative_config
from ..errors import ConfigError
from ..metadata.mode import SpeculativeDecodingMode
from ..utils import renamed
from .base import SpecWorkerBase
from .dflash import DFlashWorker
from .draft_target import DraftTargetWorker
from .eagle3 import Eagle3OneModelWorker
from .masked import MaskedDraftTargetWorker, MaskedEagle3Worker, MaskedWorker
from .mtp import MTPEagleWorker, MTPWorker
from .ngram import NGramWorker
from .one_pass import OnePassWorker
from .plain import PlainWorker, SaveHiddenStatesWorker, UserProvidedWorker
from .protocols import (
    DraftInputs,
    DraftModel,
    EndedText,
    GuidedDecoder,
    LanguageModel,
    MaskedDraftModel,
)
from .sa import SAWorker

WORKER_OF_MODE: dict[SpeculativeDecodingMode, type[SpecWorkerBase]] = {
    SpeculativeDecodingMode.NONE: PlainWorker,
    SpeculativeDecodingMode.MTP: MTPWorker,
    SpeculativeDecodingMode.MTP_EAGLE: MTPEagleWorker,
    SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL: MTPEagleWorker,
    SpeculativeDecodingMode.EAGLE3: Eagle3OneModelWorker,
    SpeculativeDecodingMode.EAGLE3_ONE_MODEL: Eagle3OneModelWorker,
    SpeculativeDecodingMode.NGRAM: NGramWorker,
    SpeculativeDecodingMode.SA: SAWorker,
    SpeculativeDecodingMode.DRAFT_TARGET: DraftTargetWorker,
    SpeculativeDecodingMode.USER_PROVIDED: UserProvidedWorker,
    SpeculativeDecodingMode.SAVE_HIDDEN_STATES: SaveHiddenStatesWorker,
}
MASKED_WORKER_OF_MODE: dict[SpeculativeDecodingMode, type[OnePassWorker]] = {
    SpeculativeDecodingMode.EAGLE3_ONE_MODEL: MaskedEagle3Worker,
    SpeculativeDecodingMode.DRAFT_TARGET: MaskedDraftTargetWorker,
    SpeculativeDecodingMode.DFLASH: DFlashWorker,
    SpeculativeDecodingMode.DSPARK: DFlashWorker,
}


def create_worker(
    config: DecodingBaseConfig | None,
    mask_token_id: int | None = None,
    *,
    reads_next_tokens: bool = False,
) -> SpecWorkerBase:
    """Returns the worker of a decoding config; `None` is plain decoding.

    Args:
        mask_token_id: what a masked drafter reads in place of its drafts, so that all of them come
            from one pass. None runs one pass for each draft.
        reads_next_tokens: the head's, of a block head: the prefix cache then looks a token ahead.

    Raises:
        ConfigError: as `resolve_speculative_config`, K is not settled, or the mode has no masked
            drafter.
    """
    config = resolve_speculative_config(config)
    if isinstance(config, HeadDecodingConfig) and config.max_draft_len == 0:
        raise ConfigError(
            f"{type(config).__name__}.max_draft_len=0 means the head's own, which `LLM` looks up; "
            "a worker made alone needs the number."
        )
    mode = config.spec_dec_mode if config is not None else SpeculativeDecodingMode.NONE
    if mask_token_id is None and mode in WORKER_OF_MODE:
        return WORKER_OF_MODE[mode](config)
    if mask_token_id is None:
        raise ConfigError(
            f"Mode {mode.name} drafts from mask tokens: give the head's, "
            "create_worker(config, head.config.mask_token_id)."
        )
    if config is None or mode not in MASKED_WORKER_OF_MODE:
        modes = " and ".join(m.name for m in MASKED_WORKER_OF_MODE)
        raise ConfigError(
            f"Mode {mode.name} does not draft in parallel (mask token {mask_token_id}); {modes} "
            "do. For an EAGLE-3 head leave out eagle3_one_model=False."
        )
    worker = MASKED_WORKER_OF_MODE[mode](config, mask_token_id)
    if isinstance(worker, DFlashWorker):
        worker.reads_next_tokens = reads_next_tokens
    return worker


__all__ = [
    "FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR",
    "MASKED_WORKER_OF_MODE",
    "WORKER_OF_MODE",
    "DFlashWorker",
    "DraftInputs",
    "DraftModel",
    "DraftTargetWorker",
    "Eagle3OneModelWorker",
    "EndedText",
    "GuidedDecoder",
    "LanguageModel",
    "MTPEagleWorker",
    "MTPWorker",
    "MaskedDraftModel",
    "MaskedDraftTargetWorker",
    "MaskedEagle3Worker",
    "MaskedWorker",
    "NGramWorker",
    "PlainWorker",
    "SAWorker",
    "SaveHiddenStatesWorker",
    "SpecWorkerBase",
    "UserProvidedWorker",
    "create_worker",
    "get_force_num_accepted_tokens",
]

__getattr__ = renamed(
    __name__,
    {
        "PARALLEL_WORKER_OF_MODE": "MASKED_WORKER_OF_MODE",
        "ParallelDraftModel": "MaskedDraftModel",
        "ParallelDraftTargetWorker": "MaskedDraftTargetWorker",
        "ParallelEagle3Worker": "MaskedEagle3Worker",
        "ParallelWorker": "MaskedWorker",
    },
)
