"""Builds an executor from an `EngineConfig`: loads models, sizes the cache, makes the runner."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..attention.base import AttentionBackend
from ..checkpoints.families.long_rope import LONG_ROPE
from ..checkpoints.hf_config import load_config
from ..checkpoints.kv_scales import load_kv_scales, says_fp8
from ..checkpoints.place import LoadOptions, weight_form
from ..checkpoints.weights import load_decoder
from ..checkpoints.zoo import resolve_model
from ..checks import is_int
from ..config import CudaGraphConfig, EngineConfig, ExecutorConfig, UserProvidedDecodingConfig
from ..distributed.agree import all_or_none, building, minimum_of_ranks
from ..distributed.launch import torchrun_size
from ..distributed.link import EngineLink
from ..distributed.parallel import ONE_RANK, Parallel
from ..distributed.start import open_world, opening
from ..errors import ConfigError, shown
from ..metadata.mode import SpeculativeDecodingMode
from ..models.config import DecoderConfig
from ..models.decoder import Decoder
from ..models.drafters.clustered_head import ClusteredHead
from ..models.gated_delta import bytes_of_memory
from ..models.kv_layout import with_scales
from ..ops.layer.fp8 import FP8
from ..state.kv_cache import KVCacheManager, KVGroupSpec, PrefixReuse
from ..utils import renamed
from ..workers import create_worker
from ..workers.base import SpecWorkerBase
from .cache_size import CacheNeeds, longest_sequence, size_cache
from .cuda_graphs.context_inputs import most_worth_capturing
from .device import attention_backend, kv_cache_dtype, resolve_device, resolve_dtype
from .drafters import DrafterLoader, LoadedDrafter, LoadedTarget, drafter_loader
from .linked_cache import LinkedKVCache, OwnedKVCache
from .py_executor import PyExecutor
from .ranks import LeadingRunner, engine_variables
from .runner import EngineParts, StepRunner
from .saving import HiddenStatesSaver

logger = logging.getLogger(__name__)

MOST_STATE_COPIES, STATE_COPIES_A_SLOT = 16, 4
"""Unless `KvCacheConfig.num_state_copies` says otherwise."""

DEFAULT_MAX_SEQ_LEN = 8192
GRAPH_ROWS = 8192
"""Where graphs serve prompts, a pass has room by default for the rows that are worth a graph, this
many at most: many short prompts of a small model cost little more than one."""

__all__ = ["build_executor", "resolve_device", "resolve_dtype"]


def build_executor(
    engine: EngineConfig | str | os.PathLike[str], *old_arguments: Any, **old_options: Any
) -> PyExecutor:
    """Returns an executor: models loaded, the cache sized, nothing running.

    Args:
        old_arguments, old_options: deprecated; the record's other fields, if the first argument is
            a model.

    Raises:
        ConfigError, CheckpointError: before anything is served.
    """
    if not isinstance(engine, EngineConfig):
        message = "build_executor(model, …) is deprecated: call build_executor(EngineConfig(…))."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        engine = EngineConfig(engine, *old_arguments, **old_options)
    device = resolve_device(engine.device)
    num_ranks, launcher = _ranks(engine)
    if num_ranks == 1:
        return _executor(*build_runner(engine, device, None))
    with opening:
        world = open_world(num_ranks, launcher, device)
        if not world.is_leader:  # of a script that torchrun runs on every rank
            from .follower import follow

            follow(world)
        link = EngineLink.new(world)
        try:
            with world.alone(), building(world):
                link.tell("build", _without_host_code(engine), engine_variables())
                return _executor(*build_runner(engine, world.device, link))
        except BaseException:
            world.close_if_idle()
            raise


def _ranks(engine: EngineConfig) -> tuple[int, str]:
    """Returns how many ranks there are, and what starts them.

    Raises:
        ConfigError: the sizes do not fit each other, or what torchrun started.
    """
    started, asked = torchrun_size(), engine.tensor_parallel_size
    launcher = engine.backend or ("mp" if started is None else "torchrun")
    if launcher == "torchrun" and started is None:
        raise ConfigError(
            "backend='torchrun', but torchrun did not start this process. Start it by torchrun "
            "--nproc-per-node N, or use backend='mp'."
        )
    size = asked or (started if launcher == "torchrun" and started else 1)
    if launcher == "torchrun" and size not in (1, started):
        raise ConfigError(
            f"tensor_parallel_size={size}, but torchrun started {started} ranks. Give that number, "
            "or leave it out."
        )
    if size % engine.moe_expert_parallel_size:
        raise ConfigError(
            f"moe_expert_parallel_size={engine.moe_expert_parallel_size} does not divide "
            f"tensor_parallel_size={size}."
        )
    return size, launcher


def _executor(
    runner: StepRunner, config: ExecutorConfig, saver: HiddenStatesSaver | None
) -> PyExecutor:
    executor = PyExecutor(runner, config, saver)
    if executor.forced_acceptance is not None:
        logger.warning(
            "Forced acceptance is on: %g draft tokens per step (bonus not counted) are accepted "
            "whatever the target says. The text is not the model's.",
            executor.forced_acceptance,
        )
    return executor


class _Loaded(NamedTuple):
    """What is loaded before ranks agree on sizes."""

    target: LoadedTarget
    drafter: LoadedDrafter
    worker: SpecWorkerBase
    needs: CacheNeeds
    specs: list[KVGroupSpec]
    num_blocks: list[int]  # of each group, as many as this rank's memory holds
    graph_rows: int  # of a pass over prompts that graphs serve; 0 on CPU and over several ranks


def build_runner(
    engine: EngineConfig, device: torch.device, link: EngineLink | None
) -> tuple[StepRunner, ExecutorConfig, HiddenStatesSaver | None]:
    """Builds the runner of this rank. `link` is None where there is one rank."""
    parallel = ONE_RANK
    if link is not None:
        parallel = Parallel(
            link.world.comm, engine.moe_expert_parallel_size, engine.enable_attention_dp
        )
    with nullcontext() if link is None else all_or_none(link.world):
        loader = drafter_loader(engine.speculative_config)
        loaded = _load(engine, loader, device, parallel)
    target, drafter, num_blocks = loaded.target, loaded.drafter, loaded.num_blocks
    if link is not None:
        num_blocks = minimum_of_ranks(link.world, num_blocks)
    with nullcontext() if link is None else all_or_none(link.world):
        config = _executor_config(
            engine,
            max_seq_len=longest_sequence(num_blocks, loaded.specs, loaded.needs),
            rows=loaded.needs.rows,
            is_cuda=device.type == "cuda",
            cuda_graph=graph_config(
                engine.cuda_graph_config, target.options.backend, device, drafter.mode
            ),
            graph_rows=loaded.graph_rows,
        )
        if parallel.size > 1 and config.cuda_graph is not None and _is_on_every_rank(drafter):
            config = replace(config, cuda_graph=replace(config.cuda_graph, enable_autotuner=False))
        saver = None
        if link is None or link.world.is_leader:  # before a runner: what it refuses ends no rank
            saver = loader.saver(target)
    parts = EngineParts(
        target=target.model,
        worker=loaded.worker,
        draft_model=drafter.model,
        draft_vocab_size=drafter.vocab_size,
        d2t=drafter.d2t,
        kv_cache=_kv_cache(loaded, num_blocks, engine, device, link),
        mode=drafter.mode,
        device=device,
        layers_to_capture=drafter.layers_to_capture,
        chooses_by_default=drafter.chooses_by_default,
    )
    if link is None or not link.world.is_leader:
        return StepRunner(parts, config), config, saver
    return LeadingRunner(parts, config, link), config, saver


def _is_on_every_rank(drafter: LoadedDrafter) -> bool:
    """Whether ranks compute the same drafts, each for itself: all must then use the same kernels,
    which measurements of their own would not choose."""
    model = drafter.model
    if isinstance(model, Decoder):
        return model.config.parallel.size == 1
    return isinstance(getattr(model, "lm_head", None), ClusteredHead)


def _kv_cache(
    loaded: _Loaded,
    num_blocks: list[int],
    engine: EngineConfig,
    device: torch.device,
    link: EngineLink | None,
) -> KVCacheManager:
    config, saves = engine.kv_cache, loaded.drafter.mode.is_save_hidden_states()
    count, rows = loaded.needs.num_state_copies, None
    if loaded.target.config.linear_layers:
        rows = range(engine.max_batch_size + 1, engine.max_batch_size + 1 + count)
        if config.enable_block_reuse and config.num_state_copies == 0:
            logger.info("The prefix cache is off: KvCacheConfig.num_state_copies is 0.")
    reuse = PrefixReuse(
        # A sample has every row.
        is_on=config.enable_block_reuse and not saves and (rows is None or count > 0),
        partial=config.enable_partial_reuse and rows is None,
        tokens_ahead=loaded.worker.num_tokens_ahead,
        state_rows=rows,
    )
    arguments = loaded.specs, num_blocks, loaded.needs.page_size, device, reuse
    if link is None:
        return KVCacheManager(*arguments)
    kind = OwnedKVCache if engine.enable_attention_dp else LinkedKVCache
    return kind(*arguments, link=link)


def _num_state_copies(engine: EngineConfig, target: LoadedTarget, drafter: LoadedDrafter) -> int:
    """Returns how many copies of slots the prefix cache has for layers with linear attention."""
    config, saves = engine.kv_cache, drafter.mode.is_save_hidden_states()
    if not (target.config.linear_layers and config.enable_block_reuse) or saves:
        return 0
    if config.num_state_copies is None:
        return min(MOST_STATE_COPIES, STATE_COPIES_A_SLOT * engine.max_batch_size)
    return config.num_state_copies


def _load(
    engine: EngineConfig, loader: DrafterLoader, device: torch.device, parallel: Parallel
) -> _Loaded:
    backend = attention_backend(engine.attn_backend, device)
    directory = resolve_model(engine.model)
    target_config = load_config(directory)
    seq_len = _sequence_length(engine.max_seq_len, [target_config, *loader.position_limits])
    target = _load_target(
        engine, directory, replace(target_config, parallel=parallel), device, backend, seq_len
    )
    drafter = loader.load(target)
    reads_next = getattr(drafter.model, "reads_next_tokens", False)
    worker = create_worker(drafter.config, drafter.mask_token_id, reads_next_tokens=reads_next)
    _check_verified_drafts(target, worker)
    rows = worker.max_draft_len + 1
    graph_rows = 0
    if device.type == "cuda" and parallel.size == 1:  # ranks must agree, and may have other parts
        graph_rows = min(GRAPH_ROWS, most_worth_capturing(target.model))
    copies = _num_state_copies(engine, target, drafter)
    needs = CacheNeeds(
        max_batch_size=engine.max_batch_size,
        max_seq_len=seq_len,
        max_num_tokens=_rows_of_pass(engine, seq_len, rows, graph_rows),
        rows=rows,
        extra_kv=worker.num_extra_kv_tokens,
        rewritten=worker.num_rewritten_tokens,
        page_size=engine.kv_cache.tokens_per_block,
        num_state_copies=copies,
        bytes_of_slots=bytes_of_memory(
            target.config,
            engine.max_batch_size + copies,
            worker.max_draft_len,
            target.model.norm.weight,
        ),
    )
    specs = _target_specs(engine, target)
    if drafter.model is not None:
        specs += drafter.model.kv_group_specs(target.options.dtype)
    num_blocks = size_cache(engine.kv_cache, specs, needs, device)
    return _Loaded(target, drafter, worker, needs, specs, num_blocks, graph_rows)


def _check_verified_drafts(target: LoadedTarget, worker: SpecWorkerBase) -> None:
    """Raises ConfigError where `max_verified_drafts` does not work with the target."""
    spec = worker.config
    if spec is None or spec.max_verified_drafts is None:
        return
    if spec.max_verified_drafts == "auto" and target.config.parallel.size > 1:
        raise ConfigError(
            'max_verified_drafts="auto" works on one device, and this engine has '
            f"{target.config.parallel.size}: steps are not timed there. Give a number."
        )
    if target.config.linear_layers:
        raise ConfigError(
            f"max_verified_drafts={spec.max_verified_drafts} does not work with linear attention, "
            f"which {target.directory} has: its rows must follow each other. Leave it out."
        )


def _target_specs(engine: EngineConfig, target: LoadedTarget) -> list[KVGroupSpec]:
    """Returns the target's KV groups, with their dtype and scales. Draft layers keep the model's
    dtype."""
    config, directory, options = target.config, target.directory, target.options
    dtype = kv_cache_dtype(
        engine.kv_cache.dtype,
        says_fp8(config, directory),
        options.dtype,
        options.backend,
        options.device,
    )
    specs = target.model.kv_group_specs(dtype)
    return with_scales(specs, config, load_kv_scales(config, directory)) if dtype == FP8 else specs


def _without_host_code(engine: EngineConfig) -> EngineConfig:
    """Returns the config as other ranks get it: a drafter that runs on the host runs on one."""
    spec = engine.speculative_config
    if isinstance(spec, UserProvidedDecodingConfig):
        return replace(engine, speculative_config=replace(spec, drafter=_NoDrafter()))
    return engine


class _NoDrafter:
    def draft(self, request_id: int, token_ids: list[int], max_draft_len: int) -> list[int]:
        raise AssertionError("rank 0 alone drafts on the host")


def graph_config(
    config: CudaGraphConfig | None,
    backend: AttentionBackend,
    device: torch.device,
    mode: SpeculativeDecodingMode,
) -> CudaGraphConfig | None:
    """Returns what is captured; None where nothing can be.

    Graphs need attention whose lengths come from the device. A graph of prompts also needs a mode
    that drafts on the device, in the step, and asks the host for no prompt's length.
    """
    if device.type != "cuda" or not backend.lengths_on_device or config is None:
        return None
    if mode.traits.captures_contexts and backend.contexts_on_device:
        return config
    if config.context_tokens:
        logger.warning(
            "CudaGraphConfig.context_tokens has no effect: mode %s with attention in %s runs "
            "prompts eagerly.",
            mode.name,
            backend.name,
        )
    return replace(config, context_tokens=())


def _load_target(
    engine: EngineConfig,
    directory: Path,
    config: DecoderConfig,
    device: torch.device,
    backend: AttentionBackend,
    seq_len: int,
) -> LoadedTarget:
    # With M-RoPE rotary positions may exceed the length, so those tables are not cut.
    num_positions = None if config.rope_parameters.get("mrope_section") else seq_len
    dtype = resolve_dtype(engine.dtype, config, device)
    has_experts = any(config.moe_of_layer(i) is not None for i in range(config.num_layers))
    if engine.moe_expert_parallel_size > 1 and not has_experts:
        raise ConfigError(
            f"moe_expert_parallel_size={engine.moe_expert_parallel_size}, but {directory} has no "
            "experts to deal out. Leave it out."
        )
    options = LoadOptions(
        dtype=dtype,
        device=device,
        backend=backend,
        num_positions=num_positions,
        form=weight_form(engine.quant, device),
    )
    if engine.quant is not None and not options.form.keeps_fp8:
        logger.warning(
            "quant=%r: %s multiplies no FP8, so weights are rounded to it and kept in %s. That "
            "saves neither memory nor time here.",
            engine.quant, device, dtype,
        )  # fmt: skip
    try:
        model = load_decoder(directory, options, config.parallel)
    except torch.OutOfMemoryError as error:
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
        raise ConfigError(
            f"GPU memory ran out while {directory} was loaded in {dtype}: {free:.1f} of "
            f"{total:.1f} GiB are free. Free some, or use a smaller model or dtype."
        ) from error
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what making the weights took is free for the KV cache
    return LoadedTarget(model=model, directory=directory, options=options)


def _executor_config(
    engine: EngineConfig,
    *,
    max_seq_len: int,
    rows: int,
    is_cuda: bool,
    cuda_graph: CudaGraphConfig | None,
    graph_rows: int = 0,
) -> ExecutorConfig:
    """Returns what the executor schedules with.

    Args:
        rows: K + 1, of a verification pass.
        graph_rows: of a pass over prompts that graphs serve.
    """
    max_num_tokens = _rows_of_pass(engine, max_seq_len, rows, graph_rows)
    no_overlap, prefill = engine.disable_overlap_scheduler, engine.prefill_batch_size
    if prefill is None:
        prefill = "auto" if is_cuda else 1
    return ExecutorConfig(
        max_batch_size=engine.max_batch_size,
        # A pass never has more rows.
        max_num_tokens=min(max_num_tokens, engine.max_batch_size * (max_seq_len + rows)),
        max_seq_len=max_seq_len,
        enable_chunked_prefill=engine.enable_chunked_prefill,
        prefill_batch_size=prefill,
        overlap=is_cuda if no_overlap is None else not no_overlap,
        guided_masked_drafts=engine.guided_masked_drafts,
        cuda_graph=cuda_graph,
    )


def _rows_of_pass(engine: EngineConfig, max_seq_len: int, rows: int, graph_rows: int) -> int:
    """Returns the most rows of a pass; arguments as of `_executor_config`.

    Raises:
        ConfigError: those that were asked for hold no full batch.
    """
    least, asked = engine.max_batch_size * rows, engine.max_num_tokens
    if asked is None:
        return max(max_seq_len, least, graph_rows)
    if asked < least:
        raise ConfigError(
            f"max_num_tokens={asked} is below max_batch_size * (K + 1) = "
            f"{engine.max_batch_size} * {rows}: a full batch could not take a step. Raise it, or "
            "lower max_batch_size."
        )
    return asked


def _sequence_length(asked: int | None, configs: list[DecoderConfig]) -> int:
    """Returns the most tokens of prompt and output that every model has positions for."""
    limit = configs[0].max_position_embeddings
    if asked is None:
        length = min(limit, DEFAULT_MAX_SEQ_LEN)
    elif is_int(asked, 2, limit):
        length = asked
    else:
        raise ConfigError(
            f"max_seq_len={shown(asked)}: it must be an int in 2 … {limit}, "
            f"{_what_limits(configs[0])}."
        )
    for config in configs[1:]:
        if config.max_position_embeddings < length:
            if asked is not None:
                raise ConfigError(
                    f"max_seq_len={asked}: the draft model has {config.max_position_embeddings} "
                    "positions. Lower it to that, or take another draft model."
                )
            logger.warning(
                "The draft model has %d positions: max_seq_len is lowered from %d to that.",
                config.max_position_embeddings,
                length,
            )
            length = config.max_position_embeddings
    return length


def _what_limits(config: DecoderConfig) -> str:
    """Returns what says how many positions a model has, and what could raise it."""
    rope, limit = config.rope_parameters, config.max_position_embeddings
    if rope.get("rope_type") == LONG_ROPE:
        return "the model's original length: longer texts by LongRoPE are not offered"
    reach = 0.0
    if rope.get("rope_type") == "yarn":
        reach = rope.get("factor", 0) * rope.get("original_max_position_embeddings", 0)
    if reach > limit:
        return (
            f"the model's max_position_embeddings. Its YaRN reaches to {reach:.0f}: raise "
            "max_position_embeddings in config.json to that"
        )
    return "the model's max_position_embeddings"


__getattr__ = renamed(
    __name__,
    {
        "DEFAULT_CUDA_GRAPHS": "trtspec.config.DEFAULT_CUDA_GRAPHS",
        "DEFAULT_DRAFT_LEN": "trtspec.executor.drafters.DEFAULT_DRAFT_LEN",
        "MAX_BATCH_SIZE": "trtspec.config.MAX_BATCH_SIZE",
    },
)
