"""Whether a drafter that was loaded proposes all its drafts in one pass, and what it reads then."""

from __future__ import annotations

from pathlib import Path

from ..checkpoints.heads.masked import pard_token
from ..config import DecodingBaseConfig, DraftTargetDecodingConfig
from ..errors import ConfigError
from ..models.decoder import Decoder
from ..models.drafters.base import DraftHead


def find_mask_token(
    spec: DecodingBaseConfig | None, draft_model: Decoder | DraftHead | None
) -> int | None:
    """The mask token of a drafter that drafts in parallel, None of any other.

    Args:
        spec: with K settled.

    Raises:
        ConfigError: it cannot do what `spec` asks for.
        CheckpointError: its mask token is none of its tokens.
    """
    if isinstance(draft_model, DraftHead):
        head = draft_model.config
        assert spec is not None
        if head.mask_token_id is not None and head.trained_draft_len is not None:
            _check_length(spec.max_draft_len, head.trained_draft_len)
        return head.mask_token_id
    if not isinstance(spec, DraftTargetDecodingConfig) or spec.parallel_drafting is False:
        return None
    assert isinstance(draft_model, Decoder) and spec.speculative_model is not None
    where, config = Path(spec.speculative_model) / "config.json", draft_model.config
    token = pard_token(config.raw, where, config.vocab_size)
    if token is None and spec.parallel_drafting:
        raise ConfigError(
            f"DraftTargetDecodingConfig.parallel_drafting=True, but {where} has no pard_token, the "
            "token that a draft model trained for it reads at the places to be drafted. Use a PARD "
            "model, or leave parallel_drafting out."
        )
    return token


def _check_length(asked: int, trained: int) -> None:
    if asked > trained:
        raise ConfigError(
            f"EagleDecodingConfig.max_draft_len={asked}: the head was trained to propose "
            f"{trained} tokens in one pass, says its config.json. Give at most {trained}."
        )
