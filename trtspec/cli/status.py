"""Progress of slow steps, on stderr: a spinner on a terminal, plain lines otherwise."""

from __future__ import annotations

from rich.status import Status
from rich.text import Text

from ..distributed.launch import torchrun_rank
from .render import make_console


class Progress:
    """`with Progress() as progress: progress("loading …")`; also a callback for the library."""

    def __init__(self) -> None:
        self._console = make_console(stderr=True)
        self._status: Status | None = None
        self._last = ""

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._status = self._console.status(Text(""), spinner="dots")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __call__(self, message: str, done: float | None = None, total: float | None = None) -> None:
        """Say what is being done; `done` of `total` is shown as a percentage on a terminal."""
        if torchrun_rank() > 0:  # the first of the processes speaks for all
            return
        if self._status is not None:
            share = f" {100 * done / total:.0f} %" if done is not None and total else ""
            self._status.update(Text(f"{message}{share}"))
        elif message != self._last:  # plain lines: once per message, not once per percent
            self._console.print(Text(message), soft_wrap=True)
        self._last = message
