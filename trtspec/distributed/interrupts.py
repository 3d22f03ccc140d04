"""Ctrl-C, held back while several ranks do something together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Holds Ctrl-C back: a rank that stops in mid-step would leave the others waiting for it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[Any] = []
    try:
        before = signal.signal(signal.SIGINT, lambda *arguments: pressed.append(arguments))
    except ValueError:  # not in the main interpreter
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            if callable(before):
                before(*pressed[0])
            elif before is not signal.SIG_IGN:
                raise KeyboardInterrupt
