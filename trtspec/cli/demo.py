"""`trtspec demo`: the same answers without and with speculation, next to each other.

On a terminal both texts grow as they are decoded, accepted draft tokens in green; elsewhere the
same is printed as plain text. Equality and speed are reported as measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..data.prompts import DEMO_PROMPTS
from .bench import identity_text
from .engine import dtype_name, load_pair, make_sampling_params
from .errors import EXIT_FAILED, show_error
from .inputs import Prompt, to_token_ids
from .options import EngineOptions, SamplingOptions
from .render import (
    ACCEPTED_STYLE,
    Piece,
    first_difference,
    forced_banner,
    make_console,
    pieces_to_text,
    position_bars,
    print_forced,
    split_step,
)
from .status import Progress

if TYPE_CHECKING:
    from ..api.outputs import EngineStats, RequestOutput
    from ..api.sampling_params import SamplingParams
    from ..llm import LLM

WARM_UP_TOKENS = 8
WITHOUT_TEMPLATE = "trtspec generate --raw needs none."
FRAME_SECONDS = 0.1  # drawing takes time from decoding: ten times a second is enough
SIDE_BY_SIDE_COLUMNS = 90  # narrower terminals get one text below the other


@dataclass
class Answer:
    """One prompt decoded by one engine, as far as it has come."""

    label: str
    pieces: list[Piece] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tokens_per_second: float | None = None  # None while it runs
    acceptance_length: float | None = None
    error: str | None = None

    @property
    def note(self) -> str:
        if self.tokens_per_second is None:
            return "…" if self.pieces else ""
        rate = f"{len(self.token_ids)} tokens, {self.tokens_per_second:.1f} tok/s"
        length = self.acceptance_length
        return rate if length is None else f"{rate}, acceptance length {length:.2f}"


@dataclass
class Duel:
    """One prompt, decoded without and with speculation."""

    prompt: Prompt
    plain: Answer
    speculative: Answer

    @property
    def difference(self) -> int | None:
        return first_difference(self.plain.token_ids, self.speculative.token_ids)


def run_demo(options: EngineOptions, sampling: SamplingOptions) -> int:
    """Returns the exit code: 0, or 1 when a request failed."""
    console = make_console()
    params = make_sampling_params(sampling)
    warm_up = make_sampling_params(
        SamplingOptions(max_tokens=min(WARM_UP_TOKENS, sampling.max_tokens))
    )
    # With a head the cache gives one token less of a prompt, and bf16 rounds other numbers of rows
    # otherwise: prompts are computed whole.
    options = replace(options, no_block_reuse=True)
    with Progress() as progress:
        plain, speculative = load_pair(options, progress)
        for llm in (plain, speculative):
            progress(f"warming up {llm.mode.name}")
            llm.generate([to_token_ids(llm, Prompt(DEMO_PROMPTS[0]), WITHOUT_TEMPLATE)], warm_up)
            llm.reset_stats()
    mode = f"{speculative.mode.name}, K = {speculative.max_draft_len}"
    console.print(Rule(f"trtspec · {options.model} · {dtype_name(plain)} on {plain.device}"))
    print_forced(console, speculative.stats().forced_acceptance)
    duels = []
    for text in DEMO_PROMPTS:
        duel = Duel(Prompt(text), Answer("without speculation"), Answer(f"with {mode}"))
        _run_duel(console, duel, plain, speculative, params)
        duels.append(duel)
        for answer in (duel.plain, duel.speculative):
            if answer.error is not None:
                show_error(f"{answer.label}: the request failed: {answer.error}")
                return EXIT_FAILED
    _print_summary(console, duels, plain, speculative, mode)
    return 0


def _run_duel(
    console: Console, duel: Duel, plain: LLM, speculative: LLM, params: SamplingParams
) -> None:
    console.print()
    console.print(Text(f"> {duel.prompt.title}", style="bold"), soft_wrap=True)
    live = (
        Live(console=console, transient=True, auto_refresh=False)
        if console.is_terminal
        else nullcontext()
    )
    with live as screen:
        for llm, answer in ((plain, duel.plain), (speculative, duel.speculative)):
            _decode(llm, duel, answer, params, screen, console)
    console.print(_duel_view(duel, console))


def _decode(
    llm: LLM,
    duel: Duel,
    answer: Answer,
    params: SamplingParams,
    screen: Live | None,
    console: Console,
) -> None:
    """Decodes one answer step by step; every snapshot of the stream is one step."""
    before = llm.stats()
    last: RequestOutput | None = None
    next_frame = 0.0
    for last in llm.generate_stream(to_token_ids(llm, duel.prompt, WITHOUT_TEMPLATE), params):
        answer.pieces += split_step(llm.tokenizer, last.outputs[0])
        if screen is not None and monotonic() >= next_frame:
            screen.update(_duel_view(duel, console), refresh=True)
            next_frame = monotonic() + FRAME_SECONDS
    assert last is not None  # a stream ends with an output
    after = llm.stats()
    answer.token_ids = list(last.outputs[0].token_ids)
    answer.tokens_per_second = _rate_between(before, after)
    answer.error = last.error if last.outputs[0].finish_reason == "error" else None
    if not llm.mode.is_none():
        answer.acceptance_length = last.spec_stats.acceptance_length


def _rate_between(before: EngineStats, after: EngineStats) -> float:
    """Returns the tokens per second decoded between two readings of the engine's totals."""
    seconds = after.decode_seconds - before.decode_seconds
    decoded = after.tokens_per_second * after.decode_seconds
    decoded -= before.tokens_per_second * before.decode_seconds
    return decoded / seconds if seconds > 0 else 0.0


def _duel_view(duel: Duel, console: Console) -> RenderableType:
    if not console.is_terminal:
        return _plain_view(duel)
    panels = [
        Panel(pieces_to_text(a.pieces), title=a.label, subtitle=a.note, border_style=style)
        for a, style in ((duel.plain, "dim"), (duel.speculative, "green"))
    ]
    if console.width < SIDE_BY_SIDE_COLUMNS:
        return Group(*panels)
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(*panels)
    return grid


def _plain_view(duel: Duel) -> RenderableType:
    """For pipes and files: one text below the other, and whether they are the same."""
    parts: list[RenderableType] = [
        Text(f"[{duel.plain.label}: {duel.plain.note}]"),
        pieces_to_text(duel.plain.pieces),
        Text(f"\n[{duel.speculative.label}: {duel.speculative.note}]"),
        pieces_to_text(duel.speculative.pieces),
        Text(f"\n[tokens: {identity_text([duel.difference]).plain}]"),
    ]
    return Group(*parts)


def _print_summary(
    console: Console, duels: Sequence[Duel], plain: LLM, speculative: LLM, mode: str
) -> None:
    before, after = plain.stats(), speculative.stats()
    differences = [duel.difference for duel in duels]
    facts = Table.grid(padding=(0, 2))
    facts.add_row("without speculation", f"{before.tokens_per_second:.1f} tok/s")
    facts.add_row(f"with {mode}", f"{after.tokens_per_second:.1f} tok/s")
    if before.tokens_per_second > 0:
        ratio = after.tokens_per_second / before.tokens_per_second
        style = "bold green" if ratio >= 1 else "bold yellow"
        facts.add_row("speedup", Text(f"{ratio:.2f}x", style=style))
    facts.add_row("acceptance length", f"{after.acceptance_length:.2f} tokens per step")
    facts.add_row("tokens", identity_text(differences))
    parts: list[RenderableType] = [
        facts,
        Text("\naccepted, by draft position"),
        position_bars(after.acceptance_per_position, console),
    ]
    if any(index is not None for index in differences) and dtype_name(plain) != "float32":
        parts.append(
            Text(
                f"\n{dtype_name(plain)} rounds a batch of rows differently from one row, which can "
                "flip near-ties; --dtype float32 is the mode to check equality in.",
                style="yellow",
            )
        )
    banner = forced_banner(after.forced_acceptance)
    if banner is not None:
        parts.append(banner)
    elif console.is_terminal:
        legend = Text("\ngreen text: ", style=ACCEPTED_STYLE)
        parts.append(legend.append("draft tokens the model accepted", style="default"))
    console.print()
    if console.is_terminal:
        console.print(Panel(Group(*parts), title="summary", border_style="cyan", expand=False))
    else:
        console.print(Text("summary"), Group(*parts), sep="\n")
