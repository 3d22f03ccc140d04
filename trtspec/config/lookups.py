"""Configs of drafters that copy from text: n-grams, and suffixes, alone or beside a network."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from ..errors import ConfigError, shown
from ..metadata.mode import SpeculativeDecodingMode
from .base import DecodingBaseConfig
from .fields import require_bool, require_int
from .suffix import SAEnhancerConfig, SuffixSearchConfig

if TYPE_CHECKING:
    from .networks import DraftTargetDecodingConfig, HeadDecodingConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NGramDecodingConfig(DecodingBaseConfig):
    """Prompt lookup: drafts copied from the request's own prompt and output.

    Args:
        max_matching_ngram_size: longest match looked for, tried first.
        min_matching_ngram_size: shortest match that may draft; None is 2, or the maximum if
            that is 1.
        is_use_oldest: among equally long matches take the oldest instead of the newest.
        is_keep_all: TensorRT-LLM's pool keeps every pattern. Here the request's tokens are
            searched, which have them all. False has no effect and warns.
        is_public_pool: TensorRT-LLM's pool may be shared by requests. Here it never is; True has
            no effect and warns.
    """

    max_draft_len: int = 6
    max_matching_ngram_size: int = 4
    min_matching_ngram_size: int | None = None
    is_use_oldest: bool = False
    is_keep_all: bool = True
    is_public_pool: bool = False

    mode: ClassVar[SpeculativeDecodingMode] = SpeculativeDecodingMode.NGRAM
    decoding_type: ClassVar[str] = "NGram"
    auto_draft_len: ClassVar[int] = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int(self, "max_matching_ngram_size", 1, 64)
        if self.min_matching_ngram_size is None:
            object.__setattr__(
                self, "min_matching_ngram_size", min(2, self.max_matching_ngram_size)
            )
        require_int(self, "min_matching_ngram_size", 1, 64)
        assert self.min_matching_ngram_size is not None
        if self.min_matching_ngram_size > self.max_matching_ngram_size:
            raise ConfigError(
                f"NGramDecodingConfig.min_matching_ngram_size={self.min_matching_ngram_size} is "
                f"above max_matching_ngram_size={self.max_matching_ngram_size}: lower it."
            )
        for name in ("is_use_oldest", "is_keep_all", "is_public_pool"):
            require_bool(self, name)
        if self.is_public_pool:
            logger.warning(
                "NGramDecodingConfig.is_public_pool=True has no effect: lookup is per request."
            )
        if not self.is_keep_all:
            logger.warning(
                "NGramDecodingConfig.is_keep_all=False has no effect: the text is searched."
            )


@dataclass(frozen=True, kw_only=True)
class SADecodingConfig(SuffixSearchConfig, DecodingBaseConfig):
    """Suffix lookup: drafts copied from the request's own text and from earlier requests' outputs.

    All earlier occurrences of the text's last tokens are compared, the longer ones first. The
    continuation that most of them agree on is drafted, as far as it is expected to be accepted.

    Args:
        max_draft_len: K; a step drafts as many as are worth it, K at most. On one device 16,
            the default, is the most: the length of a step chooses itself (decision 019).
        max_matching_ngram_size: tokens of a match that are counted; -1 is 32.
        min_matching_ngram_size: shortest match that may draft. Outputs of other requests take 2.
        min_token_prob: a draft that is accepted less probably is left out.
        match_decay: how fast a match is expected to end: draft k of a match of n tokens is in it
            with probability n / (n + match_decay * k). 0 trusts every match to the end.
        enable_global_pool: draft from outputs of requests that have ended. A request sees those of
            its own `cache_salt` alone.
        global_pool_tokens: tokens of such outputs that are kept, the latest.
        global_pool_size: TensorRT-LLM's number of requests in the pool. Here the pool is bounded by
            tokens; a number has no effect and warns.
    """

    max_draft_len: int = 16
    global_pool_size: int | None = None

    mode: ClassVar[SpeculativeDecodingMode] = SpeculativeDecodingMode.SA
    decoding_type: ClassVar[str] = "SA"
    auto_draft_len: ClassVar[int] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_search()
        require_int(self, "global_pool_size", 1, None, or_none=True)
        if self.global_pool_size is not None:
            logger.warning(
                "SADecodingConfig.global_pool_size=%d has no effect: global_pool_tokens bounds the "
                "pool.",
                self.global_pool_size,
            )


def resolve_lookup(config: HeadDecodingConfig | DraftTargetDecodingConfig) -> None:
    """Makes `sa_config` an `SAEnhancerConfig`; None stays.

    Raises:
        ConfigError: it is none, or the config cannot have one.
    """
    given, name = config.sa_config, type(config).__name__
    if given is None:
        return
    if isinstance(given, Mapping):
        given = SAEnhancerConfig.from_dict(given)
    if isinstance(given, SADecodingConfig):
        drafting = SADecodingConfig(**given.search_fields())
        values = {f.name: getattr(given, f.name) for f in fields(given)}
        other = [n for n in values if values[n] != getattr(drafting, n)]
        if other:
            raise ConfigError(
                f"{name}.sa_config=SADecodingConfig({other[0]}={shown(values[other[0]])}): beside "
                f"a drafter {name} says that. Leave it out of sa_config."
            )
        given = SAEnhancerConfig(**given.search_fields())
    if not isinstance(given, SAEnhancerConfig):
        raise ConfigError(
            f"{name}.sa_config={shown(given)}: give SAEnhancerConfig(...), a dict of its fields, "
            "or None."
        )
    one_model = getattr(config, "one_model_field", None)
    if one_model is not None and not getattr(config, one_model):
        raise ConfigError(
            f"{name}.sa_config looks up drafts inside the step, {one_model}=False drafts outside "
            "it. Leave one of them out."
        )
    object.__setattr__(config, "sa_config", given)
