"""`PrefixSearch`: the longest beginning of a sequence that the blocks of a cache still hold."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..utils import renamed
from .blocks import BlockPool
from .prefix import TOKEN_BYTES, PrefixChain

MAX_COMPARED = 32
"""How many blocks of the same beginning are compared for the longest."""


class PrefixQuery(NamedTuple):
    """A sequence that is looked up."""

    chain: PrefixChain
    tokens: Callable[[int, int], Sequence[int]]  # of positions [start, end), fewer at its end
    limit: int  # most tokens to be reused
    cut: Callable[[int], int] = int  # -> the last position up to there at which a pass may begin


class PrefixHit(NamedTuple):
    """What of a sequence the cache holds: whole blocks, then rows to be copied from another."""

    num_tokens: int = 0
    num_blocks: int = 0  # whole ones, shared
    source: bytes | None = None  # key of the block that the other rows are copied from
    owner: int | None = None  # the rank that has them, where ranks have blocks of their own

    def without_copy(self, page_size: int) -> PrefixHit:
        return self._replace(num_tokens=self.num_blocks * page_size, source=None)


class Donor(NamedTuple):
    """A block whose first rows can be copied."""

    key: bytes
    num_tokens: int


class Donors:
    """Blocks by their parent's key and first token, for requests that share a block's beginning.

    Args:
        least: tokens that a request must share, or a copy is not worth it.
    """

    def __init__(self, least: int = 1) -> None:
        self._least = least
        self._siblings: dict[bytes, OrderedDict[bytes, bytes]] = {}  # start -> key -> tokens
        self._start_of: dict[bytes, bytes] = {}  # key -> parent and first token

    def __len__(self) -> int:
        return len(self._start_of)

    def add(self, chain: PrefixChain, i: int) -> None:
        """Adds block i of a chain, unless it is not all text."""
        key, tokens = chain.keys[i], chain.tokens[i]
        if tokens and key not in self._start_of:
            start = chain.parent(i) + tokens[:TOKEN_BYTES]
            self._start_of[key] = start
            self._siblings.setdefault(start, OrderedDict())[key] = tokens

    def drop(self, key: bytes) -> None:
        """Drops a block that can no longer be found in every group."""
        start = self._start_of.pop(key, None)
        if start is not None:
            siblings = self._siblings[start]
            del siblings[key]
            if not siblings:
                del self._siblings[start]

    def longest(self, parent: bytes, wanted: Sequence[int], ahead: int) -> Donor | None:
        """Returns the block that shares most tokens with `wanted`, among the newest ones.

        The last `ahead` shared tokens do not count: a drafter's rows before them were computed from
        the tokens behind them, which differ.
        """
        more = ahead + self._least  # tokens that a better one shares
        packed = array("i", wanted).tobytes()
        siblings = self._siblings.get(parent + packed[:TOKEN_BYTES], OrderedDict())
        best: Donor | None = None
        for key, _ in zip(reversed(siblings), range(MAX_COMPARED), strict=False):
            if more > len(wanted):
                break
            # Most share no more than the template of a chat: one comparison shows it.
            if siblings[key].startswith(packed[: more * TOKEN_BYTES]):
                count = _num_shared(siblings[key], packed)
                best, more = Donor(key, count - ahead), count + 1
        return best


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
        whole = self.num_whole(chain)
        donor = self._donor(query, whole)
        end = min(query.limit, whole * page + (donor.num_tokens if donor else 0))
        while (end := query.cut(end)) > 0:
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

    def num_whole(self, chain: PrefixChain) -> int:
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


def _num_shared(a: bytes, b: bytes) -> int:
    """Returns how many tokens two packed sequences share at their beginning."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:  # by halves: comparing bytes is one call
        middle = (low + high + 1) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


__getattr__ = renamed(__name__, {"Lookup": "PrefixSearch", "Sought": "PrefixQuery"})
