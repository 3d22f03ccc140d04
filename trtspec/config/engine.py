"""Engine configs: the arguments of `LLM`, their parts, and what the executor schedules with."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec

from ..checks import are_ints, int_range, is_int, is_number
from ..errors import ConfigError, shown
from ..other_names import NamesFields, unexpected
from .fields import (
    QUANTS,
    check_bool,
    check_choice,
    check_int,
    made_of_dict,
    require_bool,
    require_int,
)

if TYPE_CHECKING:
    import torch

    from .base import DecodingBaseConfig

P = ParamSpec("P")

MAX_BATCH_SIZE = 2**20
"""A sanity bound: no cache holds more requests."""
MAX_RANKS = 1024
RANK_BACKENDS = ("mp", "ray", "torchrun")
KV_CACHE_DTYPES = ("auto", "fp8")
ATTENTION_BACKENDS = ("auto", "torch", "triton", "flashinfer")


@dataclass(frozen=True, kw_only=True)
class KvCacheConfig(NamesFields):
    """Size of the paged KV cache, and how prompts reuse what earlier ones left in it.

    Args:
        max_tokens: tokens the cache holds over all requests; layers with a sliding window hold no
            more of them than they can see. None derives it: on CUDA from
            `free_gpu_memory_fraction`, on CPU enough for max_batch_size sequences of full length,
            within a quarter of the machine's free memory.
        free_gpu_memory_fraction: share of the GPU memory free after loading weights.
        tokens_per_block: page size.
        enable_block_reuse: a prompt takes over blocks of earlier prompts and answers that begin
            with the same tokens (docs/prefix_cache.md).
        enable_partial_reuse: a block that is shared in part is copied, and computed from where
            the two differ; not with linear attention.
        num_state_copies: how many positions of earlier prompts a model with linear attention can go
            on from. Each is a copy of a slot's state, as large as it. None is 4 for each of
            max_batch_size, up to 16. 0 is no prefix cache for such a model.
        dtype: how the target's keys and values are kept. "fp8" (e4m3, with the checkpoint's scales)
            holds twice as many tokens as bfloat16. "auto" is FP8 if the checkpoint was made for it,
            else the model's dtype (docs/kv_cache.md).
    """

    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    tokens_per_block: int = 32
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    num_state_copies: int | None = None
    dtype: str = "auto"

    def __post_init__(self) -> None:
        require_int(self, "max_tokens", 1, None, or_none=True)
        require_int(self, "tokens_per_block", 1, 1024)
        require_bool(self, "enable_block_reuse")
        require_bool(self, "enable_partial_reuse")
        require_int(self, "num_state_copies", 0, None, or_none=True)
        try:
            check_choice("KvCacheConfig.dtype", self.dtype, KV_CACHE_DTYPES)
        except ConfigError as error:
            raise ConfigError(f"{error} 'fp8' is e4m3, the only kind.") from None
        share = self.free_gpu_memory_fraction
        if not is_number(share) or not 0.0 < share <= 1.0:
            raise ConfigError(
                f"KvCacheConfig.free_gpu_memory_fraction={shown(share)}: it must be a number in "
                "(0, 1]."
            )


DEFAULT_CONTEXT_TOKENS = (
    *(8, 64),  # 8: a prompt that the prefix cache knows leaves its last token alone
    *range(128, 1024, 128),
    *range(1024, 2048, 256),
    *(2048, 3072, 4096, 6144, 8192),
)
"""What fills a shape up is computed, so there are many."""


@dataclass(frozen=True, kw_only=True)
class CudaGraphConfig(NamesFields):
    """Batch sizes for which a generation step is captured as one CUDA graph.

    Args:
        batch_sizes: None is 1, 2, 4, 8 and multiples of 8 up to the engine's max_batch_size.
        enable_padding: a batch between two sizes is filled up to the larger; False runs it
            eagerly.
        capture_at_start: capture the graphs of greedy and of sampled batches when the engine is
            built, the largest first, so that no request waits for it; else each on first use. A
            draft length that chooses itself has most of its graphs captured at start anyway.
        context_tokens: sizes, in tokens, for which a pass over prompts is captured too, beside the
            generations' graph. () is none: prompts run eagerly, with the generations. None is 8,
            64, 128, 256, … 1024, 1280, … 2048, 3072, … 8192, up to the engine's max_num_tokens and
            with it. It ends where an H200 computes a layer for longer than a host launches it: for
            8 B parameters at 1024 tokens in bf16, 2048 in FP8. Prompts of more rows than that run
            eagerly, too. Others that fit none of the sizes are cut, for up to 8 passes. Such graphs
            need attention in Triton. They need a mode that drafts inside the step, but not vanilla
            MTP or SAVE_HIDDEN_STATES.
        enable_autotuner: measure which of cuBLASLt's algorithms is the fastest for each large
            product of up to 128 rows in a captured step. That is done on first use, once, in under
            a second for a batch size. The choice is kept in the cache directory. In bf16 and fp16 a
            captured step may then round otherwise than an eager one. False leaves the choice to
            cuBLAS, as in eager steps: the same on all GPUs of a kind.
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
            sizes = getattr(self, name)
            if sizes is None:
                continue
            if not are_ints(sizes, 1) or not (len(sizes) > 0 or name == "context_tokens"):
                raise ConfigError(
                    f"CudaGraphConfig.{name}={shown(sizes)}: give a list of ints >= 1, {allowed}or "
                    "None."
                )
            object.__setattr__(self, name, tuple(sizes))

    def buckets(self, max_batch_size: int) -> list[int]:
        """Returns the batch sizes in use, ascending; by default up to max_batch_size exactly."""
        if self.batch_sizes is not None:
            return sorted({min(n, max_batch_size) for n in self.batch_sizes})
        sizes = {1, 2, 4, *range(8, max_batch_size + 1, 8), max_batch_size}
        return sorted(n for n in sizes if n <= max_batch_size)

    def context_sizes(self, max_num_tokens: int, most_worth: int) -> list[int]:
        """Returns the sizes of captured passes over prompts, ascending; by default up to
        `most_worth`."""
        sizes = self.context_tokens
        if sizes is None:
            largest = min(max_num_tokens, DEFAULT_CONTEXT_TOKENS[-1])
            default = {*DEFAULT_CONTEXT_TOKENS, largest}
            return sorted(n for n in default if n <= min(largest, most_worth))
        return sorted({min(n, max_num_tokens) for n in sizes})


DEFAULT_CUDA_GRAPHS = CudaGraphConfig()


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is made from: the arguments of `LLM`, with their defaults.

    This is their one definition: `LLM`, `build_executor` and the command line read it.

    Args:
        model: HF directory, .gguf file or a known name ("smollm2-135m").
        speculative_config: a decoding config, a dict of its fields with TensorRT-LLM's
            `decoding_type` ("NGram", "Eagle3", …), or None for plain decoding.
        device: "auto" (CUDA where there is one), "cpu" or "cuda".
        dtype: "auto" (the checkpoint's; float32 on a CPU without bfloat16 instructions; bfloat16
            for weights of 4 bits in float16, where they stay so in that alone), "float32",
            "bfloat16", on CUDA also "float16".
        quant: "fp8" quantises the weights of the layers' products to e4m3 with a scale for each
            row, as they are loaded; FP8 weights stay as they are. On the CPU they are floats with
            FP8's values. None leaves all weights as the checkpoint has them.
        max_batch_size: requests that run at the same time.
        max_num_tokens: token rows in one pass; default: one full sequence, or a full batch. On
            one GPU at least 8192 with a small model, of which graphs read as many at once.
        max_seq_len: prompt and output together; default: the model's, at most 8192.
        kv_cache_config: size of the KV cache; it and cuda_graph_config may be dicts of fields.
        enable_chunked_prefill: prompts may be computed in pieces, beside generation.
        prefill_batch_size: while requests generate, new prompts wait until this many slots are
            free. For throughput: fewer steps are slowed by prompts. 1 starts each at once. "auto"
            lets them wait where more wait than slots are free, until the slots have been free for
            as long as a pass over prompts delays all others. For GPUs, where such a pass takes
            about a step, or half of one with the generations in it. None is "auto" in an `LLM` on
            CUDA, else 1.
        disable_overlap_scheduler: None overlaps the host's work with the device's on CUDA and not
            on CPU, where there is nothing to overlap; True and False decide.
        cuda_graph_config: on CUDA a generation step is one graph; None runs it eagerly.
        attn_backend: "auto" ("triton" on CUDA, else torch's operations), "torch" or, on
            CUDA, "triton" or "flashinfer". The last compiles a kernel when a shape is first used,
            for which it needs nvcc.
        tensor_parallel_size: GPUs that the model is cut over, one process each
            (docs/several_gpus.md). None is 1, or under torchrun all that it started.
        moe_expert_parallel_size: over how many of them the experts of a mixture are dealt out; the
            rest cut each expert's width. It divides tensor_parallel_size.
        enable_attention_dp: each rank has all heads, and keeps keys and values of some requests.
            For latent attention, and for fewer KV heads than ranks, which all would keep otherwise.
            `KvCacheConfig.max_tokens` is then of each rank.
        backend: "mp" starts those processes on this machine, "ray" on the hosts of a Ray cluster,
            "torchrun" has started them. None, and TensorRT-LLM's "pytorch", is "torchrun" where
            torchrun is at work, else "mp".
        pipeline_parallel_size: only 1.
        guided_masked_drafts: how many drafts of a step follow the grammar, the first ones.
            The host writes their masks while a drafter's passes run. None is all. No output
            changes but that of seeded requests under "rejection" and "block".

    Raises:
        ConfigError: a value is of the wrong type, or out of a range that no model widens.
    """

    model: str | os.PathLike[str]
    speculative_config: DecodingBaseConfig | None = None
    device: str | torch.device = field(default="auto", metadata={"help": "auto, cpu or cuda."})
    dtype: str | torch.dtype = field(
        default="auto", metadata={"help": "auto, float32 or bfloat16."}
    )
    _: KW_ONLY
    quant: str | None = field(
        default=None, metadata={"help": "fp8: quantise the layers' weights at load."}
    )
    max_batch_size: int = field(default=16, metadata={"help": "Most requests decoded together."})
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    kv_cache_config: KvCacheConfig | None = None
    enable_chunked_prefill: bool = False
    prefill_batch_size: int | Literal["auto"] | None = None
    disable_overlap_scheduler: bool | None = None
    cuda_graph_config: CudaGraphConfig | None = DEFAULT_CUDA_GRAPHS
    attn_backend: str = field(
        default="auto", metadata={"help": "auto, torch, triton or flashinfer."}
    )
    tensor_parallel_size: int | None = field(
        default=None,
        metadata={
            "help": "GPUs that the model is cut over. Default: 1; under torchrun all it started."
        },
    )
    moe_expert_parallel_size: int = field(
        default=1, metadata={"help": "Over how many of them experts are dealt out."}
    )
    enable_attention_dp: bool = False
    backend: str | None = None
    pipeline_parallel_size: int = 1
    guided_masked_drafts: int | None = None

    def __post_init__(self) -> None:
        if self.speculative_config is not None:
            from .modes import resolve_speculative_config

            resolved = resolve_speculative_config(self.speculative_config)
            object.__setattr__(self, "speculative_config", resolved)
        self._make_part("kv_cache_config", KvCacheConfig)
        self._make_part("cuda_graph_config", CudaGraphConfig)
        check_choice("quant", self.quant, QUANTS, or_none=True)
        check_int("max_batch_size", self.max_batch_size, 1, MAX_BATCH_SIZE)
        check_int("max_num_tokens", self.max_num_tokens, 1, None, or_none=True)
        if self.prefill_batch_size is not None:
            check_prefill(self.prefill_batch_size, self.max_batch_size)
        check_bool("enable_chunked_prefill", self.enable_chunked_prefill)
        check_bool("disable_overlap_scheduler", self.disable_overlap_scheduler, or_none=True)
        check_choice("attn_backend", self.attn_backend, ATTENTION_BACKENDS)
        check_int("guided_masked_drafts", self.guided_masked_drafts, 0, None, or_none=True)
        self._check_ranks()

    def _make_part(self, name: str, part: type[KvCacheConfig] | type[CudaGraphConfig]) -> None:
        """Makes a dict of fields the config it stands for. Raises ConfigError for what is none."""
        value = getattr(self, name)
        if isinstance(value, Mapping):
            object.__setattr__(self, name, made_of_dict(part, value, name))
        elif value is not None and not isinstance(value, part):
            raise ConfigError(
                f"{name}={shown(value)}: give a {part.__name__}, a dict of its fields, or None."
            )

    def _check_ranks(self) -> None:
        check_int("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_RANKS, or_none=True)
        check_bool("enable_attention_dp", self.enable_attention_dp)
        spec = self.speculative_config
        if self.enable_attention_dp and spec is not None and spec.max_verified_drafts is not None:
            raise ConfigError(
                f"{type(spec).__name__}.max_verified_drafts={spec.max_verified_drafts} with "
                "enable_attention_dp is not offered. Leave one of them out."
            )
        check_int("moe_expert_parallel_size", self.moe_expert_parallel_size, 1, MAX_RANKS)
        if self.backend == "pytorch":  # TensorRT-LLM's name for its runtime of this kind
            object.__setattr__(self, "backend", None)
        if self.backend not in (*RANK_BACKENDS, None):
            raise ConfigError(
                f"backend={shown(self.backend)}: it says how ranks are started. Use "
                f"{', '.join(map(repr, RANK_BACKENDS))} or None."
            )
        if self.pipeline_parallel_size != 1:
            raise ConfigError(
                f"pipeline_parallel_size={shown(self.pipeline_parallel_size)}: a step is one graph "
                "on every rank, which stages after one another would break up. Use "
                "tensor_parallel_size and moe_expert_parallel_size."
            )

    @property
    def kv_cache(self) -> KvCacheConfig:
        """The cache's config, the default one where none was given."""
        return self.kv_cache_config or KvCacheConfig()


ENGINE_ARGUMENTS = {argument.name: argument for argument in fields(EngineConfig)}
"""Defaults and short help (`metadata["help"]`) of those that a command line offers."""


def takes_fields_of(
    record: Callable[P, Any],
) -> Callable[[Callable[[Any, Any], None]], Callable[Concatenate[Any, P], None]]:
    """Decorates a constructor that takes a record, which then takes the record's fields.

    Names, order, defaults and types stay the record's, for callers, type checkers and `help`.
    """

    def decorate(init: Callable[[Any, Any], None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(init)
        def wrapper(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, _make(record, init.__qualname__, *args, **kwargs))

        parameters = inspect.signature(record).parameters.values()
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        wrapper.__signature__ = inspect.Signature([itself, *parameters])  # type: ignore[attr-defined]
        wrapper.__doc__ = record.__doc__
        return wrapper

    return decorate


def _make(record: Callable[P, Any], caller: str, /, *args: P.args, **kwargs: P.kwargs) -> Any:
    """Returns the record. An argument that it does not have is the caller's mistake, by name."""
    try:
        return record(*args, **kwargs)
    except TypeError as error:
        ours = f"{getattr(record, '__name__', '')}.__init__()"
        if not str(error).startswith(ours):
            raise
        known = inspect.signature(record).parameters
        name = next((name for name in kwargs if name not in known), None)
        if name is not None:
            raise unexpected(caller, name, known) from None
        raise TypeError(str(error).replace(ours, f"{caller}()", 1)) from None


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """What the executor schedules with: sizes that the builder settled."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    enable_chunked_prefill: bool = False
    prefill_batch_size: int | Literal["auto"] = 1
    overlap: bool = True
    cuda_graph: CudaGraphConfig | None = None
    guided_masked_drafts: int | None = None

    def __post_init__(self) -> None:
        require_int(self, "max_batch_size", 1, None)
        require_int(self, "max_num_tokens", 1, None)
        require_int(self, "max_seq_len", 2, None)
        check_prefill(self.prefill_batch_size, self.max_batch_size)


def check_prefill(size: object, most: int) -> None:
    """Raises ConfigError unless it is "auto" or a number of slots."""
    if size != "auto" and not is_int(size, 1, most):
        raise ConfigError(
            f'prefill_batch_size={shown(size)}: it must be {int_range(1, most)}, or "auto".'
        )
