"""Decodes the same prompts in several ways, over concurrency, temperature, text and context."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count, product
from statistics import median
from typing import Any, NamedTuple, Protocol

from ..api.outputs import EngineStats
from ..api.sampling_params import SamplingParams
from ..data.acceptance_prompts import AcceptancePrompt
from ..errors import RequestError
from .contexts import Encode, encoded
from .plots import require_matplotlib, to_svg

PLAIN, AUTO = "plain", "auto"
LEAST_PROMPTS = 2
"""Prompts of a cell at least."""
NEVER_SLOWER, NEAR_BEST = 0.99, 0.95
"""What `auto` should reach of plain decoding, and of the best fixed draft length."""


class SweepFailed(RequestError):
    """A request failed, so there is nothing to compare."""


class Engine(Protocol):
    """What is asked of an `LLM`."""

    @property
    def executor(self) -> Any: ...

    device: Any

    @property
    def chooses_draft_len(self) -> bool: ...

    def generate(self, prompts: Any, params: Any, *, cache_salt: Any = None) -> Any: ...

    def stats(self) -> EngineStats: ...

    def reset_stats(self) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def shutdown(self) -> None: ...


class Way(NamedTuple):
    """A column: an engine, and how many drafts it is held to."""

    name: str
    engine: str
    draft_len: int | None = None  # None: the engine's own

    @property
    def is_fixed(self) -> bool:
        return self.draft_len is not None


class Place(NamedTuple):
    """Where a cell is."""

    concurrency: int
    temperature: float
    kind: str  # of text
    context: int | None  # tokens that prompts are made longer to; None: as they are


@dataclass(frozen=True)
class Axes:
    """What is gone through."""

    concurrencies: Sequence[int]
    temperatures: Sequence[float]
    kinds: Mapping[str, Sequence[AcceptancePrompt]]
    contexts: Sequence[int | None] = (None,)
    rounds: int = 1  # prompts of a cell, times the requests at once

    def num_prompts(self, concurrency: int) -> int:
        """Returns the prompts of a cell."""
        return max(concurrency * self.rounds, LEAST_PROMPTS)

    def places(self, concurrency: int) -> Iterator[Place]:
        """Returns the cells of one concurrency."""
        for context, kind, temperature in product(self.contexts, self.kinds, self.temperatures):
            yield Place(concurrency, temperature, kind, context)

    @property
    def num_cells(self) -> int:
        axes = self.concurrencies, self.temperatures, self.kinds, self.contexts
        return math.prod(map(len, axes))


@dataclass
class Cell:
    """The runs of every way at one place."""

    place: Place
    num_prompts: int
    runs: dict[str, list[EngineStats]] = field(default_factory=dict)

    def speed(self, name: str) -> float:
        """Returns tokens per second of decoding, the median of the runs."""
        return median(run.tokens_per_second for run in self.runs[name])

    def speed_with_prompts(self, name: str) -> float:
        """Returns tokens per second of all steps, the median of the runs."""
        return median(run.tokens_per_second_with_prompts for run in self.runs[name])

    def acceptance_length(self, name: str) -> float:
        return median(run.acceptance_length for run in self.runs[name])


@dataclass(frozen=True)
class Sweep:
    """A table of cells."""

    ways: Sequence[Way]
    cells: Sequence[Cell]

    def best_fixed(self, cell: Cell) -> str | None:
        """Returns the fastest way of a fixed draft length, if there is one."""
        names = [way.name for way in self.ways if way.is_fixed]
        return max(names, key=cell.speed, default=None)

    def over(
        self, cell: Cell, name: str, other: str | None, *, with_prompts: bool = False
    ) -> float | None:
        """Returns one way's speed over another's; None if the sweep lacks one of them."""
        names = {way.name for way in self.ways}
        if name not in names or other not in names:
            return None
        assert other is not None
        speed = cell.speed_with_prompts if with_prompts else cell.speed
        below = speed(other)
        return speed(name) / below if below else None

    def rows(self) -> list[dict[str, Any]]:
        """Returns a record for each cell, as JSON has it."""
        rows = []
        for cell in self.cells:
            best = self.best_fixed(cell)
            columns = {
                way.name: {
                    "tokens_per_second": cell.speed(way.name),
                    "tokens_per_second_runs": [r.tokens_per_second for r in cell.runs[way.name]],
                    "tokens_per_second_with_prompts": cell.speed_with_prompts(way.name),
                    "acceptance_length": cell.acceptance_length(way.name),
                }
                for way in self.ways
            }
            rows.append(
                {
                    **cell.place._asdict(),
                    "num_prompts": cell.num_prompts,
                    "columns": columns,
                    "best_fixed": best,
                    "auto_over_plain": self.over(cell, AUTO, PLAIN),
                    "auto_over_plain_with_prompts": self.over(cell, AUTO, PLAIN, with_prompts=True),
                    "auto_over_best_fixed": self.over(cell, AUTO, best),
                }
            )
        return rows

    def to_csv(self) -> str:
        """Returns a line for each cell and column."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        names = "tokens_per_second", "acceptance_length", "tokens_per_second_with_prompts"
        writer.writerow([*Place._fields, "column", *names])
        for cell, way in product(self.cells, self.ways):
            values = (
                cell.speed(way.name),
                cell.acceptance_length(way.name),
                cell.speed_with_prompts(way.name),
            )
            writer.writerow([*cell.place, way.name, *(f"{value:.4f}" for value in values)])
        return buffer.getvalue()


Prompts = dict[tuple[str, int | None], list[list[int]]]
"""Token ids by kind of text and context."""


def encode_prompts(axes: Axes, encode: Encode) -> Prompts:
    """Returns as many prompts of each kind and context as a cell needs, or as there are."""
    most = axes.num_prompts(max(axes.concurrencies))
    everything = [prompt for prompts in axes.kinds.values() for prompt in prompts]
    found: Prompts = {}
    for (kind, given), context in product(axes.kinds.items(), axes.contexts):
        found[kind, context] = [
            encoded(prompt, context, everything, i, encode) for i, prompt in enumerate(given[:most])
        ]
    return found


@dataclass(frozen=True)
class SweepRun:
    """How cells are measured.

    Args:
        open_engines: engines by name; its argument is how many requests run at once.
        progress: is called with what is being done.
    """

    ways: Sequence[Way]
    axes: Axes
    prompts: Prompts
    params: SamplingParams
    repeat: int
    open_engines: Callable[[int], Mapping[str, Engine]]
    progress: Callable[..., None]

    def cells(self) -> Iterator[Cell]:
        """Yields each cell once it is measured.

        Raises:
            SweepFailed: a request failed.
        """
        done, salts = count(), count()
        for concurrency in self.axes.concurrencies:
            with ExitStack() as opened:
                engines = self.open_engines(concurrency)
                for engine in engines.values():
                    opened.callback(engine.shutdown)
                for number, place in enumerate(self.axes.places(concurrency)):
                    self.progress(
                        f"concurrency {concurrency}, T={place.temperature:g}, {place.kind}"
                        + ("" if place.context is None else f", context {place.context}"),
                        next(done),
                        self.axes.num_cells,
                    )
                    yield self._cell(engines, place, salts, is_first=number == 0)

    def _cell(
        self, engines: Mapping[str, Engine], place: Place, salts: Iterator[int], *, is_first: bool
    ) -> Cell:
        """Runs the ways in turns, each turn beginning with another one."""
        given = self.prompts[place.kind, place.context]
        prompts = [given[i % len(given)] for i in range(self.axes.num_prompts(place.concurrency))]
        is_cuda = any(str(engine.device).startswith("cuda") for engine in engines.values())
        cell = Cell(place, len(prompts))
        for way in self.ways:
            # On CUDA each number of requests has graphs, greedy and sampled ones, captured when
            # they first come up. Where K is chosen, it has lengths to try.
            is_whole = is_cuda or (way.draft_len is None and engines[way.engine].chooses_draft_len)
            if is_first or is_whole:
                some = prompts if is_whole else prompts[:1]
                self._run(engines, way, place, some, next(salts))
        for turn in range(self.repeat):
            shift = turn % len(self.ways)
            for way in [*self.ways[shift:], *self.ways[:shift]]:
                stats = self._run(engines, way, place, prompts, next(salts))
                cell.runs.setdefault(way.name, []).append(stats)
        return cell

    def _run(
        self,
        engines: Mapping[str, Engine],
        way: Way,
        place: Place,
        prompts: Sequence[Sequence[int]],
        salt: int,
    ) -> EngineStats:
        """Decodes the prompts once. No run, and no repeated prompt, finds another one's answer."""
        engine = engines[way.engine]
        if way.draft_len is not None:
            engine.executor.runtime_draft_len = way.draft_len
        distinct = len(self.prompts[place.kind, place.context])
        salts = [f"{salt}-{i // distinct}" for i in range(len(prompts))]
        engine.reset_prefix_cache()
        engine.reset_stats()
        params = replace(self.params, temperature=place.temperature)
        outputs = engine.generate([list(p) for p in prompts], params, cache_salt=salts)
        for number, output in enumerate(outputs, start=1):
            if output.outputs[0].finish_reason == "error":
                raise SweepFailed(
                    f"prompt {number} of {place.kind!r} failed with {way.name}: {output.error}"
                )
        return engine.stats()


def draw_sweep(sweep: Sweep) -> str:
    """Returns an SVG: for each text, temperature and context the speeds over the first way's."""
    figure_class = require_matplotlib()
    panels: dict[tuple[str, float, int | None], list[Cell]] = {}
    for cell in sweep.cells:
        place = cell.place
        panels.setdefault((place.kind, place.temperature, place.context), []).append(cell)
    columns = len(dict.fromkeys(cell.place.temperature for cell in sweep.cells))
    rows = -(-len(panels) // columns)
    figure = figure_class(figsize=(1.2 + 3.4 * columns, 0.8 + 2.5 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes, ((kind, temperature, context), cells) in zip(grid.flat, panels.items(), strict=False):
        title = f"{kind}, T={temperature:g}" + ("" if context is None else f", {context} tokens")
        axes.set_title(title, fontsize="small", parse_math=False)
        _draw_panel(axes, sweep.ways, cells)
    for axes in grid[-1]:
        axes.set_xlabel("requests at once")
    for axes in grid[:, 0]:
        axes.set_ylabel(f"tokens/s over {sweep.ways[0].name}")
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
    return to_svg(figure)


def _draw_panel(axes: Any, ways: Sequence[Way], cells: Sequence[Cell]) -> None:
    """Draws a line for each way, over the numbers of requests; dashed those of a fixed length."""
    fixed, xs = [way for way in ways if way.is_fixed], range(len(cells))
    base = [cell.speed(ways[0].name) for cell in cells]
    for way in ways:
        style: dict[str, Any] = {}
        if way.is_fixed:
            shade = 0.75 - 0.55 * fixed.index(way) / len(fixed)
            style = {"color": str(shade), "linewidth": 1.0, "linestyle": "--"}
        values = [
            cell.speed(way.name) / below if below else 0
            for cell, below in zip(cells, base, strict=True)
        ]
        axes.plot(xs, values, label=way.name, marker="o", markersize=4, **style)
    axes.set_xticks(list(xs), labels=[str(cell.place.concurrency) for cell in cells])
    axes.axhline(1, color="black", linewidth=0.8)
    axes.grid(alpha=0.3)
