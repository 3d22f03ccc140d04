"""Looking for a checkpoint's files before one is opened."""

from __future__ import annotations

import stat
from pathlib import Path

from ..errors import CheckpointError


def is_there(path: Path) -> bool:
    """Whether there is a file to read, links followed.

    Raises:
        CheckpointError: there is something else by that name. To open a pipe would wait for a
            writer for ever.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Copy it again.") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            f"{path} is not a regular file, nor a link to one: it is a {_kind(mode)}. Replace it "
            "by the file from the model's source."
        )
    return True


def _kind(mode: int) -> str:
    tests = {"directory": stat.S_ISDIR, "pipe": stat.S_ISFIFO, "socket": stat.S_ISSOCK}
    return next((name for name, test in tests.items() if test(mode)), "device")
