"""The `trtspec` command. All that takes time to import is imported where Ctrl-C is heard."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
RETRY_SECONDS = 0.05
_WEAK_FILES = "weakref.py", "_weakrefset.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    terminated = threading.Event()
    try:
        with _sigterm_is_ctrl_c(terminated) as is_pending:
            from .app import run

            code = run(list(sys.argv[1:] if argv is None else argv))
            if terminated.is_set():
                return EXIT_TERMINATED
            return EXIT_INTERRUPTED if is_pending() else code
    except KeyboardInterrupt:
        with suppress(OSError, AttributeError):  # stderr may be full, or closed and None
            sys.stderr.write("terminated\n" if terminated.is_set() else "interrupted\n")
        return EXIT_TERMINATED if terminated.is_set() else EXIT_INTERRUPTED


@contextmanager
def _sigterm_is_ctrl_c(terminated: threading.Event) -> Iterator[Callable[[], bool]]:
    """Yields what says whether a signal is still to come again.

    Lets SIGTERM end the command as Ctrl-C does, so that what is measured or trained is kept.

    Not where the process ignores one of them: a shell's background jobs ignore Ctrl-C, and end at
    SIGTERM at once.
    """
    is_main = threading.current_thread() is threading.main_thread()
    hears_ctrl_c = callable(signal.getsignal(signal.SIGINT))
    if not (is_main and hears_ctrl_c and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
        yield lambda: False
        return
    retries: list[threading.Timer] = []

    def interrupt(*_: object) -> None:
        terminated.set()
        signal.raise_signal(signal.SIGINT)

    def hear(number: int, frame: FrameType | None) -> None:
        if _loses_exceptions(frame):
            again = threading.Timer(RETRY_SECONDS, os.kill, [os.getpid(), signal.SIGINT])
            again.daemon = True
            again.start()
            retries.append(again)
        else:
            signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, hear)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield lambda: any(again.is_alive() for again in retries)
    finally:
        for again in retries:
            again.cancel()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, before)


def _loses_exceptions(frame: FrameType | None) -> bool:
    """Whether Python drops what is raised here: in `__del__` and in callbacks of weak references,
    which imports have many of."""
    while frame is not None:
        code = frame.f_code
        is_of_imports = code.co_name == "cb" and "importlib" in code.co_filename
        if code.co_name == "__del__" or is_of_imports or code.co_filename.endswith(_WEAK_FILES):
            return True
        frame = frame.f_back
    return False
