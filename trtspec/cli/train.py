"""`trtspec train`: text from the target itself or from a file, then a draft head trained on it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import TrainOptions
from .render import say
from .train_options import (
    Target,
    check_alone,
    check_before_text,
    earlier_head,
    head_spec,
    target_of,
    train_config,
)
from .train_text import TextRows, read_text

if TYPE_CHECKING:
    from ..models.decoder import Decoder
    from ..models.drafters.base import DraftHead
    from ..train.new_head import NewHead
    from ..train.trainer import TrainConfig, Trainer

HELD_OUT_BATCHES = 4


def run_train(options: TrainOptions) -> int:
    """Returns the exit code."""
    from ..train.run_directory import held

    check_alone(options)
    target = target_of(options)
    earlier = earlier_head(options, target.config)
    spec = head_spec(options, earlier)
    check_before_text(options, target.config, spec, earlier)
    with held(options.out):
        rows = read_text(options, target, earlier)
        config = train_config(options, len(rows.train), spec)
        say(
            f"{rows.num_conversations} conversations in {len(rows.train)} rows of "
            f"{options.length} tokens ({100 * rows.train.fill:.0f} % full), {rows.num_held_out} "
            f"held out; draft vocabulary covers {100 * rows.coverage:.2f} %; {config.max_steps} "
            f"steps of {config.batch_size} rows."
        )
        return _train(options, _trainer(options, target, spec, rows, config))


def _trainer(
    options: TrainOptions, place: Target, spec: NewHead, rows: TextRows, config: TrainConfig
) -> Trainer:
    """Returns the trainer of a head over the target, whose weights are read here."""
    from ..checkpoints.place import weight_form
    from ..checkpoints.weights import load_decoder
    from ..train.trainer import Trainer

    form = replace(weight_form(options.quant, place.device), keeps_fp8=False)
    target = load_decoder(place.directory, replace(place.load_options, form=form))
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
    options: TrainOptions, place: Target, spec: NewHead, rows: TextRows, target: Decoder
) -> DraftHead:
    """Returns the head that training begins with."""
    from ..checkpoints.heads.load import load_head
    from ..checkpoints.heads.records import HeadRequest
    from ..models.drafters.dflash import DFlashHead
    from ..train.create_head import create_head, fit_to_states
    from ..train.earlier_head import begin_with
    from ..train.unroll import teach

    head = create_head(spec, target, rows.draft_ids, place.dtype, options.seed)
    if options.init_head is not None:
        how = replace(place.load_options, kv_group=1)
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
        say(f"Going on from step {trainer.step} of {max_steps}.")
    first = trainer.step
    try:
        evaluation = trainer.train(progress=lambda line: say(_describe(line)))
    except KeyboardInterrupt:
        if trainer.kept_step == max_steps:
            say(f"{options.out} is trained: {max_steps} steps.")
        elif trainer.kept_step > first:
            say(f"Step {trainer.kept_step} is kept: the same command goes on from there.")
        raise
    if not evaluation.right:  # it was finished already
        say(f"{options.out} is trained: {max_steps} steps.")
        return 0
    if not evaluation.is_judged:
        say(f"Wrote {options.out}.")
        return 0
    rates = ", ".join(f"{rate:.2f}" for rate in evaluation.conditional)
    say(
        f"Wrote {options.out}. On held-out text, teacher-forced: acceptance {rates}, length "
        f"{evaluation.acceptance_length:.2f}."
    )
    return 0


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
