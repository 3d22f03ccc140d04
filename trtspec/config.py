"""Decoding and engine configuration: frozen, validated where it is made.

Class and field names are those of TensorRT-LLM's LLM API. A field that means something only to
an engine we do not have is refused or warned about, never dropped (DESIGN, decision D10).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from .errors import ConfigError, shown
from .metadata.mode import SpeculativeDecodingMode

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
class DecodingBaseConfig:
    """Base of the speculative decoding configs.

    Args:
        max_draft_len: K, draft tokens per generation request and step, >= 1.
        max_concurrency: with more requests than this in a step nothing is drafted; None is no
            such limit. (Verifying K + 1 rows each stops paying in large batches.)
        acceptance: how the drafts of *sampled* requests are made and judged; greedy ones keep a
            draft that is the target's best token. All four are lossless.
            "rejection": drawn from the drafter's distribution; kept by rejection sampling.
            "block": the same drafts, judged together; keeps at least as many.
            "exact_match": drawn with the noise that the target's sample will be drawn with; kept
            while they are that sample. A seeded text is the same as without speculation, for this
            rule and for "strict".
            "strict": the drafter's best tokens; kept while they are the target's sample.
            Drafts from elsewhere than a network (NGRAM, USER_PROVIDED) have no distribution: for
            them the four are one.

    Raises:
        ConfigError: a value is out of range.
    """

    max_draft_len: int = 4
    max_concurrency: int | None = None
    acceptance: str = "rejection"

    mode: ClassVar[SpeculativeDecodingMode]
    decoding_type: ClassVar[str]  # TensorRT-LLM's name

    def __post_init__(self) -> None:
        require_int(self, "max_draft_len", 1, MAX_DRAFT_LEN)
        require_common(self)

    @property
    def spec_dec_mode(self) -> SpeculativeDecodingMode:
        return self.mode

    @property
    def max_total_draft_tokens(self) -> int:
        """K for a chain; trees are not offered."""
        return self.max_draft_len

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DecodingBaseConfig:
        """Builds the config, naming unknown keys instead of dropping them. TensorRT-LLM's
        `decoding_type` may be among them, if it is this class's.

        Raises:
            ConfigError: not a mapping, an unknown key, another class's `decoding_type`, a value
                not allowed.
        """
        if not hasattr(cls, "decoding_type"):
            raise ConfigError("DecodingBaseConfig is no mode's: call from_dict of a config class.")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{cls.__name__}.from_dict({shown(values)}): give a dict of fields.")
        values = dict(values)
        kind = values.pop("decoding_type", None) or cls.decoding_type
        if str(kind).replace("_", "").lower() != cls.decoding_type.lower():
            raise ConfigError(
                f"decoding_type={kind!r} is not {cls.__name__}'s; it must be "
                f"{cls.decoding_type!r}. Use the class it belongs to, or leave it out."
            )
        known = {f.name for f in fields(cls) if f.init}
        unknown = sorted(map(str, set(values) - known))
        if unknown:
            raise ConfigError(
                f"{cls.__name__} has no field {', '.join(unknown)}. Known: "
                f"{', '.join(sorted(known))}."
            )
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class NGramDecodingConfig(DecodingBaseConfig):
    """Prompt lookup: drafts copied from the request's own prompt and output.

    Args:
        max_matching_ngram_size: longest match looked for, tried first.
        min_matching_ngram_size: shortest match that may draft; None is 2, or the maximum if
            that is 1.
        is_use_oldest: among equally long matches take the oldest instead of the newest.
        is_keep_all: TensorRT-LLM's pool keeps every pattern. Ours always can: it searches the
            text itself. False has no effect and warns.
        is_public_pool: TensorRT-LLM's pool may be shared by requests. Ours never is; True has no
            effect and warns.
    """

    max_draft_len: int = 6
    max_matching_ngram_size: int = 4
    min_matching_ngram_size: int | None = None
    is_use_oldest: bool = False
    is_keep_all: bool = True
    is_public_pool: bool = False

    mode: ClassVar[SpeculativeDecodingMode] = SpeculativeDecodingMode.NGRAM
    decoding_type: ClassVar[str] = "NGram"

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
class DraftTargetDecodingConfig(DecodingBaseConfig):
    """A second, smaller model with the same tokenizer drafts inside the target's step.

    Args:
        speculative_model: its HF directory, .gguf file or known name.
        parallel_drafting: all K drafts from one pass, as a PARD model was trained to make them.
            None is whether its config.json has a `pard_token`.
    """

    speculative_model: str | os.PathLike[str] | None = None
    parallel_drafting: bool | None = None

    mode: ClassVar[SpeculativeDecodingMode] = SpeculativeDecodingMode.DRAFT_TARGET
    decoding_type: ClassVar[str] = "DraftTarget"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_path(self, "speculative_model")
        if self.parallel_drafting is not None:
            require_bool(self, "parallel_drafting")


@dataclass(frozen=True, kw_only=True)
class UserProvidedDecodingConfig(DecodingBaseConfig):
    """Drafts come from a `Drafter` on the host. Steps cannot overlap; the executor says so once."""

    drafter: Any = None

    mode: ClassVar[SpeculativeDecodingMode] = SpeculativeDecodingMode.USER_PROVIDED
    decoding_type: ClassVar[str] = "UserProvided"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(getattr(self.drafter, "draft", None)):
            raise ConfigError(
                f"UserProvidedDecodingConfig.drafter={self.drafter!r} has no method "
                "draft(request_id, token_ids, max_draft_len) -> list of token ids."
            )


@dataclass(frozen=True, kw_only=True)
class EagleDecodingConfig(DecodingBaseConfig):
    """An EAGLE-3 (or EAGLE-1) head drafts from the target's hidden states; a P-EAGLE head makes
    all K drafts in one pass.

    Args:
        max_draft_len: K; 0 is what the head was trained for (the speculators format says so),
            else 4.
        speculative_model: the head's directory, raw or speculators format, or a known name
            ("smollm2-135m-eagle3").
        eagle3_one_model: True drafts inside the target's step (EAGLE3_ONE_MODEL), False in passes
            of its own (EAGLE3), for comparison.
        eagle3_layers_to_capture: target layers whose output the head reads, 0-based; None is what
            the head's config says, else 1, L/2-1 and L-4.
    """

    max_draft_len: int = 0
    speculative_model: str | os.PathLike[str] | None = None
    eagle3_one_model: bool = True
    eagle3_layers_to_capture: Sequence[int] | None = None

    mode: ClassVar[SpeculativeDecodingMode] = SpeculativeDecodingMode.EAGLE3_ONE_MODEL
    decoding_type: ClassVar[str] = "Eagle"

    def __post_init__(self) -> None:
        require_int(self, "max_draft_len", 0, MAX_DRAFT_LEN)
        require_common(self)
        require_path(self, "speculative_model")
        require_bool(self, "eagle3_one_model")
        require_layers(self, "eagle3_layers_to_capture")

    @property
    def spec_dec_mode(self) -> SpeculativeDecodingMode:
        if self.eagle3_one_model:
            return SpeculativeDecodingMode.EAGLE3_ONE_MODEL
        return SpeculativeDecodingMode.EAGLE3


@dataclass(frozen=True, kw_only=True)
class MTPDecodingConfig(DecodingBaseConfig):
    """The target's multi-token-prediction layers draft.

    Args:
        num_nextn_predict_layers: K, draft tokens per step; `max_draft_len` is the same and need
            not be given.
        speculative_model: directory with the MTP layers, or a known name ("smollm2-135m-mtp");
            None is the target's own checkpoint.
        use_mtp_vanilla: True is K layers, one for each draft token; False uses the first layer K
            times. None is what the checkpoint's family was trained for (True for Step-3.5), which
            `LLM` looks up. False where that is not known: other families, a worker made alone.
        mtp_eagle_one_model: with one layer, True drafts inside the target's step, False in passes
            of its own (MTP_EAGLE), for comparison.
        mtp_feeds_post_norm: the hidden state fed on is the normed one; None is the family's way.
        use_relaxed_acceptance_for_thinking: between the thinking tokens a greedy request keeps
            drafts that are close to the target's best. Lossy.
        relaxed_topk: such a draft is among that many of the target's best tokens …
        relaxed_delta: … and its probability at most that much below the best one's.
        begin_thinking_phase_token, end_thinking_phase_token: token ids (DeepSeek-R1's by default).
    """

    max_draft_len: int = 0
    num_nextn_predict_layers: int = 1
    speculative_model: str | os.PathLike[str] | None = None
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

    def __post_init__(self) -> None:
        require_int(self, "num_nextn_predict_layers", 1, MAX_DRAFT_LEN)
        require_int(self, "max_draft_len", 0, MAX_DRAFT_LEN)
        for name in ("mtp_eagle_one_model", "use_relaxed_acceptance_for_thinking"):
            require_bool(self, name)
        for name in ("use_mtp_vanilla", "mtp_feeds_post_norm"):
            if getattr(self, name) is not None:
                require_bool(self, name)
        if self.use_mtp_vanilla and not self.mtp_eagle_one_model:
            raise ConfigError(
                "MTPDecodingConfig.mtp_eagle_one_model=False asks for the two-engine form of one "
                "layer used K times, use_mtp_vanilla=True for K layers: give one of them."
            )
        require_common(self)
        if self.max_draft_len == 0:
            object.__setattr__(self, "max_draft_len", self.num_nextn_predict_layers)
        if self.max_draft_len != self.num_nextn_predict_layers:
            raise ConfigError(
                f"MTPDecodingConfig.max_draft_len={self.max_draft_len} differs from "
                f"num_nextn_predict_layers={self.num_nextn_predict_layers}: give only the latter."
            )
        if self.speculative_model is not None:
            require_path(self, "speculative_model")
        require_int(self, "relaxed_topk", 1, 1024)
        require_int(self, "begin_thinking_phase_token", 0, None)
        require_int(self, "end_thinking_phase_token", 0, None)
        if self.begin_thinking_phase_token == self.end_thinking_phase_token:
            raise ConfigError(
                f"MTPDecodingConfig.begin_thinking_phase_token={self.begin_thinking_phase_token} "
                "is also end_thinking_phase_token: give two different tokens."
            )
        delta: Any = self.relaxed_delta
        if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 <= delta <= 1:
            raise ConfigError(
                f"MTPDecodingConfig.relaxed_delta={shown(self.relaxed_delta)} is a difference of "
                "probabilities: it must be in 0 … 1."
            )
        relaxes = self.relaxed_topk > 1 and self.relaxed_delta > 0
        if relaxes != self.use_relaxed_acceptance_for_thinking:
            logger.warning(
                "MTPDecodingConfig: use_relaxed_acceptance_for_thinking=%s with relaxed_topk=%d "
                "and relaxed_delta=%g relaxes nothing: it takes all three (say True, 10, 0.6).",
                self.use_relaxed_acceptance_for_thinking, self.relaxed_topk, self.relaxed_delta,
            )  # fmt: skip

    @property
    def spec_dec_mode(self) -> SpeculativeDecodingMode:
        if self.use_mtp_vanilla:
            return SpeculativeDecodingMode.MTP
        if self.mtp_eagle_one_model:
            return SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL
        return SpeculativeDecodingMode.MTP_EAGLE


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

    def __post_init__(self) -> None:
        require_int(self, "max_draft_len", 0, 0)
        require_common(self)
        if self.acceptance != DecodingBaseConfig.acceptance:
            raise ConfigError(
                f"SaveHiddenStatesDecodingConfig.acceptance={self.acceptance!r}: nothing is "
                "drafted here, so there is nothing to accept. Leave it out."
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


CONFIG_OF_MODE: dict[SpeculativeDecodingMode, type[DecodingBaseConfig]] = {
    SpeculativeDecodingMode.NGRAM: NGramDecodingConfig,
    SpeculativeDecodingMode.DRAFT_TARGET: DraftTargetDecodingConfig,
    SpeculativeDecodingMode.USER_PROVIDED: UserProvidedDecodingConfig,
    SpeculativeDecodingMode.EAGLE3_ONE_MODEL: EagleDecodingConfig,
    SpeculativeDecodingMode.EAGLE3: EagleDecodingConfig,
    SpeculativeDecodingMode.MTP: MTPDecodingConfig,
    SpeculativeDecodingMode.MTP_EAGLE: MTPDecodingConfig,
    SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL: MTPDecodingConfig,
    SpeculativeDecodingMode.SAVE_HIDDEN_STATES: SaveHiddenStatesDecodingConfig,
    SpeculativeDecodingMode.AUTO: AutoDecodingConfig,
}


def resolve_speculative_config(config: DecodingBaseConfig | None) -> DecodingBaseConfig | None:
    """AUTO becomes the config it stands for.

    Raises:
        ConfigError: not a decoding config.
    """
    if config is None:
        return None
    if not isinstance(config, DecodingBaseConfig):
        raise ConfigError(
            f"speculative_config={config!r} is not a decoding config. Use one of "
            f"{', '.join(sorted({c.__name__ for c in CONFIG_OF_MODE.values()}))}, or None."
        )
    if isinstance(config, AutoDecodingConfig):
        return NGramDecodingConfig(
            max_draft_len=config.max_draft_len, max_concurrency=config.max_concurrency,
            acceptance=config.acceptance,
        )  # fmt: skip
    return config


@dataclass(frozen=True, kw_only=True)
class KvCacheConfig:
    """Size of the paged KV cache.

    Args:
        max_tokens: tokens the cache holds over all requests; layers with a sliding window hold no
            more of them than they can see. None derives it: on CUDA from
            `free_gpu_memory_fraction`, on CPU enough for max_batch_size sequences of full length,
            within a quarter of the machine's free memory.
        free_gpu_memory_fraction: share of the GPU memory free after loading weights.
        tokens_per_block: page size.
    """

    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    tokens_per_block: int = 32

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            require_int(self, "max_tokens", 1, None)
        require_int(self, "tokens_per_block", 1, 1024)
        share = self.free_gpu_memory_fraction
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if not is_number or not 0.0 < share <= 1.0:
            raise ConfigError(
                f"KvCacheConfig.free_gpu_memory_fraction={shown(share)}: it must be a number in "
                "(0, 1]."
            )


@dataclass(frozen=True, kw_only=True)
class CudaGraphConfig:
    """Batch sizes for which a generation step is captured as one CUDA graph.

    Args:
        batch_sizes: None is 1, 2, 4, 8 and multiples of 8 up to the engine's max_batch_size.
        enable_padding: a batch between two sizes is filled up to the larger; False runs it
            eagerly.
        capture_at_start: capture the graphs of greedy and of sampled batches when the engine is
            built, the largest first, so that no request waits for it; else each on first use.
        context_tokens: sizes, in tokens, for which a pass over prompts is captured too, beside the
            generations' graph; prompts that fit none run eagerly, with the generations. None is
            64, 128, … 2048 up to the engine's max_num_tokens and to where an H200 computes a layer
            for longer than a host launches it (in bf16 512 tokens for 8 B parameters), if such
            graphs can be had (modes that draft inside the step, but not vanilla MTP or
            SAVE_HIDDEN_STATES; attention in Triton); () is none.
        enable_autotuner: measure, on first use, which of cuBLASLt's algorithms is the fastest for
            each large product of up to 128 rows in a captured step (under a second for a batch
            size, once), and keep the choice in the cache directory. In bf16 and fp16 a captured
            step may then round otherwise than an eager one. False leaves the choice to cuBLAS, as
            in eager steps: the same on all GPUs of a kind.
    """

    batch_sizes: Sequence[int] | None = None
    enable_padding: bool = True
    capture_at_start: bool = False
    context_tokens: Sequence[int] | None = None
    enable_autotuner: bool = True

    def __post_init__(self) -> None:
        require_bool(self, "enable_autotuner")
        require_bool(self, "enable_padding")
        require_bool(self, "capture_at_start")
        for name, allowed in (("batch_sizes", ""), ("context_tokens", "() for none, ")):
            sizes: Any = getattr(self, name)
            if sizes is None:
                continue
            good = isinstance(sizes, Sequence) and not isinstance(sizes, str)
            good = good and (len(sizes) > 0 or name == "context_tokens")
            if not good or any(
                isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes
            ):
                raise ConfigError(
                    f"CudaGraphConfig.{name}={shown(sizes)}: give a list of ints >= 1, {allowed}or "
                    "None."
                )
            object.__setattr__(self, name, tuple(sizes))

    def buckets(self, max_batch_size: int) -> list[int]:
        """The sizes in use, ascending; by default up to max_batch_size exactly."""
        if self.batch_sizes is not None:
            return sorted({min(n, max_batch_size) for n in self.batch_sizes})
        sizes = {1, 2, 4, *range(8, max_batch_size + 1, 8), max_batch_size}
        return sorted(n for n in sizes if n <= max_batch_size)

    def context_sizes(self, max_num_tokens: int, most_worth: int) -> list[int]:
        """The sizes in use of passes over prompts, ascending; by default up to `most_worth`."""
        sizes = self.context_tokens
        if sizes is None:
            sizes = [min(64, max_num_tokens), *(2**i for i in range(7, 12))]
            return [n for n in sizes if n <= min(max_num_tokens, most_worth)]
        return sorted({min(n, max_num_tokens) for n in sizes})


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """What the executor schedules with; resolved once by the builder, never edited."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    enable_chunked_prefill: bool = False
    prefill_batch_size: int = 1
    overlap: bool = True
    cuda_graph: CudaGraphConfig | None = None

    def __post_init__(self) -> None:
        require_int(self, "max_batch_size", 1, None)
        require_int(self, "max_num_tokens", 1, None)
        require_int(self, "max_seq_len", 2, None)
        require_int(self, "prefill_batch_size", 1, self.max_batch_size)


def require_int(config: object, name: str, low: int, high: int | None) -> None:
    value = getattr(config, name)
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < low
        or (high is not None and value > high)
    ):
        allowed = f"an int >= {low}" if high is None else f"an int in {low} … {high}"
        raise ConfigError(f"{type(config).__name__}.{name}={shown(value)}: it must be {allowed}.")


def require_bool(config: object, name: str) -> None:
    value = getattr(config, name)
    if not isinstance(value, bool):
        raise ConfigError(
            f"{type(config).__name__}.{name}={shown(value)}: it must be True or False."
        )


def require_common(config: DecodingBaseConfig) -> None:
    if config.max_concurrency is not None:
        require_int(config, "max_concurrency", 1, None)
    if config.acceptance not in ACCEPTANCE_RULES:
        raise ConfigError(
            f"{type(config).__name__}.acceptance={shown(config.acceptance)}: it must be one of "
            f"{', '.join(ACCEPTANCE_RULES)}."
        )


def require_layers(config: object, name: str) -> None:
    value = getattr(config, name)
    if value is None:
        return
    good = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    if not good or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in value):
        raise ConfigError(
            f"{type(config).__name__}.{name}={shown(value)}: give a list of layer numbers from 0, "
            "or None for the default."
        )
    object.__setattr__(config, name, tuple(value))


def require_path(config: object, name: str) -> None:
    value = getattr(config, name)
    if value is None or not str(value).strip():
        raise ConfigError(f"{type(config).__name__}.{name} is required: give a directory.")
    if not isinstance(value, (str, Path, os.PathLike)):
        raise ConfigError(f"{type(config).__name__}.{name}={value!r} is not a path.")
