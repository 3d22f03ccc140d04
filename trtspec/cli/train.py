"""`trtspec train`: text from the target itself or from a file, then a draft head trained on it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from .engine import resolve_model
from .errors import CliError
from .render import make_console
from .status import Progress

GENERATED = "text.jsonl"
HELD_OUT = 0.02
HELD_OUT_BATCHES = 4


@dataclass(frozen=True)
class TrainOptions:
    """The command's options, as given."""

    kind: str
    target: str
    out: Path
    data: Path | None
    self_generate: int | None
    prompts: Path | None
    self_written: float
    num_layers: int
    draft_vocab_size: int
    length: int
    max_answer: int
    max_steps: int | None
    epochs: float
    batch_size: int
    num_steps: int
    learning_rate: float
    head_format: str
    dtype: str
    device: str
    max_batch_size: int
    seed: int
    skip_bad: bool


def run_train(options: TrainOptions) -> int:
    """Returns the exit code."""
    import torch

    from ..attention.torch_sdpa import TorchAttention
    from ..checkpoints.hf_config import load_config
    from ..checkpoints.tokenizer import load_tokenizer
    from ..checkpoints.weights import load_decoder
    from ..executor.build import resolve_device, resolve_dtype
    from ..train.data import (
        TrainingText,
        draft_vocabulary,
        pack,
        special_token_ids,
        split,
    )
    from ..train.new_head import NewHead, check_format, check_target, create_head
    from ..train.trainer import TrainConfig, Trainer

    console = make_console(stderr=True)
    say = lambda text: console.print(Text(text), soft_wrap=True)  # noqa: E731
    if options.data is None and options.self_generate is None:
        raise CliError("Give --data FILE, or --self-generate N to let the target write the text.")
    spec = NewHead(kind=options.kind, num_layers=options.num_layers)
    with Progress() as progress:
        target_dir = Path(resolve_model(options.target, progress))
    config = load_config(target_dir)
    check_target(config)
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, config, device)
    if dtype == torch.float16:
        raise CliError("Gradients leave float16's range: train with --dtype bfloat16 or float32.")
    check_format(options.head_format, options.kind)
    if options.length > config.max_position_embeddings:
        raise CliError(
            f"--length {options.length} is above the target's {config.max_position_embeddings} "
            "positions: lower it."
        )
    if options.kind == "eagle3" and options.draft_vocab_size > config.vocab_size:
        raise CliError(
            f"--draft-vocab-size {options.draft_vocab_size} is above the target's vocabulary of "
            f"{config.vocab_size}: lower it."
        )
    TrainConfig(  # before hours
        learning_rate=options.learning_rate, num_steps=options.num_steps, seed=options.seed
    )
    tokenizer = load_tokenizer(target_dir)
    if tokenizer is None:
        raise CliError(f"{target_dir} has no tokenizer, which the text needs. Use one that has.")
    path = options.data
    if options.self_generate is not None:
        path = path or options.out / GENERATED
        _generate(options, target_dir, path, config.max_position_embeddings, say)
        gc.collect()  # the engine refers to itself; its cache's memory is wanted for training
        if device.type == "cuda":
            torch.cuda.empty_cache()
    assert path is not None

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
    rows, held_rows = pack(examples, options.length, options.seed), pack(held, options.length, 0)
    draft_ids, coverage = None, 1.0
    if options.kind == "eagle3":
        draft_ids, coverage = draft_vocabulary(
            examples, options.draft_vocab_size, config.vocab_size,
            always=[*special_token_ids(tokenizer), *config.eos_token_ids],
        )  # fmt: skip
    batch_size = min(options.batch_size, len(rows))
    max_steps = options.max_steps or max(1, round(options.epochs * len(rows) / batch_size))
    say(
        f"{len(examples)} conversations in {len(rows)} rows of {options.length} tokens "
        f"({100 * rows.fill:.0f} % full), {len(held)} held out; draft vocabulary covers "
        f"{100 * coverage:.2f} %; {max_steps} steps of {batch_size} rows."
    )
    target = load_decoder(target_dir, dtype, device, TorchAttention(), pack=False)
    head = create_head(spec, target, draft_ids, dtype, options.seed)
    steps = options.num_layers if options.kind == "mtp" and options.num_layers > 1 else None
    train_config = TrainConfig(
        num_steps=steps or options.num_steps, learning_rate=options.learning_rate,
        max_steps=max_steps, batch_size=batch_size, seed=options.seed,
        warmup_steps=min(50, max_steps // 10),
    )  # fmt: skip
    held_out = [
        batch
        for _, batch in zip(
            range(HELD_OUT_BATCHES),
            held_rows.epoch_batches(min(16, len(held_rows)), 0, drop_last=False),
            strict=False,
        )
    ]
    trainer = Trainer(
        target, head, rows, held_out, train_config, options.out, head_format=options.head_format,
        notes={
            "target": options.target, "conversations": len(examples), "rows": len(rows),
            "length": options.length, "coverage": round(coverage, 4),
        },
    )  # fmt: skip
    if trainer.resume():
        say(f"Going on from step {trainer.step} of {max_steps}.")
    evaluation = trainer.train(progress=lambda line: say(_describe(line)))
    if not evaluation.right:  # it was finished already
        say(f"{options.out} is trained: {max_steps} steps.")
        return 0
    rates = ", ".join(f"{rate:.2f}" for rate in evaluation.conditional)
    say(
        f"Wrote {options.out}. On held-out text, teacher-forced: acceptance {rates}, length "
        f"{evaluation.acceptance_length:.2f}."
    )
    return 0


def _generate(
    options: TrainOptions,
    target_dir: Path,
    path: Path,
    num_positions: int,
    say: Callable[[str], None],
) -> None:
    from ..llm import LLM
    from ..train.conversation import Mix
    from ..train.self_generate import Report, read_prompts, self_generate

    assert options.self_generate is not None
    prompts = None if options.prompts is None else read_prompts(options.prompts)
    llm = LLM(
        target_dir, device=options.device, dtype=options.dtype,
        max_batch_size=options.max_batch_size, max_seq_len=min(2048, num_positions),
        prefill_batch_size=max(1, options.max_batch_size // 8),
    )  # fmt: skip
    with Progress() as progress:

        def tell(report: Report) -> None:
            progress("the target writes text", report.examples, options.self_generate)

        report = self_generate(
            llm, path, options.self_generate, seed=options.seed, prompts=prompts,
            max_tokens=options.max_answer, mix=Mix(self_written=options.self_written),
            progress=tell,
        )  # fmt: skip
    say(
        f"{path}: {report.examples} conversations, {report.added} of them new, "
        f"{report.tokens_per_second:,.0f} tokens/s; {sum(report.dropped.values())} dropped."
    )
    if report.is_exhausted:
        say(f"The prompts were used up before {options.self_generate} conversations were made.")


def _describe(line: dict[str, Any]) -> str:
    accuracy = " ".join(f"{value:.2f}" for value in line["accuracy"])
    text = (
        f"step {line['step']:6d}  loss {line['loss']:7.4f}  accuracy {accuracy}  "
        f"lr {line['learning_rate']:.1e}  {line['tokens_per_second']:,} tokens/s"
    )
    if "held_out_acceptance_length" in line:
        text += f"  held-out length {line['held_out_acceptance_length']:.3f}"
    return text
