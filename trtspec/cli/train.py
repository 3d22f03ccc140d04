"""`trtspec train`: text from the target itself or from a file, then a draft head trained on it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ..config import MAX_DRAFT_LEN
from .engine import resolve_model
from .errors import CliError
from .options import TrainOptions
from .output import check_directory
from .render import make_console
from .status import Progress

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..checkpoints.heads.records import HeadReport
    from ..models.config import DecoderConfig
    from ..models.decoder import Decoder
    from ..models.drafters.base import DraftHead
    from ..train.new_head import NewHead
    from ..train.packing import Packed
    from ..train.trainer import TrainConfig, Trainer

GENERATED = "text.jsonl"
HELD_OUT = 0.02
HELD_OUT_BATCHES = 4
MAX_EPOCHS = 10**6
DEFAULT_BLOCK, DEFAULT_ANCHORS, DEFAULT_STEPS, DEFAULT_VOCABULARY = 8, 64, 6, 16384


@dataclass(frozen=True)
class _Rows:
    """The text, packed."""

    train: Packed
    held_out: Packed
    num_conversations: int  # to train on
    num_held_out: int
    draft_ids: Tensor | None  # the head's vocabulary; None is the target's
    coverage: float  # share of the text's tokens that are in it


@dataclass(frozen=True)
class _Target:
    """The model that a head is trained for, before its weights are read."""

    directory: Path
    config: DecoderConfig
    device: torch.device
    dtype: torch.dtype


def run_train(options: TrainOptions) -> int:
    """Returns the exit code."""
    from ..train.run_directory import held

    _check_alone(options)
    target = _target_of(options)
    earlier = _earlier(options, target.config)
    spec = _spec(options, earlier)
    _check_before_text(options, target.config, spec, earlier)
    with held(options.out):
        rows = _text(options, target, earlier)
        config = _train_config(options, len(rows.train), spec)
        _say(
            f"{rows.num_conversations} conversations in {len(rows.train)} rows of "
            f"{options.length} tokens ({100 * rows.train.fill:.0f} % full), {rows.num_held_out} "
            f"held out; draft vocabulary covers {100 * rows.coverage:.2f} %; {config.max_steps} "
            f"steps of {config.batch_size} rows."
        )
        return _train(options, _trainer(options, target, spec, rows, config))


def _check_alone(options: TrainOptions) -> None:
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
    _spec(options, None)


def _target_of(options: TrainOptions) -> _Target:
    """Raises CliError, ConfigError, CheckpointError: no head can be trained for this target."""
    import torch

    from ..checkpoints.hf_config import load_config
    from ..executor.device import resolve_device, resolve_dtype
    from ..train.new_head import check_target

    with Progress() as progress:
        directory = Path(resolve_model(options.target, progress))
    config = load_config(directory)
    check_target(config)
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, config, device)
    if dtype == torch.float16:
        raise CliError("Gradients leave float16's range: train with --dtype bfloat16 or float32.")
    return _Target(directory, config, device, dtype)


def _spec(options: TrainOptions, earlier: HeadReport | None) -> NewHead:
    """Returns what the head is to be. What is not asked for is as in the one to begin with."""
    from ..train.new_head import NewHead

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
    return replace(spec, layers_to_capture=layers, like=like)


def _check_before_text(
    options: TrainOptions, target: DecoderConfig, spec: NewHead, earlier: HeadReport | None
) -> None:
    """Raises CliError, ConfigError for what is wrong, before the target writes text for hours."""
    from ..train.earlier_head import check_alike
    from ..train.new_head import head_config

    _check_options(options, target)
    _train_config(options, 1, spec)
    known = None if earlier is None else earlier.require()
    made = head_config(spec, target, 1 if known is None else known.draft_vocab_size)
    if known is not None:
        check_alike(known, made)


def _text(options: TrainOptions, target: _Target, earlier: HeadReport | None) -> _Rows:
    """Returns the text, after the target has written it where it is to."""
    from ..checkpoints.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(target.directory)
    if tokenizer is None:
        raise CliError(
            f"{target.directory} has no tokenizer, which the text needs. Use one that has."
        )
    path = options.data or options.out / GENERATED
    if options.self_generate is not None:
        _generate(options, target.directory, path, target.config.max_position_embeddings)
    return _read_rows(options, path, tokenizer, target.config, earlier)


def _trainer(
    options: TrainOptions, place: _Target, spec: NewHead, rows: _Rows, config: TrainConfig
) -> Trainer:
    """Returns the trainer of a head over the target, whose weights are read here."""
    from ..attention.torch_sdpa import TorchAttention
    from ..checkpoints.place import LoadOptions, weight_form
    from ..checkpoints.weights import load_decoder
    from ..train.trainer import Trainer

    target = load_decoder(
        place.directory,
        LoadOptions(
            dtype=place.dtype,
            device=place.device,
            backend=TorchAttention(),
            pack=False,
            form=replace(weight_form(options.quant, place.device), keeps_fp8=False),
        ),
    )
    batches = rows.held_out.epoch_batches(min(16, len(rows.held_out)), 0, drop_last=False)
    return Trainer(
        target,
        _first_head(options, place, spec, rows, target),
        rows.train,
        list(islice(batches, HELD_OUT_BATCHES)),
        config,
        options.out,
        head_format=options.head_format,
        notes={
            "target": options.target,
            "conversations": rows.num_conversations,
            "rows": len(rows.train),
            "length": options.length,
            "coverage": round(rows.coverage, 4),
            **({} if options.init_head is None else {"init_head": options.init_head}),
        },
    )


def _first_head(
    options: TrainOptions, place: _Target, spec: NewHead, rows: _Rows, target: Decoder
) -> DraftHead:
    """Returns the head that training begins with."""
    from ..attention.torch_sdpa import TorchAttention
    from ..checkpoints.heads.load import load_head
    from ..checkpoints.heads.records import HeadRequest
    from ..checkpoints.place import LoadOptions
    from ..models.drafters.dflash import DFlashHead
    from ..train.create_head import create_head, fit_to_states
    from ..train.earlier_head import begin_with
    from ..train.unroll import teach

    head = create_head(spec, target, rows.draft_ids, place.dtype, options.seed)
    if options.init_head is not None:
        how = LoadOptions(
            dtype=place.dtype,
            device=place.device,
            backend=TorchAttention(),
            kv_group=1,
            pack=False,
        )
        begin_with(head, load_head(Path(options.init_head), target, HeadRequest(), how))
    elif isinstance(head, DFlashHead):
        some = next(rows.train.epoch_batches(min(8, len(rows.train)), 0)).to(place.device)
        later = (some.positions > 0).flatten()  # first tokens' states are unlike all others
        fit_to_states(head, teach(target, head, some).hidden[later])
    return head


def _train(options: TrainOptions, trainer: Trainer) -> int:
    """Trains to the end, or goes on; returns the exit code."""
    max_steps = trainer.config.max_steps
    if trainer.resume():
        _say(f"Going on from step {trainer.step} of {max_steps}.")
    evaluation = trainer.train(progress=lambda line: _say(_describe(line)))
    if not evaluation.right:  # it was finished already
        _say(f"{options.out} is trained: {max_steps} steps.")
        return 0
    rates = ", ".join(f"{rate:.2f}" for rate in evaluation.conditional)
    _say(
        f"Wrote {options.out}. On held-out text, teacher-forced: acceptance {rates}, length "
        f"{evaluation.acceptance_length:.2f}."
    )
    return 0


def _earlier(options: TrainOptions, target: DecoderConfig) -> HeadReport | None:
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


def _say(text: str) -> None:
    make_console(stderr=True).print(Text(text), soft_wrap=True)


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise CliError(
            f"--capture-layers {text!r}: give numbers of layers with commas, e.g. 1,14,27."
        ) from None


def _check_fits_kind(options: TrainOptions) -> None:
    """Raises CliError for options of another kind of head, and for one that is missing."""
    from ..train.new_head import BLOCK_KINDS

    of_blocks = {
        "--block-size": options.block_size,
        "--mask-token-id": options.mask_token_id,
        "--anchors": options.num_anchors,
        "--position-weights": options.position_weights,
        "--context-embeddings": options.context_embeddings or None,
    }
    is_block = options.kind in BLOCK_KINDS
    others: dict[str, Any] = {"--unroll": options.num_steps} if is_block else of_blocks
    if options.kind == "mtp":
        others["--capture-layers"] = options.capture_layers
        others["--sliding-window"] = options.sliding_window
    if options.kind != "eagle3":
        others["--draft-vocab-size"] = options.draft_vocab_size
    if options.kind != "dspark":
        others["--markov-rank"] = options.markov_rank
    if options.kind != "dflash2":
        others["--selector-rank"] = options.selector_rank
        others["--selector-weight"] = options.selector_weight
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise CliError(f"{given[0]} was given, but is not for {options.kind}: leave it out.")
    if options.kind == "mtp" and options.num_layers > 1 and options.num_steps is not None:
        raise CliError(
            f"--unroll {options.num_steps} with --num-layers {options.num_layers}: several layers "
            "of mtp have one draft each. Leave --unroll out."
        )
    if is_block and options.mask_token_id is None:
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


def _draft_window(options: TrainOptions) -> int:
    """Returns how many tokens the head is to see at most while serving; 0 is all.

    Tokens further apart than in training are foreign to it. An EAGLE-3 head bears twice as much,
    and misses what it could see (docs/decisions/026).
    """
    window = options.length * (2 if options.kind == "eagle3" else 1)
    return window if window > MAX_DRAFT_LEN else 0


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


def _train_config(options: TrainOptions, num_rows: int, spec: NewHead) -> TrainConfig:
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


def _read_rows(
    options: TrainOptions,
    path: Path,
    tokenizer: Any,
    config: DecoderConfig,
    earlier: HeadReport | None,
) -> _Rows:
    """Returns the text of a file, some of it held out.

    Args:
        earlier: the head to begin with, whose draft vocabulary stays.

    Raises:
        CliError, DataError: there is too little of it, or a line is bad.
    """
    import torch

    from ..api.text_stream import special_token_ids
    from ..train.data import TrainingText
    from ..train.draft_vocabulary import draft_vocabulary
    from ..train.packing import pack, split

    text = TrainingText(
        path, tokenizer, config.vocab_size, max_len=options.length, skip_bad=options.skip_bad
    )
    examples, held = split(text, HELD_OUT)
    if len(examples) + len(held) < 2:
        raise CliError(
            f"{path} has {len(examples) + len(held)} conversations with an answer in their first "
            f"{options.length} tokens; one to train on and one to hold out are the least. Give "
            "more text, or a larger --length."
        )
    if not examples:
        examples, held = held[:-1], held[-1:]
    if not held:  # of little text
        examples, held = examples[:-1], examples[-1:]
    draft_ids, coverage = None, 1.0
    if options.kind == "eagle3":
        always = [*special_token_ids(tokenizer), *config.eos_token_ids]
        size = options.draft_vocab_size or min(DEFAULT_VOCABULARY, config.vocab_size)
        if earlier is not None:
            count = earlier.require().draft_vocab_size
            draft_ids = torch.arange(count)
            draft_ids = draft_ids if earlier.d2t is None else draft_ids + earlier.d2t
            always, size = draft_ids.tolist(), options.draft_vocab_size or count
        draft_ids, coverage = draft_vocabulary(examples, size, config.vocab_size, always=always)
    return _Rows(
        train=pack(examples, options.length, options.seed),
        held_out=pack(held, options.length, 0),
        num_conversations=len(examples),
        num_held_out=len(held),
        draft_ids=draft_ids,
        coverage=coverage,
    )


def _generate(options: TrainOptions, target_dir: Path, path: Path, num_positions: int) -> None:
    from ..llm import LLM
    from ..train.conversation import Mix
    from ..train.self_generate import Report, read_prompts, self_generate

    assert options.self_generate is not None
    prompts = None if options.prompts is None else read_prompts(options.prompts)
    engine = LLM(
        target_dir,
        device=options.device,
        dtype=options.dtype,
        quant=options.quant,
        max_batch_size=options.max_batch_size,
        max_seq_len=min(max(2048, options.length), num_positions),
        prefill_batch_size=max(1, options.max_batch_size // 8),
        tensor_parallel_size=options.tensor_parallel_size,
    )
    with engine as llm, Progress() as progress:

        def tell(report: Report) -> None:
            progress("the target writes text", report.examples, options.self_generate)

        report = self_generate(
            llm,
            path,
            options.self_generate,
            seed=options.seed,
            prompts=prompts,
            max_tokens=options.max_answer,
            mix=Mix(self_written=options.self_written, max_turns=options.max_turns),
            progress=tell,
        )
    _say(
        f"{path}: {report.examples} conversations, {report.added} of them new, "
        f"{report.tokens_per_second:,.0f} tokens/s; {sum(report.dropped.values())} dropped."
    )
    if report.is_exhausted:
        _say(f"The prompts were used up before {options.self_generate} conversations were made.")


def _describe(line: dict[str, Any]) -> str:
    accuracy = " ".join(f"{value:.2f}" for value in line["accuracy"])
    text = (
        f"step {line['step']:6d}  loss {line['loss']:7.4f} "
        f"of {100 * line['loss_share']:.0f} % of rows  accuracy {accuracy}  "
        f"lr {line['learning_rate']:.1e}  {line['tokens_per_second']:,} tokens/s"
    )
    if "held_out_acceptance_length" in line:
        text += f"  held-out length {line['held_out_acceptance_length']:.3f}"
    return text
