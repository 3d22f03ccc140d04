"""Where the tensors of a checkpoint go in a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed.parallel import Cut


@dataclass(frozen=True)
class Placement:
    """Where one checkpoint tensor, or this rank's cut of it, goes: rows `start:start + shape[0]` of
    a module's parameter, or of another of its dimensions."""

    module: str
    leaf: str
    start: int
    shape: tuple[int, ...]
    order: Tensor | None = None  # of the source along `dim`, int64; None is its own
    full: int | None = None  # entries of the source along `dim`, where `order` takes some of them
    expert: int | None = None  # the rows of parameter[expert]
    dtype: torch.dtype | None = None  # of the parameter; None is the model's
    offset: float = 0.0  # added to the source in float32
    dim: int = 0  # that `start` counts along
    cut: Cut | None = None  # of the source; None is all of it
    experts: Cut | None = None  # of a stack that `cut` cuts by width: which of its experts
    floats_by_columns: bool = False  # a stack [E, in, out] in the checkpoint if not quantised
    is_elsewhere: bool = False  # another rank has it: checked here, not read

    @property
    def source_shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have."""
        shape = list(self.shape)
        if self.full is not None:
            shape[self.dim] = self.full
        for cut in filter(None, (self.cut, self.experts)):
            shape[cut.dim] = cut.full
        return tuple(shape)

    def arranged(self, tensor: Tensor) -> Tensor:
        """Returns what was read as the parameter has it: this rank's experts, rows in order."""
        if self.experts is not None:
            tensor = tensor.narrow(0, self.experts.start, self.experts.length)
        if self.order is not None:
            tensor = tensor.index_select(self.dim, self.order.to(tensor.device))
        return tensor


def beside(module: str, tensor: str) -> str:
    """Returns the name of a tensor that the checkpoint has beside a module, not within it."""
    parent = module.rpartition(".")[0]
    return f"{parent}.{tensor}" if parent else tensor
