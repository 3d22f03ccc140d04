"""What the command line does with errors: one red line and an exit code, never a traceback.

2 is bad usage or configuration (nothing was decoded), 1 a request that failed.
"""

from __future__ import annotations

import typer
from rich.text import Text

from ..errors import DrafterError, KVCacheError, RequestError
from .render import make_console

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

# Option errors of typer: `BadParameter` -> `UsageError` -> `ClickException`. Taken from the
# public class because typer moved from the click package to a copy of its own.
PARSE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]


class CliError(Exception):
    """Bad usage that the command line itself finds."""


# What the library raises on purpose. Anything else is a bug, and its traceback is wanted.
# RequestError and ConfigError are ValueErrors; a model file that is not there is an OSError.
USER_ERRORS: tuple[type[Exception], ...] = (
    CliError,
    ValueError,
    RequestError,
    DrafterError,
    KVCacheError,
    OSError,
    ImportError,
)


def exit_code_of(error: BaseException) -> int:
    if isinstance(error, (RequestError, DrafterError, KVCacheError)):
        return EXIT_FAILED
    return EXIT_USAGE


def show_error(message: str) -> None:
    """`error: …` in red on stderr, on one line."""
    line = " ".join(message.split())
    make_console(stderr=True).print(Text(f"error: {line}", style="bold red"), soft_wrap=True)
