"""The ledger of KV blocks over several ranks: rank 0 keeps it, the others copy block tables."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..distributed.link import EngineLink
from ..metadata.attention import NULL_BLOCK
from ..state.blocks import BlockPool
from ..state.kv_cache import BlockCopy, KVCacheManager
from ..state.prefix import PrefixChain
from ..state.prefix_search import PrefixHit, PrefixQuery


class CopiedTables(NamedTuple):
    """A request's block tables as rank 0 has them."""

    tables: list[array[int]]  # one for each group
    version: int
    owner: int | None  # as `LinkedKVCache.owner_of`


class LinkedKVCache(KVCacheManager):
    """The ledger of rank 0, and its copy on the others. What is done to blocks, all ranks do."""

    def __init__(self, *arguments: Any, link: EngineLink):
        super().__init__(*arguments)
        self.link = link
        self.owner: int | None = None
        """The rank whose blocks are spoken of; None is all."""

    def zero(self, group: int, blocks: list[int]) -> None:
        world = self.link.world
        if world.is_leader and world.failure is None and blocks:
            self.link.tell("zero", group, blocks, self.owner)
        self.zero_own(group, blocks, self.owner)

    def zero_own(self, group: int, blocks: list[int], owner: int | None) -> None:
        """Zeroes blocks of this rank, if they are its own."""
        if owner in (None, self.link.world.rank):
            super().zero(group, blocks)

    def copy(self, group: int, copies: Sequence[BlockCopy]) -> None:
        world = self.link.world
        if world.is_leader and world.failure is None:
            self.link.tell("copy", group, copies, self.owner)
        self.copy_own(group, copies, self.owner)

    def copy_own(self, group: int, copies: Sequence[BlockCopy], owner: int | None) -> None:
        """Copies blocks of this rank, if they are its own."""
        if owner in (None, self.link.world.rank):
            super().copy(group, copies)

    def copy_state(self, source: int, target: int) -> None:
        world = self.link.world
        if world.is_leader and world.failure is None:
            self.link.tell("copy_state", source, target)
        super().copy_state(source, target)

    def copy_of(self, request_id: int) -> CopiedTables:
        """Returns what the other ranks must know of a request's blocks."""
        version, owner = self.version(request_id), self.owner_of(request_id)
        return CopiedTables(self._tables[request_id], version, owner)

    def copy_tables(self, request_id: int, copy: CopiedTables) -> None:
        """Takes over the tables of rank 0, which alone hands out blocks."""
        self._tables[request_id], self._versions[request_id] = copy.tables, copy.version

    def forget(self, request_id: int) -> None:
        """Drops tables that were copied."""
        self._tables.pop(request_id, None)
        self._versions.pop(request_id, None)


class OwnedKVCache(LinkedKVCache):
    """The same for attention data parallelism: one rank has all of a request's keys and values.

    Each rank has blocks of its own, by the same numbers. To the others a request has null blocks
    alone: they write nothing, and what they attend to is zero. So the ranks' attention adds up to
    the owner's. A request goes to the rank that has most of its prompt, if that is half of it or
    more, else to the one with most free blocks.
    """

    has_foreign_requests = True

    def __init__(self, *arguments: Any, link: EngineLink):
        super().__init__(*arguments, link=link)
        counts = [pool.num_blocks for pool in self._pools]
        self._pools_of = [[BlockPool(n) for n in counts] for _ in range(link.world.size)]
        self._donors_of = [self._no_donors() for _ in range(link.world.size)]
        self._owners: dict[int, int] = {}

    def owner_of(self, request_id: int) -> int | None:
        return self._owners.get(request_id)

    def _freest(self) -> int:
        free = [min(pool.num_free for pool in pools) for pools in self._pools_of]
        return free.index(max(free))

    def _turn_to(self, owner: int) -> None:
        self.owner, self._pools = owner, self._pools_of[owner]
        self._donors = self._donors_of[owner]

    def _turn_to_owner_of(self, request_id: int) -> None:
        owner = self._owners.get(request_id)
        self._turn_to(self._freest() if owner is None else owner)

    @property
    def num_free_blocks(self) -> int:
        self._turn_to(self._freest())
        return super().num_free_blocks

    def has_room(self, request_id: int, num_tokens: int) -> bool:
        self._turn_to_owner_of(request_id)
        return super().has_room(request_id, num_tokens)

    def reserve(self, request_id: int, num_tokens: int) -> bool:
        self._turn_to_owner_of(request_id)
        assert self.owner is not None
        reserved = super().reserve(request_id, num_tokens)
        if reserved:
            self._owners[request_id] = self.owner
        return reserved

    def trim(self, request_id: int, num_tokens: int) -> None:
        self._turn_to_owner_of(request_id)
        super().trim(request_id, num_tokens)

    def release_behind(self, request_id: int, first: int, num_unseen: int = 0) -> None:
        self._turn_to_owner_of(request_id)
        super().release_behind(request_id, first, num_unseen)

    def scrub(self, request_id: int) -> None:
        self._turn_to_owner_of(request_id)
        super().scrub(request_id)

    def free(self, request_id: int) -> None:
        self._turn_to_owner_of(request_id)
        super().free(request_id)
        self._owners.pop(request_id, None)

    def start_over(self) -> None:
        for owner in range(len(self._pools_of)):
            self._turn_to(owner)
            super().start_over()
            self._pools_of[owner], self._donors_of[owner] = self._pools, self._donors
        self._owners = {}

    # -- prefixes ------------------------------------------------------------------------------
    def find(self, query: PrefixQuery) -> PrefixHit:
        best = PrefixHit()
        for owner in range(len(self._pools_of)):
            self._turn_to(owner)
            hit = super().find(query)
            if hit.num_tokens > best.num_tokens:
                best = hit._replace(owner=owner)
        if 2 * best.num_tokens >= query.limit:
            return best
        freest = self._freest()  # else a common beginning would send all requests to one rank
        self._turn_to(freest)
        return super().find(query)._replace(owner=freest)

    def fits(self, chain: PrefixChain, hit: PrefixHit, num_tokens: int, spare: int = 0) -> bool:
        self._turn_to(self._freest() if hit.owner is None else hit.owner)
        return super().fits(chain, hit, num_tokens, spare)

    def adopt(self, request_id: int, chain: PrefixChain, hit: PrefixHit, num_tokens: int) -> None:
        self._turn_to(self._freest() if hit.owner is None else hit.owner)
        assert self.owner is not None
        self._owners[request_id] = self.owner
        super().adopt(request_id, chain, hit, num_tokens)
        self.make_copies()  # before it turns to another rank's blocks

    def publish(self, request_id: int, chain: PrefixChain, num_tokens: int) -> None:
        self._turn_to_owner_of(request_id)
        super().publish(request_id, chain, num_tokens)

    def reset_prefixes(self) -> None:
        for owner in range(len(self._pools_of)):
            self._turn_to(owner)
            super().reset_prefixes()
            self._donors_of[owner] = self._donors

    @property
    def usage(self) -> float:
        """Returns the share of blocks in use on the fullest rank."""
        return max(pool.usage for pools in self._pools_of for pool in pools)

    @property
    def num_known_blocks(self) -> int:
        return sum(max(pool.num_keys for pool in pools) for pools in self._pools_of)

    @property
    def num_evicted_blocks(self) -> int:
        return sum(max(pool.num_evicted for pool in pools) for pools in self._pools_of)

    def copy_tables(self, request_id: int, copy: CopiedTables) -> None:
        super().copy_tables(request_id, copy)
        assert copy.owner is not None
        self._owners[request_id] = copy.owner

    def forget(self, request_id: int) -> None:
        super().forget(request_id)
        self._owners.pop(request_id, None)

    def table_of(self, request_id: int) -> Sequence[Sequence[int]]:
        tables, rank = super().table_of(request_id), self.link.world.rank
        if self._owners.get(request_id, rank) == rank:
            return tables
        return [[NULL_BLOCK] * len(table) for table in tables]

    def check_integrity(self) -> None:
        everything = self._tables
        for owner in range(len(self._pools_of)):
            self._turn_to(owner)
            self._tables = {r: t for r, t in everything.items() if self._owners[r] == owner}
            try:
                super().check_integrity()
            finally:
                self._tables = everything
