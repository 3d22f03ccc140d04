"""Free blocks of one KV group."""

from __future__ import annotations

import heapq

from ..errors import KVCacheError
from ..metadata.attention import NUM_RESERVED_BLOCKS


class BlockPool:
    """Hands out block ids, lowest first. The reserved blocks are never handed out."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(NUM_RESERVED_BLOCKS, num_blocks))  # a heap
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks. Raises KVCacheError, and takes none, when fewer are free."""
        if count > len(self._free):
            raise KVCacheError(f"{count} blocks asked for, {len(self._free)} free.")
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        self._used.update(blocks)
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Gives blocks back. Raises KVCacheError when one was not allocated (freed twice)."""
        for block in blocks:
            if block not in self._used:
                raise KVCacheError(f"Block {block} is freed but not in use.")
            self._used.remove(block)
            heapq.heappush(self._free, block)

    @property
    def taken(self) -> list[int]:
        """Returns the blocks that are not free."""
        return sorted(set(range(NUM_RESERVED_BLOCKS, self.num_blocks)) - set(self._free))

    def check(self, expected_used: set[int]) -> None:
        """Raises KVCacheError unless used and free blocks are exactly what they should be."""
        if expected_used != self._used:
            lost, stray = self._used - expected_used, expected_used - self._used
            raise KVCacheError(f"Blocks leaked: {sorted(lost)}; not accounted: {sorted(stray)}.")
        if len(self._used) + len(self._free) + NUM_RESERVED_BLOCKS != self.num_blocks:
            raise KVCacheError("Used and free blocks do not add up to the pool.")
