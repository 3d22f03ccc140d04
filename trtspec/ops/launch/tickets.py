"""Counters by which the thread block that ends last finds out that it does."""

from __future__ import annotations

import torch
from torch import Tensor

_tickets: dict[tuple[int, int], list[Tensor]] = {}  # by device and stream


def tickets(device: torch.device, count: int) -> Tensor:
    """Returns at least `count` zeros, int32.

    They are zero again after each kernel that takes them. So kernels that run one after another
    share them: those of a stream, and those of graphs that one stream captured if no two of the
    graphs are replayed at a time.
    """
    stream = torch.cuda.current_stream(device)
    made = _tickets.setdefault((stream.device_index, stream.cuda_stream), [])
    if made and made[-1].shape[0] >= count:
        return made[-1]
    new = torch.zeros(max(4096, 2 * count), dtype=torch.int32, device=device)
    if not torch.cuda.is_current_stream_capturing():  # else only a replay would make them zeros
        made.append(new)  # older ones stay: graphs hold them
    return new
