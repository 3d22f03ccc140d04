"""Calls that may fail or hang, in threads. They can be made while Python ends, too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from queue import SimpleQueue

CALLS_AT_END = 3  # that a process makes at most: to followers, to torch's groups

_calls: SimpleQueue[tuple[Callable[[], object], threading.Event]] = SimpleQueue()


def in_background(run: Callable[[], object]) -> threading.Event:
    """Starts a call. Returns what is set once it has ended."""
    done = threading.Event()
    _calls.put((run, done))
    with suppress(RuntimeError):  # Python ends: a thread that is ready takes the call
        start_thread()
    return done


@cache
def keep_threads_ready() -> None:
    """Starts the threads of calls that come while Python ends: since 3.12 none can start then."""
    for _ in range(CALLS_AT_END):
        start_thread()


def start_thread() -> None:
    """Starts a thread that waits for one call."""

    def work() -> None:
        run, done = _calls.get()
        with suppress(Exception):
            run()
        done.set()

    threading.Thread(target=work, daemon=True, name="trtspec-background").start()
