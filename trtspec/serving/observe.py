"""`add_observability`: metrics and a page."""

from __future__ import annotations

from typing import Any


def add_observability(app: Any, engine: Any, model_name: str | None = None) -> None:
    """Mounts nothing yet."""
