"""One HTML file that needs nothing else: tables, and plots as images within it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from .advice import Advice
from .measure import INTERVAL, AcceptanceReport
from .statistics import Estimate, Group

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25rem 0.8rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
.warning { background: #b00020; color: #fff; padding: 0.6rem 1rem; font-weight: bold; }
.best { font-weight: bold; }
.small { color: #666; font-size: 0.9em; }
"""


def render_html(report: AcceptanceReport, title: str, plots: dict[str, str]) -> str:
    """The page; `plots` are SVG documents by title, from `plots.draw_plots`."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
    ]
    if report.settings.get("forced_acceptance"):
        parts.append('<p class="warning">Forced acceptance is on: no figure is the drafter\'s.</p>')
    if report.warning:
        parts.append(f'<p class="warning">Warning: {escape(report.warning)}</p>')
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    parts.append(f'<p class="small">{escape(settings)}. Intervals: {escape(INTERVAL)}.</p>')
    parts.append("<h2>Acceptance length</h2>")
    parts.append("<p>Mean tokens of a generation step, the bonus included.</p>")
    parts.append(_lengths("category", [*report.by_category, *report.overall]))
    parts.append("<h2>By draft position</h2>")
    parts.append(_positions(report))
    parts.append("<h2>By context length at the step</h2>")
    parts.append(_lengths("context", report.by_context))
    if report.advice is not None:
        parts.append("<h2>Draft length</h2>")
        parts.append(_advice(report.advice))
    for name, svg in plots.items():
        data = base64.b64encode(svg.encode()).decode()
        parts.append(f"<h2>{escape(name)}</h2>")
        parts.append(f'<img alt="{escape(name)}" src="data:image/svg+xml;base64,{data}">')
    return "\n".join([*parts, "</body></html>", ""])


def interval_text(estimate: Estimate, percent: bool = False) -> str:
    """`2.31 (2.20-2.43)`; a dash where nothing was counted."""
    if estimate.value is None:
        return "-"
    scale, digits = (100, 1) if percent else (1, 2)
    text = f"{scale * estimate.value:.{digits}f}{' %' if percent else ''}"
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} ({scale * estimate.low:.{digits}f}-{scale * estimate.high:.{digits}f})"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], best: int | None = None) -> str:
    lines = ["<table><tr>" + "".join(f"<th>{escape(h)}</th>" for h in headings) + "</tr>"]
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        lines.append(f"<tr{' class=best' if number == best else ''}>{cells}</tr>")
    return "\n".join([*lines, "</table>"])


def _lengths(heading: str, groups: Sequence[Group]) -> str:
    rows = [
        [
            group.name,
            f"{group.temperature:g}",
            interval_text(group.acceptance.acceptance_length),
            str(group.acceptance.num_prompts),
            str(group.acceptance.num_steps),
        ]
        for group in groups
    ]
    return _table([heading, "temperature", "tokens per step", "prompts", "steps"], rows)


def _positions(report: AcceptanceReport) -> str:
    rows = [
        [
            f"draft {i + 1}",
            f"{group.temperature:g}",
            interval_text(group.acceptance.conditional[i], percent=True),
            interval_text(group.acceptance.unconditional[i], percent=True),
            str(group.acceptance.reached[i]),
            str(group.acceptance.accepted[i]),
        ]
        for group in report.overall
        for i in range(report.max_draft_len)
    ]
    headings = ["position", "temperature", "if all before were", "of all steps", "reached"]
    return _table([*headings, "accepted"], rows)


def _advice(advice: Advice) -> str:
    rows = [
        [
            "plain" if row.draft_len == 0 else f"K = {row.draft_len}",
            f"{row.expected_tokens:.2f}",
            "-" if row.step_ms is None else f"{row.step_ms:.2f}",
            "-" if row.tokens_per_second is None else f"{row.tokens_per_second:.1f}",
            "-" if row.speedup is None else f"{row.speedup:.2f}x",
        ]
        for row in advice.rows
    ]
    headings = ["draft length", "expected tokens", "step, ms", "tokens/s", "over plain"]
    return _table(headings, rows, best=advice.best_draft_len)
