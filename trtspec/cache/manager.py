"""The paged KV cache: storage per group, a block table per request and group.

The ledger of one generation request, K drafts, half-open intervals of token positions. The host
knows an upper bound `past` of the tokens whose KV is valid; the device knows the truth:

    [0, past)                    valid or, until the truth arrives, possibly rejected
    [past, past + K + 1)         written by the next verification pass
    [past + K + 1, past + 2K + 1) written by drafting, for drafters with a KV group of their own

`reserve` covers the last bound before a step is launched, `trim` gives whole blocks back when the
accepted count arrives. Rejected rows are never cleared, only overwritten.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import KVCacheError
from ..metadata.attention import NULL_BLOCK, NUM_RESERVED_BLOCKS, KVGroup
from ..metadata.sampling import rows_to_tensor
from .blocks import BlockPool


@dataclass(frozen=True)
class KVGroupSpec:
    """Shape of one group: the layers that share a block table."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None  # no layer of the group sees further back; None is no limit
    value_dim: int | None = None  # values are the first so many numbers of keys; None: of their own

    def bytes_per_token(self) -> int:
        sides = 2 if self.value_dim is None else 1
        return sides * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, num_blocks: int, page_size: int, device: torch.device) -> KVGroup:
        """The group's storage, all zeros."""
        shape = self.num_layers, num_blocks, page_size, self.num_kv_heads, self.head_dim
        keys = torch.zeros(shape, dtype=self.dtype, device=device)
        if self.value_dim is None:
            return KVGroup(keys, torch.zeros_like(keys))
        return KVGroup(keys, keys[..., : self.value_dim])


class KVCacheManager:
    """Blocks of every group for every request. Host bookkeeping only; no device reads."""

    def __init__(
        self, specs: list[KVGroupSpec], num_blocks: int, page_size: int, device: torch.device
    ):
        if num_blocks <= NUM_RESERVED_BLOCKS:
            raise KVCacheError(f"{num_blocks} blocks leave none for requests.")
        self.page_size, self.num_blocks, self.device = page_size, num_blocks, device
        self.groups = tuple(spec.allocate(num_blocks, page_size, device) for spec in specs)
        self._pools = [BlockPool(num_blocks) for _ in specs]
        self._tables: dict[int, list[list[int]]] = {}
        self._clock = itertools.count(1)
        self._versions: dict[int, int] = {}  # request -> time of its tables' last change

    @property
    def num_free_blocks(self) -> int:
        """Of the fullest group."""
        return min(pool.num_free for pool in self._pools)

    @property
    def max_tokens(self) -> int:
        """Tokens a lone request can hold."""
        return (self.num_blocks - NUM_RESERVED_BLOCKS) * self.page_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def reserve(self, request_id: int, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens in every group, or changes nothing and says False."""
        tables = self._tables.get(request_id) or [[] for _ in self._pools]
        missing = [self.blocks_for(num_tokens) - len(table) for table in tables]
        if any(n > pool.num_free for n, pool in zip(missing, self._pools, strict=True)):
            return False
        for table, pool, count in zip(tables, self._pools, missing, strict=True):
            if count > 0:
                table.extend(pool.allocate(count))
                self._versions[request_id] = next(self._clock)
        self._tables[request_id] = tables
        return True

    def trim(self, request_id: int, num_tokens: int) -> None:
        """Gives back the blocks past the first `num_tokens` tokens."""
        keep = self.blocks_for(num_tokens)
        for table, pool in zip(self._tables[request_id], self._pools, strict=True):
            if len(table) > keep:
                pool.free(table[keep:])
                del table[keep:]
                self._versions[request_id] = next(self._clock)

    def free(self, request_id: int) -> None:
        """Gives back all blocks of a request; a request without blocks is fine."""
        tables = self._tables.pop(request_id, None)
        self._versions.pop(request_id, None)
        if tables:
            for table, pool in zip(tables, self._pools, strict=True):
                pool.free(table)

    def version(self, request_id: int) -> int:
        """Changes whenever one of the request's block tables does."""
        return self._versions.get(request_id, 0)

    def scrub(self, request_id: int) -> None:
        """Zeros a request's blocks (and the scratch block's neighbours are untouched).

        For a request that wrote NaN: masked reads multiply stale values by zero, and 0 * NaN
        would poison whoever gets the blocks next.
        """
        for group, table in zip(self.groups, self._tables.get(request_id, []), strict=False):
            blocks = rows_to_tensor(table, torch.int64, self.device)
            group.k_cache.index_fill_(1, blocks, 0)
            group.v_cache.index_fill_(1, blocks, 0)

    def block_tables(self, request_ids: list[int]) -> list[Tensor]:
        """Per group [B, M] int32 on the host, padded with NULL_BLOCK; M is the longest's."""
        result = []
        for g in range(len(self._pools)):
            rows = [self._tables[r][g] for r in request_ids]
            width = max((len(row) for row in rows), default=1) or 1
            padded = [row + [NULL_BLOCK] * (width - len(row)) for row in rows]
            result.append(torch.tensor(padded, dtype=torch.int32).view(len(rows), width))
        return result

    def check_integrity(self) -> None:
        """Every used block belongs to exactly one request. Raises KVCacheError; for tests."""
        for g, pool in enumerate(self._pools):
            held = [block for tables in self._tables.values() for block in tables[g]]
            if len(held) != len(set(held)):
                raise KVCacheError(f"KV group {g}: a block is held twice.")
            pool.check(set(held))
