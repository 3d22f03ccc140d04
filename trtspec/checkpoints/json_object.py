"""Reading a checkpoint's JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .files import is_there


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
