"""A checkpoint's files: whether one is there, and those that are JSON."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

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


def read_json_object(path: Path, cure: str) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError, which ends with `cure`."""
    if not is_there(path):
        raise CheckpointError(f"There is no {path.name} in {path.parent}. {cure}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}). {cure}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object. {cure}")
    return content


def _kind(mode: int) -> str:
    tests = {"directory": stat.S_ISDIR, "pipe": stat.S_ISFIFO, "socket": stat.S_ISSOCK}
    return next((name for name, test in tests.items() if test(mode)), "device")
