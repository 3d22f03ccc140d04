"""`StepLaunch`: a step that may be launched in part, up to where the host would wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .forward_step import StepOutputs


@dataclass(eq=False)
class StepLaunch:
    """A launched step.

    The masks of drafts need what the step itself accepts. Before the host waits for that it does
    its other work: it reads the step before, and schedules the next one.
    """

    outputs: StepOutputs  # of the whole step: valid once `finish` has returned
    is_replay: bool = False  # whether a graph ran it
    rest: Iterator[None] | None = None
    """Launches the rest, part by part. The host waits for the device in each."""

    def finish(self) -> StepOutputs:
        """Launches what is left. Nothing else may have been launched since."""
        for _ in self.rest or ():
            pass
        self.rest = None
        return self.outputs
