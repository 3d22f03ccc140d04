"""Configs of drafters with a network: a draft model, and the heads."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..checks import are_ints, is_int, is_number
from ..errors import ConfigError, shown
from ..metadata.mode import SpeculativeDecodingMode
from .base import MAX_DRAFT_LEN, DecodingBaseConfig
from .fields import require_bool, require_int, require_layers, require_path, require_quant
from .lookups import SADecodingConfig, resolve_lookup
from .suffix import SAEnhancerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DraftTargetDecodingConfig(DecodingBaseConfig):
    """A second, smaller model with the same tokenizer drafts inside the target's step.

    Args:
        speculative_model: its HF directory, .gguf file or known name.
        parallel_drafting: all K drafts from one pass, as a PARD model was trained to make them.
            None is whether its config.json has a `pard_token`.
        draft_tensor_parallel_size: ranks that the draft model is cut over: all of the target's, or
            1, where every rank has all of it and drafts the same. None is all, if it can be cut.
        sa_config: suffix lookup beside the model (`SAEnhancerConfig`); None is without.
        quant: as `EngineConfig.quant`, of the draft model.
    """

    speculative_model: str | os.PathLike[str] | None = None
    parallel_drafting: bool | None = None
    draft_tensor_parallel_size: int | None = None
    sa_config: SAEnhancerConfig | SADecodingConfig | None = None
    quant: str | None = None

    mode: ClassVar[SpeculativeDecodingMode] = SpeculativeDecodingMode.DRAFT_TARGET
    decoding_type: ClassVar[str] = "DraftTarget"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_path(self, "speculative_model", "a model's directory or name")
        require_bool(self, "parallel_drafting", or_none=True)
        require_int(self, "draft_tensor_parallel_size", 1, None, or_none=True)
        require_quant(self)
        resolve_lookup(self)


@dataclass(frozen=True, kw_only=True)
class HeadDecodingConfig(DecodingBaseConfig, ABC):
    """Base of the configs whose drafter is a head: a network that reads the target's hidden states.

    The engine loads any of them alike, by what the class says of itself.

    Args:
        sa_config: suffix lookup beside the head (`SAEnhancerConfig`); None is without.
        draft_window: each layer of the head sees this many of the last tokens at most, 65 or more;
            0 is all. None is what the head's config.json says (`draft_window`), else all. All keys
            and values are kept, so it changes neither memory nor the prefix cache.
        quant: "fp8" quantises the head's large products as `EngineConfig.quant` does the target's:
            o_proj, the MLP, experts and the lm_head (of a shared one a copy, on a GPU). Drafts take
            less time and may be a little worse; the answers are the target's all the same. None
            is what the checkpoint has.
        draft_token_ids: the tokens that a head with an lm_head of all tokens may propose, or a file
            of them (`checkpoints/heads/draft_tokens.py`). A draft pass then reads their rows alone.
            Other tokens are never drafted, and answers stay the target's. None is all tokens.
    """

    max_draft_len: int = 0
    speculative_model: str | os.PathLike[str] | None = None
    sa_config: SAEnhancerConfig | SADecodingConfig | None = None
    draft_window: int | None = None
    quant: str | None = None
    draft_token_ids: Sequence[int] | str | os.PathLike[str] | None = None

    least_draft_len: ClassVar[int] = 0
    auto_draft_len: ClassVar[int] = 0  # the head's own
    head_kind: ClassVar[str]  # what the checkpoint must hold: "eagle", "mtp", …
    head_name: ClassVar[str]  # what the names of the package's heads end in
    target_may_hold_head: ClassVar[bool] = False  # then speculative_model may be left out
    one_model_field: ClassVar[str | None] = None  # False there: it drafts in passes of its own

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.speculative_model is not None or not self.target_may_hold_head:
            require_path(self, "speculative_model", "a head's directory or name")
        if self.one_model_field is not None:
            require_bool(self, self.one_model_field)
        self._check_window()
        self._check_draft_tokens()
        require_quant(self)
        resolve_lookup(self)

    def _check_window(self) -> None:
        """Raises ConfigError for a window in which a block's rows would not see each other."""
        window, least = self.draft_window, MAX_DRAFT_LEN + 1
        if window is not None and not is_int(window, 0, 0) and not is_int(window, least, None):
            raise ConfigError(
                f"{type(self).__name__}.draft_window={shown(window)}: it must be None, 0 (all "
                f"tokens) or an int >= {least}."
            )

    def _check_draft_tokens(self) -> None:
        """Makes a list of ids a tuple. Raises ConfigError for what is no such list, nor a path."""
        given = self.draft_token_ids
        if given is None:
            return
        if isinstance(given, str | os.PathLike):
            require_path(self, "draft_token_ids", "a file")
        elif are_ints(given, 0) and len(given):
            object.__setattr__(self, "draft_token_ids", tuple(given))
        else:
            raise ConfigError(
                f"{type(self).__name__}.draft_token_ids={shown(given)}: give a list of token ids "
                "as Python ints (`.tolist()` of an array or a tensor), or a file of them."
            )

    @classmethod
    def fields_of_mode(cls, mode: SpeculativeDecodingMode) -> dict[str, Any]:
        """Returns the fields that make a config one of this mode, but for `one_model_field`."""
        return {}

    @property
    @abstractmethod
    def head_options(self) -> dict[str, Any]:
        """What the reader of the head is asked for beside its kind."""


@dataclass(frozen=True, kw_only=True)
class EagleDecodingConfig(HeadDecodingConfig):
    """An EAGLE-3 (or EAGLE-1) head drafts from the target's hidden states.

    A P-EAGLE head makes all K drafts in one pass.

    Args:
        max_draft_len: K; 0 is what the head was trained for (the speculators format says so),
            else 4. With a head of the package on one device 0 is that many at most, chosen while
            serving as with "auto", but for steps with seeded requests that depend on K.
        speculative_model: the head's directory, raw or speculators format, or a known name
            ("smollm2-135m-eagle3").
        eagle3_one_model: True drafts inside the target's step (EAGLE3_ONE_MODEL), False in passes
            of its own (EAGLE3), for comparison.
        eagle3_layers_to_capture: target layers whose output the head reads, 0-based; None is what
            the head's config says, else 1, L/2-1 and L-4.
        sa_config, draft_window, quant, draft_token_ids: suffix lookup beside the head, how far back
            it sees, how its weights are kept, and what it may propose (`HeadDecodingConfig`).
    """

    eagle3_one_model: bool = True
    eagle3_layers_to_capture: Sequence[int] | None = None

    mode: ClassVar[SpeculativeDecodingMode] = SpeculativeDecodingMode.EAGLE3_ONE_MODEL
    decoding_type: ClassVar[str] = "Eagle"
    head_kind: ClassVar[str] = "eagle"
    head_name: ClassVar[str] = "eagle3"
    one_model_field: ClassVar[str] = "eagle3_one_model"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_layers(self, "eagle3_layers_to_capture")

    @property
    def spec_dec_mode(self) -> SpeculativeDecodingMode:
        if self.eagle3_one_model:
            return SpeculativeDecodingMode.EAGLE3_ONE_MODEL
        return SpeculativeDecodingMode.EAGLE3

    @property
    def head_options(self) -> dict[str, Any]:
        return {"layers_to_capture": self.eagle3_layers_to_capture}


Eagle3DecodingConfig = EagleDecodingConfig
"""TensorRT-LLM's newer name."""


@dataclass(frozen=True, kw_only=True)
class DFlashDecodingConfig(HeadDecodingConfig):
    """A DFlash or DFlash2 head drafts a block of tokens in one pass, from the target's states.

    Args:
        max_draft_len: K; 0 is what the head was trained for, its block but for the last token. With
            a head of the package 0 is the most on one device, and K chooses itself.
        speculative_model: the head's directory, z-lab's or speculators format.
        target_layer_ids: target layers whose output the head reads, 0-based; None is what the
            head's config says.
        sa_config, draft_window, quant, draft_token_ids: suffix lookup beside the head, how far back
            it sees, how its weights are kept, and what it may propose (`HeadDecodingConfig`).
    """

    target_layer_ids: Sequence[int] | None = None

    mode: ClassVar[SpeculativeDecodingMode] = SpeculativeDecodingMode.DFLASH
    decoding_type: ClassVar[str] = "DFlash"
    head_kind: ClassVar[str] = "dflash"
    head_name: ClassVar[str] = "dflash"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_layers(self, "target_layer_ids")

    @property
    def head_options(self) -> dict[str, Any]:
        return {"layers_to_capture": self.target_layer_ids}


@dataclass(frozen=True, kw_only=True)
class DSparkDecodingConfig(DFlashDecodingConfig):
    """A DSpark head drafts as a DFlash head does, each draft with a bias by the one before it.

    Its fields are those of `DFlashDecodingConfig`. The last token's row may propose too: then
    `max_draft_len=0` is as many drafts as the block has rows.
    """

    mode: ClassVar[SpeculativeDecodingMode] = SpeculativeDecodingMode.DSPARK
    decoding_type: ClassVar[str] = "DSpark"
    head_kind: ClassVar[str] = "dspark"
    head_name: ClassVar[str] = "dspark"


@dataclass(frozen=True, kw_only=True)
class MTPDecodingConfig(HeadDecodingConfig):
    """The target's multi-token-prediction layers draft.

    Args:
        num_nextn_predict_layers: K, draft tokens per step; `max_draft_len` is the same. Give one of
            them; without both (0) K is 1.
        speculative_model: directory with the MTP layers, or a known name ("smollm2-135m-mtp");
            None is the target's own checkpoint.
        use_mtp_vanilla: True is K layers, one for each draft token; False uses the first layer K
            times. None is what the checkpoint's family was trained for (True for Step-3.5), which
            `LLM` looks up. False where that is not known: other families, a worker made alone.
        mtp_eagle_one_model: with one layer, True drafts inside the target's step, False in passes
            of its own (MTP_EAGLE), for comparison.
        mtp_feeds_post_norm: the feedback is the hidden state after the norm; None is as the family
            does.
        use_relaxed_acceptance_for_thinking: between the thinking tokens a greedy request accepts
            drafts that are close to the target's best. Lossy.
        relaxed_topk: such a draft is among that many of the target's best tokens …
        relaxed_delta: … and its probability at most that much below the best one's.
        begin_thinking_phase_token, end_thinking_phase_token: token ids (DeepSeek-R1's by default).
        sa_config, draft_window, quant, draft_token_ids: suffix lookup beside the head, how far back
            it sees, how its weights are kept, and what it may propose (`HeadDecodingConfig`).
    """

    num_nextn_predict_layers: int = 0
    mtp_eagle_one_model: bool = True
    use_mtp_vanilla: bool | None = None
    mtp_feeds_post_norm: bool | None = None
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = 1
    relaxed_delta: float = 0.0
    begin_thinking_phase_token: int = 128798
    end_thinking_phase_token: int = 128799

    mode: ClassVar[SpeculativeDecodingMode] = SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL
    decoding_type: ClassVar[str] = "MTP"
    draft_len_field: ClassVar[str] = "num_nextn_predict_layers"
    auto_draft_len: ClassVar[int] = 3
    head_kind: ClassVar[str] = "mtp"
    head_name: ClassVar[str] = "mtp"
    target_may_hold_head: ClassVar[bool] = True
    one_model_field: ClassVar[str] = "mtp_eagle_one_model"

    def __post_init__(self) -> None:
        self._settle_draft_len()
        super().__post_init__()
        require_bool(self, "use_mtp_vanilla", or_none=True)
        require_bool(self, "mtp_feeds_post_norm", or_none=True)
        if self.use_mtp_vanilla and not self.mtp_eagle_one_model:
            raise ConfigError(
                "MTPDecodingConfig.mtp_eagle_one_model=False asks for the two-engine form of one "
                "layer used K times, use_mtp_vanilla=True for K layers: give one of them."
            )
        self._check_relaxed_acceptance()

    def _settle_draft_len(self) -> None:
        """Gives both fields that are K the same number."""
        self._resolve_auto()
        names = "num_nextn_predict_layers", "max_draft_len"
        for name in names:
            require_int(self, name, 0, MAX_DRAFT_LEN)
        given = {getattr(self, name) for name in names} - {0}
        if len(given) > 1:
            raise ConfigError(
                f"MTPDecodingConfig.max_draft_len={self.max_draft_len} differs from "
                f"num_nextn_predict_layers={self.num_nextn_predict_layers}: give one of them."
            )
        for name in names:
            object.__setattr__(self, name, max(given, default=1))

    def _check_relaxed_acceptance(self) -> None:
        require_bool(self, "use_relaxed_acceptance_for_thinking")
        require_int(self, "relaxed_topk", 1, 1024)
        require_int(self, "begin_thinking_phase_token", 0, None)
        require_int(self, "end_thinking_phase_token", 0, None)
        if self.begin_thinking_phase_token == self.end_thinking_phase_token:
            raise ConfigError(
                f"MTPDecodingConfig.begin_thinking_phase_token={self.begin_thinking_phase_token} "
                "is also end_thinking_phase_token: give two different tokens."
            )
        if not is_number(self.relaxed_delta) or not 0 <= self.relaxed_delta <= 1:
            raise ConfigError(
                f"MTPDecodingConfig.relaxed_delta={shown(self.relaxed_delta)} is a difference of "
                "probabilities: it must be a number in 0 … 1."
            )
        relaxes = self.relaxed_topk > 1 and self.relaxed_delta > 0
        if relaxes != self.use_relaxed_acceptance_for_thinking:
            logger.warning(
                "MTPDecodingConfig: use_relaxed_acceptance_for_thinking=%s with relaxed_topk=%d "
                "and relaxed_delta=%g relaxes nothing: it takes all three (say True, 10, 0.6).",
                self.use_relaxed_acceptance_for_thinking,
                self.relaxed_topk,
                self.relaxed_delta,
            )

    @property
    def spec_dec_mode(self) -> SpeculativeDecodingMode:
        if self.use_mtp_vanilla:
            return SpeculativeDecodingMode.MTP
        if self.mtp_eagle_one_model:
            return SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL
        return SpeculativeDecodingMode.MTP_EAGLE

    @classmethod
    def fields_of_mode(cls, mode: SpeculativeDecodingMode) -> dict[str, Any]:
        return {"use_mtp_vanilla": mode.is_mtp_vanilla()}

    @property
    def head_options(self) -> dict[str, Any]:
        return {
            "num_mtp_layers": self.max_draft_len,
            "layer_per_draft": self.use_mtp_vanilla if self.mtp_eagle_one_model else False,
            "norm_output": self.mtp_feeds_post_norm,
        }
