"""Memory that kernels keep from launch to launch: counters, and what thread blocks send each other.

By a counter the thread block that ends last finds out that it does.
"""

from __future__ import annotations

import torch
from torch import Tensor


class StreamMemory:
    """Memory of each stream, zeros at first.

    Kernels that run one after another share it: those of a stream, and those of graphs that one
    stream captured if no two of the graphs are replayed at a time.

    Args:
        dtype: of the memory. least: elements that are allocated at least.
    """

    def __init__(self, dtype: torch.dtype, least: int):
        self.dtype, self.least = dtype, least
        self._made: dict[tuple[int, int], list[Tensor]] = {}  # by device and stream

    def on(self, device: torch.device, count: int) -> Tensor:
        """Returns at least `count` elements."""
        stream = torch.cuda.current_stream(device)
        made = self._made.setdefault((stream.device_index, stream.cuda_stream), [])
        if made and made[-1].shape[0] >= count:
            return made[-1]
        new = torch.zeros(max(self.least, 2 * count), dtype=self.dtype, device=device)
        if not torch.cuda.is_current_stream_capturing():  # else only a replay would make them zeros
            made.append(new)  # older ones stay: graphs hold them
        return new


_TICKETS = StreamMemory(torch.int32, least=4096)


def tickets(device: torch.device, count: int) -> Tensor:
    """Returns at least `count` zeros, int32. Each kernel that takes them leaves zeros."""
    return _TICKETS.on(device, count)
