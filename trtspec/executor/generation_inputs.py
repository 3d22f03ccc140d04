"""`GenerationInputs`: what the graphs of generations read from the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..metadata.attention import NULL_BLOCK
from ..state.kv_cache import KVCacheManager
from .pinned import PinnedBuffer, PinnedBuffers
from .request import Request

_Row = tuple[int, int, int]
"""Slot, request and the version of its tables."""


class StagedRows(NamedTuple):
    """Rows that are to be sent."""

    host: Tensor  # int32
    buffer: PinnedBuffer | None  # that they are in; None on CPU


class GenerationInputs:
    """Slots and block tables of up to N requests, in one tensor on the device.

    A step of n requests reads its first rows. The host has the same, and writes the rows whose
    tables changed. Where none has, nothing is sent.

    Args:
        size: N. scratch_slot: of rows that are no request's.
    """

    def __init__(
        self,
        size: int,
        scratch_slot: int,
        max_seq_len: int,
        kv_cache: KVCacheManager,
        device: torch.device,
    ):
        self.size, self.kv_cache = size, kv_cache
        self.widths = [kv_cache.blocks_for(max_seq_len)] * len(kv_cache.groups)
        # First the slots as int64, so that a step need not convert them, then rows of tables.
        length = size * (2 + sum(self.widths))
        self.sent = torch.zeros(length, dtype=torch.int32, device=device)
        self._host = torch.zeros(length, dtype=torch.int32)
        self._buffers = PinnedBuffers()
        # The same memory. Numpy writes a few numbers in less time than torch.
        self._host_slots = self._slots_of(self._host).numpy()
        self._host_tables = self._tables_of(self._host).numpy()
        self._inert: _Row = (scratch_slot, -1, 0)
        self._rows: list[_Row | None] = []
        self.clear()

    def clear(self) -> None:
        """Makes all rows inert, here and on the device."""
        self._host.zero_()
        self._slots_of(self._host).fill_(self._inert[0])
        self.sent.copy_(self._host)
        self._rows = [self._inert] * self.size

    def forget(self) -> None:
        """Makes the next step send all that it reads, whatever the device has."""
        self._rows = [None] * self.size

    def slots(self, count: int) -> Tensor:
        """Returns the slots of the first rows, [count] int64."""
        return self._slots_of(self.sent)[:count]

    def tables(self, count: int) -> tuple[Tensor, ...]:
        """Returns the block tables of the first rows, per KV group [count, M] int32."""
        return tuple(self._tables_of(self.sent)[:count].split(self.widths, dim=1))

    def _slots_of(self, tensor: Tensor) -> Tensor:
        return tensor[: 2 * self.size].view(torch.int64)

    def _tables_of(self, tensor: Tensor) -> Tensor:
        return tensor[2 * self.size :].view(self.size, sum(self.widths))

    def rows_to_send(self, requests: Sequence[Request], count: int) -> StagedRows | None:
        """Returns what `send` takes for these requests, in the first of `count` rows; None if the
        device has it."""
        rows, ids = self._rows, [request.request_id for request in requests]
        slots = [request.slot for request in requests]
        now: list[_Row] = list(zip(slots, ids, self.kv_cache.versions(ids), strict=True))
        now += [self._inert] * (count - len(now))
        if rows[:count] == now:
            return None
        changed = [i for i, row in enumerate(now) if row != rows[i]]
        rows[:count] = now
        self._write(changed, requests)
        length = 2 * self.size + count * sum(self.widths)
        if not self.sent.is_cuda:
            return StagedRows(self._host[:length].clone(), None)
        # A copy, for rows are written again while it is on its way.
        buffer = self._buffers.take(length * self._host.element_size())
        host = buffer.tensor.view(torch.int32)[:length]
        np.copyto(buffer.memory.view(np.int32)[:length], self._host.numpy()[:length])
        return StagedRows(host, buffer)

    def _write(self, places: list[int], requests: Sequence[Request]) -> None:
        """Writes these rows on the host."""
        for place in places:
            request = requests[place] if place < len(requests) else None
            row, start = self._host_tables[place], 0
            row.fill(NULL_BLOCK)
            self._host_slots[place] = self._inert[0] if request is None else request.slot
            tables = () if request is None else self.kv_cache.table_of(request.request_id)
            for table, width in zip(tables, self.widths, strict=False):
                row[start : start + len(table)] = table
                start += width

    def send(self, rows: StagedRows) -> None:
        """Sends what `rows_to_send` returned, for the graphs that are launched from now on."""
        host, buffer = rows
        self.sent[: host.shape[0]].copy_(host, non_blocking=True)
        if buffer is not None:
            buffer.event.record()
            self._buffers.give(buffer)
