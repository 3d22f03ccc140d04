"""Ctrl-C while training: the step that runs is ended first, so that it can be kept."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

SAME_SECONDS = 1.0
"""`timeout` and batch systems signal a process and its group: it hears one interrupt twice."""


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Lets the first Ctrl-C set the event that is yielded, and do nothing else.

    A second one interrupts at once, if it comes later than `SAME_SECONDS`. Outside the main thread,
    and where Ctrl-C is ignored or not Python's, nothing changes and the event stays unset.
    """
    asked = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield asked
        return

    first = 0.0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if not asked.is_set():
            first = time.monotonic()
            asked.set()
            logger.warning("The step that runs is ended and kept. Ctrl-C again ends at once.")
        elif time.monotonic() - first > SAME_SECONDS:
            before(number, frame)

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
