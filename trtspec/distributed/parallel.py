"""How a model is cut: `Parallel` says over which ranks, `Shard` which part of a weight is where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .comm import ALONE, Communicator


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` equal parts of a weight, along one of its dimensions."""

    dim: int = 0  # 0: outputs (column parallel), 1: inputs (row parallel); of [out, in]
    index: int = 0
    count: int = 1
    full: int | None = None  # entries in all, where the last part is shorter than the others

    def source(self, length: int) -> Cut | None:
        """Returns what a part of `length` entries takes of the whole; None is all of it."""
        if self.count == 1:
            return None
        full, start = self.full or length * self.count, self.index * length
        return Cut(self.dim, min(start, full), max(0, min(length, full - start)), full)


class Cut(NamedTuple):
    """Entries [start, start + length) of the `full` ones along a dimension."""

    dim: int
    start: int
    length: int
    full: int


WHOLE = Shard()


@dataclass(frozen=True)
class Parallel:
    """Tensor and expert parallelism of one model.

    Heads, the width of MLPs and the vocabulary are cut over all ranks. The experts of a mixture are
    dealt out over `expert_ranks` of them, and cut by width over the rest. With `attention_dp` every
    rank has all heads, and attends for the requests alone whose keys and values it keeps.
    """

    comm: Communicator = ALONE
    expert_ranks: int = 1
    attention_dp: bool = False

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    @property
    def width_ranks(self) -> int:
        """Over how many ranks an expert's width is cut."""
        return self.size // self.expert_ranks

    @property
    def head_ranks(self) -> int:
        """Over how many ranks attention heads are cut."""
        return 1 if self.attention_dp else self.size

    def heads(self, dim: int = 0) -> Shard:
        """Returns this rank's part of a weight of attention heads."""
        return Shard(dim) if self.attention_dp else self.shard(dim)

    def shard(self, dim: int = 0, full: int | None = None) -> Shard:
        """Returns this rank's part of a weight that all ranks share."""
        return Shard(dim, self.rank, self.size, full)

    def kv_shard(self, num_kv_heads: int) -> Shard:
        """Returns this rank's part of keys and values: with fewer heads than ranks, several ranks
        hold the same."""
        count = min(self.head_ranks, num_kv_heads)
        if count == 1:
            return WHOLE
        return Shard(0, self.rank * count // self.size, count)


ONE_RANK = Parallel()
