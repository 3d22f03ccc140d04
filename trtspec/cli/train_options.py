"""What the options of `trtspec train` ask for, checked before the target writes text for hours."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import MAX_DRAFT_LEN
from .engine import resolve_model
from .errors import CliError
from .options import TrainOptions
from .output import check_directory
from .status import Progress

if TYPE_CHECKING:
    import torch

    from ..checkpoints.heads.records import HeadReport
    from ..checkpoints.place import LoadOptions
    from ..models.config import DecoderConfig
    from ..train.new_head import NewHead
    from ..train.trainer import TrainConfig

MAX_EPOCHS = 10**6
DEFAULT_BLOCK, DEFAULT_ANCHORS, DEFAULT_STEPS = 8, 64, 6


@dataclass(frozen=True)
class Target:
    """The model that a head is trained for, before its weights are read."""

    directory: Path
    config: DecoderConfig
    device: torch.device
    dtype: torch.dtype

    @property
    def load_options(self) -> LoadOptions:
        """How models and heads are loaded for training: not packed, for derivatives."""
        from ..attention.torch_sdpa import TorchAttention
        from ..checkpoints.place import LoadOptions

        return LoadOptions(
            dtype=self.dtype, device=self.device, backend=TorchAttention(), pack=False
        )


def target_of(options: TrainOptions) -> Target:
    """Raises CliError, ConfigError, CheckpointError: no head can be trained for this target."""
    import torch

    from ..checkpoints.hf_config import load_config
    from ..executor.device import resolve_device, resolve_dtype
    from ..train.new_head import check_target

    with Progress() as progress:
        directory = Path(resolve_model(options.target, progress))
    config = load_config(directory)
    check_target(config, options.kind)
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, config, device)
    if dtype == torch.float16:
        raise CliError("Gradients leave float16's range: train with --dtype bfloat16 or float32.")
    return Target(directory, config, device, dtype)


def earlier_head(options: TrainOptions, target: DecoderConfig) -> HeadReport | None:
    """Returns what the head to begin with is, None without one.

    Raises:
        CheckpointError, CliError: it does not fit the target, the kind, or the vocabulary.
    """
    from ..checkpoints.heads.load import read_head
    from ..train.new_head import kind_of_head

    if options.init_head is None:
        return None
    with ExitStack() as stack:
        report = read_head(Path(options.init_head), target, stack)
    kind, size = kind_of_head(report.require()), report.require().draft_vocab_size
    if kind != options.kind:
        raise CliError(
            f"--init-head {options.init_head} is a head of kind {kind}, and {options.kind} is to "
            "be trained. Give a head of that kind."
        )
    if options.kind == "eagle3" and (options.draft_vocab_size or size) < size:
        raise CliError(
            f"--draft-vocab-size {options.draft_vocab_size}: the head of --init-head drafts among "
            f"{size} tokens, which stay. Give {size} or more, or leave the option out."
        )
    return report


def head_spec(options: TrainOptions, earlier: HeadReport | None) -> NewHead:
    """Returns what the head is to be. What is not asked for is as in the one to begin with."""
    from ..train.new_head import BLOCK_KINDS, NewHead, block_rows

    spec = NewHead(
        kind=options.kind,
        num_layers=options.num_layers,
        block_size=options.block_size or DEFAULT_BLOCK,
        mask_token_id=options.mask_token_id,
        markov_rank=options.markov_rank,
        context_embeddings=options.context_embeddings,
        selector_rank=options.selector_rank,
        layers_to_capture=_layers(options.capture_layers),
        sliding_window=options.sliding_window,
        draft_window=_draft_window(options),
    )
    if earlier is None:
        return spec
    known = earlier.require()
    layers = spec.layers_to_capture or known.layers_to_capture or None
    like = None if options.kind == "mtp" else known.decoder
    spec = replace(spec, layers_to_capture=layers, like=like)
    if options.block_size is None and options.kind in BLOCK_KINDS:
        return replace(spec, block_size=block_rows(known))
    return spec


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise CliError(
            f"--capture-layers {text!r}: give numbers of layers with commas, e.g. 1,14,27."
        ) from None


def _draft_window(options: TrainOptions) -> int:
    """Returns how many tokens the head is to see at most while serving; 0 is all.

    Tokens further apart than in training are foreign to it. An EAGLE-3 head bears twice as much,
    and misses what it could see (docs/decisions/026).
    """
    window = options.length * (2 if options.kind == "eagle3" else 1)
    return window if window > MAX_DRAFT_LEN else 0


def train_config(options: TrainOptions, num_rows: int, spec: NewHead) -> TrainConfig:
    """Raises CliError, ConfigError for an option that is out of range."""
    from ..train.losses import POSITION_WEIGHTS
    from ..train.trainer import TrainConfig

    batch_size, max_steps = min(options.batch_size, num_rows), options.max_steps
    if max_steps is None:
        if options.epochs > MAX_EPOCHS:
            raise CliError(f"--epochs {options.epochs:g}: give at most {MAX_EPOCHS}, or --steps.")
        max_steps = max(1, round(options.epochs * num_rows / batch_size))
    num_steps = spec.drafts_of_block or options.num_steps or DEFAULT_STEPS
    if options.kind == "mtp" and options.num_layers > 1:
        num_steps = options.num_layers
    return TrainConfig(
        num_steps=num_steps,
        num_anchors=options.num_anchors or DEFAULT_ANCHORS,
        position_weights=options.position_weights or POSITION_WEIGHTS[0],
        variation=options.variation,
        selector_weight=1.0 if options.selector_weight is None else options.selector_weight,
        optimizer=options.optimizer,
        learning_rate=options.learning_rate,
        max_steps=max_steps,
        batch_size=batch_size,
        seed=options.seed,
        warmup_steps=min(50, max_steps // 10),
    )


# -- checks ----------------------------------------------------------------------------------------
def check_alone(options: TrainOptions) -> None:
    """Raises CliError, ConfigError for what is wrong whatever the target is."""
    from ..train.new_head import check_kind
    from ..train.run_directory import check_run_directory

    check_kind(options.kind)  # first: what other options can be depends on it
    if options.data is None and options.self_generate is None:
        raise CliError("Give --data FILE, or --self-generate N to let the target write the text.")
    _check_fits_kind(options)
    _check_fits_text(options)
    check_directory(options.out)
    check_run_directory(options.out)
    head_spec(options, None)


def _check_fits_kind(options: TrainOptions) -> None:
    """Raises CliError for options of another kind of head, and for one that is missing."""
    from ..train.new_head import BLOCK_KINDS

    reads_states = "eagle3", *BLOCK_KINDS
    kinds_of = {  # option: its value, None if it was not given, and the kinds that it is for
        "--unroll": (options.num_steps, ("eagle3", "mtp")),
        "--block-size": (options.block_size, BLOCK_KINDS),
        "--mask-token-id": (options.mask_token_id, BLOCK_KINDS),
        "--anchors": (options.num_anchors, BLOCK_KINDS),
        "--position-weights": (options.position_weights, BLOCK_KINDS),
        "--context-embeddings": (options.context_embeddings or None, BLOCK_KINDS),
        "--capture-layers": (options.capture_layers, reads_states),
        "--sliding-window": (options.sliding_window, reads_states),
        "--draft-vocab-size": (options.draft_vocab_size, ("eagle3",)),
        "--markov-rank": (options.markov_rank, ("dspark",)),
        "--selector-rank": (options.selector_rank, ("dflash2",)),
        "--selector-weight": (options.selector_weight, ("dflash2",)),
    }
    for name, (value, kinds) in kinds_of.items():
        if value is not None and options.kind not in kinds:
            raise CliError(f"{name} was given, but is not for {options.kind}: leave it out.")
    if options.kind == "mtp" and options.num_layers > 1 and options.num_steps is not None:
        raise CliError(
            f"--unroll {options.num_steps} with --num-layers {options.num_layers}: several layers "
            "of mtp have one draft each. Leave --unroll out."
        )
    if options.kind in BLOCK_KINDS and options.mask_token_id is None:
        raise CliError(
            f"{options.kind} needs --mask-token-id: a token that texts do not have, a reserved one "
            "at best."
        )


def _check_fits_text(options: TrainOptions) -> None:
    """Raises CliError for options of the text that the target writes, where it writes none."""
    if options.self_generate is not None:
        return
    of_writing = {
        "--prompts": "prompts",
        "--self-written": "self_written",
        "--max-turns": "max_turns",
        "--max-answer": "max_answer",
        "--max-batch-size": "max_batch_size",
        "--tensor-parallel-size": "tensor_parallel_size",
    }
    defaults = {field.name: field.default for field in fields(TrainOptions)}
    given = [
        option for option, name in of_writing.items() if getattr(options, name) != defaults[name]
    ]
    if given:
        raise CliError(
            f"{given[0]} was given, but is for the text that the target writes: give "
            "--self-generate N too, or leave it out."
        )


def check_before_text(
    options: TrainOptions, target: DecoderConfig, spec: NewHead, earlier: HeadReport | None
) -> None:
    """Raises CliError, ConfigError for what is wrong, before the target writes text for hours."""
    from ..train.earlier_head import check_alike
    from ..train.new_head import head_config

    _check_options(options, target)
    train_config(options, 1, spec)
    known = None if earlier is None else earlier.require()
    made = head_config(spec, target, 1 if known is None else known.draft_vocab_size)
    if known is not None:
        check_alike(known, made)


def _check_options(options: TrainOptions, config: DecoderConfig) -> None:
    """Raises CliError, ConfigError for what the kind or the target does not allow."""
    from ..train.save_head import check_format

    check_format(options.head_format, options.kind)
    if options.length > config.max_position_embeddings:
        raise CliError(
            f"--length {options.length} is above the target's {config.max_position_embeddings} "
            "positions: lower it."
        )
    if (options.draft_vocab_size or 0) > config.vocab_size:
        raise CliError(
            f"--draft-vocab-size {options.draft_vocab_size} is above the target's vocabulary of "
            f"{config.vocab_size}: lower it."
        )
