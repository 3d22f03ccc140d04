"""Decoding configs, one class per way of drafting: frozen, checked where they are made.

Class and field names are those of TensorRT-LLM's LLM API. A field that means something only to
another engine is refused or warned about, never dropped.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from ..checks import is_int, is_number
from ..errors import ConfigError, shown
from ..metadata.mode import SpeculativeDecodingMode
from ..other_names import NamesFields
from .fields import (
    check_choice,
    made_of_dict,
    require_bool,
    require_int,
    require_layers,
    require_path,
    require_quant,
)
from .suffix import SAEnhancerConfig, SuffixSearchConfig

logger = logging.getLogger(__name__)

MAX_DRAFT_LEN = 64
"""A sanity bound: a chain this long has never paid."""

ACCEPTANCE_RULES = ("strict", "exact_match", "rejection", "block")


@runtime_checkable
class Drafter(Protocol):
    """Host code that proposes draft tokens for one request (mode USER_PROVIDED)."""

    def draft(self, request_id: int, token_ids: Sequence[int], max_draft_len: int) -> Sequence[int]:
        """Proposes what follows `token_ids` (prompt and output so far).

        Returns:
            0 … max_draft_len token ids; fewer than K means "no draft here" for the rest.
        """


@dataclass(frozen=True, kw_only=True)
class DecodingBaseConfig(NamesFields):
    """Base of the speculative decoding configs.

    Args:
        max_draft_len: K, draft tokens per generation request and step, >= 1.
        max_concurrency: with more requests than this in a step nothing is drafted; None is no
            such limit. (Verifying K + 1 rows each stops paying in large batches.)
        draft_len_schedule: drafts by the number of requests in a step. {4: 4, 8: 2, 32: 1} drafts 4
            with up to 4 requests, 2 with up to 8, 1 with up to 32, and nothing with more. None is K
            with any number. "auto" chooses 0 … K while serving: what gives the most tokens per
            second, by the steps' times and the drafts that are accepted. K itself may be "auto":
            that is this, with the drafter's usual K as the most.
        max_verified_drafts: drafts that a step verifies at most, of all its requests together; None
            is all. Where they propose more, the likeliest are verified, by the drafter's own
            probabilities (of all requests' first drafts, then second ones …, where it has none).
            So a step of n requests costs the target n rows and at most this many more. Steps that
            also read prompts verify all. Under "rejection" and "block" a seeded request's tokens
            then depend on the requests beside it. Not with "auto", nor with enable_attention_dp.
        acceptance: how drafts of *sampled* requests are made and judged. A greedy request accepts
            a draft that is the target's best token. All four rules are lossless.
            "rejection": drawn from the drafter's distribution; accepted by rejection sampling.
            "block": the same drafts, judged together; accepts at least as many.
            "exact_match": drawn with the noise that the target's sample will be drawn with;
            accepted while they are that sample. A seeded request gets the same tokens as without
            speculation, under this rule and under "strict".
            "strict": the drafter's best tokens; accepted while they are the target's sample.
            Without a network (NGRAM, USER_PROVIDED) drafts have no distribution: the four rules
            are one.

    Raises:
        ConfigError: a value is out of range.
    """

    max_draft_len: int = 4
    max_concurrency: int | None = None
    draft_len_schedule: Mapping[int, int] | Literal["auto"] | None = field(default=None, hash=False)
    max_verified_drafts: int | None = None
    acceptance: str = "rejection"

    mode: ClassVar[SpeculativeDecodingMode]
    decoding_type: ClassVar[str]  # TensorRT-LLM's name
    draft_len_field: ClassVar[str] = "max_draft_len"  # the field that a user gives K in
    least_draft_len: ClassVar[int] = 1  # 0 where that is the drafter's own number
    auto_draft_len: ClassVar[int] = 4  # the most drafts of K = "auto"
    needs_python: ClassVar[str] = ""  # what it takes that a command line cannot give

    def __post_init__(self) -> None:
        self._resolve_auto()
        require_int(self, "max_draft_len", self.least_draft_len, MAX_DRAFT_LEN)
        self._check_common()

    def _resolve_auto(self) -> None:
        """Makes K = "auto" the drafter's usual number, with `draft_len_schedule="auto"`."""
        name = self.draft_len_field
        if "auto" not in (getattr(self, name), self.max_draft_len):
            return
        if self.draft_len_schedule not in (None, "auto"):
            raise ConfigError(
                f"{type(self).__name__}: {name}='auto' chooses K itself; give a number with "
                f"draft_len_schedule={shown(self.draft_len_schedule)}, or leave that out."
            )
        for given in (getattr(self, name), self.max_draft_len):
            if given not in ("auto", 0, getattr(type(self), name)):
                raise ConfigError(
                    f"{type(self).__name__}: {shown(given)} drafts beside 'auto': {name} and "
                    "max_draft_len are the same. Give one of them."
                )
        for each in {name, "max_draft_len"}:
            object.__setattr__(self, each, self.auto_draft_len)
        object.__setattr__(self, "draft_len_schedule", "auto")

    def _check_common(self) -> None:
        """Checks the fields that all decoding configs have, but for K."""
        require_int(self, "max_concurrency", 1, None, or_none=True)
        self._check_schedule()
        require_int(self, "max_verified_drafts", 1, None, or_none=True)
        if self.max_verified_drafts is not None and self.draft_len_schedule == "auto":
            raise ConfigError(
                f"{type(self).__name__}: max_verified_drafts={self.max_verified_drafts} with "
                'draft_len_schedule="auto" is not offered: auto counts what was accepted of all '
                "drafts. Give K as a number, or leave max_verified_drafts out."
            )
        check_choice(f"{type(self).__name__}.acceptance", self.acceptance, ACCEPTANCE_RULES)

    def _check_schedule(self) -> None:
        schedule, most = self.draft_len_schedule, self.max_draft_len or MAX_DRAFT_LEN
        if schedule is None or schedule == "auto":
            return
        is_one = isinstance(schedule, Mapping) and bool(schedule)
        if not is_one or not all(is_int(n, 1) and is_int(k, 0, most) for n, k in schedule.items()):
            raise ConfigError(
                f"{type(self).__name__}.draft_len_schedule={shown(schedule)}: it must be a dict "
                f"from numbers of requests (>= 1) to draft lengths in 0 … {most}, like "
                f'{{4: {min(4, most)}, 8: {min(2, most)}, 32: 1}}, "auto" or None.'
            )
        object.__setattr__(self, "draft_len_schedule", dict(schedule))  # not the caller's

    @property
    def spec_dec_mode(self) -> SpeculativeDecodingMode:
        return self.mode

    @property
    def max_total_draft_tokens(self) -> int:
        """K for a chain; trees are not offered."""
        return self.max_draft_len

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DecodingBaseConfig:
        """Returns the config of these fields; refuses unknown ones by name.

        TensorRT-LLM's `decoding_type` may be among them. It must be this class's; of
        `DecodingBaseConfig` it is needed, and says which class.

        Raises:
            ConfigError: not a mapping, an unknown key, another class's `decoding_type`, a value
                not allowed.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"{cls.__name__}.from_dict({shown(values)}): give a dict of fields.")
        values = dict(values)
        kind = values.pop("decoding_type", None)
        if kind is None and "method" in values:  # vLLM's form, of which the error names ours
            method = str(values["method"])
            kind = METHODS.get(method, method)
        if kind is None and hasattr(cls, "decoding_type"):
            kind = cls.decoding_type
        of_type = {name.lower(): entry for name, entry in CONFIG_OF_TYPE.items()}
        made, implied = of_type.get(str(kind).replace("_", "").lower(), (None, {}))
        if made is None or not issubclass(made, cls):
            mine = [name for name, (of, _) in CONFIG_OF_TYPE.items() if issubclass(of, cls)]
            raise ConfigError(
                f"{cls.__name__}.from_dict: decoding_type={shown(kind)}: it must be "
                f"{', '.join(map(repr, mine))}. Others belong to other classes, or are not here."
            )
        return made_of_dict(made, {**implied, **values}, made.__name__, ("decoding_type",))


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
        max_draft_len: K; a step drafts as many as are worth it, K at most. On one GPU 16, the
            default, is the most: the length of a step chooses itself (decision 019).
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
class HeadDecodingConfig(DecodingBaseConfig, ABC):
    """Base of the configs whose drafter is a head: a network that reads the target's hidden states.

    The engine loads any of them alike, by what the class says of itself.

    Args:
        sa_config: suffix lookup beside the head (`SAEnhancerConfig`); None is without.
        draft_window: each layer of the head sees this many of the last tokens at most, 65 or more;
            0 is all. None is what the head's config.json says (`draft_window`), else all. All keys
            and values are kept, so it changes neither memory nor the prefix cache.
        quant: "fp8" quantises the head's large products as `EngineConfig.quant` does the target's:
            o_proj, the MLP, experts and an lm_head of its own. Drafts take less time and may be a
            little worse; the answers are the target's all the same.
    """

    max_draft_len: int = 0
    speculative_model: str | os.PathLike[str] | None = None
    sa_config: SAEnhancerConfig | SADecodingConfig | None = None
    draft_window: int | None = None
    quant: str | None = None

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
            else 4. With a head of the package on one GPU 0 is that many at most, chosen while
            serving as with "auto", but for steps with seeded requests that depend on K.
        speculative_model: the head's directory, raw or speculators format, or a known name
            ("smollm2-135m-eagle3").
        eagle3_one_model: True drafts inside the target's step (EAGLE3_ONE_MODEL), False in passes
            of its own (EAGLE3), for comparison.
        eagle3_layers_to_capture: target layers whose output the head reads, 0-based; None is what
            the head's config says, else 1, L/2-1 and L-4.
        sa_config, draft_window, quant: suffix lookup beside the head, how far back it sees, and
            how its weights are kept (`HeadDecodingConfig`).
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
            a head of the package 0 is the most on one GPU, and K chooses itself.
        speculative_model: the head's directory, z-lab's or speculators format.
        target_layer_ids: target layers whose output the head reads, 0-based; None is what the
            head's config says.
        sa_config, draft_window, quant: suffix lookup beside the head, how far back it sees, and
            how its weights are kept (`HeadDecodingConfig`).
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
        sa_config, draft_window, quant: suffix lookup beside the head, how far back it sees, and
            how its weights are kept (`HeadDecodingConfig`).
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
