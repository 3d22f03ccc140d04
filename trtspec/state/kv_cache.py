"""The paged KV cache: storage per group, a block table per request and group.

The ledger of one generation request, K drafts, half-open intervals of token positions. The host
knows an upper bound `past` of the tokens whose KV is valid; the device knows the truth:

    [0, past)                    valid or, until the truth arrives, possibly rejected
    [past, past + K + 1)         written by the next verification pass
    [past + K + 1, past + 2K + 1) written by drafting, for drafters with a KV group of their own

`reserve` covers the last bound before a step is launched, `trim` gives whole blocks back when the
accepted count arrives. Rejected rows are never cleared, only overwritten. The accepted rows' KV is
where the text wants it, because their path is a chain (`metadata/accepted_path.py`).

Behind a sliding window of W, blocks are given back while the text grows. With `first` the lowest
position of any row that a pass launched from now on can have:

    [0, first - W + 1)           seen by no later row: its whole blocks are free again
    [first - W + 1, first)       keys that later rows see
    [first, …)                   as above

`first` is the lower bound of the past, never `past` itself, less the rows that drafting computes
again: the end of the last chunk launched of a prompt; of a generation the tokens that the host has
read, less the one that has no KV yet; for vanilla MTP less K-1. All other drafters' rows (EAGLE's
K+1, DRAFT_TARGET's two) begin at the step's own first row or after it. A step in flight started
further back, but it was launched with its own copy of the tables on the one stream of all launches,
so it has read the blocks before a later launch writes to them. A table keeps its logical indexing:
what was given back is NULL_BLOCK there, where masked reads land on zeros and nothing is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import KVCacheError
from ..metadata.attention import NULL_BLOCK, NUM_RESERVED_BLOCKS, KVGroup
from ..utils import rows_to_tensor
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
    """Blocks of every group for every request. Host bookkeeping only; no device reads.

    Args:
        num_blocks: of every group, or of each; reserved ones included.
    """

    def __init__(
        self,
        specs: list[KVGroupSpec],
        num_blocks: int | Sequence[int],
        page_size: int,
        device: torch.device,
    ):
        counts = [num_blocks] * len(specs) if isinstance(num_blocks, int) else list(num_blocks)
        if min(counts) <= NUM_RESERVED_BLOCKS:
            raise KVCacheError(f"{min(counts)} blocks leave none for requests.")
        self.page_size, self.device = page_size, device
        self.num_blocks = min(counts)  # of the smallest group
        self.groups = tuple(
            spec.allocate(count, page_size, device)
            for spec, count in zip(specs, counts, strict=True)
        )
        self.windows = tuple(spec.window for spec in specs)
        self._pools = [BlockPool(count) for count in counts]
        self._tables: dict[int, list[list[int]]] = {}
        self._clock = itertools.count(1)
        self._versions: dict[int, int] = {}  # request -> time of its tables' last change

    @property
    def num_free_blocks(self) -> int:
        """Of the fullest group."""
        return min(pool.num_free for pool in self._pools)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def reserve(self, request_id: int, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens in every group, or changes nothing and says False."""
        tables, missing = self._missing(request_id, num_tokens)
        if not self.has_room(request_id, num_tokens):
            return False
        for table, pool, count in zip(tables, self._pools, missing, strict=True):
            if count > 0:
                table.extend(pool.allocate(count))
                self._versions[request_id] = next(self._clock)
        self._tables[request_id] = tables
        return True

    def has_room(self, request_id: int, num_tokens: int) -> bool:
        """Whether `reserve` would succeed."""
        _, missing = self._missing(request_id, num_tokens)
        return all(n <= pool.num_free for n, pool in zip(missing, self._pools, strict=True))

    def _missing(self, request_id: int, num_tokens: int) -> tuple[list[list[int]], list[int]]:
        """Its block tables, and how many blocks each lacks (not above 0: none)."""
        tables = self._tables.get(request_id) or [[] for _ in self._pools]
        return tables, [self.blocks_for(num_tokens) - len(table) for table in tables]

    def trim(self, request_id: int, num_tokens: int) -> None:
        """Gives back the blocks past the first `num_tokens` tokens."""
        keep = self.blocks_for(num_tokens)
        for table, pool in zip(self._tables[request_id], self._pools, strict=True):
            if len(table) > keep:
                pool.free(_held(table[keep:]))
                del table[keep:]
                self._versions[request_id] = next(self._clock)

    def release_behind(self, request_id: int, first: int, num_unseen: int = 0) -> None:
        """Gives back the blocks behind the windows of the rows at `first` and later.

        Args:
            first: lowest position of any row that a pass launched from now on has.
            num_unseen: the text's first tokens whose logits nobody looked at (a prompt's). NaN in
                their rows may have gone unnoticed, so their blocks are zeroed: see `scrub`.
        """
        tables = self._tables.get(request_id, [])
        for g, (table, window) in enumerate(zip(tables, self.windows, strict=False)):
            end = 0 if window is None else max(0, first - window + 1) // self.page_size
            blocks: list[int] = []
            unseen: list[int] = []
            for i in range(min(end, len(table)) - 1, -1, -1):
                if table[i] == NULL_BLOCK:  # and so are all before it
                    break
                blocks.append(table[i])
                if i * self.page_size < num_unseen:
                    unseen.append(table[i])
                table[i] = NULL_BLOCK
            if blocks:
                self._zero(self.groups[g], unseen)
                self._pools[g].free(blocks)
                self._versions[request_id] = next(self._clock)

    def free(self, request_id: int) -> None:
        """Gives back all blocks of a request; a request without blocks is fine."""
        tables = self._tables.pop(request_id, None)
        self._versions.pop(request_id, None)
        if tables:
            for table, pool in zip(tables, self._pools, strict=True):
                pool.free(_held(table))

    def start_over(self) -> None:
        """Gives back every block, zeroed, whatever an exception left half done."""
        for group, pool in zip(self.groups, self._pools, strict=True):
            self._zero(group, pool.taken)
        self._pools = [BlockPool(pool.num_blocks) for pool in self._pools]
        self._tables, self._versions = {}, {}

    def release_memory(self) -> None:
        """Lets go of the storage; nothing can be computed after it."""
        self.groups = ()

    def version(self, request_id: int) -> int:
        """Changes whenever one of the request's block tables does."""
        return self._versions.get(request_id, 0)

    def scrub(self, request_id: int) -> None:
        """Zeros a request's blocks (and the scratch block's neighbours are untouched).

        For a request that wrote NaN: masked reads multiply stale values by zero, and 0 * NaN
        would poison whoever gets the blocks next.
        """
        for group, table in zip(self.groups, self._tables.get(request_id, []), strict=False):
            self._zero(group, _held(table))

    def _zero(self, group: KVGroup, blocks: list[int]) -> None:
        if blocks:
            index = rows_to_tensor(blocks, torch.int64, self.device)
            group.k_cache.index_fill_(1, index, 0)
            group.v_cache.index_fill_(1, index, 0)

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
            held = [block for tables in self._tables.values() for block in _held(tables[g])]
            if len(held) != len(set(held)):
                raise KVCacheError(f"KV group {g}: a block is held twice.")
            pool.check(set(held))


def _held(table: list[int]) -> list[int]:
    """The blocks of a table without the places that were given back."""
    return [block for block in table if block != NULL_BLOCK]
