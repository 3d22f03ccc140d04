"""`trtspec generate`: decode prompts and show the text, or one JSON object."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from .engine import check_filters, describe, load_llm, make_sampling_params
from .errors import EXIT_FAILED, CliError, show_error
from .inputs import Prompt, read_prompts, to_inputs
from .options import EngineOptions, JsonOptions, PromptOptions, SamplingOptions
from .output import check_writable, write_json
from .render import finite, make_console, print_summary, split_step, write_pieces
from .status import Progress

if TYPE_CHECKING:
    from ..api.outputs import EngineStats, RequestOutput
    from ..api.sampling_params import SamplingParams
    from ..llm import LLM


def run_generate(
    options: EngineOptions,
    given: PromptOptions,
    sampling: SamplingOptions,
    output: JsonOptions,
) -> int:
    """Returns the exit code: 0, or 1 when a request failed."""
    prompts = read_prompts(given)
    if not prompts:
        raise CliError("no prompt: give --prompt TEXT (repeatable) or --prompt-file F.jsonl.")
    params = make_sampling_params(sampling)
    check_filters(sampling, [sampling.temperature])
    check_writable(output.json_file)
    decode = _decode_quietly if output.as_json else _decode_and_show
    with _failures_told_at_the_end():
        llm, outputs = decode(options, params, prompts, given.raw)
    if output.is_wanted:
        pairs = zip(prompts, outputs, strict=True)
        report = {
            "model": options.model,
            **describe(llm),
            "outputs": [output_json(prompt, each) for prompt, each in pairs],
            "stats": stats_json(llm.stats()),
        }
        write_json(output, report)
    return _report_failures(outputs)


def _decode_and_show(
    options: EngineOptions, params: SamplingParams, prompts: Sequence[Prompt], raw: bool
) -> tuple[LLM, list[RequestOutput]]:
    """Returns the engine and its outputs, after printing them as they come."""
    with Progress() as progress:
        llm = load_llm(options, progress)
        inputs = to_inputs(llm, prompts, raw)
    console = make_console()
    outputs: dict[int, RequestOutput] = {}
    if len(prompts) == 1:
        outputs[0] = _stream(console, llm, inputs[0], params)
    else:
        for index, output in _as_finished(llm, inputs, params, options.max_batch_size):
            heading = f"[{index + 1}/{len(prompts)}] {prompts[index].title}"
            _print_output(console, heading, output)
            outputs[index] = output
    if not all(map(_has_failed, outputs.values())):
        print_summary(console, llm.stats(), describe(llm))
    return llm, [outputs[index] for index in range(len(prompts))]


def _decode_quietly(
    options: EngineOptions, params: SamplingParams, prompts: Sequence[Prompt], raw: bool
) -> tuple[LLM, list[RequestOutput]]:
    """Returns the engine and its outputs. Stdout is for the JSON object alone."""
    with redirect_stdout(sys.stderr), Progress() as progress:
        llm = load_llm(options, progress)
        inputs = to_inputs(llm, prompts, raw)
        progress(f"decoding {len(prompts)} prompt(s)")
        return llm, llm.generate(inputs, params)


def _stream(
    console: Console, llm: LLM, prompt: str | list[int], params: SamplingParams
) -> RequestOutput:
    last = None
    for last in llm.generate_stream(prompt, params):
        write_pieces(console, split_step(llm.tokenizer, last.outputs[0]))
    console.file.write("\n")
    assert last is not None  # a stream ends with an output
    return last


def _as_finished(
    llm: LLM, inputs: Sequence[str | list[int]], params: SamplingParams, max_batch_size: int
) -> Iterator[tuple[int, RequestOutput]]:
    """All prompts decoded together; each output with its index, as soon as it is finished.

    All are queued at once. Advancing one stream advances the others, so going round those that
    can be running (a queued one would wait for a place) sees every end within a step or two.
    """
    streams = dict(enumerate([llm.generate_stream(given, params) for given in inputs]))
    while streams:
        for index, stream in list(streams.items())[:max_batch_size]:
            output = next(stream)
            if output.finished:
                del streams[index]
                yield index, output


def _print_output(console: Console, heading: str, output: RequestOutput) -> None:
    completion = output.outputs[0]
    console.print(Text(heading, style="bold"), soft_wrap=True)
    write_pieces(console, [(completion.text, False)])
    line = (
        f"\n({len(completion.token_ids)} tokens, {completion.finish_reason}, "
        f"acceptance length {output.spec_stats.acceptance_length:.2f})\n"
    )
    console.print(Text(line, style="dim"), soft_wrap=True)


@contextmanager
def _failures_told_at_the_end() -> Iterator[None]:
    """Leaves it to `_report_failures` to say which requests failed: the library logs it as well."""
    from ..executor.book import FAILED, logger

    def is_other(record: logging.LogRecord) -> bool:
        return record.msg != FAILED

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _has_failed(output: RequestOutput) -> bool:
    return output.outputs[0].finish_reason == "error"


def _report_failures(outputs: Sequence[RequestOutput]) -> int:
    failed = [output for output in outputs if _has_failed(output)]
    for output in failed:
        show_error(f"request {output.request_id} failed: {output.error}")
    return EXIT_FAILED if failed else 0


def output_json(prompt: Prompt, output: RequestOutput) -> dict[str, Any]:
    completion, stats = output.outputs[0], output.spec_stats
    entry: dict[str, Any] = {
        "prompt": prompt.given,
        "prompt_token_ids": list(output.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "num_steps": stats.num_steps,
        "acceptance_length": finite(stats.acceptance_length),
        "acceptance_per_position": [finite(rate) for rate in stats.acceptance_per_position],
    }
    if completion.finish_reason == "error":
        entry["error"] = output.error
    return entry


def stats_json(stats: EngineStats) -> dict[str, Any]:
    return {
        "generated_tokens": stats.generated_tokens,
        "decode_seconds": finite(stats.decode_seconds),
        "tokens_per_second": finite(stats.tokens_per_second),
        "acceptance_length": finite(stats.acceptance_length),
        "forced_acceptance": stats.forced_acceptance,
    }
