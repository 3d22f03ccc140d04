"""Ctrl-C while training: the step that runs is ended first, so that it can be kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Lets the first Ctrl-C set the event that is yielded, and do nothing else.

    A second one interrupts at once. Outside the main thread, and where Ctrl-C is ignored or not
    Python's, nothing changes and the event stays unset.
    """
    asked = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield asked
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            before(number, frame)
        asked.set()

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
