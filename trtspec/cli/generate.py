"""`trtspec generate`: decode prompts and show the text, or one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from .engine import describe, load_llm, make_sampling_params
from .errors import EXIT_FAILED, CliError, show_error
from .inputs import Prompt, check_raw, to_inputs
from .options import EngineOptions, SamplingOptions
from .render import finite, make_console, print_summary, split_step, write_pieces
from .status import Progress

if TYPE_CHECKING:
    from ..api.outputs import EngineStats, RequestOutput
    from ..api.sampling_params import SamplingParams
    from ..llm import LLM


def run_generate(
    options: EngineOptions,
    sampling: SamplingOptions,
    prompts: Sequence[Prompt],
    raw: bool,
    as_json: bool,
) -> int:
    """Returns the exit code: 0, or 1 when a request failed."""
    if not prompts:
        raise CliError("no prompt: give --prompt TEXT (repeatable) or --prompt-file F.jsonl.")
    if raw:
        check_raw(prompts)
    params = make_sampling_params(sampling)
    if as_json:
        return _run_json(options, params, prompts, raw)
    with Progress() as progress:
        llm = load_llm(options, progress)
        inputs = to_inputs(llm, prompts, raw)
    console = make_console()
    if len(prompts) == 1:
        outputs = [_stream(console, llm, inputs[0], params)]
    else:
        outputs = []
        for index, output in _as_finished(llm, inputs, params, options.max_batch_size):
            heading = f"[{index + 1}/{len(prompts)}] {prompts[index].title}"
            _print_output(console, heading, output)
            outputs.append(output)
    print_summary(console, llm.stats(), llm.mode.name, llm.max_draft_len)
    return _report_failures(outputs)


def _stream(
    console: Console, llm: LLM, prompt: str | list[int], params: SamplingParams
) -> RequestOutput:
    last = None
    for last in llm.generate_stream(prompt, params):
        write_pieces(console, split_step(llm.tokenizer, last.outputs[0]))
    console.file.write("\n")
    if last is None:
        raise RuntimeError("generate_stream ended without an output: this is a bug in trtspec.")
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


def _report_failures(outputs: Sequence[RequestOutput]) -> int:
    failed = [output for output in outputs if output.outputs[0].finish_reason == "error"]
    for output in failed:
        show_error(f"request {output.request_id} failed: {output.error}")
    return EXIT_FAILED if failed else 0


def _run_json(
    options: EngineOptions, params: SamplingParams, prompts: Sequence[Prompt], raw: bool
) -> int:
    with redirect_stdout(sys.stderr), Progress() as progress:  # stdout is for the object alone
        llm = load_llm(options, progress)
        inputs = to_inputs(llm, prompts, raw)
        progress(f"decoding {len(prompts)} prompt(s)")
        outputs = llm.generate(inputs, params)
    report = {
        "model": options.model,
        **describe(llm),
        "outputs": [
            output_json(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)
        ],
        "stats": stats_json(llm.stats()),
    }
    write_json(report)
    return _report_failures(outputs)


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


def write_json(report: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(report, allow_nan=False) + "\n")
    sys.stdout.flush()
