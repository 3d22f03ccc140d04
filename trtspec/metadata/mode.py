"""`SpeculativeDecodingMode`: the TensorRT-LLM enum, every predicate read from one table.

A mode is a row of that table. The predicates have TensorRT-LLM's names, so that its users know
them. `docs/modes.md` says where an answer differs from TensorRT-LLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True)
class ModeTraits:
    """What a mode is and needs."""

    one_engine: bool = False  # the drafter is part of the target's forward
    draft_model: bool = False  # a second checkpoint is loaded, as a separate model
    kv_cache_rewind: bool = False
    kv_cache_recompute: bool = False  # first draft pass recomputes the KV of accepted tokens
    load_draft_weights: bool = False  # drafter weights come from another directory
    spec_decoder: bool = False
    spec_drafter: bool = False
    guided_decoder: bool = False
    overlap: bool = False  # the next step is launched before the host has read this one's tokens
    # Not in TensorRT-LLM:
    drafts_in_step: bool = False  # the worker drafts on the device, with no host round trip
    drafts_on_host: bool = False  # a Python drafter needs the accepted tokens
    drafts_in_passes: bool = False  # the executor launches each draft pass after the step
    looks_up: bool = False  # drafts are copied from texts
    captures_contexts: bool = False  # a pass over prompts needs no host data, so can be a graph

    @property
    def drafts_with_network(self) -> bool:
        """Whether a head or a model drafts, which always finds drafts."""
        return (self.one_engine or self.draft_model) and not self.looks_up


Predicate = Callable[[Any], bool]


def _is(*names: str) -> Predicate:
    return lambda mode: mode.name in names


def _has(trait: str) -> Predicate:
    return lambda mode: getattr(mode.traits, trait)


class _Predicates:
    """Yes-or-no questions about a mode. All but the last four are TensorRT-LLM's."""

    is_mtp_one_model = _is("MTP", "MTP_EAGLE_ONE_MODEL")
    is_mtp_vanilla = _is("MTP")
    is_mtp_eagle = _is("MTP_EAGLE")
    is_mtp_eagle_one_model = _is("MTP_EAGLE_ONE_MODEL")
    is_eagle3 = _is("EAGLE3")
    is_eagle3_one_model = _is("EAGLE3_ONE_MODEL")
    is_ngram = _is("NGRAM")
    is_sa = _is("SA")
    is_draft_target = _is("DRAFT_TARGET")
    is_dflash = _is("DFLASH")
    is_dspark = _is("DSPARK")
    is_user_provided = _is("USER_PROVIDED")
    is_save_hidden_states = _is("SAVE_HIDDEN_STATES")
    is_none = _is("NONE")

    use_one_engine = _has("one_engine")
    without_logits = _has("one_engine")  # the drafter's logits never leave the step
    support_capturable_guided_decoder = _has("one_engine")
    has_draft_model = _has("draft_model")
    needs_kv_cache_rewind = _has("kv_cache_rewind")
    needs_kv_cache_recompute = _has("kv_cache_recompute")
    need_load_draft_weights = _has("load_draft_weights")
    has_spec_decoder = _has("spec_decoder")
    has_spec_drafter = _has("spec_drafter")
    support_guided_decoder = _has("guided_decoder")
    support_overlap_scheduler = _has("overlap")

    drafts_in_step = _has("drafts_in_step")
    drafts_on_host = _has("drafts_on_host")
    drafts_in_passes = _has("drafts_in_passes")
    drafts_with_network = _has("drafts_with_network")


class SpeculativeDecodingMode(_Predicates, IntEnum):
    """Where drafts come from, and what that asks of an engine.

    Members and predicates are TensorRT-LLM's. docs/modes.md has those that are missing or ours
    alone, and the answers that differ.
    """

    MTP = auto()
    MTP_EAGLE = auto()
    MTP_EAGLE_ONE_MODEL = auto()
    EAGLE3 = auto()
    EAGLE3_ONE_MODEL = auto()
    NGRAM = auto()
    DRAFT_TARGET = auto()
    USER_PROVIDED = auto()
    SAVE_HIDDEN_STATES = auto()
    NONE = auto()
    AUTO = auto()
    DFLASH = auto()
    DSPARK = auto()
    SA = auto()

    # TensorRT-LLM's further names of a draft model, whose config says how it drafts.
    DRAFT_TARGET_ONE_MODEL = DRAFT_TARGET
    PARD = DRAFT_TARGET

    @property
    def traits(self) -> ModeTraits:
        return _TRAITS[self]

    @staticmethod
    def from_string(name: str | None) -> SpeculativeDecodingMode:
        """Returns the mode of a name, in any case; for None it is NONE.

        Raises:
            ConfigError: the name is not a mode.
        """
        if name is None:
            return SpeculativeDecodingMode.NONE
        if isinstance(name, str) and name.upper() in SpeculativeDecodingMode.__members__:
            return SpeculativeDecodingMode[name.upper()]
        allowed = ", ".join(mode.name for mode in SpeculativeDecodingMode)
        raise ConfigError(f"Unknown speculative decoding mode {name!r}. Allowed: {allowed}.")

    def extend_ctx(self, attention_backend: Any) -> bool:
        """Returns whether multi-token generation rows run as chunked context.

        Args:
            attention_backend: a class or object with `supports_multi_token_generation`.
        """
        return not self.use_one_engine() and not _has_multi_token_kernel(attention_backend)

    def attention_need_spec_dec_mode(
        self,
        spec_resource_manager: Any,
        is_draft_model: bool,
        attention_backend: Any,
        use_chain_drafter: bool,
    ) -> bool:
        """Returns whether attention must run its multi-token generation kernel in a pass.

        One-engine modes always do, given such a kernel. Two-engine modes do for the target model
        (which verifies K+1 rows) and for the first pass of a chained drafter.
        """
        if self.is_none() or not _has_multi_token_kernel(attention_backend):
            return False
        if self.use_one_engine() or not is_draft_model:
            return True
        is_first_draft = bool(getattr(spec_resource_manager, "is_first_draft", False))
        return is_first_draft and use_chain_drafter


def _has_multi_token_kernel(attention_backend: Any) -> bool:
    return bool(getattr(attention_backend, "supports_multi_token_generation", False))


_ONE_ENGINE = ModeTraits(
    one_engine=True, kv_cache_rewind=True, spec_decoder=True, overlap=True, drafts_in_step=True
)
_TWO_ENGINES = ModeTraits(
    draft_model=True,
    kv_cache_recompute=True,
    spec_decoder=True,
    spec_drafter=True,
    guided_decoder=True,
    overlap=True,
    drafts_in_passes=True,
)
_TRAITS: dict[SpeculativeDecodingMode, ModeTraits] = {
    SpeculativeDecodingMode.MTP: _ONE_ENGINE,
    SpeculativeDecodingMode.MTP_EAGLE: _TWO_ENGINES,
    SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL: replace(_ONE_ENGINE, captures_contexts=True),
    SpeculativeDecodingMode.EAGLE3: _TWO_ENGINES,
    SpeculativeDecodingMode.EAGLE3_ONE_MODEL: replace(
        _ONE_ENGINE, load_draft_weights=True, captures_contexts=True
    ),
    SpeculativeDecodingMode.NGRAM: ModeTraits(
        kv_cache_rewind=True,
        spec_drafter=True,
        guided_decoder=True,
        overlap=True,  # TensorRT-LLM: False. Here the lookup runs on the device.
        drafts_in_step=True,
        looks_up=True,
        captures_contexts=True,
    ),
    SpeculativeDecodingMode.DRAFT_TARGET: ModeTraits(
        draft_model=True,
        spec_drafter=True,
        guided_decoder=True,
        overlap=True,
        drafts_in_step=True,
        captures_contexts=True,
    ),
    SpeculativeDecodingMode.USER_PROVIDED: ModeTraits(
        spec_drafter=True, guided_decoder=True, drafts_on_host=True
    ),
    SpeculativeDecodingMode.SAVE_HIDDEN_STATES: ModeTraits(
        spec_drafter=True,
        guided_decoder=True,
        overlap=True,  # TensorRT-LLM: False. Here the states are copied out asynchronously.
    ),
    SpeculativeDecodingMode.NONE: ModeTraits(
        guided_decoder=True,
        overlap=True,  # TensorRT-LLM: False (it asks only when speculating).
        captures_contexts=True,
    ),
    SpeculativeDecodingMode.DFLASH: replace(
        _ONE_ENGINE, load_draft_weights=True, captures_contexts=True
    ),
    SpeculativeDecodingMode.DSPARK: replace(
        _ONE_ENGINE, load_draft_weights=True, captures_contexts=True
    ),
    SpeculativeDecodingMode.SA: replace(_ONE_ENGINE, looks_up=True, captures_contexts=True),
    # AUTO resolves to another mode before anything is built (config.resolve_speculative_config).
    SpeculativeDecodingMode.AUTO: ModeTraits(),
}
