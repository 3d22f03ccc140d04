"""`GenerationInputs`: what the graphs of generations read from the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...metadata.attention import NULL_BLOCK, NUM_RESERVED_BLOCKS
from ...state.kv_cache import KVCacheManager
from ..inputs import ContextRows, StepInputs
from ..pinned import PinnedBuffer, PinnedBuffers
from ..request import Request

NO_REQUEST, UNKNOWN = -1, -2  # of a row that is inert; of one that the device may not have


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
        self.size, self.max_seq_len, self.kv_cache = size, max_seq_len, kv_cache
        self.widths = [kv_cache.blocks_for(max_seq_len)] * len(kv_cache.groups)
        # First the slots as int64, so that a step need not convert them, then rows of tables.
        length = size * (2 + sum(self.widths))
        self.sent = torch.zeros(length, dtype=torch.int32, device=device)
        self._host = torch.zeros(length, dtype=torch.int32)
        self._buffers = PinnedBuffers()
        # The same memory. Numpy writes a few numbers in less time than torch.
        self._host_slots = self._slots_of(self._host).numpy()
        self._host_tables = self._tables_of(self._host).numpy()
        self._scratch_slot = scratch_slot
        self._now: list[list[int]] = []  # of each row: request, slot, version of its tables
        self.clear()

    def clear(self) -> None:
        """Makes all rows inert, here and on the device."""
        self._host.zero_()
        self._slots_of(self._host).fill_(self._scratch_slot)
        self.sent.copy_(self._host)
        self._now = [[NO_REQUEST] * self.size, [self._scratch_slot] * self.size, [0] * self.size]

    def forget(self) -> None:
        """Makes the next step send all that it reads, whatever the device has."""
        self._now[0] = [UNKNOWN] * self.size

    def spread(self, count: int, num_tokens: int) -> list[Tensor]:
        """Gives each of the first rows blocks of its own, on the device alone, until `clear`.

        Where there are too few, rows share some. No request may have blocks.

        Returns:
            per KV group [count, M] int64 on the host, for `num_tokens` tokens.
        """
        used, spread = self.kv_cache.blocks_for(num_tokens), []
        for table, group in zip(self.tables(count), self.kv_cache.groups, strict=True):
            num_blocks = group.k_cache.shape[1] - NUM_RESERVED_BLOCKS
            blocks = torch.arange(count * used).view(count, used) % num_blocks
            spread.append(blocks + NUM_RESERVED_BLOCKS)
            table[:, :used].copy_(spread[-1])
        return spread

    def slots(self, count: int) -> Tensor:
        """Returns the slots of the first rows, [count] int64."""
        return self._slots_of(self.sent)[:count]

    def tables(self, count: int) -> tuple[Tensor, ...]:
        """Returns the block tables of the first rows, per KV group [count, M] int32."""
        return tuple(self._tables_of(self.sent)[:count].split(self.widths, dim=1))

    def step_inputs(
        self, count: int, num_drafts: int, all_greedy: bool, has_filters: bool
    ) -> StepInputs:
        """Returns what a step of the first `count` rows reads: views of the device tensor."""
        return StepInputs(
            slot_ids=self.slots(count),
            block_tables=self.tables(count),
            contexts=ContextRows.none(self.sent.device),
            num_generations=count,
            num_drafts=num_drafts,
            max_kv_len=self.max_seq_len,
            request_ids=[-1] * count,
            all_greedy=all_greedy,
            has_filters=has_filters,
        )

    def _slots_of(self, tensor: Tensor) -> Tensor:
        return tensor[: 2 * self.size].view(torch.int64)

    def _tables_of(self, tensor: Tensor) -> Tensor:
        return tensor[2 * self.size :].view(self.size, sum(self.widths))

    def rows_to_send(self, requests: Sequence[Request], count: int) -> StagedRows | None:
        """Returns what `send` takes for these requests, in the first of `count` rows; None if the
        device has it."""
        ids = [request.request_id for request in requests]
        slots = [request.slot for request in requests]
        padding = count - len(ids)
        now = [
            ids + [NO_REQUEST] * padding,
            slots + [self._scratch_slot] * padding,
            [*self.kv_cache.versions(ids), *[0] * padding],
        ]
        before = [column[:count] for column in self._now]
        if now == before:  # of three lists: of as many tuples it would take three times as long
            return None
        rows, rows_before = zip(*now, strict=True), zip(*before, strict=True)
        changed = [i for i, (a, b) in enumerate(zip(rows, rows_before, strict=True)) if a != b]
        for column, values in zip(self._now, now, strict=True):
            column[:count] = values
        self._write(changed, requests)
        length = 2 * self.size + count * sum(self.widths)
        if not self.sent.is_cuda:
            return StagedRows(self._host[:length].clone(), None)
        # A copy, for rows are written again while it is on its way.
        buffer = self._buffers.take(length * self._host.element_size())
        host = buffer.tensor.view(torch.int32)[:length]
        np.copyto(buffer.memory.view(np.int32)[:length], self._host.numpy()[:length])
        return StagedRows(host, buffer)

    def _write(self, rows: list[int], requests: Sequence[Request]) -> None:
        """Writes these rows on the host."""
        for i in rows:
            request = requests[i] if i < len(requests) else None
            row, start = self._host_tables[i], 0
            row.fill(NULL_BLOCK)
            self._host_slots[i] = self._scratch_slot if request is None else request.slot
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
