"""`Exchange`: kernels of `csrc/` in which ranks tell each other something.

Each rank writes packets into the others' memory, and waits for what they write in its own. There is
no barrier, so an all-reduce of a step's few rows takes little more than one trip over the link. How
that is safe is in csrc/include/trtspec/exchange.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MAX_RANKS = 16
PACKET = 16  # bytes
PART_BYTES = 2 * 2**20
"""What one rank may send to another at once."""
_ROUNDS = 3  # whose memory takes turns
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def memory_bytes(size: int) -> int:
    """Returns the bytes that each of `size` ranks keeps for packets."""
    return _ROUNDS * size * PART_BYTES


class Exchange:
    """The kernels of one rank.

    Calls must be the same on all ranks and in one order: in a kernel's place a rank waits for the
    others' kernel.

    Args:
        kernels: the compiled module.
        memory: this rank's, `memory_bytes(size)` of uint8; no rank may start before all have made
            this object.
        pointers: the addresses of all ranks' memory, as this rank's device sees them.
    """

    def __init__(self, kernels: Any, rank: int, memory: Tensor, pointers: Sequence[int]):
        self.kernels, self.size = kernels, len(pointers)
        self.memory = memory.fill_(0xFF)  # empty
        self.state = torch.zeros(4, dtype=torch.int32, device=memory.device)
        self.handle = torch.tensor(
            [rank, self.size, PART_BYTES // PACKET, self.state.data_ptr(), *pointers]
        )
        """What kernels take, [4 + size] int64 on the host (`peers_of` in csrc/bindings_step.cu)."""

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Whether x can be sent."""
        size = x.numel() * x.element_size()
        is_whole = x.is_contiguous() and size % PACKET == 0 and x.data_ptr() % PACKET == 0
        return x.dtype in _FLOATS and is_whole and size <= PART_BYTES

    def all_reduce(self, x: Tensor) -> Tensor:
        """As `Communicator.all_reduce`, in x's memory."""
        self.kernels.all_reduce(x, self.handle, x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """As `Communicator.all_gather`. The NaN of all one bits arrives as another."""
        out = x.new_empty(self.size, *x.shape)
        self.kernels.all_gather(x, self.handle, out)
        return out
