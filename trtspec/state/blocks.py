"""Blocks of one KV group: who holds them, and which free ones still have known contents.

    blank ── allocate ──▶ held by 1, 2, … requests ── free, by the last ──▶ blank, or
                            ▲     (publish: a key)                           cached, with a key
                            └────────────── hold, found by its key ──────────── │
    blank ◀──────────────── allocate (evicted), forget ─────────────────────────┘

A cached block counts as free: `allocate` takes blank ones first, then the cached one that was given
back longest ago.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ..errors import KVCacheError
from ..metadata.attention import NUM_RESERVED_BLOCKS


class BlockPool:
    """Hands out block ids, blank ones lowest first. The reserved blocks are never handed out.

    Args:
        num_evicted: how many blocks an earlier pool of the same group has evicted.
    """

    def __init__(self, num_blocks: int, num_evicted: int = 0):
        self.num_blocks = num_blocks
        self._blank = list(range(NUM_RESERVED_BLOCKS, num_blocks))  # a heap
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, with a key; next victim first
        self._holders: dict[int, int] = {}  # block in use -> tables that hold it
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._suspect: set[int] = set()
        """Blocks with a key whose rows may hold NaN: to be zeroed when they are handed out."""
        self._evicted: list[bytes] = []
        self.num_evicted = num_evicted

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def usage(self) -> float:
        """Returns the share of blocks that are in use, 0 … 1."""
        return 1 - self.num_free / (self.num_blocks - NUM_RESERVED_BLOCKS)

    @property
    def num_keys(self) -> int:
        """Returns how many blocks can be found, in use or free."""
        return len(self._key_of)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks. Raises KVCacheError, and takes none, when fewer are free.

        `take_evicted` and `take_suspects` tell what must follow.
        """
        if count > self.num_free:
            raise KVCacheError(f"{count} blocks asked for, {self.num_free} free.")
        blocks = [heapq.heappop(self._blank) for _ in range(min(count, len(self._blank)))]
        while len(blocks) < count:
            block, _ = self._cached.popitem(last=False)
            key = self._key_of.pop(block)
            del self._block_of[key]
            self._evicted.append(key)
            self.num_evicted += 1
            blocks.append(block)
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def take_evicted(self) -> list[bytes]:
        """Returns the keys that `allocate` has taken from blocks since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def take_suspects(self, blocks: Iterable[int]) -> list[int]:
        """Returns those of newly allocated blocks that must be zeroed, once."""
        if not self._suspect:
            return []
        found = [block for block in blocks if block in self._suspect]
        self._suspect.difference_update(found)
        return found

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a holder to blocks that were found by their keys."""
        holders, cached = self._holders, self._cached
        for block in blocks:
            if block in holders:
                holders[block] += 1
            elif block in cached:
                del cached[block]
                holders[block] = 1
            else:
                raise KVCacheError(f"Block {block} is held but neither in use nor cached.")

    def free(self, blocks: list[int]) -> None:
        """Takes a holder from each block. The first ones are evicted first.

        Raises KVCacheError when one is not in use (freed twice).
        """
        for block in blocks:
            count = self._holders.get(block, 0)
            if count == 0:
                raise KVCacheError(f"Block {block} is freed but not in use.")
            if count > 1:
                self._holders[block] = count - 1
                continue
            del self._holders[block]
            if block in self._key_of:
                self._cached[block] = None
            else:
                heapq.heappush(self._blank, block)

    def num_holders(self, block: int) -> int:
        return self._holders.get(block, 0)

    # -- keys ----------------------------------------------------------------------------------
    def find(self, key: bytes) -> int | None:
        """Returns the block with this key."""
        return self._block_of.get(key)

    def find_all(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the blocks with these keys. Raises KVCacheError if one is gone."""
        try:
            return [self._block_of[key] for key in keys]
        except KeyError:
            raise KVCacheError("A block was evicted after it was found.") from None

    def num_found(self, keys: Iterable[bytes]) -> int:
        """Returns how many keys, up to the first unknown one, have a block."""
        known, count = self._block_of, 0
        for key in keys:
            if key not in known:
                break
            count += 1
        return count

    def num_unused(self, keys: Iterable[bytes]) -> int:
        """Returns how many of the blocks with these keys nothing holds."""
        return sum(self._block_of[key] not in self._holders for key in keys)

    def has_key(self, block: int) -> bool:
        return block in self._key_of

    def publish(self, block: int, key: bytes) -> bool:
        """Gives a block in use its key. False: another block has it, or this one has one."""
        if key in self._block_of or block in self._key_of:
            return False
        if block not in self._holders:
            raise KVCacheError(f"Block {block} is published but not in use.")
        self._block_of[key], self._key_of[block] = block, key
        return True

    def refresh(self, keys: Sequence[bytes]) -> None:
        """Makes the free blocks with these keys, which follow each other, the last to be evicted:
        as if they had just been given back."""
        for key in reversed(keys):
            block = self._block_of.get(key)
            if block is not None and block in self._cached:
                self._cached.move_to_end(block)

    def suspect(self, blocks: Iterable[int]) -> None:
        """Marks blocks to be zeroed when they are handed out again."""
        self._suspect.update(blocks)

    def forget(self, block: int) -> bytes | None:
        """Takes a block's key away. Returns the key, if it had one."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            if block in self._cached:
                del self._cached[block]
                heapq.heappush(self._blank, block)
        return key

    def forget_all(self) -> None:
        """Takes all keys away."""
        for block in list(self._key_of):
            self.forget(block)

    # -- the ledger ----------------------------------------------------------------------------
    @property
    def taken(self) -> list[int]:
        """Returns the blocks that are not blank."""
        return sorted(set(range(NUM_RESERVED_BLOCKS, self.num_blocks)) - set(self._blank))

    @property
    def unclean(self) -> list[int]:
        """Returns the blocks that may hold anything: those not blank, and those to be zeroed."""
        return sorted({*self.taken, *self._suspect})

    def check(self, expected: dict[int, int]) -> None:
        """Raises KVCacheError unless the blocks are as they should be.

        Args:
            expected: block -> tables that hold it.
        """
        if expected != self._holders:
            lost = {b: n for b, n in self._holders.items() if expected.get(b) != n}
            stray = {b: n for b, n in expected.items() if self._holders.get(b) != n}
            raise KVCacheError(f"Blocks leaked: {lost}; not accounted: {stray}.")
        blank, cached = set(self._blank), set(self._cached)
        held = set(self._holders)
        if len(blank) != len(self._blank) or blank & cached or (blank | cached) & held:
            raise KVCacheError("A block is free twice, or free and in use.")
        if len(held) + self.num_free + NUM_RESERVED_BLOCKS != self.num_blocks:
            raise KVCacheError("Used and free blocks do not add up to the pool.")
        if {key: block for block, key in self._key_of.items()} != self._block_of:
            raise KVCacheError("Keys and blocks do not match one to one.")
        if cached != set(self._key_of) - held or blank & set(self._key_of):
            raise KVCacheError("A free block is cached without a key, or blank with one.")
