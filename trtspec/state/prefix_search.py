"""`PrefixSearch`: which beginning of a sequence the blocks of a cache still hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .blocks import BlockPool
from .prefix import Donor, Donors, PrefixChain, PrefixHit


class PrefixQuery(NamedTuple):
    """A sequence that is looked up."""

    chain: PrefixChain
    tokens: Callable[[int, int], Sequence[int]]  # of positions [start, end), fewer at its end
    limit: int  # most tokens to be reused
    cut: Callable[[int], int] = int  # -> the last position up to there at which a pass may begin


class PrefixSearch(NamedTuple):
    """The blocks of a cache's groups, for searches among them."""

    page_size: int
    pools: Sequence[BlockPool]  # by group
    windows: Sequence[int | None]
    donors: Donors | None  # None: no block is copied in part

    def longest(self, query: PrefixQuery) -> PrefixHit:
        """Returns the longest beginning that every group still holds.

        A group with a window holds it if it has the blocks that the row at its end sees.
        """
        page, chain = self.page_size, query.chain
        whole = self._num_whole(chain)
        donor = self._donor(query, whole)
        end = min(query.limit, whole * page + (donor.num_tokens if donor else 0))
        while end > 0 and (end := query.cut(end)) > 0:
            count, copied = divmod(end, page)
            source = None
            if copied:
                source = chain.keys[count] if count < whole else donor.key if donor else None
                if not self._may_copy(source):
                    end = count * page
                    continue
            missing = self._missing_in_windows(chain, count)
            if missing is None:
                return PrefixHit(end, count, source)
            end = missing * page
        return PrefixHit()

    def _num_whole(self, chain: PrefixChain) -> int:
        """Returns how many blocks from the beginning on all groups without a window have."""
        count = len(chain.keys)
        for pool, window in zip(self.pools, self.windows, strict=True):
            if window is None:
                count = pool.num_found(chain.keys[:count])
        return count

    def _donor(self, query: PrefixQuery, whole: int) -> Donor | None:
        """Returns the block of another text that shares most of what follows."""
        chain, start = query.chain, whole * self.page_size
        if self.donors is None or query.limit <= start:
            return None
        wanted = query.tokens(start, start + self.page_size + chain.ahead)
        if chain.content(start, start + len(wanted)):
            return None
        return self.donors.longest(chain.parent(whole), wanted, chain.ahead)

    def _may_copy(self, source: bytes | None) -> bool:
        if source is None or self.donors is None:
            return False
        return all(pool.find(source) is not None for pool in self.pools)

    def _first_seen(self, window: int | None, num_blocks: int) -> int:
        """Returns the first block that rows after `num_blocks` blocks see."""
        if window is None:
            return 0
        return max(0, num_blocks * self.page_size - window + 1) // self.page_size

    def _missing_in_windows(self, chain: PrefixChain, num_blocks: int) -> int | None:
        """Returns the last block that a window needs for rows after `num_blocks` and that is gone.

        None: all are there.
        """
        gone = -1
        for pool, window in zip(self.pools, self.windows, strict=True):
            if window is not None:
                for i in range(num_blocks - 1, self._first_seen(window, num_blocks) - 1, -1):
                    if pool.find(chain.keys[i]) is None:
                        gone = max(gone, i)
                        break
        return None if gone < 0 else gone

    def seen_keys(self, chain: PrefixChain, hit: PrefixHit, group: int) -> list[bytes]:
        """Returns the keys of a hit's whole blocks that later rows see in a group."""
        first = self._first_seen(self.windows[group], hit.num_blocks)
        return chain.keys[first : hit.num_blocks]

    def has_room(self, chain: PrefixChain, hit: PrefixHit, num_blocks: int, spare: int) -> bool:
        """Whether a request that takes over the hit gets `num_blocks` blocks in all.

        Args:
            spare: blocks of each group that must be left free.
        """
        for group, pool in enumerate(self.pools):
            keys = self.seen_keys(chain, hit, group)
            if hit.source is not None:  # held while it is copied
                keys.append(hit.source)
            if num_blocks - hit.num_blocks + pool.num_unused(keys) + spare > pool.num_free:
                return False
        return True
