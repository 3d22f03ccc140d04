"""`SpeculativeDecodingMode`: the TensorRT-LLM enum, every predicate read from one table.

A mode is a row of data (DESIGN, decision D4). The predicates keep TensorRT-LLM's names so that
its users find their way; `drafts_in_step`, `drafts_on_host`, `drafts_in_passes` and
`drafts_with_network` are ours. Where a predicate differs from TensorRT-LLM's because our mode can
do more, `docs/modes.md` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True)
class ModeTraits:
    """What a mode is and needs. Every field is read by at least one predicate below."""

    one_engine: bool = False  # the drafter is part of the target's forward
    draft_model: bool = False  # a second checkpoint is loaded as a model of its own
    kv_cache_rewind: bool = False
    kv_cache_recompute: bool = False  # first draft pass recomputes the KV of accepted tokens
    load_draft_weights: bool = False  # drafter weights come from a directory of their own
    spec_decoder: bool = False
    spec_drafter: bool = False
    guided_decoder: bool = False
    overlap: bool = False
    drafts_in_step: bool = False  # ours: the worker drafts on the device, inside the step
    drafts_on_host: bool = False  # ours: a Python drafter needs the accepted tokens
    drafts_in_passes: bool = False  # ours: the executor drives the draft passes after the step


class SpeculativeDecodingMode(IntEnum):
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

    @property
    def traits(self) -> ModeTraits:
        return _TRAITS[self]

    @staticmethod
    def from_string(name: str | None) -> SpeculativeDecodingMode:
        """The mode of that name, any case; `None` is NONE.

        Raises:
            ConfigError: the name is not a mode.
        """
        if name is None:
            return SpeculativeDecodingMode.NONE
        if isinstance(name, str) and name.upper() in SpeculativeDecodingMode.__members__:
            return SpeculativeDecodingMode[name.upper()]
        allowed = ", ".join(mode.name for mode in SpeculativeDecodingMode)
        raise ConfigError(f"Unknown speculative decoding mode {name!r}. Allowed: {allowed}.")

    # -- which mode is it ----------------------------------------------------------------------
    def is_mtp_one_model(self) -> bool:
        return self in (SpeculativeDecodingMode.MTP, SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL)

    def is_mtp_vanilla(self) -> bool:
        return self is SpeculativeDecodingMode.MTP

    def is_mtp_eagle(self) -> bool:
        return self is SpeculativeDecodingMode.MTP_EAGLE

    def is_mtp_eagle_one_model(self) -> bool:
        return self is SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL

    def is_eagle3(self) -> bool:
        return self is SpeculativeDecodingMode.EAGLE3

    def is_eagle3_one_model(self) -> bool:
        return self is SpeculativeDecodingMode.EAGLE3_ONE_MODEL

    def is_ngram(self) -> bool:
        return self is SpeculativeDecodingMode.NGRAM

    def is_draft_target(self) -> bool:
        return self is SpeculativeDecodingMode.DRAFT_TARGET

    def is_user_provided(self) -> bool:
        return self is SpeculativeDecodingMode.USER_PROVIDED

    def is_save_hidden_states(self) -> bool:
        return self is SpeculativeDecodingMode.SAVE_HIDDEN_STATES

    def is_none(self) -> bool:
        return self is SpeculativeDecodingMode.NONE

    # -- what it needs -------------------------------------------------------------------------
    def use_one_engine(self) -> bool:
        return self.traits.one_engine

    def without_logits(self) -> bool:
        """The drafter's outputs are tokens; its logits never leave the step."""
        return self.traits.one_engine

    def needs_kv_cache_rewind(self) -> bool:
        return self.traits.kv_cache_rewind

    def has_draft_model(self) -> bool:
        return self.traits.draft_model

    def support_overlap_scheduler(self) -> bool:
        """The next step can be launched before the host has read this one's tokens."""
        return self.traits.overlap

    def needs_kv_cache_recompute(self) -> bool:
        return self.traits.kv_cache_recompute

    def need_load_draft_weights(self) -> bool:
        return self.traits.load_draft_weights

    def has_spec_decoder(self) -> bool:
        return self.traits.spec_decoder

    def has_spec_drafter(self) -> bool:
        return self.traits.spec_drafter

    def support_guided_decoder(self) -> bool:
        return self.traits.guided_decoder

    def support_capturable_guided_decoder(self) -> bool:
        return self.traits.one_engine

    def drafts_in_step(self) -> bool:
        """Ours: drafting happens inside the device step, with no host round trip."""
        return self.traits.drafts_in_step

    def drafts_on_host(self) -> bool:
        """Ours: drafting is host code that needs the accepted tokens, so steps cannot overlap."""
        return self.traits.drafts_on_host

    def drafts_in_passes(self) -> bool:
        """Ours: the step only verifies; the executor then launches each draft pass by itself."""
        return self.traits.drafts_in_passes

    def drafts_with_network(self) -> bool:
        """Ours: a head or a model drafts; looking up n-grams may well find nothing."""
        return self.traits.one_engine or self.traits.draft_model

    def extend_ctx(self, attention_backend: Any) -> bool:
        """Multi-token generation rows run as chunked context.

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
        """Whether attention must run its multi-token generation kernel for this model's pass.

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


_TRAITS: dict[SpeculativeDecodingMode, ModeTraits] = {
    SpeculativeDecodingMode.MTP: ModeTraits(
        one_engine=True, kv_cache_rewind=True, spec_decoder=True, overlap=True, drafts_in_step=True
    ),
    SpeculativeDecodingMode.MTP_EAGLE: ModeTraits(
        draft_model=True,
        kv_cache_recompute=True,
        spec_decoder=True,
        spec_drafter=True,
        guided_decoder=True,
        overlap=True,
        drafts_in_passes=True,
    ),
    SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL: ModeTraits(
        one_engine=True, kv_cache_rewind=True, spec_decoder=True, overlap=True, drafts_in_step=True
    ),
    SpeculativeDecodingMode.EAGLE3: ModeTraits(
        draft_model=True,
        kv_cache_recompute=True,
        spec_decoder=True,
        spec_drafter=True,
        guided_decoder=True,
        overlap=True,
        drafts_in_passes=True,
    ),
    SpeculativeDecodingMode.EAGLE3_ONE_MODEL: ModeTraits(
        one_engine=True,
        kv_cache_rewind=True,
        load_draft_weights=True,
        spec_decoder=True,
        overlap=True,
        drafts_in_step=True,
    ),
    SpeculativeDecodingMode.NGRAM: ModeTraits(
        kv_cache_rewind=True,
        spec_drafter=True,
        guided_decoder=True,
        overlap=True,  # TensorRT-LLM: False. Our lookup is a device op.
        drafts_in_step=True,
    ),
    SpeculativeDecodingMode.DRAFT_TARGET: ModeTraits(
        draft_model=True,
        spec_drafter=True,
        guided_decoder=True,
        overlap=True,
        drafts_in_step=True,
    ),
    SpeculativeDecodingMode.USER_PROVIDED: ModeTraits(
        spec_drafter=True, guided_decoder=True, drafts_on_host=True
    ),
    SpeculativeDecodingMode.SAVE_HIDDEN_STATES: ModeTraits(
        spec_drafter=True,
        guided_decoder=True,
        overlap=True,  # TensorRT-LLM: False. Ours copies the states out asynchronously.
    ),
    SpeculativeDecodingMode.NONE: ModeTraits(
        guided_decoder=True,
        overlap=True,  # TensorRT-LLM: False (it asks only when speculating).
    ),
    # AUTO resolves to another mode before anything is built (config.resolve_speculative_config).
    SpeculativeDecodingMode.AUTO: ModeTraits(),
}
