"""All-reduces through memory that GPUs share, for the few rows of a decoding step.

torch's symmetric memory maps every rank's buffer into all of them (NVLink or PCIe peer access;
multicast is not used). Our kernel pushes each rank's part to the others (`exchange.py`). torch's
have a barrier: in one shot each rank reads all parts and adds them up; in two shots each adds up
its share of the entries, and reads the others' sums. NCCL does better on large tensors. Which way
is taken is measured when the ranks start, for each size.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..errors import ConfigError, described
from .comm import GroupCommunicator
from .exchange import MAX_RANKS, PART_BYTES, Exchange, memory_bytes

logger = logging.getLogger(__name__)

MAX_BYTES = 4 * 2**20
"""Of a tensor that goes through torch's kernels."""
ALL_REDUCE_ENV_VAR = "TRTSPEC_ALL_REDUCE"
NCCL, PUSH, ONE_SHOT, TWO_SHOT = WAYS = ("nccl", "push", "one_shot", "two_shot")
_ALIGNMENT = 16  # bytes
_SIZES = [2**n for n in range(13, 23)]  # 8 KiB … 4 MiB
_CALLS, _REPEATS = 20, 5
_rendezvous: list[Any] = []  # groups of this process that had one


class PeerCommunicator(GroupCommunicator):
    """`GroupCommunicator` on GPUs with peer access.

    Args:
        device: this rank's GPU.
        forced: one of `WAYS` for every size that it takes; by default the fastest.
    """

    def __init__(self, group: Any, device: torch.device, forced: str | None = None):
        import torch.distributed._symmetric_memory as symmetric_memory

        super().__init__(group)
        self.name = group.group_name
        size = MAX_BYTES + memory_bytes(self.size)
        self.buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        peers = symmetric_memory.rendezvous(self.buffer, group=self.name)
        kernels = native.kernels(self.buffer) if self.size <= MAX_RANKS else None
        if kernels is not None:
            pointers = [pointer + MAX_BYTES for pointer in peers.buffer_ptrs]
            self.exchange = Exchange(kernels, self.rank, self.buffer[MAX_BYTES:], pointers)
        torch.cuda.synchronize(device)
        self.way_of_size = {size: forced or NCCL for size in _SIZES}
        self.microseconds: dict[int, dict[str, float]] = {}
        """What `choose` measured: bytes -> way -> time."""

    def all_reduce(self, x: Tensor) -> Tensor:
        size = x.numel() * x.element_size()
        if x.dtype not in (torch.bfloat16, torch.float32) or size % _ALIGNMENT or size > MAX_BYTES:
            return super().all_reduce(x)
        return self.all_reduce_by(self.way(size), x)

    def way(self, size: int) -> str:
        """Returns how a tensor of `size` bytes is reduced: as the next larger size measured."""
        return next(way for measured, way in self.way_of_size.items() if size <= measured)

    def all_gather(self, x: Tensor) -> Tensor:
        if self.exchange is not None and self.exchange.takes(x):
            return self.exchange.all_gather(x)
        return super().all_gather(x)

    def all_reduce_by(self, way: str, x: Tensor) -> Tensor:
        """Sums x, whose size every way but `PUSH` takes, which leaves larger ones to NCCL."""
        if way == PUSH and self.exchange is not None and self.exchange.takes(x := x.contiguous()):
            return self.exchange.all_reduce(x)
        if way in (NCCL, PUSH):
            return super().all_reduce(x)
        flat = x.reshape(-1)
        buffer = self.buffer[: flat.numel() * flat.element_size()].view(flat.dtype)
        if way == ONE_SHOT:
            return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, flat, "sum", self.name).view(
                x.shape
            )
        buffer.copy_(flat)
        torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", self.name)
        return buffer.clone().view(x.shape)

    def choose(self, all_of: Callable[[Any], list[Any]], device: torch.device) -> None:
        """Measures every way and size, and takes the fastest; the slowest rank counts.

        Args:
            all_of: gathers a value of every rank on the host.
        """
        for size in _SIZES:
            x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
            ways = [way for way in WAYS if way != PUSH or self._pushes(size)]
            own = [_microseconds(partial(self.all_reduce_by, way, x)) for way in ways]
            slowest = [max(column) for column in zip(*all_of(own), strict=True)]
            self.way_of_size[size] = ways[slowest.index(min(slowest))]
            self.microseconds[size] = dict(zip(ways, slowest, strict=True))

    def _pushes(self, size: int) -> bool:
        return self.exchange is not None and size <= PART_BYTES


def _microseconds(run: Callable[[], Any]) -> float:
    """Time of one call within a captured graph, as a step replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(_CALLS):
            run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
    graph.replay()
    start.record()
    for _ in range(_REPEATS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / (_CALLS * _REPEATS) * 1e3


def forced_way() -> str | None:
    """Returns the way that `TRTSPEC_ALL_REDUCE` names; None if it is not set.

    Raises:
        ConfigError: it names none of `WAYS`.
    """
    forced = os.environ.get(ALL_REDUCE_ENV_VAR)
    if forced is not None and forced not in WAYS:
        raise ConfigError(f"{ALL_REDUCE_ENV_VAR}={forced!r}: use one of {', '.join(WAYS)}.")
    return forced


def gpu_communicator(
    group: Any, device: torch.device, all_of: Callable[[Any], list[Any]]
) -> GroupCommunicator:
    """Returns the communicator of GPUs: through peer memory where all ranks have it, else NCCL.

    A process has peer memory once: torch counts rendezvous for good, and new ranks begin at 0.

    Raises:
        ConfigError: as `forced_way`.
    """
    forced = forced_way()
    if forced == NCCL or any(all_of(bool(_rendezvous))):
        return GroupCommunicator(group)
    _rendezvous.append(group)
    comm, reason = None, None
    try:
        comm = PeerCommunicator(group, device, forced)
    except Exception as error:  # noqa: BLE001 - of many kinds, by driver and machine
        reason = described(error)
    reasons = [text for text in all_of(reason) if text is not None]
    if comm is None or reasons:
        logger.warning("All-reduces use NCCL alone; there is no peer memory: %s", reasons[0])
        return GroupCommunicator(group)
    lacking = [r for r, size in enumerate(all_of(comm.exchange and comm.exchange.size)) if not size]
    if lacking or forced not in (None, PUSH):
        comm.exchange = None
    if lacking and forced == PUSH:
        raise ConfigError(
            f"{ALL_REDUCE_ENV_VAR}=push, but rank {lacking[0]} has no kernels that push: they need "
            f"Hopper or newer, nvcc and at most {MAX_RANKS} ranks. Leave the variable out."
        )
    if forced is None:
        comm.choose(all_of, device)
    return comm
