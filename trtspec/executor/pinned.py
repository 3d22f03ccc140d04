"""Host memory for the copies of a step, and a step's small results copied at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

MAX_PIECE_BYTES = 1 << 20
"""Tensors that are parts of one piece of memory are copied with it, if it has no more bytes."""


class PinnedBuffer:
    """Memory that a copy to or from the device reads or writes, and the event after that copy."""

    def __init__(self, num_bytes: int):
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.memory = self.tensor.numpy()
        self.event = torch.cuda.Event()


class PinnedBuffers:
    """Buffers that are used again. To allocate one, and an event, takes some 0.1 ms."""

    def __init__(self) -> None:
        self._given: deque[PinnedBuffer] = deque()

    def take(self, num_bytes: int) -> PinnedBuffer:
        """Returns a buffer of that size or larger, which no copy uses."""
        if self._given and self._given[0].event.query():
            buffer = self._given.popleft()
            if len(buffer.memory) >= num_bytes:
                return buffer
        return PinnedBuffer(1 << (num_bytes - 1).bit_length())

    def give(self, buffer: PinnedBuffer) -> None:
        """Takes a buffer back, which may be used again after its event."""
        self._given.append(buffer)


class _Part(NamedTuple):
    """Where a tensor lies in memory, as numpy has it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int  # bytes
    strides: tuple[int, ...]  # bytes


class Piece(NamedTuple):
    """Tensors that are parts of one small piece of memory."""

    memory: Tensor  # [bytes] uint8
    parts: list[_Part]

    @staticmethod
    def of(*tensors: Tensor) -> Piece | None:
        """Returns the piece that these are parts of, if they are."""
        memory = tensors[0].untyped_storage()
        is_one = all(t.untyped_storage().data_ptr() == memory.data_ptr() for t in tensors)
        if not is_one or memory.nbytes() > MAX_PIECE_BYTES:
            return None
        whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
        parts = []
        for t in tensors:
            size, dtype = t.element_size(), torch.empty(0, dtype=t.dtype).numpy().dtype
            strides = tuple(size * step for step in t.stride())
            parts.append(_Part(tuple(t.shape), dtype, size * int(t.storage_offset()), strides))
        return Piece(whole, parts)

    def arrays(self, copy: np.ndarray) -> Sequence[np.ndarray]:
        """Returns the tensors' values in a copy of the memory."""
        return [
            np.ndarray(part.shape, part.dtype, copy, part.offset, part.strides)
            for part in self.parts
        ]
