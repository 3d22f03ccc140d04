"""`GenerationInputs`: what the graphs of generations read from the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..state.kv_cache import KVCacheManager
from .request import Request


class GenerationInputs:
    """Slots and block tables of up to N requests, in one tensor on the device.

    A step of n requests reads its first rows. Nothing is sent that the device has.

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
        self.size, self.scratch_slot, self.kv_cache = size, scratch_slot, kv_cache
        self.widths = [kv_cache.blocks_for(max_seq_len)] * len(kv_cache.groups)
        # First the slots as int64, so that a step need not convert them, then rows of tables.
        self.sent = torch.zeros(size * (2 + sum(self.widths)), dtype=torch.int32, device=device)
        self._rows: list[tuple[int, int, int]] = []  # slot, request and its table's version
        self.clear()

    def clear(self) -> None:
        """Makes all rows inert, and the next step send everything."""
        self.sent.zero_()
        self.slots(self.size).fill_(self.scratch_slot)
        self.forget()

    def forget(self) -> None:
        """Makes the next step send everything."""
        self._rows = []

    def slots(self, count: int) -> Tensor:
        """Returns the slots of the first rows, [count] int64."""
        return self.sent[: 2 * self.size].view(torch.int64)[:count]

    def tables(self, count: int) -> tuple[Tensor, ...]:
        """Returns the block tables of the first rows, per KV group [count, M] int32."""
        return tuple(self._tables(self.sent, count).split(self.widths, dim=1))

    def _tables(self, tensor: Tensor, count: int) -> Tensor:
        return tensor[2 * self.size :].view(-1, sum(self.widths))[:count]

    def rows_to_send(self, requests: Sequence[Request], count: int) -> Tensor | None:
        """Returns what `send` takes for these requests, in the first of `count` rows; None if the
        device has it."""
        rows = [(r.slot, r.request_id, self.kv_cache.version(r.request_id)) for r in requests]
        rows += [(self.scratch_slot, -1, 0)] * (count - len(rows))
        if self._rows[:count] == rows:
            return None
        self._rows = rows
        length = 2 * self.size + count * sum(self.widths)
        host = torch.zeros(length, dtype=torch.int32, pin_memory=self.sent.is_cuda)
        slots = host[: 2 * self.size].view(torch.int64)
        slots.fill_(self.scratch_slot)
        slots[: len(requests)] = torch.tensor([r.slot for r in requests])
        parts = self._tables(host, len(requests)).split(self.widths, dim=1)
        tables = self.kv_cache.block_tables([r.request_id for r in requests])
        for part, table in zip(parts, tables, strict=True):
            part[:, : table.shape[1]] = table
        return host

    def send(self, rows: Tensor) -> None:
        self.sent[: rows.shape[0]].copy_(rows, non_blocking=True)
