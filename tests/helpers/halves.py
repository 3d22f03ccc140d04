"""Steps that are launched in two halves on the CPU, as graphs with grammars are on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from trtspec.executor.forward_step import StepOutputs
from trtspec.executor.inputs import build_inputs
from trtspec.executor.request import StepPlan
from trtspec.executor.runner import StepRunner
from trtspec.metadata.guided import DraftPoint, Point


class Dropped(Exception):
    """Ends a step of which the second half never comes."""


class StepInHalves:
    """Runs a step in a thread of its own, which stops at each point until the host has done its
    part. Launching it goes to the first `DraftPoint`."""

    is_replay, rows = True, None

    def __init__(self, runner: StepRunner, plan: StepPlan):
        assert plan.host_part is not None
        self.runner, self.plan = runner, plan
        self._points: SimpleQueue[Point | None] = SimpleQueue()
        self._go_on: SimpleQueue[bool] = SimpleQueue()
        self._done: list[StepOutputs | BaseException] = []
        threading.Thread(target=self._run, daemon=True).start()
        self._rest = self._launch()
        next(self._rest, None)

    def finish(self) -> StepOutputs:
        for _ in self._rest:
            pass
        (done,) = self._done
        if isinstance(done, BaseException):
            raise done
        return done

    def _launch(self) -> Iterator[None]:
        assert self.plan.host_part is not None
        is_whole = False
        try:
            while (point := self._points.get()) is not None:
                if isinstance(point, DraftPoint):
                    yield
                self.plan.host_part(point)
                self._go_on.put(True)
            is_whole = True
        finally:
            if not is_whole:
                self._go_on.put(False)

    def _run(self) -> None:
        try:
            self._done.append(self._compute())
        except BaseException as error:  # noqa: BLE001 - `finish` raises it
            self._done.append(error)
        self._points.put(None)

    def _compute(self) -> StepOutputs:
        runner, plan = self.runner, self.plan
        step, rewritten = runner.step, runner.step.worker.num_rewritten_tokens
        inputs = build_inputs(
            plan.batch, runner.kv_cache, plan.num_drafts, runner.device, rewritten
        )
        guided = runner.masks.step(self._stop_at, plan.draft_len)
        outputs = step.run(replace(inputs, guided=guided), plan.draft_len)
        for _ in step.draft_passes(outputs):
            pass
        return outputs

    def _stop_at(self, point: Point) -> None:
        self._points.put(point)
        if not self._go_on.get():
            raise Dropped


def launch_in_halves(monkeypatch: Any) -> None:
    """Makes every engine launch its steps of generations with grammars in halves."""

    def replay(self: StepRunner, plan: StepPlan) -> Any:
        if plan.batch.contexts or plan.host_part is None:
            return None
        plan.finish_before()
        return StepInHalves(self, plan)

    monkeypatch.setattr(StepRunner, "_replay", replay)
