"""`StepCosts`: what a step takes, by its requests and drafts. Kept on disk between runs."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from ...config import MAX_DRAFT_LEN
from ...utils import replace_text

logger = logging.getLogger(__name__)

FEW, WEIGHT = 5, 0.03
MOST = 1.5  # times the average: what a slow step counts at most
LEAST = 1e-9  # seconds of a step: what a file may say
LEAST_WAIT = 0.02  # of a step: where the host waits less, the device was done before
HOST_AT_REST = 0.75  # of what the host's work takes with drafts: what it takes without any
HOST_STEPS = 32  # the latest ones, whose work on the host is remembered
GUESSED_SHARE = 0.05  # of a step's time, for one more draft, before anything is measured


class StepShape(NamedTuple):
    """What a step's time depends on, beside its drafts."""

    size: int  # requests, rounded up to a bucket
    all_greedy: bool
    is_guided: bool = False


class StepSeconds(NamedTuple):
    """What a step takes: `fixed`, and `per_token` of context that a request has on average."""

    fixed: float
    per_token: float = 0.0

    def behind(self, context: float) -> float:
        """Returns the seconds of a step whose requests have `context` tokens on average."""
        return self.fixed + self.per_token * context

    @staticmethod
    def through(short: tuple[int, float], long: tuple[int, float]) -> StepSeconds:
        """Returns the line through two (tokens of context, seconds). A longer context takes no less
        time: where it seems to, both times are noise around one."""
        (few, least), (many, most) = short, long
        if most <= least:
            return StepSeconds((least + most) / 2)
        slope = min((most - least) / (many - few), most / many)
        return StepSeconds(max(0.0, most - slope * many), slope)  # rounding may give less


@dataclass
class _Cell:
    """A time as it runs: the median of the first few, then an average of the latest."""

    seconds: StepSeconds
    first: list[float] = field(default_factory=list)

    @staticmethod
    def known(seconds: StepSeconds) -> _Cell:
        return _Cell(seconds, [seconds.fixed] * FEW)

    @property
    def is_settled(self) -> bool:
        return len(self.first) >= FEW

    def add(self, seconds: float, context: float) -> float:
        """Returns what the time was multiplied by, behind any context."""
        if not self.is_settled:
            self.first.append(seconds)
            self.seconds = StepSeconds(median(self.first))
            return 1.0
        factor = 1 + WEIGHT * (min(seconds / self.seconds.behind(context), MOST) - 1)
        self.scale(factor)
        return factor

    def scale(self, factor: float) -> None:
        self.seconds = StepSeconds(factor * self.seconds.fixed, factor * self.seconds.per_token)


class StepCosts:
    """A table of seconds. What was not measured is derived from its nearest neighbours.

    Under overlap a step takes as long as the device or the host needs, whichever is slower. Drafts
    make the device's part longer, and hardly the host's. So both are known apart.

    A longer context takes all lengths about the same time more, so that drafts are relatively
    cheaper there. Times that were measured at start know that, times of use alone do not.

    Args:
        path: JSON file to read and write; None keeps nothing.
    """

    def __init__(self, path: Path | None = None):
        self.path, self._is_saved = path, True
        self._cells: dict[StepShape, dict[int, _Cell]] = {}  # of the device
        # With drafts, since this engine started.
        self._hosts: dict[StepShape, deque[float]] = {}
        self._waits = 0  # steps in a row that the host waited for
        self._load()

    def add(
        self,
        shape: StepShape,
        draft_len: int,
        seconds: float,
        waited: float | None = None,
        context: float = 0.0,
    ) -> None:
        """Adds the time of one step.

        What makes the device's steps longer or shorter does so with any length. So the shape's
        other times follow this one. Where the host hardly waited, the time is the host's. The
        device's stay as they are, but a length without one takes it.

        Args:
            waited: the part of it that the host waited for the device. None: the whole is taken for
                the device's.
            context: tokens of context that a request had on average.
        """
        if waited is not None:
            host = (seconds - waited) / (1 if draft_len else HOST_AT_REST)
            self._hosts.setdefault(shape, deque(maxlen=HOST_STEPS)).append(host)
            self._waits = 0 if waited < LEAST_WAIT * seconds else self._waits + 1
            # A step or two that the host waited for, among many that it did not, say nothing.
            if self._waits < FEW and self.is_known(shape, draft_len):
                return
        cells = self._cells.setdefault(shape, {})
        cell = cells.setdefault(draft_len, _Cell(StepSeconds(seconds)))
        factor = cell.add(seconds, context)
        for other in cells.values():
            if other is not cell:
                other.scale(factor)
        self._is_saved = False

    def set(self, shape: StepShape, draft_len: int, seconds: StepSeconds) -> None:
        """Puts in a time that was measured well."""
        self._cells.setdefault(shape, {})[draft_len] = _Cell.known(seconds)
        self._is_saved = False

    def is_known(self, shape: StepShape, draft_len: int) -> bool:
        return draft_len in self._cells.get(shape, {})

    def is_settled(self, shape: StepShape, draft_len: int) -> bool:
        """Whether enough steps were timed that one slow one does not count.

        Lengths are to each other about the same in greedy and in sampled steps, so times of either
        are enough.
        """
        like = shape, shape._replace(all_greedy=not shape.all_greedy)
        cells = (self._cells.get(one, {}).get(draft_len) for one in like)
        cell = next(filter(None, cells), None)
        return cell is not None and cell.is_settled

    def of(
        self, shape: StepShape, draft_lens: Sequence[int], context: float = 0.0
    ) -> dict[int, float]:
        """Returns the seconds of a step for each draft length, behind `context` tokens.

        A length that was not measured with this shape is to the others as with the nearest shape.
        Without any, a draft is guessed to take a twentieth of a step.
        """
        known = self._measured(shape, context)
        near = self._measured(self._nearest(shape), context)
        device = {k: known[k] if k in known else _scaled(known, near, k) for k in draft_lens}
        return {k: self._slower(shape, k, seconds) for k, seconds in device.items()}

    def _slower(self, shape: StepShape, draft_len: int, device: float) -> float:
        """Returns the mean over the latest steps of the device's time or the host's, whichever is
        longer.

        The host's does not depend on the length, unless that is 0: it follows what else the machine
        does. A few steps take it much longer, such as those that end requests. Its mean would hide
        that it waits for the device in all others.
        """
        share = 1 if draft_len else HOST_AT_REST
        hosts = self._hosts.get(shape)
        if not hosts or share * max(hosts) <= device:
            return device
        return fmean([max(device, share * host) for host in hosts])

    def _measured(self, shape: StepShape | None, context: float) -> dict[int, float]:
        cells = {} if shape is None else self._cells.get(shape, {})
        return {k: cell.seconds.behind(context) for k, cell in sorted(cells.items())}

    def _nearest(self, shape: StepShape) -> StepShape | None:
        def distance(other: StepShape) -> tuple[int, int]:
            differences = other.all_greedy != shape.all_greedy, other.is_guided != shape.is_guided
            return abs(other.size - shape.size), sum(differences)

        several = [
            other for other, cells in self._cells.items() if len(cells) > 1 and other != shape
        ]
        return min(several, key=distance, default=None)

    # -- on disk -------------------------------------------------------------------------------
    def save(self) -> None:
        """Writes the file, at once as a whole. A folder that cannot be written is no error.

        Times that another engine wrote meanwhile are kept, where this one has none.
        """
        if self.path is None or self._is_saved:
            return
        times = _read(self.path)
        for shape, cells in self._cells.items():
            times.setdefault(shape, {}).update({k: cell.seconds for k, cell in cells.items()})
        rows = [[*shape, k, *seconds] for shape, of in times.items() for k, seconds in of.items()]
        try:
            replace_text(self.path, json.dumps(rows))
            self._is_saved = True
        except OSError as error:
            logger.info("Step times are not kept: %s", error)

    def _load(self) -> None:
        for shape, times in ({} if self.path is None else _read(self.path)).items():
            self._cells[shape] = {k: _Cell.known(seconds) for k, seconds in times.items()}


def _read(path: Path) -> dict[StepShape, dict[int, StepSeconds]]:
    """Returns a file's times; none where it is missing or broken."""
    times: dict[StepShape, dict[int, StepSeconds]] = {}
    try:
        for size, all_greedy, is_guided, draft_len, fixed, per_token in json.loads(
            path.read_text()
        ):
            seconds = StepSeconds(float(fixed), float(per_token))
            if not (min(seconds) >= 0 and LEAST < sum(seconds) < inf):
                raise ValueError(f"{fixed} and {per_token} seconds")
            if size < 1 or not 0 <= draft_len <= MAX_DRAFT_LEN:
                raise ValueError(f"{size} requests and {draft_len} drafts")
            shape = StepShape(int(size), bool(all_greedy), bool(is_guided))
            times.setdefault(shape, {})[int(draft_len)] = seconds
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        logger.warning("%s holds no step times and is ignored: %s", path, error)
        return {}
    return times


def _scaled(known: dict[int, float], near: dict[int, float], draft_len: int) -> float:
    """Returns a length's time with the nearest shape, scaled by a length that both have."""
    if not known or not near:
        return _derived(known or near, draft_len)
    closest = min(known, key=lambda k: abs(k - draft_len))
    return known[closest] * _derived(near, draft_len) / _derived(near, closest)


def _derived(known: dict[int, float], draft_len: int) -> float:
    """Returns the time of a length by the line through its two nearest neighbours."""
    if draft_len in known:
        return known[draft_len]
    nearest = sorted(known, key=lambda k: abs(k - draft_len))[:2]
    if not nearest:
        return 1 + GUESSED_SHARE * draft_len
    if len(nearest) == 1:
        one = known[nearest[0]]
        return one * (1 + GUESSED_SHARE * draft_len) / (1 + GUESSED_SHARE * nearest[0])
    a, b = sorted(nearest)
    slope = max(0.0, (known[b] - known[a]) / (b - a))
    return max(known[a] + slope * (draft_len - a), 0.5 * min(known.values()))
