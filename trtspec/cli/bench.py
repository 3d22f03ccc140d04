"""`trtspec bench`: the same prompts without and with speculation, interleaved, medians.

One engine of each kind is built; after one warm-up each, they take turns (A B A B …), so that a
machine that slows down or speeds up does so for both.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from itertools import count
from math import isnan
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..data.prompts import PROMPT_SETS
from .engine import check_filters, describe, load_pair, make_sampling_params
from .errors import EXIT_FAILED, CliError, show_error, show_note
from .inputs import Prompt, read_prompts, to_inputs
from .numbers import check_max_tokens
from .options import (
    EngineOptions,
    JsonOptions,
    PromptOptions,
    SamplingOptions,
    SweepOptions,
)
from .output import check_writable, write_json
from .render import (
    draft_len_text,
    finite,
    first_difference,
    make_console,
    position_bars,
    print_forced,
)
from .status import Progress

if TYPE_CHECKING:
    from ..api.outputs import EngineStats
    from ..api.sampling_params import SamplingParams
    from ..llm import LLM


_RUNS = count()


class BenchFailed(Exception):
    """A request failed, so there is nothing to compare."""


@dataclass
class Side:
    """The runs of one engine over one prompt set."""

    runs: list[EngineStats] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)  # of the last run

    @property
    def tokens_per_second(self) -> float:
        return median(run.tokens_per_second for run in self.runs)

    @property
    def acceptance_length(self) -> float:
        return median(run.acceptance_length for run in self.runs)

    @property
    def acceptance_per_position(self) -> list[float]:
        columns = zip(*(run.acceptance_per_position for run in self.runs), strict=True)
        return [median(column) for column in columns]


@dataclass
class SetResult:
    """One prompt set, decoded by both engines."""

    name: str
    num_prompts: int
    plain: Side = field(default_factory=Side)
    speculative: Side = field(default_factory=Side)

    @property
    def speedup(self) -> float:
        """NaN where an engine had no step: an answer's first token comes with its prompt."""
        plain, speculative = self.plain.tokens_per_second, self.speculative.tokens_per_second
        return speculative / plain if plain and speculative else float("nan")

    @property
    def differences(self) -> list[int | None]:
        """Per prompt: index of the first token that differs, None if all are equal."""
        pairs = zip(self.plain.token_ids, self.speculative.token_ids, strict=True)
        return [first_difference(left, right) for left, right in pairs]

    @property
    def is_identical(self) -> bool:
        return all(index is None for index in self.differences)


def refuse_sweep_options(sweep: SweepOptions) -> None:
    """Raises CliError for an option that only a sweep reads."""
    for name, value in vars(sweep).items():
        if value != getattr(SweepOptions(), name):
            raise CliError(f"--{name} is of --sweep: give that too.")


def run_bench(
    options: EngineOptions,
    given: PromptOptions,
    sampling: SamplingOptions,
    repeat: int,
    output: JsonOptions,
) -> int:
    """Returns the exit code: 0, or 1 when a request failed."""
    prompts = read_prompts(given)
    check_writable(output.json_file)
    check_max_tokens(sampling.max_tokens)
    if sampling.temperature > 0 and sampling.seed is None:  # else the two could never agree
        sampling = replace(sampling, seed=0)
    params = make_sampling_params(sampling)
    check_filters(sampling, [sampling.temperature])
    sets = {"given": list(prompts)} if prompts else _built_in_sets()
    about: dict[str, Any] = {}
    results: list[SetResult] = []
    try:
        with redirect_stdout(sys.stderr), Progress() as progress:
            plain, speculative = load_pair(options, progress)
            about = _about(options, sampling, repeat, speculative)
            measure = Measurement(plain, speculative, params, given.raw, repeat, progress)
            for name, items in sets.items():
                results.append(measure.run(name, items))
    except BenchFailed as error:
        show_error(str(error))
        return EXIT_FAILED
    finally:  # also where a later set failed, or was interrupted
        if results:
            _show({**about, "num_sets": len(sets)}, results, output)
            if len(results) < len(sets):
                show_note(f"these are {len(results)} of {len(sets)} prompt sets.")
    return 0


def _show(about: dict[str, Any], results: Sequence[SetResult], output: JsonOptions) -> None:
    if output.is_wanted:
        write_json(output, {**about, "sets": [_set_json(result) for result in results]})
    if not output.as_json:
        _print_report(make_console(), about, results)


def _built_in_sets() -> dict[str, list[Prompt]]:
    return {name: [Prompt(text) for text in texts] for name, texts in PROMPT_SETS.items()}


@dataclass(frozen=True)
class Measurement:
    """Two engines, and how a prompt set is decoded with both."""

    plain: LLM
    speculative: LLM
    params: SamplingParams
    raw: bool
    repeat: int
    progress: Progress

    def run(self, name: str, prompts: Sequence[Prompt]) -> SetResult:
        """Returns the set's runs, after one warm-up of each engine."""
        result = SetResult(name, len(prompts))
        engines = [(self.plain, result.plain), (self.speculative, result.speculative)]
        self.progress(f"warming up on {name!r}")
        for llm, _ in engines:
            # Each batch size has a graph on CUDA, which is captured when it first comes up, and
            # lengths to try, where K is chosen.
            is_cuda = str(llm.device).startswith("cuda")
            warm = prompts if is_cuda or llm.chooses_draft_len else prompts[:1]
            self._run_once(llm, warm, Side())
        for turn in range(1, self.repeat + 1):
            for llm, side in engines:
                self.progress(f"decoding {name!r}, run {turn} of {self.repeat}, {llm.mode.name}")
                self._run_once(llm, prompts, side)
        return result

    def _run_once(self, llm: LLM, prompts: Sequence[Prompt], side: Side) -> None:
        inputs = to_inputs(llm, prompts, self.raw)
        llm.reset_prefix_cache()  # else all runs but the first would find the prompts
        llm.reset_stats()
        salt = f"run {next(_RUNS)}"  # else suffix lookup would find an earlier run's answers
        outputs = llm.generate(inputs, self.params, cache_salt=salt)
        for number, output in enumerate(outputs, start=1):
            if output.outputs[0].finish_reason == "error":
                raise BenchFailed(f"prompt {number} failed with {llm.mode.name}: {output.error}")
        side.runs.append(llm.stats())
        side.token_ids = [list(output.outputs[0].token_ids) for output in outputs]


def _draws_anew(speculative: LLM, sampling: SamplingOptions) -> bool:
    """Returns whether other tokens than without speculation are no fault: the rule draws anew."""
    from ..acceptance.rules import RULES

    is_sampled = sampling.temperature > 0 and sampling.top_k != 1
    has_network = speculative.mode.drafts_with_network()
    rule = RULES.get(speculative.acceptance or "")
    return is_sampled and has_network and rule is not None and not rule.keeps_seeded_output


def _about(
    options: EngineOptions, sampling: SamplingOptions, repeat: int, speculative: LLM
) -> dict[str, Any]:
    """Returns what is measured with."""
    return {
        "model": options.model,
        **describe(speculative),
        "max_batch_size": options.max_batch_size,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "repeat": repeat,
        "draws_anew": _draws_anew(speculative, sampling),
        "forced_acceptance": speculative.stats().forced_acceptance,
    }


def _set_json(result: SetResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "num_prompts": result.num_prompts,
        "identical": result.is_identical,
        "first_differences": result.differences,
        "speedup": finite(result.speedup),
        "plain": _side_json(result.plain),
        "speculative": _side_json(result.speculative),
    }


def _side_json(side: Side) -> dict[str, Any]:
    return {
        "tokens_per_second": finite(side.tokens_per_second),
        "tokens_per_second_runs": [finite(run.tokens_per_second) for run in side.runs],
        "generated_tokens": side.runs[-1].generated_tokens,
        "acceptance_length": finite(side.acceptance_length),
        "acceptance_per_position": [finite(rate) for rate in side.acceptance_per_position],
    }


def _print_report(console: Console, about: dict[str, Any], results: Sequence[SetResult]) -> None:
    mode = f"{about['mode']} K={draft_len_text(about)}"
    sampled = ""
    if about["temperature"] > 0:
        sampled = (
            f", temperature {about['temperature']:g}, seed {about['seed']}, {about['acceptance']}"
        )
    console.print(
        Text(
            f"{about['model']}, {about['dtype']} on {about['device']}, batch "
            f"{about['max_batch_size']}, {about['max_tokens']} tokens{sampled}; median of "
            f"{about['repeat']} run(s); tok/s of decoding, without the time that reading the "
            "prompts takes"
        ),
        soft_wrap=True,
    )
    table = Table()
    table.add_column("prompts")
    for heading in ("NONE tok/s", f"{mode} tok/s", "speedup", "AL"):
        table.add_column(heading, justify="right")
    table.add_column("tokens")
    for result in results:
        table.add_row(
            f"{result.name} ({result.num_prompts})",
            f"{result.plain.tokens_per_second:.1f}",
            f"{result.speculative.tokens_per_second:.1f}",
            "-" if isnan(result.speedup) else f"{result.speedup:.2f}x",
            f"{result.speculative.acceptance_length:.2f}",
            Text("other draws of the same distribution")
            if about["draws_anew"]
            else identity_text(result.differences),
        )
    console.print(table)
    for result in results:
        console.print(Text(f"acceptance per position, {result.name}", style="bold"))
        console.print(position_bars(result.speculative.acceptance_per_position, console))
    print_forced(console, about["forced_acceptance"])


def identity_text(differences: Sequence[int | None]) -> Text:
    """`identical`, or how many of the answers are not, and from which token on."""
    indices = [index for index in differences if index is not None]
    if not indices:
        return Text("identical", style="green")
    return Text(
        f"{len(indices)} of {len(differences)} differ, first at token {min(indices)}",
        style="yellow",
    )
