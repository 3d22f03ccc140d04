"""Copies of what layers with linear attention keep of a slot, for the prefix cache.

Keys and values of a prompt's beginning are found block by block. A matrix is of one position alone.
So what a slot has at the end of some block is copied to a row of its own, which a later prompt that
begins with the same blocks takes over (decision 033).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class _Copy(NamedTuple):
    row: int
    blocks: int  # up to whose end its sequence had been computed
    request_id: int  # whose slot it was copied from


class StateCopies:
    """Which copies there are, by the keys of the blocks at whose ends they were made. Host
    bookkeeping alone.

    Args:
        rows: of `RecurrentStates`, for copies. The copy used longest ago gives way.
    """

    def __init__(self, rows: Sequence[int]):
        self.num_rows, self._free = len(rows), sorted(rows, reverse=True)
        self._copies: OrderedDict[bytes, _Copy] = OrderedDict()  # next victim first

    def __len__(self) -> int:
        return len(self._copies)

    def __contains__(self, key: bytes) -> bool:
        return key in self._copies

    def last(self, keys: Sequence[bytes], count: int) -> int:
        """Returns how many blocks, `count` at most, the last copy is behind; 0 if there is none.

        Args:
            keys: of a sequence's blocks, `count` at least.
        """
        behind = (
            copy.blocks
            for key, copy in self._copies.items()
            if copy.blocks <= count and keys[copy.blocks - 1] == key
        )
        return max(behind, default=0)

    def add(self, keys: Sequence[bytes], request_id: int) -> int:
        """Returns the row of a new copy, behind the blocks with these keys. It must be made before
        another call."""
        key = keys[-1]
        self.drop(key)
        if not self._free:
            _, oldest = self._copies.popitem(last=False)
            self._free.append(oldest.row)
        self._copies[key] = _Copy(self._free.pop(), len(keys), request_id)
        return self._copies[key].row

    def use(self, key: bytes) -> int:
        """Returns the row of a copy, which is then the last to give way."""
        self._copies.move_to_end(key)
        return self._copies[key].row

    def drop(self, key: bytes) -> None:
        """Drops a copy, if it is there."""
        if (copy := self._copies.pop(key, None)) is not None:
            self._free.append(copy.row)

    def drop_of(self, request_id: int) -> None:
        """Drops what was copied from a request's slot."""
        for key in [k for k, copy in self._copies.items() if copy.request_id == request_id]:
            self.drop(key)

    def clear(self) -> None:
        for key in list(self._copies):
            self.drop(key)
