"""Where the tensors of a checkpoint go in a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """Where one checkpoint tensor goes: rows `start:start + shape[0]` of a module's parameter, or
    of another of its dimensions."""

    module: str
    leaf: str
    start: int
    shape: tuple[int, ...]
    order: Tensor | None = None  # of the source's rows, int64; None is its own
    expert: int | None = None  # the rows of parameter[expert]
    dtype: torch.dtype | None = None  # of the parameter; None is the model's
    offset: float = 0.0  # added to the source in float32
    dim: int = 0  # that `start` counts along
