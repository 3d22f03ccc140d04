"""The text of `trtspec train`: written by the target or read from a file, then packed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CliError
from .options import TrainOptions
from .render import say
from .status import Progress
from .train_options import Target

if TYPE_CHECKING:
    from torch import Tensor

    from ..checkpoints.heads.records import HeadReport
    from ..models.config import DecoderConfig
    from ..train.data import Example
    from ..train.packing import Packed

GENERATED = "text.jsonl"
HELD_OUT = 0.02
DEFAULT_VOCABULARY = 16384


@dataclass(frozen=True)
class TextRows:
    """The text, packed."""

    train: Packed
    held_out: Packed
    num_conversations: int  # to train on
    num_held_out: int
    draft_ids: Tensor | None  # the head's vocabulary; None is the target's
    coverage: float  # share of the text's tokens that are in it


def read_text(options: TrainOptions, target: Target, earlier: HeadReport | None) -> TextRows:
    """Returns the text, after the target has written it where it is to."""
    from ..checkpoints.tokenizer import load_tokenizer
    from ..train.run_directory import CHECKPOINT

    tokenizer = load_tokenizer(target.directory)
    if tokenizer is None:
        raise CliError(
            f"{target.directory} has no tokenizer, which the text needs. Use one that has."
        )
    path = options.data or options.out / GENERATED
    has_begun = path.exists() and (options.out / CHECKPOINT).exists()
    if options.self_generate is not None and has_begun:
        say(f"{path} stays as it is: training on it has begun. More text needs another --out.")
    elif options.self_generate is not None:
        _generate(options, target.directory, path, target.config.max_position_embeddings)
    return _read_rows(options, path, tokenizer, target.config, earlier)


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
    say(
        f"{path}: {report.examples} conversations, {report.added} of them new, "
        f"{report.tokens_per_second:,.0f} tokens/s; {sum(report.dropped.values())} dropped."
    )
    if report.is_exhausted:
        say(f"The prompts were used up before {options.self_generate} conversations were made.")


def _read_rows(
    options: TrainOptions,
    path: Path,
    tokenizer: Any,
    config: DecoderConfig,
    earlier: HeadReport | None,
) -> TextRows:
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
        if path.is_file() and not path.stat().st_size:
            raise CliError(f"{path} is empty: give conversations, one JSON per line.")
        raise CliError(
            f"{path} has {len(examples) + len(held)} conversation(s) with an answer in the first "
            f"{options.length} tokens; one to train on and one to hold out are the least. Give "
            "more text, or a larger --length."
        )
    if not examples:
        examples, held = held[:-1], held[-1:]
    if not held:  # of little text
        examples, held = examples[:-1], examples[-1:]
    if options.mask_token_id is not None:
        _warn_of_mask_token(options.mask_token_id, [*examples, *held], path)
    draft_ids, coverage = None, 1.0
    if options.kind == "eagle3":
        special = [*special_token_ids(tokenizer), *config.eos_token_ids]
        always = [token for token in special if token < config.vocab_size]  # it may know more
        size = options.draft_vocab_size or min(DEFAULT_VOCABULARY, config.vocab_size)
        if earlier is not None:
            count = earlier.require().draft_vocab_size
            draft_ids = torch.arange(count)
            draft_ids = draft_ids if earlier.d2t is None else draft_ids + earlier.d2t
            always, size = draft_ids.tolist(), options.draft_vocab_size or count
        draft_ids, coverage = draft_vocabulary(examples, size, config.vocab_size, always=always)
    return TextRows(
        train=pack(examples, options.length, options.seed),
        held_out=pack(held, options.length, 0),
        num_conversations=len(examples),
        num_held_out=len(held),
        draft_ids=draft_ids,
        coverage=coverage,
    )


def _warn_of_mask_token(token: int, examples: list[Example], path: Path) -> None:
    """Says so where texts have the token by which a block head is asked for drafts."""
    count = sum(int((example.input_ids == token).sum()) for example in examples)
    if count:
        say(
            f"Warning: --mask-token-id {token} is in {path} ({count} times), and drafts are asked "
            "for by it. Give a token that texts do not have."
        )
