"""What the command line does with errors: one red line and an exit code, never a traceback.

2 is bad usage or configuration (nothing was decoded), 1 a request that failed or an output that
cannot be written.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress

import typer
from rich.text import Text

from ..errors import DrafterError, KVCacheError, RequestError
from .other_options import NOT_OFFERED, OTHER_NAMES
from .render import make_console

EXIT_FAILED, EXIT_USAGE = 1, 2

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
    DrafterError,
    KVCacheError,
    OSError,
    ImportError,
)


_UNWRITTEN = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO


def exit_code_of(error: BaseException) -> int:
    failed = isinstance(error, (RequestError, DrafterError, KVCacheError))
    return EXIT_FAILED if failed or _is_unwritten(error) else EXIT_USAGE


def message_of(error: BaseException) -> str:
    if isinstance(error, OSError) and _is_unwritten(error):
        where = error.filename or "the output"
        return f"{where} cannot be written: {error.strerror}. Make room, or write elsewhere."
    return str(error) or type(error).__name__


def message_of_parser(error: Exception) -> str:
    """Returns what is wrong with the arguments, and where the right ones are listed."""
    context = getattr(error, "ctx", None)
    command = "trtspec" if context is None else context.command_path
    listed = "the commands" if command == "trtspec" else "the options"
    message = _with_our_name(error) or getattr(error, "format_message", error.__str__)()
    return f"{message} ({command} --help lists {listed})"


def _with_our_name(error: Exception) -> str | None:
    """Returns the message for an option that has another name here; None if it is not known."""
    given, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if given is None or context is None:
        return None
    name = given.replace("_", "-")
    allowed = {option for param in context.command.params for option in param.opts}
    ours = [word for word in OTHER_NAMES.get(name, (name,)) if word in allowed - {given}]
    named = ", ".join(word if word.startswith("-") else f"the argument {word}" for word in ours)
    if ours:
        return f"No such option: {given}. Use {named}."
    reason = NOT_OFFERED.get(name)
    return None if reason is None else f"No such option: {given}. Leave it out: {reason}."


def _is_unwritten(error: BaseException) -> bool:
    """The usage is right, and the place that is written to has no room or is broken."""
    return isinstance(error, OSError) and error.errno in _UNWRITTEN


def show_error(message: str) -> None:
    """`error: …` in red on stderr, on one line. (Without a word where stderr is full or gone.)"""
    line = " ".join(message.split())
    with suppress(OSError):
        make_console(stderr=True).print(Text(f"error: {line}", style="bold red"), soft_wrap=True)


def show_note(message: str) -> None:
    """`note: …` on stderr, on one line."""
    with suppress(OSError):
        make_console(stderr=True).print(Text(f"note: {message}", style="yellow"), soft_wrap=True)


def prepare_streams() -> None:
    """Lets any text be written, also to streams that are closed (and None)."""
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):  # model text may not fit the terminal's encoding
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def drop_unwritten() -> None:
    """Forgets what stdout cannot take, or the interpreter would fail over it once more."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
