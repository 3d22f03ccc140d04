"""`trtspec bench --sweep`: a table over concurrency, temperature, kind of text and context."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..data.acceptance_prompts import CATEGORIES, AcceptancePrompt, load_prompts
from ..data.agent_prompts import agent_prompts
from .engine import (
    check_filters,
    chosen_head,
    describe,
    int_or_auto,
    load_small_llm,
    make_sampling_params,
    parse_draft_len,
    parse_mode,
)
from .errors import CliError, show_note
from .inputs import read_prompts
from .numbers import MAX_TEMPERATURE, check_max_tokens, parse_contexts, parse_numbers
from .options import EngineOptions, JsonOptions, PromptOptions, SamplingOptions, SweepOptions
from .output import check_files, write_json
from .render import finite, make_console
from .status import Progress

if TYPE_CHECKING:
    from ..llm import LLM
    from ..report.sweep import Axes, Cell, Sweep, SweepRun, Way

AGENT = "agent"
DEFAULT_KINDS = "chat,agent"
COLUMNS = ("plain", "fixed", "auto", "sa", "both")
SCOUT_LENGTH = 8192
"""Tokens of a sequence in the engine that is loaded first, to ask it about the model."""
MAX_LISTED = 8
"""Of longer drafts not every fixed length is a column."""


@dataclass(frozen=True)
class SweepCommand:
    """What the command line says, read and checked."""

    engine: EngineOptions
    sampling: SamplingOptions
    axes: Axes
    columns: Sequence[str]
    fixed: Sequence[int] | None  # None: by K

    @classmethod
    def of(
        cls,
        options: EngineOptions,
        given: PromptOptions,
        sampling: SamplingOptions,
        sweep: SweepOptions,
    ) -> SweepCommand:
        """Raises CliError where an option cannot be."""
        from ..report.sweep import Axes

        _check_others(options, given, sampling)
        check_max_tokens(sampling.max_tokens)
        mode = parse_mode(options.speculative)
        can_have_both = mode.drafts_with_network() and not options.two_engine
        possible = [name for name in COLUMNS if name != "both" or can_have_both]
        if mode.is_sa():
            possible.remove("sa")
        columns = _names("--columns", sweep.columns, COLUMNS) or possible
        wrong = [name for name in columns if name not in possible]
        if wrong:
            raise CliError(
                f"--columns {wrong[0]}: with --speculative {options.speculative} there is no such "
                f"column. Give some of {', '.join(possible)}."
            )
        if sweep.fixed is not None and "fixed" not in columns:
            raise CliError(
                f"--fixed {sweep.fixed} has lengths of the column fixed, which --columns leaves "
                "out. Name it there, or leave out --fixed."
            )
        contexts = parse_contexts(sweep.contexts)
        concurrencies = parse_numbers("--concurrency", sweep.concurrency, int, 1, 4096)
        fixed = None if sweep.fixed is None else parse_numbers("--fixed", sweep.fixed, int, 1, 64)
        temperatures = parse_numbers(
            "--temperatures", sweep.temperatures, float, 0, MAX_TEMPERATURE
        )
        if options.max_draft_len is not None and "fixed" in columns:
            _check_fixed(fixed or (), int(options.max_draft_len))
        check_filters(sampling, temperatures)
        if options.prefill_batch_size is not None:
            _check_slots(options.prefill_batch_size, min(concurrencies))
        return cls(
            engine=options,
            sampling=replace(sampling, seed=sampling.seed or 0),
            axes=Axes(
                concurrencies=concurrencies,
                temperatures=temperatures,
                kinds=_kinds(given, sweep.kinds),
                contexts=contexts or [None],
                rounds=sweep.rounds,
            ),
            columns=[name for name in COLUMNS if name in columns],
            fixed=fixed,
        )

    def engine_options(self, column: str, concurrency: int) -> EngineOptions:
        """Returns the options of a column's engine."""
        options = replace(self.engine, max_batch_size=concurrency)
        if column in ("plain", "sa"):
            options = options.with_plain("none" if column == "plain" else "sa")
        if column == "auto":
            options = replace(options, draft_len_schedule="auto")
        return replace(options, sa=True) if column == "both" else options

    def ways(self, max_draft_len: int) -> list[Way]:
        """Returns the columns.

        Args:
            max_draft_len: K of the drafter.
        """
        from ..report.sweep import Way

        ways = []
        for column in self.columns:
            if column == "fixed":
                lengths = self.fixed or _lengths(max_draft_len)
                _check_fixed(lengths, max_draft_len)
                ways += [Way(f"K={k}", column, k) for k in lengths]
            else:
                name = f"{self.engine.speculative}+sa" if column == "both" else column
                ways.append(Way(name, column))
        return ways


def run_sweep(
    options: EngineOptions,
    given: PromptOptions,
    sampling: SamplingOptions,
    sweep: SweepOptions,
    repeat: int,
    output: JsonOptions,
) -> int:
    """Returns the exit code.

    Raises:
        SweepFailed: a request failed. The cells before it are shown and written.
    """
    command = SweepCommand.of(options, given, sampling, sweep)
    files = check_files(
        {"--picture": sweep.picture, "--csv": sweep.csv, "--json-file": output.json_file}
    )
    if sweep.picture is not None:
        if sweep.picture.suffix.lower() not in ("", ".svg"):
            raise CliError(
                f"--picture {sweep.picture}: the table is drawn as SVG alone. Give a name that "
                "ends with .svg."
            )
        from ..report.plots import require_matplotlib

        require_matplotlib()  # before minutes of measuring
    from ..report.sweep import Sweep

    progress, cells = Progress(), []
    with redirect_stdout(sys.stderr), progress:
        about, run = _prepare(command, repeat, progress)
    try:
        with redirect_stdout(sys.stderr), progress:
            for cell in run.cells():
                cells.append(cell)
    finally:  # also where a later cell failed, or was interrupted
        if cells:
            _show(about, Sweep(run.ways, cells), sweep, output)
            console = make_console(stderr=output.as_json)
            for path in files:
                console.print(Text(f"written: {path}", style="dim"), soft_wrap=True)
            if len(cells) < run.axes.num_cells:
                show_note(f"these are {len(cells)} of {run.axes.num_cells} cells.")
    return 0


def _show(about: dict[str, Any], table: Sweep, asked: SweepOptions, output: JsonOptions) -> None:
    """Prints the table, and writes the files that are asked for."""
    from ..report.sweep import draw_sweep

    if output.is_wanted:  # first: whatever happens to the rest, nothing is measured again
        write_json(output, {**about, "cells": _finite(table.rows())})
    if not output.as_json:
        _print_table(make_console(), about, table)
    if asked.csv is not None:
        asked.csv.write_text(table.to_csv(), encoding="utf-8")
    if asked.picture is not None:
        asked.picture.write_text(draw_sweep(table), encoding="utf-8", errors="xmlcharrefreplace")


def _prepare(
    command: SweepCommand, repeat: int, progress: Progress
) -> tuple[dict[str, Any], SweepRun]:
    """Returns what is measured with, and the run."""
    from ..report.sweep import SweepRun, encode_prompts

    axes, answer = command.axes, command.sampling.max_tokens
    # The drafter's engine says K, and is the one whose options can fail.
    drafter = next(name for name in (*command.columns, "fixed") if name not in ("plain", "sa"))
    alone = replace(command.engine_options(drafter, 1), prefill_batch_size=None)
    scout = load_small_llm(alone, SCOUT_LENGTH, progress)
    about, ways = _about(command, scout, repeat), command.ways(scout.max_draft_len)
    longest = scout.max_draft_len
    prompts = encode_prompts(axes, scout.apply_chat_template)
    most = scout.executor.config.max_seq_len
    scout.shutdown()
    length = answer + max(len(ids) for some in prompts.values() for ids in some)
    if length > most:
        raise CliError(
            f"Prompts and answers have up to {length} tokens, more than the model's {most}: give "
            "fewer --max-tokens or shorter --contexts."
        )

    def open_engines(concurrency: int) -> dict[str, Any]:
        options = {name: command.engine_options(name, concurrency) for name in command.columns}
        engines = {
            name: load_small_llm(asked, length, progress, max_seq_len=min(most, length + 64))
            for name, asked in options.items()
        }
        if "both" in engines:  # not what is chosen by default
            engines["both"].executor.runtime_draft_len = longest
        return engines

    run = SweepRun(
        ways=ways,
        axes=axes,
        prompts=prompts,
        params=make_sampling_params(command.sampling),
        repeat=repeat,
        open_engines=open_engines,
        progress=progress,
    )
    return about, run


def _about(command: SweepCommand, llm: LLM, repeat: int) -> dict[str, Any]:
    return {
        "model": command.engine.model,
        "head": chosen_head(command.engine),
        **describe(llm),
        "max_tokens": command.sampling.max_tokens,
        "seed": command.sampling.seed,
        "repeat": repeat,
        "rounds": command.axes.rounds,
        "num_cells": command.axes.num_cells,  # more than `cells` has where the run ended early
    }


def _check_others(options: EngineOptions, given: PromptOptions, sampling: SamplingOptions) -> None:
    """Raises CliError for options of `bench` that a sweep has in another form."""
    if parse_mode(options.speculative).is_none():
        raise CliError("--speculative none leaves nothing to compare: name a drafting mode.")
    others = {
        "--temperature": (sampling.temperature != 0, "--temperatures 0,1"),
        "--max-batch-size": (options.max_batch_size != 1, "--concurrency 1,8"),
        "--draft-len-schedule": (options.draft_len_schedule is not None, "the column auto"),
        "--max-verified-drafts": (options.max_verified_drafts is not None, "all drafts of each K"),
        "--sa": (options.sa, "the column both"),
        "--raw": (given.raw, "prompts for the chat template"),
    }
    for name, (is_given, instead) in others.items():
        if is_given:
            raise CliError(f"{name} was given with --sweep, which takes {instead} in its place.")
    if options.max_draft_len is not None and parse_draft_len(options.max_draft_len) == "auto":
        raise CliError("--max-draft-len auto was given with --sweep, which has a column for it.")


def _check_slots(text: str, fewest: int) -> None:
    """Raises CliError for slots that the smallest engine refuses: the scout is asked for none."""
    slots = int_or_auto("--prefill-batch-size", text, "slots")
    if slots == "auto":
        return
    if slots < 1:
        raise CliError(f"--prefill-batch-size {slots}: give 1 or more, or auto.")
    if slots > fewest:
        raise CliError(
            f"--prefill-batch-size {slots} is above --concurrency {fewest}: so many slots are "
            "never free. Lower the one, or leave out the other."
        )


def _check_fixed(lengths: Sequence[int], max_draft_len: int) -> None:
    """Raises CliError for a draft length above K."""
    too_long = [k for k in lengths if k > max_draft_len]
    if too_long:
        raise CliError(f"--fixed {too_long[0]}: K is {max_draft_len}; give at most it.")


def _names(option: str, text: str | None, known: Sequence[str]) -> list[str]:
    """Returns the names of `a,b`, each once."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise CliError(f"{option} {text!r}: {name!r} is not one of {', '.join(known)}.")
    if text is not None and not names:
        raise CliError(f"{option} {text!r} names nothing: give some of {', '.join(known)}.")
    return list(dict.fromkeys(names))


def _kinds(given: PromptOptions, text: str | None) -> dict[str, list[AcceptancePrompt]]:
    """Returns the prompts of each kind of text."""
    prompts = read_prompts(given)
    if prompts and text is not None:
        raise CliError(
            "--kinds was given with prompts, which are a kind of their own: leave out one of them."
        )
    if prompts:
        asked = [
            AcceptancePrompt(f"given-{i}", "given", tuple(prompt.messages))
            for i, prompt in enumerate(prompts)
        ]
        return {"given": asked}
    known, text = (*CATEGORIES, AGENT), DEFAULT_KINDS if text is None else text
    names = list(known) if text == "all" else _names("--kinds", text, known)
    built_in, agents = load_prompts(), agent_prompts()
    tasks = len(dict.fromkeys(prompt.category for prompt in agents))
    each = len(agents) // tasks
    mixed = [prompt for i in range(each) for prompt in agents[i::each]]
    return {
        name: mixed if name == AGENT else [p for p in built_in if p.category == name]
        for name in names
    }


def _lengths(max_draft_len: int) -> list[int]:
    """Returns the fixed draft lengths to compare with."""
    if max_draft_len <= MAX_LISTED:
        return list(range(1, max_draft_len + 1))
    powers = [2**i for i in range(7) if 2**i < max_draft_len]
    return [*powers, max_draft_len]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return finite(value) if isinstance(value, float) else value


def _print_table(console: Console, about: dict[str, Any], sweep: Sweep) -> None:
    console.print(
        Text(
            f"{about['model']}, {about['mode'].upper()} K={about['max_draft_len']}, "
            f"{about['dtype']} on {about['device']}, {about['max_tokens']} tokens; median of "
            f"{about['repeat']} run(s). tok/s of decoding, below it the acceptance length; the "
            "best fixed K is bold. With prompts: of all steps"
        ),
        soft_wrap=True,
    )
    has_contexts = any(cell.place.context is not None for cell in sweep.cells)
    table = Table(padding=(0, 0), pad_edge=False)
    for heading in ("at once", "T", "text", *(["context"] if has_contexts else [])):
        table.add_column(heading, justify="left" if heading == "text" else "right")
    for way in sweep.ways:
        table.add_column(way.name, justify="right", no_wrap=True)
    names = {way.name for way in sweep.ways}
    compared = "auto" in names and ("plain" in names or any(w.is_fixed for w in sweep.ways))
    for heading in ("auto/plain", "with prompts", "auto/best") if compared else ():
        table.add_column(heading, justify="right")
    for cell in sweep.cells:
        place = cell.place
        cells = [Text(str(place.concurrency)), Text(f"{place.temperature:g}"), Text(place.kind)]
        if has_contexts:
            cells.append(Text(str(place.context)))
        cells += [_figures(sweep, cell, way) for way in sweep.ways]
        table.add_row(*cells, *(_verdicts(sweep, cell) if compared else ()))
    console.print(table)


def _figures(sweep: Sweep, cell: Cell, way: Way) -> Text:
    text = Text(f"{cell.speed(way.name):.1f}")
    if way.name == sweep.best_fixed(cell):
        text.stylize("bold")
    return text.append(f"\n{cell.acceptance_length(way.name):.2f}", style="dim")


def _verdicts(sweep: Sweep, cell: Cell) -> list[Text]:
    """Returns `auto` over plain, of decoding and of all steps, and over the best fixed K, marked
    where it falls short."""
    from ..report.sweep import AUTO, NEAR_BEST, NEVER_SLOWER, PLAIN

    texts = []
    best = sweep.best_fixed(cell)
    for ratio, least in (
        (sweep.over(cell, AUTO, PLAIN), NEVER_SLOWER),
        (sweep.over(cell, AUTO, PLAIN, with_prompts=True), NEVER_SLOWER),
        (sweep.over(cell, AUTO, best), NEAR_BEST),
    ):
        if ratio is None:
            texts.append(Text("-"))
        elif ratio >= least:
            texts.append(Text(f"{ratio:.2f}", style="green"))
        else:
            texts.append(Text(f"{ratio:.2f} !", style="bold red"))
    return texts
