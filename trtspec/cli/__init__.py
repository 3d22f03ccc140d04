"""The `trtspec` command. All that takes time to import is imported where Ctrl-C is heard."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    try:
        from .app import run

        return run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        with suppress(OSError, AttributeError):  # stderr may be full, or closed and None
            sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
