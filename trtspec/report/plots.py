"""The report's plots as SVG, drawn with matplotlib (the extra `report`)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from .advice import Advice
from .measure import AcceptanceReport
from .statistics import Estimate, Group

_WIDTH, _ROW = 7.0, 0.34  # inches: of a plot, and of one bar in it
_LABEL = 50  # characters


def require_matplotlib() -> Any:
    """Returns its Figure class.

    Raises:
        ConfigError: matplotlib is not installed; names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"The HTML report is drawn with matplotlib, which cannot be imported ({error}): pip "
            "install 'trtspec[report]', or leave the HTML out."
        ) from error
    return Figure


def draw_plots(report: AcceptanceReport) -> dict[str, str]:
    """Title -> SVG document."""
    plots = {
        "Acceptance by draft position": _positions(report),
        "Acceptance length by category": _bars(report.by_category, report.temperatures),
        "Acceptance length by context": _bars(report.by_context, report.temperatures),
    }
    if len(report.overall) > 1:
        plots["Acceptance length by temperature"] = _temperatures(report.overall)
    if report.advice is not None:
        plots["Tokens per second by draft length"] = _speeds(report.advice)
    return plots


def _figure(height: float) -> tuple[Any, Any]:
    """Returns a figure and its axes. height: in inches."""
    figure = require_matplotlib()(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _positions(report: AcceptanceReport) -> str:
    figure, axes = _figure(3.4)
    numbers = range(1, report.max_draft_len + 1)
    for color, group in enumerate(report.overall):
        for rates, style, name in (
            (group.acceptance.conditional, "o-", "if all before were"),
            (group.acceptance.unconditional, "s--", "of all steps"),
        ):
            values, errors = _with_errors(rates)
            axes.errorbar(
                numbers,
                values,
                yerr=errors,
                fmt=style,
                color=f"C{color}",
                capsize=3,
                label=f"T = {group.temperature:g}, {name}",
            )
    axes.set(xlabel="draft position", ylabel="accepted", ylim=(0, 1.03), xticks=list(numbers))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return to_svg(figure)


def _bars(groups: Sequence[Group], temperatures: Sequence[float]) -> str:
    names = list(dict.fromkeys(group.name for group in groups))
    figure, axes = _figure(1.1 + _ROW * len(names) * len(temperatures))
    height = 0.8 / len(temperatures)
    for number, temperature in enumerate(temperatures):
        chosen = [group for group in groups if group.temperature == temperature]
        values, errors = _with_errors([group.acceptance.acceptance_length for group in chosen])
        offset = (number - (len(temperatures) - 1) / 2) * height
        offsets = [names.index(group.name) + offset for group in chosen]
        axes.barh(
            offsets,
            values,
            height,
            xerr=errors,
            capsize=3,
            color=f"C{number}",
            label=f"T = {temperature:g}",
        )
    axes.set(xlabel="tokens per step")
    labels = [_label(name) for name in names]
    axes.set_yticks(list(range(len(names))), labels=labels, parse_math=False)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    if len(temperatures) > 1:
        axes.legend(fontsize="small")
    return to_svg(figure)


def _temperatures(overall: Sequence[Group]) -> str:
    figure, axes = _figure(3.0)
    groups = sorted(overall, key=lambda group: group.temperature)
    values, errors = _with_errors([group.acceptance.acceptance_length for group in groups])
    axes.errorbar([g.temperature for g in groups], values, yerr=errors, fmt="o-", capsize=3)
    axes.set(xlabel="temperature", ylabel="tokens per step")
    axes.set_ylim(bottom=0.95)
    axes.grid(alpha=0.3)
    return to_svg(figure)


def _speeds(advice: Advice) -> str:
    figure, axes = _figure(3.0)
    rows, best = [row for row in advice.rows if row.tokens_per_second is not None], advice.best
    axes.plot([row.draft_len for row in rows], [row.tokens_per_second for row in rows], "o-")
    axes.plot([best.draft_len], [best.tokens_per_second], "*", markersize=16, label="best")
    axes.set(xlabel="draft length K (0: plain)", ylabel="tokens per second")
    axes.set_xticks([row.draft_len for row in rows])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return to_svg(figure)


def _label(name: str) -> str:
    """Makes a caller's text one line that XML can hold. (`$` needs nothing: parse_math=False.)"""
    line = "".join(c if c.isprintable() else "\ufffd" for c in name)
    return line if len(line) <= _LABEL else f"{line[: _LABEL - 1]}…"


def _with_errors(estimates: Sequence[Estimate]) -> tuple[list[float], list[list[float]]]:
    """Values, and how far the interval goes below and above; NaN where nothing was counted."""
    nan = float("nan")
    values = [nan if e.value is None else e.value for e in estimates]
    below = [0.0 if e.low is None else max(0.0, (e.value or 0.0) - e.low) for e in estimates]
    above = [0.0 if e.high is None else max(0.0, e.high - (e.value or 0.0)) for e in estimates]
    return values, [below, above]


def to_svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]  # without the DTD's address
