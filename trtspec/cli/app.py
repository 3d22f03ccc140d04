"""The commands and their options. torch and transformers are imported by the commands, not here."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
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
    prepare_streams,
    show_error,
)
from .inputs import read_prompts
from .options import (
    DEFAULT_MODEL,
    AcceptanceOption,
    BatchSizeOption,
    DeviceOption,
    DraftLenOption,
    DraftModelOption,
    DtypeOption,
    EngineOptions,
    HeadOption,
    JsonOption,
    MaxTokensOption,
    ModelOption,
    PromptFileOption,
    PromptOption,
    RawOption,
    SamplingOptions,
    SeedOption,
    SpeculativeOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    TwoEngineOption,
)

app = typer.Typer(
    name="trtspec",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
def generate(
    model: ModelOption = DEFAULT_MODEL,
    speculative: SpeculativeOption = "none",
    max_draft_len: DraftLenOption = None,
    draft_model: DraftModelOption = None,
    head: HeadOption = None,
    two_engine: TwoEngineOption = False,
    acceptance_rule: AcceptanceOption = None,
    prompt: PromptOption = None,
    prompt_file: PromptFileOption = None,
    raw: RawOption = False,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    seed: SeedOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    max_batch_size: BatchSizeOption = 8,
    json_output: JsonOption = False,
) -> None:
    """Decode prompts; one prompt streams as it is decoded, accepted draft tokens in green."""
    from .generate import run_generate

    engine = EngineOptions(
        model, speculative, max_draft_len, draft_model, head, two_engine, dtype, device,
        max_batch_size, acceptance_rule,
    )  # fmt: skip
    sampling = SamplingOptions(max_tokens, temperature, top_p, top_k, seed)
    prompts = read_prompts(prompt, prompt_file)
    raise typer.Exit(run_generate(engine, sampling, prompts, raw, json_output))


@app.command()
def bench(
    model: ModelOption = DEFAULT_MODEL,
    speculative: SpeculativeOption = "ngram",
    max_draft_len: DraftLenOption = None,
    draft_model: DraftModelOption = None,
    head: HeadOption = None,
    two_engine: TwoEngineOption = False,
    acceptance_rule: AcceptanceOption = None,
    prompt: PromptOption = None,
    prompt_file: PromptFileOption = None,
    raw: RawOption = False,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    seed: SeedOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    max_batch_size: BatchSizeOption = 1,
    repeat: int = typer.Option(3, "--repeat", min=1, help="Measured runs of each engine."),
    json_output: JsonOption = False,
) -> None:
    """Decode the same prompts without and with speculation, interleaved; medians."""
    from .bench import run_bench

    engine = EngineOptions(
        model, speculative, max_draft_len, draft_model, head, two_engine, dtype, device,
        max_batch_size, acceptance_rule,
    )  # fmt: skip
    sampling = SamplingOptions(max_tokens, temperature, top_p, top_k, seed)
    prompts = read_prompts(prompt, prompt_file)
    raise typer.Exit(run_bench(engine, sampling, prompts, raw, repeat, json_output))


@app.command()
def demo(
    model: ModelOption = DEFAULT_MODEL,
    speculative: Annotated[
        str | None,
        typer.Option(
            "--speculative",
            help="As for generate. Default: eagle3, K = 3, where the package has a head for the "
            "model, else ngram.",
        ),
    ] = None,
    max_draft_len: DraftLenOption = None,
    draft_model: DraftModelOption = None,
    head: HeadOption = None,
    two_engine: TwoEngineOption = False,
    max_tokens: MaxTokensOption = 128,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Show the same answers decoded without and with speculation."""
    from ..checkpoints.zoo import head_for
    from .demo import run_demo

    if speculative is None and (head or head_for(model, "eagle3")):
        speculative, max_draft_len = "eagle3", max_draft_len or 3
    speculative = speculative or "ngram"
    engine = EngineOptions(
        model, speculative, max_draft_len, draft_model, head, two_engine, dtype, device, 1
    )
    raise typer.Exit(run_demo(engine, SamplingOptions(max_tokens)))


@app.command()
def acceptance(
    model: ModelOption = DEFAULT_MODEL,
    speculative: SpeculativeOption = "ngram",
    max_draft_len: DraftLenOption = None,
    draft_model: DraftModelOption = None,
    head: HeadOption = None,
    two_engine: TwoEngineOption = False,
    acceptance_rule: AcceptanceOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help='One JSON per line: {"id": "...", "category": "...", "messages": [...]}. '
            "Default: the 120 prompts in the box.",
        ),
    ] = None,
    categories: Annotated[
        str | None, typer.Option("--categories", help="Only these, like chat,code. Default: all.")
    ] = None,
    per_category: Annotated[
        int | None,
        typer.Option("--per-category", min=1, help="Only the first so many of each category."),
    ] = None,
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="Like 0,0.7,1. 0 is greedy.")
    ] = "0",
    contexts: Annotated[
        str | None,
        typer.Option(
            "--contexts",
            help="Like 256,1024,4096: the prompts again, after turns that make them this long.",
        ),
    ] = None,
    max_tokens: MaxTokensOption = 128,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of sampled answers.")] = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    max_batch_size: BatchSizeOption = 8,
    advise: Annotated[
        bool, typer.Option("--advise", help="Time a step for each K, and say which K pays.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write one self-contained page with plots."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything, every step included.")
    ] = None,
) -> None:
    """Measure how well drafts are accepted, by position, category, context and temperature."""
    from .acceptance import AcceptanceOptions, run_acceptance

    engine = EngineOptions(
        model, speculative, max_draft_len, draft_model, head, two_engine, dtype, device,
        max_batch_size, acceptance_rule,
    )  # fmt: skip
    what = AcceptanceOptions(
        prompts, categories, per_category, temperatures, contexts, max_tokens, seed, advise, html,
        json_file,
    )  # fmt: skip
    raise typer.Exit(run_acceptance(engine, what))


@app.command()
def train(
    kind: Annotated[str, typer.Argument(help="eagle3 or mtp.")],
    target: Annotated[
        str, typer.Option("--target", help="smollm2-135m or a model directory.")
    ] = DEFAULT_MODEL,
    out: Annotated[
        Path, typer.Option("--out", help="The run's directory; a run that is there goes on.")
    ] = Path("head"),
    data: Annotated[
        Path | None, typer.Option("--data", help="Conversations, one JSON per line.")
    ] = None,
    self_generate: Annotated[
        int | None,
        typer.Option("--self-generate", min=1, help="Let the target write so many conversations."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="What to ask it; default: made from templates."),
    ] = None,
    self_written: Annotated[
        float, typer.Option(min=0, max=1, help="Share of user turns that the target writes too.")
    ] = 0.4,
    num_layers: Annotated[
        int, typer.Option("--num-layers", min=1, help="mtp: more than one is vanilla.")
    ] = 1,
    draft_vocab_size: Annotated[
        int, typer.Option("--draft-vocab-size", min=1, help="eagle3: tokens to draft among.")
    ] = 16384,
    length: Annotated[int, typer.Option("--length", min=8, help="Tokens of a packed row.")] = 512,
    max_answer: Annotated[
        int, typer.Option("--max-answer", min=1, help="Most tokens of a generated answer.")
    ] = 384,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Optimizer steps. Default: by --epochs.")
    ] = None,
    epochs: Annotated[float, typer.Option("--epochs", min=0.01)] = 3.0,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Rows of a step.")] = 48,
    unroll: Annotated[
        int, typer.Option("--unroll", min=1, help="Draft steps trained at each position.")
    ] = 6,
    learning_rate: Annotated[float, typer.Option("--learning-rate")] = 1e-3,
    head_format: Annotated[
        str, typer.Option("--format", help="raw, or for eagle3 speculators.")
    ] = "raw",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    max_batch_size: BatchSizeOption = 256,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad lines of --data out, and count them.")
    ] = False,
) -> None:
    """Train a draft head for a target, on text the target itself writes or on a file."""
    from .train import TrainOptions, run_train

    options = TrainOptions(
        kind, target, out, data, self_generate, prompts, self_written, num_layers,
        draft_vocab_size, length, max_answer, steps, epochs, batch_size, unroll, learning_rate,
        head_format, dtype, device, max_batch_size, seed, skip_bad,
    )  # fmt: skip
    raise typer.Exit(run_train(options))


@app.command()
def doctor(
    target: Annotated[str, typer.Option("--target", help="smollm2-135m or a model directory.")],
    head: Annotated[
        Path, typer.Option("--head", help="Directory or name of a draft head or a draft model.")
    ],
    num_prompts: Annotated[
        int, typer.Option("--prompts", min=1, help="How many of the prompts in the box to use.")
    ] = 24,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Most new tokens per prompt.")
    ] = 64,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    json_output: JsonOption = False,
) -> None:
    """Find out why a draft head or a draft model is accepted so little: try the known mistakes."""
    from .doctor import run_doctor

    raise typer.Exit(run_doctor(target, head, num_prompts, max_tokens, dtype, device, json_output))


@app.command("inspect-head")
def inspect_head(
    directory: Annotated[
        Path, typer.Argument(help="Directory of an EAGLE head or MTP layers, or a name.")
    ],
    target: Annotated[
        str | None,
        typer.Option("--target", help="Directory (or name) of the model it is to draft for."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show what a draft head is, and everything that keeps it from drafting for a target."""
    from .inspect_head import run_inspect_head

    raise typer.Exit(run_inspect_head(directory, target, json_output))


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    prepare_streams()
    try:
        code = app(list(arguments) or ["--help"], prog_name="trtspec", standalone_mode=False)
        sys.stdout.flush()
    except typer.Abort:
        code = EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone; so do we, without a word
        drop_unwritten()
        return EXIT_FAILED
    except PARSE_ERROR as error:
        message = getattr(error, "format_message", error.__str__)()
        show_error(f"{message} (trtspec --help lists the commands and options)")
        return EXIT_USAGE
    except USER_ERRORS as error:
        drop_unwritten()
        show_error(message_of(error))
        return exit_code_of(error)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    return int(code or 0)
