"""Ranks as threads of one process: what layers and loaders of several ranks compute together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from trtspec.distributed.comm import Communicator

T = TypeVar("T")


class ThreadRanks:
    """`size` ranks; a collective waits at a barrier for all of them."""

    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.values: list[Tensor] = [torch.empty(0)] * size

    def run(self, of_rank: Callable[[Communicator], T]) -> list[T]:
        """Runs it on every rank; returns each one's result, or raises the first error."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                with torch.no_grad():
                    results[rank] = of_rank(_ThreadCommunicator(self, rank))
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            lost = threading.BrokenBarrierError
            raise next((e for e in errors if not isinstance(e, lost)), errors[0])
        return results


class _ThreadCommunicator(Communicator):
    def __init__(self, ranks: ThreadRanks, rank: int):
        self.ranks, self.rank, self.size = ranks, rank, ranks.size

    def all_gather(self, x: Tensor) -> Tensor:
        self.ranks.values[self.rank] = x
        self.ranks.barrier.wait()
        gathered = torch.stack(self.ranks.values)
        self.ranks.barrier.wait()
        return gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x).float().sum(0).to(x.dtype)
