"""What the commands print with: consoles, highlighted steps, bars, the summary line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from ..api.outputs import CompletionOutput, EngineStats

ACCEPTED_STYLE = "bold green"  # draft tokens that the target accepted
BAR_WIDTH = 30
PLAIN_WIDTH = 100  # columns where stdout is not a terminal

Piece = tuple[str, bool]  # text, and whether it is accepted draft tokens


def make_console(stderr: bool = False) -> Console:
    """A console on today's stdout or stderr; prints what it is given, no markup, no guessing."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def say(text: str) -> None:
    """Prints a line on stderr."""
    make_console(stderr=True).print(Text(text), soft_wrap=True)


def write_pieces(console: Console, pieces: Iterable[Piece]) -> None:
    """Model text as it comes: highlighted on a terminal, byte for byte otherwise."""
    for text, accepted in pieces:
        if console.is_terminal:
            style = ACCEPTED_STYLE if accepted else ""
            console.print(Text(text, style=style), end="", soft_wrap=True)
        else:
            console.file.write(text)
    console.file.flush()


def split_step(tokenizer: Any, output: CompletionOutput) -> list[Piece]:
    """The text of one step, cut into accepted draft tokens and the rest.

    A step's tokens are its accepted drafts and then the bonus token. The cut is only made where
    the drafts alone decode to the beginning of the step's text; a tokenizer that decodes them
    differently, or a character spread over two steps, leaves the step unhighlighted.
    """
    text = output.text_diff
    if not text:
        return []
    drafts = list(output.token_ids_diff[:-1])
    head = tokenizer.decode(drafts, skip_special_tokens=True) if drafts else ""
    if head and text.startswith(head):
        return [piece for piece in ((head, True), (text[len(head) :], False)) if piece[0]]
    return [(text, False)]


def pieces_to_text(pieces: Iterable[Piece]) -> Text:
    text = Text()
    for piece, accepted in pieces:
        text.append(piece, style=ACCEPTED_STYLE if accepted else None)
    return text


def position_bars(rates: Sequence[float], console: Console) -> Text:
    """One line per draft position: how often the token drafted there was accepted."""
    is_utf = (console.encoding or "").lower().startswith("utf")
    full, empty = ("█", "░") if is_utf else ("#", ".")
    lines = Text()
    for position, rate in enumerate(rates, start=1):
        share = rate if math.isfinite(rate) else 0.0
        filled = round(min(max(share, 0.0), 1.0) * BAR_WIDTH)
        lines.append(f"{'' if position == 1 else chr(10)}draft {position:>2}  ")
        lines.append(full * filled, style="green")
        lines.append(empty * (BAR_WIDTH - filled), style="dim")
        lines.append(f" {100 * share:5.1f} %")
    return lines


def forced_banner(forced: float | None) -> Text | None:
    """The loud line of a run whose acceptance is forced; None where it is not."""
    if not forced:
        return None
    return Text(
        f"FORCED ACCEPTANCE IS ON: {forced:g} draft tokens per step (bonus token not counted) are "
        "accepted whatever the target says. The text is not the model's; "
        "unset TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS to turn it off.",
        style="bold white on red",
    )


def print_forced(console: Console, forced: float | None) -> None:
    """Prints that line, where it is due."""
    banner = forced_banner(forced)
    if banner is not None:
        console.print(banner, soft_wrap=True)


def draft_len_text(about: Mapping[str, Any]) -> str:
    """Returns K, or `0…K` where each step's is chosen. about: of `describe`."""
    first = "0…" if about["chooses_draft_len"] else ""
    return f"{first}{about['max_draft_len']}"


def summary_line(stats: EngineStats, about: Mapping[str, Any]) -> Text:
    """`128 tokens · 45.2 tok/s · acceptance length 2.31 · NGRAM, K = 4`; about: of `describe`."""
    mode = about["mode"].upper()
    how = mode if mode == "NONE" else f"{mode}, K = {draft_len_text(about)}"
    forced = f" (FORCED {stats.forced_acceptance:g})" if stats.forced_acceptance else ""
    return Text(
        f"{stats.generated_tokens} tokens · {stats.tokens_per_second:.1f} tok/s · "
        f"acceptance length {stats.acceptance_length:.2f}{forced} · {how}",
        style="cyan",
    )


def print_summary(console: Console, stats: EngineStats, about: Mapping[str, Any]) -> None:
    print_forced(console, stats.forced_acceptance)
    console.print(summary_line(stats, about), soft_wrap=True)


def finite(value: float | None) -> float | None:
    """The number, or None where JSON has no word for it (NaN, infinity)."""
    return value if value is not None and math.isfinite(value) else None


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs (or that only one has); None if all are equal."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))
