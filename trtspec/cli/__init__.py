"""The `trtspec` command. All that takes time to import is imported where Ctrl-C is heard."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    terminated = threading.Event()
    try:
        with _sigterm_is_ctrl_c(terminated):
            from .app import run

            return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        with suppress(OSError, AttributeError):  # stderr may be full, or closed and None
            sys.stderr.write("terminated\n" if terminated.is_set() else "interrupted\n")
        return EXIT_TERMINATED if terminated.is_set() else EXIT_INTERRUPTED


@contextmanager
def _sigterm_is_ctrl_c(terminated: threading.Event) -> Iterator[None]:
    """Lets SIGTERM end the command as Ctrl-C does, so that what is measured or trained is kept.

    Not where the process ignores one of them: a shell's background jobs ignore Ctrl-C, and end at
    SIGTERM at once.
    """
    is_main = threading.current_thread() is threading.main_thread()
    hears_ctrl_c = callable(signal.getsignal(signal.SIGINT))
    if not (is_main and hears_ctrl_c and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
        yield
        return

    def interrupt(*_: object) -> None:
        terminated.set()
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
