"""Counters by which the thread block that ends last finds out that it does."""

from __future__ import annotations

import torch
from torch import Tensor

_tickets: dict[tuple[int, int], list[Tensor]] = {}  # by device and stream


def tickets(device: torch.device, count: int) -> Tensor:
    """Returns at least `count` zeros, int32.

    They are zero again after each kernel that takes them, so that those of one stream, one after
    another, share them.
    """
    stream = torch.cuda.current_stream(device)
    made = _tickets.setdefault((stream.device_index, stream.cuda_stream), [])
    if not made or made[-1].shape[0] < count:  # older ones stay: graphs hold them
        made.append(torch.zeros(max(4096, 2 * count), dtype=torch.int32, device=device))
    return made[-1]
