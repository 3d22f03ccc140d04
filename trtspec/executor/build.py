"""From names and configs to a running executor: the one place that knows models and workers."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from dataclasses import replace
from pathlib import Path

import torch

from ..attention.base import AttentionBackend
from ..attention.torch_sdpa import TorchAttention
from ..checkpoints.heads.config import MIN_LAYERS_FOR_DEFAULT, default_layers_to_capture
from ..checkpoints.heads.load import load_head
from ..checkpoints.tokenizer import load_tokenizer, token_problem
from ..checkpoints.weights import finish, load_decoder
from ..checkpoints.zoo import resolve_model
from ..config import (
    CudaGraphConfig,
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    ExecutorConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    SaveHiddenStatesDecodingConfig,
    resolve_speculative_config,
)
from ..data.hidden_states import HiddenStatesWriter
from ..errors import ConfigError, shown
from ..metadata.attention import NUM_RESERVED_BLOCKS
from ..metadata.mode import SpeculativeDecodingMode
from ..models.config import DecoderConfig
from ..models.decoder import Decoder, keep_kv_finite
from ..models.drafters.base import DraftHead
from ..state.kv_cache import KVCacheManager
from ..workers import create_worker
from .cache_size import CacheNeeds, longest_text, size_cache
from .mask_token import find_mask_token
from .py_executor import PyExecutor
from .runner import DraftVocab, EngineParts, StepRunner
from .saving import HiddenStatesSaver

logger = logging.getLogger(__name__)

DEFAULT_MAX_SEQ_LEN = 8192
DEFAULT_DRAFT_LEN = 4
MAX_BATCH_SIZE = 2**20
"""A sanity bound: no cache holds so many requests."""
DEFAULT_CUDA_GRAPHS = CudaGraphConfig()
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_device(device: str | torch.device) -> torch.device:
    """ "auto" is CUDA where there is one. Raises ConfigError for a device that is not here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r}: use 'auto', 'cpu' or 'cuda'.") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}: use 'auto', 'cpu' or 'cuda'.")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda', but torch sees no CUDA device. Use device='cpu'.")
    if resolved.type == "cuda" and resolved.index not in (None, torch.cuda.current_device()):
        raise ConfigError(
            f"device={device!r} is not the current device, on which kernels are launched: call "
            f"torch.cuda.set_device({resolved.index}) first, or set CUDA_VISIBLE_DEVICES="
            f"{resolved.index} and use device='cuda'."
        )
    return resolved


def resolve_dtype(
    dtype: str | torch.dtype, config: DecoderConfig, device: torch.device
) -> torch.dtype:
    """ "auto" is the checkpoint's dtype, but float32 for bfloat16 on a CPU without instructions for
    it, where bfloat16 is the slower one. Raises ConfigError for one that is not supported."""
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        name = config.dtype
        if name == "bfloat16" and device.type == "cpu" and not _multiplies_bfloat16():
            logger.info("This CPU multiplies float32 faster than bfloat16: dtype is float32.")
            name = "float32"
    allowed = [n for n in _DTYPES if device.type == "cuda" or n != "float16"]
    if name not in allowed:
        raise ConfigError(
            f"dtype={name!r} on {device.type}: use one of {', '.join(['auto', *allowed])}."
        )
    return _DTYPES[name]


def _multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for it. Other than x86-64 counts as one that has."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return bool(torch.cpu._is_avx512_bf16_supported())


def build_executor(
    model: str | os.PathLike[str],
    speculative_config: DecodingBaseConfig | None = None,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    max_batch_size: int = 16,
    max_num_tokens: int | None = None,
    max_seq_len: int | None = None,
    kv_cache_config: KvCacheConfig | None = None,
    enable_chunked_prefill: bool = False,
    prefill_batch_size: int = 1,
    disable_overlap_scheduler: bool | None = None,
    cuda_graph_config: CudaGraphConfig | None = DEFAULT_CUDA_GRAPHS,
    attn_backend: str = "auto",
) -> PyExecutor:
    """Loads the models and sizes the cache. Arguments as in `LLM`.

    Raises:
        ConfigError, CheckpointError: before anything is served.
    """
    from ..checkpoints.hf_config import load_config

    speculative_config = resolve_speculative_config(speculative_config)
    kv_cache_config = KvCacheConfig() if kv_cache_config is None else kv_cache_config
    if not isinstance(kv_cache_config, KvCacheConfig):
        raise ConfigError(f"kv_cache_config={kv_cache_config!r}: give a KvCacheConfig.")
    require_batch(max_batch_size)
    _require_flag("enable_chunked_prefill", enable_chunked_prefill)
    if disable_overlap_scheduler is not None:
        _require_flag("disable_overlap_scheduler", disable_overlap_scheduler, "True, False or None")
    where = resolve_device(device)
    if isinstance(speculative_config, SaveHiddenStatesDecodingConfig):
        directory = Path(speculative_config.output_directory or "")
        if directory.exists() and not directory.is_dir():
            raise ConfigError(f"output_directory={str(directory)!r} is a file: give a directory.")
    target_dir = resolve_model(model)
    config = load_config(target_dir)
    limits, draft_dir = [config], None  # a head covers its target's positions, whatever it says
    if isinstance(speculative_config, DraftTargetDecodingConfig):
        assert speculative_config.speculative_model is not None
        draft_dir = resolve_model(speculative_config.speculative_model)
        limits.append(load_config(draft_dir))
    seq_len = _sequence_length(max_seq_len, limits)
    # With M-RoPE a text's positions may run ahead of its length: those tables stay whole.
    num_positions = None if config.rope_parameters.get("mrope_section") else seq_len
    torch_dtype = resolve_dtype(dtype, config, where)
    backend = _attention_backend(attn_backend, where)
    try:
        target = load_decoder(target_dir, torch_dtype, where, backend, num_positions=num_positions)
    except torch.OutOfMemoryError as error:
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(where))
        raise ConfigError(
            f"GPU memory ran out while {target_dir} was loaded in {torch_dtype}: {free:.1f} of "
            f"{total:.1f} GiB are free. Free some, or use a smaller model or dtype."
        ) from error
    draft_model: Decoder | DraftHead | None = None
    capture: tuple[int, ...] = ()
    if isinstance(speculative_config, MTPDecodingConfig):
        _check_thinking_tokens(speculative_config, config.vocab_size)
    if draft_dir is not None:
        draft_model = _load_draft_model(
            draft_dir, target_dir, config, torch_dtype, where, backend,
            first_group=len(target.kv_group_specs(torch_dtype)), num_positions=num_positions,
        )  # fmt: skip
    elif isinstance(speculative_config, EagleDecodingConfig | MTPDecodingConfig):
        head = _load_head(
            speculative_config, target, target_dir, torch_dtype, where, backend, num_positions
        )
        if speculative_config.max_draft_len == 0:
            draft_len = head.config.suggested_draft_len or DEFAULT_DRAFT_LEN
            speculative_config = replace(speculative_config, max_draft_len=draft_len)
        if isinstance(speculative_config, MTPDecodingConfig):
            speculative_config = _settle_mtp_layers(speculative_config, head)
        draft_model, capture = head, head.layers_to_capture
    elif isinstance(speculative_config, SaveHiddenStatesDecodingConfig):
        capture = _layers_to_save(speculative_config, config)
    worker = create_worker(speculative_config, find_mask_token(speculative_config, draft_model))

    rows = worker.max_draft_len + 1
    specs = [
        spec
        for model in (target, draft_model)
        if model is not None
        for spec in model.kv_group_specs(torch_dtype)
    ]
    page_size = kv_cache_config.tokens_per_block
    needs = CacheNeeds(
        max_batch_size, seq_len, max_num_tokens if isinstance(max_num_tokens, int) else None,
        rows, worker.num_extra_kv_tokens, worker.num_rewritten_tokens, page_size,
    )  # fmt: skip
    num_blocks = size_cache(kv_cache_config, specs, needs, where)
    held = (min(num_blocks) - NUM_RESERVED_BLOCKS) * page_size
    if max_batch_size > held:
        raise ConfigError(
            f"max_batch_size={max_batch_size}, but the KV cache holds {held} tokens, of which each "
            "request that runs needs one at least. Lower it, or raise KvCacheConfig.max_tokens."
        )
    capacity = longest_text(num_blocks, specs, needs)
    if capacity < seq_len:
        logger.warning(
            "The KV cache holds %d tokens: max_seq_len is lowered from %d to that.",
            capacity,
            seq_len,
        )
        seq_len = capacity
    if max_num_tokens is None:
        max_num_tokens = max(seq_len, max_batch_size * rows)
    if not isinstance(max_num_tokens, int) or max_num_tokens < max_batch_size * rows:
        raise ConfigError(
            f"max_num_tokens={shown(max_num_tokens)} is below max_batch_size * (K + 1) = "
            f"{max_batch_size} * {rows}: a full batch could not take a step. Raise it, or lower "
            "max_batch_size."
        )
    max_num_tokens = min(max_num_tokens, max_batch_size * (seq_len + rows))  # a pass has no more
    overlap = (
        where.type == "cuda" if disable_overlap_scheduler is None else not disable_overlap_scheduler
    )
    mode = (
        SpeculativeDecodingMode.NONE
        if speculative_config is None
        else speculative_config.spec_dec_mode
    )
    executor_config = ExecutorConfig(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=seq_len,
        enable_chunked_prefill=enable_chunked_prefill,
        prefill_batch_size=prefill_batch_size,
        overlap=overlap,
        cuda_graph=_graph_config(cuda_graph_config, backend, where, mode),
    )
    kv_cache = KVCacheManager(specs, num_blocks, page_size, where)
    saver = None
    if isinstance(speculative_config, SaveHiddenStatesDecodingConfig):
        assert speculative_config.output_directory is not None
        writer = HiddenStatesWriter(
            speculative_config.output_directory, capture, config.hidden_size, torch_dtype,
            speculative_config.tokens_per_file, _fingerprint(target),
        )  # fmt: skip
        saver = HiddenStatesSaver(writer, config.hidden_size)
    parts = EngineParts(
        target=target,
        worker=worker,
        draft_model=draft_model,
        draft_vocab=_draft_vocab(draft_model, config.vocab_size),
        kv_cache=kv_cache,
        mode=mode,
        device=where,
        layers_to_capture=capture,
    )
    executor = PyExecutor(StepRunner(parts, executor_config), executor_config, saver)
    forced = executor.forced_acceptance
    if forced is not None:
        logger.warning(
            "Forced acceptance is on: %g draft tokens per step (bonus not counted) are accepted "
            "whatever the target says. The text is not the model's.",
            forced,
        )
    return executor


def _attention_backend(name: str, device: torch.device) -> AttentionBackend:
    """ "auto" is Triton's kernel on CUDA, where triton is installed, else torch's operations.

    Raises:
        ConfigError: the name is unknown, or what it asks for cannot run here.
    """
    if name not in ("auto", "torch", "triton", "flashinfer"):
        raise ConfigError(f"attn_backend={name!r}: use 'auto', 'torch', 'triton' or 'flashinfer'.")
    asked = name
    if name == "auto":  # the one place where auto's choice is made
        name = "triton" if device.type == "cuda" else "torch"
    if name == "torch":
        return TorchAttention()
    if device.type != "cuda":
        raise ConfigError(f"attn_backend={name!r} needs device='cuda'; on CPU use 'torch'.")
    try:
        from ..attention.paged import TritonAttention
    except ImportError as error:
        if asked != "auto":
            raise ConfigError(
                f"attn_backend={name!r} needs the package triton ({error}): pip install "
                "'trtspec[cuda]', or use attn_backend='torch'."
            ) from error
        logger.warning("triton is not installed: attention runs in torch, without CUDA graphs.")
        return TorchAttention()
    if name == "flashinfer":
        from ..attention.flashinfer import FlashInferAttention

        return FlashInferAttention(device)
    return TritonAttention()


def _graph_config(
    config: CudaGraphConfig | None, backend: AttentionBackend, device: torch.device,
    mode: SpeculativeDecodingMode,
) -> CudaGraphConfig | None:  # fmt: skip
    """Graphs need attention whose lengths come from the device; those of prompts also a drafter
    that asks the host for no prompt's length, and nothing between the step and the next."""
    if config is not None and not isinstance(config, CudaGraphConfig):
        raise ConfigError(f"cuda_graph_config={config!r}: give a CudaGraphConfig, or None.")
    if device.type != "cuda" or not backend.lengths_on_device:
        return None
    asks_host = mode.is_mtp_vanilla() or mode.is_save_hidden_states()
    apart = mode.drafts_in_passes() or mode.drafts_on_host()
    unserved = asks_host or apart or not backend.contexts_on_device
    if config is not None and unserved:
        if config.context_tokens:
            logger.warning(
                "CudaGraphConfig.context_tokens has no effect: mode %s with attention in %s runs "
                "prompts eagerly.", mode.name, backend.name,
            )  # fmt: skip
        return replace(config, context_tokens=())
    return config


def require_batch(max_batch_size: int) -> None:
    if (
        isinstance(max_batch_size, bool)
        or not isinstance(max_batch_size, int)
        or not 1 <= max_batch_size <= MAX_BATCH_SIZE
    ):
        raise ConfigError(
            f"max_batch_size={shown(max_batch_size)}: it must be an int in 1 … {MAX_BATCH_SIZE}."
        )


def _require_flag(name: str, value: object, allowed: str = "True or False") -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)}: it must be {allowed}.")


def _load_draft_model(
    draft_dir: Path,
    target_dir: Path,
    target: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
    first_group: int,
    num_positions: int | None,
) -> Decoder:
    """The draft model, once its tokens are known to be the target's."""
    from ..checkpoints.hf_config import load_config

    tokenizers = load_tokenizer(draft_dir), load_tokenizer(target_dir)
    problem = token_problem(load_config(draft_dir).vocab_size, target.vocab_size, *tokenizers)
    if problem:
        raise ConfigError(problem)
    draft = load_decoder(
        draft_dir, dtype, device, backend, kv_group=first_group, pack=False,
        num_positions=num_positions,
    )  # fmt: skip
    draft.keep_logits(target.vocab_size)
    finish(draft, device)
    keep_kv_finite(draft)
    return draft


def _load_head(
    spec: EagleDecodingConfig | MTPDecodingConfig,
    target: Decoder,
    target_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
    num_positions: int | None,
) -> DraftHead:
    """The EAGLE head or MTP layers, which may be in the target's checkpoint. Their KV groups come
    after the target's."""
    head_dir = Path(target_dir if spec.speculative_model is None else spec.speculative_model)
    first_group = len(target.kv_group_specs(dtype))
    if isinstance(spec, EagleDecodingConfig):
        return load_head(
            head_dir, target, dtype, device, backend, kv_group=first_group, kind="eagle",
            layers_to_capture=spec.eagle3_layers_to_capture, num_positions=num_positions,
        )  # fmt: skip
    head = load_head(
        head_dir, target, dtype, device, backend, kv_group=first_group, kind="mtp",
        num_mtp_layers=spec.max_draft_len,
        layer_per_draft=spec.use_mtp_vanilla if spec.mtp_eagle_one_model else False,
        norm_output=spec.mtp_feeds_post_norm, num_positions=num_positions,
    )  # fmt: skip
    for name, defaults in (("use_mtp_vanilla", (None, False)), ("mtp_feeds_post_norm", (None,))):
        if not head.advances_positions and getattr(spec, name) not in defaults:
            raise ConfigError(
                f"MTPDecodingConfig.{name}={getattr(spec, name)!r} is about MTP layers; "
                f"{head_dir} is a {head.config.format}, which drafts every token alike. Leave it "
                "out."
            )
    return head


def _draft_vocab(draft_model: Decoder | DraftHead | None, target_vocab_size: int) -> DraftVocab:
    if isinstance(draft_model, DraftHead):
        size = min(draft_model.config.draft_vocab_size, target_vocab_size)
        return DraftVocab(size=size, d2t=draft_model.d2t)
    if draft_model is not None:  # a draft model, whose logits are cut to the target's tokens
        return DraftVocab(size=min(draft_model.config.vocab_size, target_vocab_size))
    return DraftVocab(size=target_vocab_size)


def _settle_mtp_layers(spec: MTPDecodingConfig, head: DraftHead) -> MTPDecodingConfig:
    """`use_mtp_vanilla` as the head was loaded; tells which of its layers do not draft."""
    used, there = head.num_layers, head.config.num_mtp_layers
    if not there:  # an assistant, all of whose layers make every draft
        return spec
    if used > 1 and spec.use_mtp_vanilla is None:
        spec = replace(spec, use_mtp_vanilla=True)
    if used < there:
        unused = ", ".join(map(str, range(used, there)))
        logger.warning(
            "Of the checkpoint's %d MTP layers, counted from 0, %s draft nothing. To have each of "
            "them draft a token: MTPDecodingConfig(num_nextn_predict_layers=%d, "
            "use_mtp_vanilla=True). `trtspec doctor` compares that with the first layer alone.",
            there, unused, there,
        )  # fmt: skip
    return spec


def _layers_to_save(spec: SaveHiddenStatesDecodingConfig, config: DecoderConfig) -> tuple[int, ...]:
    asked = spec.eagle3_layers_to_capture
    if asked is None and config.num_layers < MIN_LAYERS_FOR_DEFAULT:
        raise ConfigError(
            f"The default capture (layers 1, L/2-1, L-4) needs {MIN_LAYERS_FOR_DEFAULT} layers; "
            f"the model has {config.num_layers}. Give eagle3_layers_to_capture."
        )
    layers = default_layers_to_capture(config.num_layers) if asked is None else tuple(asked)
    if not all(0 <= layer < config.num_layers for layer in layers):
        raise ConfigError(
            f"Layers {list(layers)} cannot be captured of a model of {config.num_layers}: give "
            f"eagle3_layers_to_capture in 0 … {config.num_layers - 1}."
        )
    return layers


def _fingerprint(target: Decoder) -> str:
    """Tells one target's weights from another's: a hash of its sizes and some of its embedding."""
    rows = target.embed_tokens.weight[:64].float().cpu().numpy().tobytes()
    sizes = f"{target.config.num_layers} {target.config.vocab_size} {target.config.hidden_size}"
    return hashlib.sha256(sizes.encode() + rows).hexdigest()[:16]


def _check_thinking_tokens(spec: MTPDecodingConfig, vocab_size: int) -> None:
    for name in ("begin_thinking_phase_token", "end_thinking_phase_token"):
        if spec.use_relaxed_acceptance_for_thinking and getattr(spec, name) >= vocab_size:
            raise ConfigError(
                f"MTPDecodingConfig.{name}={getattr(spec, name)} is not in the model's vocabulary "
                f"0 … {vocab_size - 1}: give the model's own thinking tokens."
            )


def _sequence_length(asked: int | None, configs: list[DecoderConfig]) -> int:
    """Prompt and output together. Never past what any of the models has positions for."""
    limit = configs[0].max_position_embeddings
    if asked is None:
        length = min(limit, DEFAULT_MAX_SEQ_LEN)
    elif isinstance(asked, bool) or not isinstance(asked, int) or not 2 <= asked <= limit:
        raise ConfigError(
            f"max_seq_len={shown(asked)}: it must be an int in 2 … {limit}, the model's "
            "max_position_embeddings."
        )
    else:
        length = asked
    for config in configs[1:]:
        if config.max_position_embeddings < length:
            logger.warning(
                "The draft model has %d positions: max_seq_len is lowered from %d to that.",
                config.max_position_embeddings,
                length,
            )
            length = config.max_position_embeddings
    return length
