"""Collectives: what the ranks of one model tell each other inside a step.

Every rank calls the same collectives in the same order. Each leaves the same bits on all ranks: the
sum of an `all_reduce` is one rank's arithmetic, or is added up in the order of the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange


class Communicator(ABC):
    """The ranks that hold parts of the same weights, numbered 0 … size - 1."""

    rank: int
    size: int
    exchange: Exchange | None = None
    """Kernels that tell other ranks something themselves; all ranks have them, or none."""

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x, of the same shape; it may take x's memory."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Returns all ranks' x of shape [...] in the order of ranks, [size, ...]."""


class Alone(Communicator):
    """One rank: nothing to tell."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]


ALONE = Alone()

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name from torch 2.13 on, and before."""


class GroupCommunicator(Communicator):
    """The ranks of a `torch.distributed` group: NCCL on GPUs, gloo on the CPU."""

    def __init__(self, group: Any):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            x = x.contiguous()
            dist.all_reduce(x, group=self.group)
            return x
        total = self.all_gather(x).float().sum(0)  # in float32, whatever the number of ranks
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        out = torch.empty((self.size, x.numel()), dtype=x.dtype, device=x.device)
        _all_gather(out.flatten(), x.reshape(-1), group=self.group)
        return out.view(self.size, *x.shape)
