"""`StepObserver`: sees requests and steps as the executor does. Metrics are counted by one.

It never waits for the device: a step's results come to the host in any case.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from .request import Request, ScheduledBatch
from .results import Applied, LaunchedStep

logger = logging.getLogger(__name__)


class StepFacts(NamedTuple):
    """What one call of `PyExecutor.step` brought.

    On a GPU the time is that of the steps that were read: it begins where the steps before were
    read, so that what the host does between two calls is part of it. On CPU a step runs while it is
    launched, and the time is that of the call.
    """

    ended: float  # time.perf_counter()
    seconds: float
    timed: Sequence[LaunchedStep]  # the steps that `seconds` is the time of
    results: Sequence[Applied]  # of live requests that got tokens


class StepObserver(Protocol):
    """Called in the thread that steps. A method that raises ends the observation, not the step."""

    def on_request_queued(self, request: Request) -> None:
        """Called before the request is scheduled for the first time."""

    def on_request_started(self, request: Request) -> None:
        """Called before the first part of its prompt is launched; again after a preemption."""

    def on_step(self, facts: StepFacts) -> None:
        """Called after each step that brought something. An exception in it loses its facts."""

    def on_request_finished(self, request: Request) -> None:
        """Called once for each request, however it ended, after the step that ended it."""


class Watch:
    """Gathers facts for one observer; without one they are dropped."""

    def __init__(self, observer: StepObserver | None, *, runs_at_launch: bool):
        self.observer, self.runs_at_launch = observer, runs_at_launch
        self.launched: list[LaunchedStep] = []
        self.read: list[LaunchedStep] = []
        self.results: list[Applied] = []
        self.finished: list[Request] = []
        self._began = self._ended = 0.0
        self._is_in_step = False

    def queued(self, request: Request) -> None:
        if self.observer is not None:
            self._call(self.observer.on_request_queued, request)

    def started(self, batch: ScheduledBatch) -> None:
        for chunk in batch.contexts:
            if chunk.is_first and self.observer is not None:
                self._call(self.observer.on_request_started, chunk.request)

    def begin_step(self, *, is_in_flight: bool) -> None:
        """Notes when a call of `step` begins, and whether a step is running then."""
        self._is_in_step, self._began = True, time.perf_counter()
        if is_in_flight and self._ended and not self.runs_at_launch:
            self._began = self._ended

    def end_step(self) -> None:
        """Hands over what the call brought."""
        self._ended = now = time.perf_counter()
        timed = self.launched if self.runs_at_launch else self.read
        if self.observer is not None and (self.results or _is_live(timed)):
            facts = StepFacts(now, now - self._began, timed, self.results)
            self._call(self.observer.on_step, facts)
        self.drop_step()

    def drop_step(self) -> None:
        """Forgets the step's facts: they are handed over, or an exception ended the step."""
        self.launched, self.read, self.results = [], [], []
        self._is_in_step = False
        self.report_finished()

    def add_launched(self, step: LaunchedStep) -> None:
        self.launched.append(step)

    def add_read(self, step: LaunchedStep) -> None:
        self.read.append(step)

    def add_results(self, results: Sequence[Applied]) -> None:
        self.results += results

    def add_finished(self, request: Request) -> None:
        if request not in self.finished:  # an interrupt may have come in between
            self.finished.append(request)

    def report_finished(self) -> None:
        """Hands over requests that ended, unless a step is to be handed over first."""
        while self.finished and not self._is_in_step:
            request = self.finished.pop(0)
            if self.observer is not None:
                self._call(self.observer.on_request_finished, request)

    def _call(self, method: Callable[[Any], None], what: Any) -> None:
        try:
            method(what)
        except Exception:  # the observer is the caller's code
            logger.exception("The observer of steps raised. It sees nothing more.")
            self.observer = None


def _is_live(steps: Sequence[LaunchedStep]) -> bool:
    """Returns whether a step was run for a request that goes on."""
    return any(not request.is_finished for step in steps for request in step.batch.requests)
