"""What torchrun says of this process, by its environment."""

from __future__ import annotations

import os


def torchrun_size() -> int | None:
    """Returns how many ranks torchrun started; None outside of it."""
    started = "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ
    return int(os.environ["WORLD_SIZE"]) if started else None


def torchrun_rank() -> int:
    """Returns this process's rank under torchrun, else 0."""
    return int(os.environ["RANK"]) if torchrun_size() is not None else 0
