"""The `trtspec` command. torch and transformers are imported by the commands, not here."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    PARSE_ERROR,
    USER_ERRORS,
    exit_code_of,
    show_error,
)
from .inputs import read_prompts
from .options import (
    DEFAULT_MODEL,
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
from .render import make_console

app = typer.Typer(
    name="trtspec",
    help="Speculative decoding: verify, accept and draft in one step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def generate(
    model: ModelOption = DEFAULT_MODEL,
    speculative: SpeculativeOption = "none",
    max_draft_len: DraftLenOption = None,
    draft_model: DraftModelOption = None,
    head: HeadOption = None,
    two_engine: TwoEngineOption = False,
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
        max_batch_size,
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
        max_batch_size,
    )  # fmt: skip
    sampling = SamplingOptions(max_tokens, temperature, top_p, top_k, seed)
    prompts = read_prompts(prompt, prompt_file)
    raise typer.Exit(run_bench(engine, sampling, prompts, raw, repeat, json_output))


@app.command()
def demo(
    model: ModelOption = DEFAULT_MODEL,
    speculative: SpeculativeOption = "ngram",
    max_draft_len: DraftLenOption = None,
    draft_model: DraftModelOption = None,
    head: HeadOption = None,
    two_engine: TwoEngineOption = False,
    max_tokens: MaxTokensOption = 128,
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "auto",
) -> None:
    """Show the same answers decoded without and with speculation."""
    from .demo import run_demo

    engine = EngineOptions(
        model, speculative, max_draft_len, draft_model, head, two_engine, dtype, device, 1
    )
    raise typer.Exit(run_demo(engine, SamplingOptions(max_tokens)))


@app.command("inspect-head")
def inspect_head(
    directory: Annotated[Path, typer.Argument(help="Directory of an EAGLE head or MTP layers.")],
    target: Annotated[
        str | None,
        typer.Option("--target", help="Directory (or name) of the model it is to draft for."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Show what a draft head is, and everything that keeps it from drafting for a target."""
    from .inspect_head import run_inspect_head

    raise typer.Exit(run_inspect_head(directory, target, json_output))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    for stream in (sys.stdout, sys.stderr):  # model text may not fit the terminal's encoding
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = app(arguments or ["--help"], prog_name="trtspec", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone; so do we, without a word
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except PARSE_ERROR as error:
        message = getattr(error, "format_message", error.__str__)()
        show_error(f"{message} (trtspec --help lists the commands and options)")
        return EXIT_USAGE
    except USER_ERRORS as error:
        show_error(str(error) or type(error).__name__)
        return exit_code_of(error)
    if code == EXIT_INTERRUPTED:
        make_console(stderr=True).print("interrupted")
    return int(code or 0)
