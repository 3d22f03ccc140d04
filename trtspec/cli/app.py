"""The commands. torch and transformers are imported by them, not here.

Annotations are no strings, as `records.py` wants them: no `from __future__ import annotations`.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from . import EXIT_INTERRUPTED
from .errors import (
    EXIT_FAILED,
    EXIT_USAGE,
    PARSE_ERROR,
    USER_ERRORS,
    drop_unwritten,
    exit_code_of,
    message_of,
    message_of_parser,
    prepare_streams,
    show_error,
)
from .options import (
    AcceptanceOptions,
    DoctorOptions,
    EngineOptions,
    JsonOptions,
    MaxTokens,
    PromptOptions,
    SamplingOptions,
    ServeOptions,
    SweepOptions,
    TrainOptions,
)
from .output import in_new_spelling
from .records import takes_records

app = typer.Typer(
    name="trtspec",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

# Their defaults, where a command has others than `EngineOptions`.
BENCH_ENGINE = EngineOptions(speculative="ngram", max_batch_size=1)
DEMO_ENGINE = EngineOptions(max_batch_size=1)
ACCEPTANCE_ENGINE = EngineOptions(speculative="ngram")


def _print_version(asked: bool) -> None:
    if asked:
        import trtspec

        typer.echo(f"trtspec {trtspec.__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Speculative decoding: verify, accept and draft in one step."""


@app.command()
@takes_records()
def generate(
    *,
    engine: EngineOptions,
    prompts: PromptOptions,
    sampling: SamplingOptions,
    output: JsonOptions,
) -> None:
    """Decode prompts; one prompt streams as it is decoded, accepted draft tokens in green."""
    from .generate import run_generate

    raise typer.Exit(run_generate(engine, prompts, sampling, output))


@app.command()
@takes_records(without=("model", "engine.max_batch_size"))
def serve(
    *,
    model: Annotated[
        str, typer.Argument(help="smollm2-135m (fetched on first use) or a model directory.")
    ],
    engine: EngineOptions,
    server: ServeOptions,
) -> None:
    """Serve a model to OpenAI's clients, with metrics and a live page. Needs the extra serve."""
    from .serve import run_serve

    raise typer.Exit(run_serve(replace(engine, model=model), server))


@app.command()
@takes_records()
def bench(
    *,
    engine: EngineOptions = BENCH_ENGINE,
    prompts: PromptOptions,
    sampling: SamplingOptions,
    repeat: Annotated[
        int | None,
        typer.Option(
            "--repeat", min=1, help="Measured runs of each engine. Default: 3, with --sweep 1."
        ),
    ] = None,
    sweep: SweepOptions,
    output: JsonOptions,
) -> None:
    """Decode the same prompts without and with speculation, interleaved; medians."""
    if sweep.sweep:
        from .sweep import run_sweep

        raise typer.Exit(run_sweep(engine, prompts, sampling, sweep, repeat or 1, output))
    from .bench import refuse_sweep_options, run_bench

    refuse_sweep_options(sweep)
    raise typer.Exit(run_bench(engine, prompts, sampling, repeat or 3, output))


@app.command()
@takes_records(without=("speculative", "acceptance", "max_batch_size", "no_block_reuse"))
def demo(
    *,
    speculative: Annotated[
        str | None,
        typer.Option(
            "--speculative",
            help="As for generate. Default: eagle3, K = 3, where the package has a head for the "
            "model, else ngram.",
        ),
    ] = None,
    engine: EngineOptions = DEMO_ENGINE,
    max_tokens: MaxTokens = 128,
) -> None:
    """Show the same answers decoded without and with speculation."""
    from ..checkpoints.zoo import head_for
    from .demo import run_demo

    max_draft_len = engine.max_draft_len
    if speculative is None and (engine.head or head_for(engine.model, "eagle3")):
        speculative, max_draft_len = "eagle3", max_draft_len or "3"
    engine = replace(engine, speculative=speculative or "ngram", max_draft_len=max_draft_len)
    raise typer.Exit(run_demo(engine, SamplingOptions(max_tokens=max_tokens)))


@app.command()
@takes_records()
def acceptance(
    *,
    engine: EngineOptions = ACCEPTANCE_ENGINE,
    what: AcceptanceOptions,
    output: JsonOptions,
) -> None:
    """Measure how well drafts are accepted, by position, category, context and temperature."""
    from .acceptance import run_acceptance

    raise typer.Exit(run_acceptance(engine, what, output))


@app.command()
@takes_records()
def train(options: TrainOptions) -> None:
    """Train a draft head for a target, on text the target itself writes or on a file."""
    from .train import run_train

    raise typer.Exit(run_train(options))


@app.command()
@takes_records()
def doctor(options: DoctorOptions, output: JsonOptions) -> None:
    """Find out why a draft head or a draft model is accepted so little: try the known mistakes."""
    from .doctor import run_doctor

    raise typer.Exit(run_doctor(options, output))


@app.command("inspect-head")
@takes_records()
def inspect_head(
    *,
    directory: Annotated[Path, typer.Argument(help="A draft head's directory, or a name.")],
    target: Annotated[
        str | None,
        typer.Option("--target", help="Directory (or name) of the model it is to draft for."),
    ] = None,
    output: JsonOptions,
) -> None:
    """Show what a draft head is, and everything that keeps it from drafting for a target."""
    from .inspect_head import run_inspect_head

    raise typer.Exit(run_inspect_head(directory, target, output))


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    prepare_streams()
    try:
        words = in_new_spelling(arguments) or ["--help"]
        code = app(words, prog_name="trtspec", standalone_mode=False)
        sys.stdout.flush()
    except typer.Abort:
        code = EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone; so do we, without a word
        drop_unwritten()
        return EXIT_FAILED
    except PARSE_ERROR as error:
        show_error(message_of_parser(error))
        return EXIT_USAGE
    except USER_ERRORS as error:
        drop_unwritten()
        show_error(message_of(error))
        return exit_code_of(error)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    return int(code or 0)
