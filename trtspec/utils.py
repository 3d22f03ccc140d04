"""Where things are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$TRTSPEC_CACHE`, or `~/.cache/trtspec`. Not created here."""
    chosen = os.environ.get("TRTSPEC_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "trtspec"
