"""`trtspec acceptance`: how well drafts are accepted, and where."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..data.acceptance_prompts import AcceptancePrompt, load_prompts, select_prompts
from .engine import chosen_head, load_llm, load_pair, parse_mode
from .errors import CliError
from .inputs import encoder
from .numbers import MAX_TEMPERATURE, check_max_tokens, parse_contexts, parse_numbers
from .options import AcceptanceOptions, EngineOptions, JsonOptions
from .output import check_files, write_json
from .render import make_console, print_forced
from .status import Progress

if TYPE_CHECKING:
    from ..llm import LLM
    from ..report import AcceptanceReport, Advice, Group


@dataclass(frozen=True)
class Plan:
    """What is measured: the options, read and checked."""

    prompts: Sequence[AcceptancePrompt]
    temperatures: Sequence[float]
    contexts: Sequence[int]

    @classmethod
    def of(cls, what: AcceptanceOptions) -> Plan:
        """Raises CliError, DataError where an option cannot be."""
        categories = [name.strip() for name in (what.categories or "").split(",") if name.strip()]
        if what.categories is not None and not categories:
            raise CliError(
                f"--categories {what.categories!r} names none: give some, like chat,code, or leave "
                "it out for all."
            )
        check_max_tokens(what.max_tokens)
        temperatures = parse_numbers("--temperatures", what.temperatures, float, 0, MAX_TEMPERATURE)
        contexts = parse_contexts(what.contexts)
        prompts = select_prompts(load_prompts(what.prompts), categories, what.per_category)
        return cls(prompts, temperatures, contexts)


def run_acceptance(options: EngineOptions, what: AcceptanceOptions, output: JsonOptions) -> int:
    """Returns the exit code."""
    if parse_mode(options.speculative).is_none():
        raise CliError("--speculative none drafts nothing to measure: name a drafting mode.")
    if what.advise:
        _refuse_advice(options)
    plan = Plan.of(what)
    files = check_files({"--html": what.html, "--json-file": output.json_file})
    if what.html is not None:
        from ..report.plots import require_matplotlib

        require_matplotlib()  # before minutes of measuring
    with redirect_stdout(sys.stderr), Progress() as progress:
        report, failure = _measure(options, what, plan, progress)
    if output.is_wanted:  # first: whatever happens to the rest, nothing is measured again
        about = {"model": options.model, "head": chosen_head(options)}
        write_json(output, {**about, **report.to_json()})
    console = make_console(stderr=output.as_json)
    if not output.as_json:
        _print_report(console, options, report)
    if what.html is not None:
        from ..report.html import render_html
        from ..report.plots import draw_plots

        title = f"Acceptance: {options.model}, {_mode(report)}"
        page = render_html(report, title, draw_plots(report))
        what.html.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    for path in files:
        console.print(Text(f"written: {path}", style="dim"), soft_wrap=True)
    if failure is not None:
        raise failure
    return 0


def _refuse_advice(options: EngineOptions) -> None:
    """Raises CliError where steps would draft less than K: advice is on K for all steps."""
    settings = {
        "--max-draft-len auto": (options.max_draft_len or "").strip().lower() == "auto",
        "--draft-len-schedule": options.draft_len_schedule is not None,
        "--max-verified-drafts": options.max_verified_drafts is not None,
    }
    for name, is_given in settings.items():
        if is_given:
            raise CliError(
                f"--advise needs the acceptance of all K drafts, and with {name} steps verify "
                "fewer. Leave out one of them."
            )


def _measure(
    options: EngineOptions, what: AcceptanceOptions, plan: Plan, progress: Progress
) -> tuple[AcceptanceReport, BaseException | None]:
    """Returns the report, and why it is not whole: it was interrupted, or advice was asked for and
    could not be given."""
    from ..report.measure import InterruptedReport, measure_acceptance

    plain: LLM | None = None
    if what.advise:
        plain, llm = load_pair(options, progress)
    else:
        llm = load_llm(options, progress)
    try:
        report = measure_acceptance(
            llm,
            plan.prompts,
            temperatures=plan.temperatures,
            contexts=plan.contexts,
            max_tokens=what.max_tokens,
            seed=what.seed,
            encode=encoder(llm, what.raw),
            progress=progress,
        )
    except InterruptedReport as interrupt:
        return interrupt.report, interrupt
    if plain is None:
        return report, None
    ids = sorted(map(encoder(llm, what.raw), (p.messages for p in plan.prompts)), key=len)
    try:
        advice = _advise(plain, llm, ids, report, options.max_batch_size, progress)
    except BaseException as error:  # noqa: BLE001 - what was measured is worth minutes
        return report, error
    return replace(report, advice=advice), None


def _advise(
    plain: LLM,
    llm: LLM,
    ids: Sequence[Sequence[int]],
    report: AcceptanceReport,
    batch: int,
    progress: Progress,
) -> Advice:
    """Returns which K pays, from the time of a step for each.

    Args:
        ids: the prompts' tokens, the shortest first.
    """
    from ..report import advise, measure_step_ms
    from ..report.advice import check_measured

    check_measured(report.rates_to_advise)
    start = max(0, (len(ids) - batch) // 2)  # the prompts of middling length
    step_ms = measure_step_ms(
        plain,
        llm,
        range(llm.max_draft_len + 1),
        ids[start : start + batch],
        batch_size=batch,
        temperature=report.temperatures[0],
        progress=progress,
    )
    return advise(step_ms, report.rates_to_advise, batch)


def _mode(report: AcceptanceReport) -> str:
    return f"{report.settings['mode'].upper()} K={report.max_draft_len}"


def _print_report(console: Console, options: EngineOptions, report: AcceptanceReport) -> None:
    from ..report.measure import INTERVAL

    about = report.settings
    console.print(
        Text(
            f"{options.model}, {_mode(report)}, {about['dtype']} on {about['device']}, batch "
            f"{about['max_batch_size']}; {about['num_prompts']} prompts, at most "
            f"{about['max_tokens']} tokens each, seed {about['seed']}; in brackets: {INTERVAL}"
        ),
        soft_wrap=True,
    )
    console.print(_length_table("category", [report.by_category, report.overall], report))
    console.print(_position_table(report))
    console.print(_length_table("context", [report.by_context], report))
    if report.advice is not None:
        _print_advice(console, report.advice, report)
    print_forced(console, about["forced_acceptance"])
    if report.warning is not None:
        text = f"WARNING: {report.warning}"
        console.print(Text(text, style="bold white on red"), soft_wrap=True)


def _length_table(name: str, parts: Sequence[Sequence[Group]], report: AcceptanceReport) -> Table:
    """Returns a table with a row for each name of each part, and a column per temperature."""
    from ..report.html import interval_text

    table = Table(title=f"tokens per step by {name}", title_justify="left")
    table.add_column(name)
    for temperature in report.temperatures:
        table.add_column(f"T={temperature:g}", justify="right")
    for heading in ("prompts", "steps"):
        table.add_column(heading, justify="right")
    rows = [(i, group.name) for i, part in enumerate(parts) for group in part]
    for i, row in dict.fromkeys(rows):
        found = {g.temperature: g.acceptance for g in parts[i] if g.name == row}
        cells = [
            interval_text(found[t].acceptance_length) if t in found else "-"
            for t in report.temperatures
        ]
        prompts = max(acceptance.num_prompts for acceptance in found.values())
        steps = sum(acceptance.num_steps for acceptance in found.values())
        table.add_row(row, *cells, str(prompts), str(steps))
    return table


def _position_table(report: AcceptanceReport) -> Table:
    from ..report.html import interval_text

    table = Table(title="accepted by draft position", title_justify="left")
    table.add_column("T", justify="right")
    for heading in ("draft", "if all before were", "of all steps", "reached", "accepted"):
        table.add_column(heading, justify="right")
    for group in report.overall:
        found = group.acceptance
        for i in range(report.max_draft_len):
            table.add_row(
                f"{group.temperature:g}",
                str(i + 1),
                interval_text(found.conditional[i], percent=True),
                interval_text(found.unconditional[i], percent=True),
                str(found.reached[i]),
                str(found.accepted[i]),
            )
    return table


def _print_advice(console: Console, advice: Advice, report: AcceptanceReport) -> None:
    title = f"draft length, batch {advice.batch_size}, T={report.temperatures[0]:g}"
    table = Table(title=title, title_justify="left")
    for heading in ("K", "expected tokens", "step ms", "tok/s", "over plain"):
        table.add_column(heading, justify="right")
    for row in advice.rows:
        table.add_row(
            str(row.draft_len or "plain"),
            f"{row.expected_tokens:.2f}",
            "-" if row.step_ms is None else f"{row.step_ms:.2f}",
            "-" if row.tokens_per_second is None else f"{row.tokens_per_second:.1f}",
            "-" if row.speedup is None else f"{row.speedup:.2f}x",
            style="bold green" if row is advice.best else None,
        )
    console.print(table)
    best = advice.best
    if best.draft_len == 0:
        text = "Plain decoding is the fastest here: drafting does not pay."
    else:
        speedup = "" if best.speedup is None else f", {best.speedup:.2f}x plain"
        text = f"Use --max-draft-len {best.draft_len}{speedup}."
    console.print(Text(text, style="green"), soft_wrap=True)
