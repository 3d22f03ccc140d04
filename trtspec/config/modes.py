"""The config of every mode, and those of modes without a drafter of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, runtime_checkable

from ..errors import ConfigError, shown
from ..metadata.mode import SpeculativeDecodingMode
from .base import DecodingBaseConfig
from .fields import require_int, require_layers, require_path
from .lookups import NGramDecodingConfig, SADecodingConfig
from .networks import (
    DFlashDecodingConfig,
    DraftTargetDecodingConfig,
    DSparkDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
)


@runtime_checkable
class Drafter(Protocol):
    """Host code that proposes draft tokens for one request (mode USER_PROVIDED)."""

    def draft(self, request_id: int, token_ids: Sequence[int], max_draft_len: int) -> Sequence[int]:
        """Proposes what follows `token_ids` (prompt and output so far).

        Returns:
            0 … max_draft_len token ids; fewer than K means "no draft here" for the rest.
        """


@dataclass(frozen=True, kw_only=True)
class UserProvidedDecodingConfig(DecodingBaseConfig):
    """Drafts come from a `Drafter` on the host. Steps cannot overlap; the executor says so once.

    Args:
        drafter: an object with the method of `Drafter`.
    """

    drafter: Any = None

    mode: ClassVar[SpeculativeDecodingMode] = SpeculativeDecodingMode.USER_PROVIDED
    decoding_type: ClassVar[str] = "UserProvided"
    needs_python: ClassVar[str] = "a Python object that drafts"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(getattr(self.drafter, "draft", None)):
            raise ConfigError(
                f"UserProvidedDecodingConfig.drafter={self.drafter!r} has no method "
                "draft(request_id, token_ids, max_draft_len) -> list of token ids."
            )


@dataclass(frozen=True, kw_only=True)
class SaveHiddenStatesDecodingConfig(DecodingBaseConfig):
    """Decodes plainly and writes the target's hidden states: what a head's trainer reads.

    Args:
        output_directory: where shards and their index go; an index that is there is continued.
        eagle3_layers_to_capture: target layers, 0-based; None is 1, L/2-1 and L-4.
        tokens_per_file: rows of a shard, and so a bound of the memory held.
    """

    max_draft_len: int = 0
    output_directory: str | os.PathLike[str] | None = None
    eagle3_layers_to_capture: Sequence[int] | None = None
    tokens_per_file: int = 16384

    mode: ClassVar[SpeculativeDecodingMode] = SpeculativeDecodingMode.SAVE_HIDDEN_STATES
    decoding_type: ClassVar[str] = "SaveState"
    needs_python: ClassVar[str] = "an output_directory"

    def __post_init__(self) -> None:
        require_int(self, "max_draft_len", 0, 0)
        self._check_common()
        for base in fields(DecodingBaseConfig):
            value = getattr(self, base.name)
            if base.name != "max_draft_len" and value != base.default:
                raise ConfigError(
                    f"SaveHiddenStatesDecodingConfig.{base.name}={shown(value)}: nothing is "
                    "drafted here. Leave it out."
                )
        require_path(self, "output_directory")
        require_layers(self, "eagle3_layers_to_capture")
        require_int(self, "tokens_per_file", 1, None)


@dataclass(frozen=True, kw_only=True)
class AutoDecodingConfig(DecodingBaseConfig):
    """Lets trtspec choose. Today it chooses NGRAM, the one drafter every model has."""

    max_draft_len: int = 6

    mode: ClassVar[SpeculativeDecodingMode] = SpeculativeDecodingMode.AUTO
    decoding_type: ClassVar[str] = "AUTO"
    auto_draft_len: ClassVar[int] = 6


CONFIG_OF_MODE: dict[SpeculativeDecodingMode, type[DecodingBaseConfig]] = {
    SpeculativeDecodingMode.NGRAM: NGramDecodingConfig,
    SpeculativeDecodingMode.SA: SADecodingConfig,
    SpeculativeDecodingMode.DRAFT_TARGET: DraftTargetDecodingConfig,
    SpeculativeDecodingMode.USER_PROVIDED: UserProvidedDecodingConfig,
    SpeculativeDecodingMode.EAGLE3_ONE_MODEL: EagleDecodingConfig,
    SpeculativeDecodingMode.EAGLE3: EagleDecodingConfig,
    SpeculativeDecodingMode.DFLASH: DFlashDecodingConfig,
    SpeculativeDecodingMode.DSPARK: DSparkDecodingConfig,
    SpeculativeDecodingMode.MTP: MTPDecodingConfig,
    SpeculativeDecodingMode.MTP_EAGLE: MTPDecodingConfig,
    SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL: MTPDecodingConfig,
    SpeculativeDecodingMode.SAVE_HIDDEN_STATES: SaveHiddenStatesDecodingConfig,
    SpeculativeDecodingMode.AUTO: AutoDecodingConfig,
}


CONFIG_OF_TYPE: Mapping[str, tuple[type[DecodingBaseConfig], Mapping[str, Any]]] = {
    **{config.decoding_type: (config, {}) for config in CONFIG_OF_MODE.values()},
    "Eagle3": (EagleDecodingConfig, {}),
    "DFlash2": (DFlashDecodingConfig, {}),
    "PARD": (DraftTargetDecodingConfig, {"parallel_drafting": True}),
}
"""TensorRT-LLM's `decoding_type` -> the config, and fields that the type says. Case and underscores
do not count."""
METHODS: Mapping[str, str] = {
    "draft_model": "DraftTarget",
    "eagle": "Eagle",
    "deepseek_mtp": "MTP",
    "suffix": "SA",
}
"""vLLM's `method` -> `decoding_type`, where they differ in more than case."""


def resolve_speculative_config(
    config: DecodingBaseConfig | Mapping[str, Any] | None,
) -> DecodingBaseConfig | None:
    """Returns the config that decodes: for AUTO the one it stands for.

    Args:
        config: or a dict of its fields, with `decoding_type`.

    Raises:
        ConfigError: not a decoding config.
    """
    if config is None:
        return None
    if isinstance(config, Mapping):
        config = DecodingBaseConfig.from_dict(config)
    if not isinstance(config, DecodingBaseConfig) or not hasattr(config, "mode"):
        raise ConfigError(
            f"speculative_config={config!r} is not a decoding config. Use one of "
            f"{', '.join(sorted({c.__name__ for c in CONFIG_OF_MODE.values()}))}, a dict of its "
            "fields with 'decoding_type', or None."
        )
    if isinstance(config, AutoDecodingConfig):
        shared = {f.name: getattr(config, f.name) for f in fields(DecodingBaseConfig)}
        return NGramDecodingConfig(**shared)
    return config
