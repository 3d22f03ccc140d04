"""Where things are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ConfigError


def cache_dir() -> Path:
    """`$TRTSPEC_CACHE`, or `~/.cache/trtspec`. Not created here.

    Raises:
        ConfigError: it begins with the home directory of a user who has none.
    """
    chosen = os.environ.get("TRTSPEC_CACHE") or "~/.cache/trtspec"
    try:
        return Path(chosen).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"The cache directory {chosen!r} is not known ({error}). Set TRTSPEC_CACHE to a "
            "directory that can be written."
        ) from error
