"""What suffix lookup is asked for: alone (mode SA) or beside a drafter with a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..checks import is_int, is_number
from ..errors import ConfigError, shown
from ..other_names import NamesFields
from .fields import made_of_dict, require_bool, require_int

LONGEST = 32
"""Tokens of a match that are counted, where the config names no limit."""


@dataclass(frozen=True, kw_only=True)
class SuffixSearchConfig(NamesFields):
    """The fields of a search, which `SADecodingConfig` explains."""

    max_matching_ngram_size: int = -1
    min_matching_ngram_size: int = 1
    min_token_prob: float = 0.1
    match_decay: float = 1.0
    enable_global_pool: bool = True
    global_pool_tokens: int = 2**20

    def check_search(self) -> None:
        """Raises ConfigError where a field is out of range."""
        most, name = self.max_matching_ngram_size, type(self).__name__
        if most != -1 and not is_int(most, 1, 64):
            raise ConfigError(
                f"{name}.max_matching_ngram_size={shown(most)}: it must be an int in 1 … 64, or "
                f"-1 ({LONGEST})."
            )
        require_int(self, "min_matching_ngram_size", 1, 64)
        if most != -1 and self.min_matching_ngram_size > most:
            raise ConfigError(
                f"{name}.min_matching_ngram_size={self.min_matching_ngram_size} is above "
                f"max_matching_ngram_size={most}: lower it."
            )
        for field, high in (("min_token_prob", 1.0), ("match_decay", 100.0)):
            value = getattr(self, field)
            if not is_number(value) or not 0 <= value <= high:
                raise ConfigError(
                    f"{name}.{field}={shown(value)}: it must be a number in 0 … {high:g}."
                )
        require_bool(self, "enable_global_pool")
        require_int(self, "global_pool_tokens", 1024, 2**28)

    def search_fields(self) -> dict[str, Any]:
        """Returns the fields of the search."""
        return {field.name: getattr(self, field.name) for field in fields(SuffixSearchConfig)}


@dataclass(frozen=True, kw_only=True)
class SAEnhancerConfig(SuffixSearchConfig):
    """Suffix lookup beside a drafter with a network, the `sa_config` of its config.

    Where a match is good enough, what followed it is drafted in place of the network's drafts, for
    that request in that step. K is the drafter's. Class and field names are TensorRT-LLM's; the
    fields of the search are those of `SADecodingConfig`.

    Args:
        threshold: tokens that a match must have.
    """

    threshold: int = 4

    def __post_init__(self) -> None:
        self.check_search()
        require_int(self, "threshold", 1, 64)
        longest = LONGEST if self.max_matching_ngram_size == -1 else self.max_matching_ngram_size
        if self.threshold > longest:
            raise ConfigError(
                f"SAEnhancerConfig.threshold={self.threshold} is above the {longest} tokens of a "
                "match that are counted: no match would do. Lower it, or raise "
                "max_matching_ngram_size."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SAEnhancerConfig:
        """Returns the config of these fields.

        Raises:
            ConfigError: an unknown key, or a value that is not allowed.
        """
        return made_of_dict(cls, values, "sa_config")
