"""The paged KV cache: storage per group, a block table per request and group.

The ledger of one generation request with K drafts, in half-open intervals of token positions. The
device knows how many tokens have valid KV; the host knows an upper bound `past`:

    [0, past)                    valid or, until the accepted count arrives, possibly rejected
    [past, past + K + 1)         written by the next verification pass
    behind it, E tokens          written by drafting: E is the worker's `num_extra_kv_tokens`

`reserve` covers the last of these ends before a step is launched. `trim` gives whole blocks back,
once other requests want some: those that accepted counts or a smaller K have left over. Rejected
rows are never cleared, only overwritten. The KV of accepted rows needs no move, because their path
is a chain (`metadata/accepted_path.py`).

Behind a sliding window of W, blocks are given back while the sequence grows. With `first` the
lowest position of any row that a pass launched from now on can have:

    [0, first - W + 1)           seen by no later row: its whole blocks are free again
    [first - W + 1, first)       keys that later rows see
    [first, …)                   as above

`first` is a lower bound, never `past`:
- in a prompt, the end of the last chunk launched;
- in a generation, the tokens that the host has read, less one, whose KV is not written yet;
- K-1 less with vanilla MTP, which computes these rows again. All other drafters' rows (EAGLE's K+1,
  DRAFT_TARGET's two) begin at the step's first row or after it.

A step in flight may have started further back. It was launched with a copy of the tables, on the
one stream of all launches, so it reads the blocks before a later launch writes to them. A table
keeps its logical indexing: a block that was given back becomes NULL_BLOCK there. Masked reads find
zeros in it, and nothing is written to it.

Blocks may be shared. `publish` gives whole blocks their keys (`state/prefix.py`) once nothing
writes to them again, `find` looks a sequence up, and `adopt` takes what was found. So a shared
block is only read. A free block keeps its key until it is handed out. NaN in a published block is
dealt with later than in others: it is zeroed when it is handed out (`BlockPool.take_suspects`).
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import KVCacheError
from ..metadata.attention import NULL_BLOCK, NUM_RESERVED_BLOCKS, KVGroup
from ..ops.layer.kv_codes import as_bytes
from ..utils import rows_to_tensor, to_device, untouched_zeros
from .blocks import BlockPool
from .prefix import Content, PrefixChain, no_content
from .prefix_search import Donors, PrefixHit, PrefixQuery, PrefixSearch
from .recurrent import RecurrentStates
from .state_copies import StateCopies


@dataclass(frozen=True)
class PrefixReuse:
    """How prompts use blocks of earlier ones."""

    is_on: bool = False
    partial: bool = False  # a block that is shared in part is copied
    tokens_ahead: int = 0  # `SpecWorkerBase.num_tokens_ahead`
    state_rows: range | None = None  # for copies of slots, if layers have linear attention


@dataclass(frozen=True)
class KVGroupSpec:
    """Shape of one group: the layers that share a block table."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None  # no layer of the group sees further back; None is no limit
    value_dim: int | None = None  # values are keys[..., :value_dim]; None: stored separately
    k_scales: Tensor | None = field(default=None, compare=False)  # [layers, Hkv] as of `KVGroup`
    v_scales: Tensor | None = field(default=None, compare=False)

    def bytes_per_token(self) -> int:
        sides = 2 if self.value_dim is None else 1
        return sides * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, num_blocks: int, page_size: int, device: torch.device) -> KVGroup:
        """Allocates the group's storage, all zeros."""
        shape = self.num_layers, num_blocks, page_size, self.num_kv_heads, self.head_dim
        keys = untouched_zeros(shape, self.dtype, device)
        if self.value_dim is None:
            values = untouched_zeros(shape, self.dtype, device)
        else:
            values = keys[..., : self.value_dim]
        k_scales, v_scales = (
            None if scales is None else scales.to(device, torch.float32)
            for scales in (self.k_scales, self.v_scales)
        )
        return KVGroup(keys, values, k_scales, v_scales)


class BlockCopy(NamedTuple):
    """The first rows of a block, to be copied to another one of its group."""

    source: int
    target: int
    num_rows: int


class KVCacheManager:
    """Blocks of every group for every request. Host bookkeeping only; no device reads.

    `has_foreign_requests` says that other ranks may hold a request's blocks. Its tables are then of
    null blocks here.

    Args:
        num_blocks: one number for all groups, or one for each; reserved blocks included.
        reuse: whether prompts are looked up among blocks of earlier ones.
    """

    has_foreign_requests = False

    def __init__(
        self,
        specs: list[KVGroupSpec],
        num_blocks: int | Sequence[int],
        page_size: int,
        device: torch.device,
        reuse: PrefixReuse = PrefixReuse(),
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
        self.reuse = reuse
        self.states: RecurrentStates | None = None  # of layers with linear attention
        self.state_copies = None if reuse.state_rows is None else StateCopies(reuse.state_rows)
        self._pools = [BlockPool(count) for count in counts]
        self._donors = self._no_donors()
        self._epoch = 0  # chains of an earlier one are not published
        self._tables: dict[int, list[array[int]]] = {}
        self.capacity: dict[int, int] = {}  # request -> tokens that it has blocks for
        self._copies: list[list[BlockCopy]] = [[] for _ in specs]  # of each group, to be made
        self._clock = itertools.count(1)
        self._versions: dict[int, int] = {}  # request -> time of its tables' last change

    @property
    def num_free_blocks(self) -> int:
        """Returns the free blocks of the fullest group."""
        return min(pool.num_free for pool in self._pools)

    @property
    def usage(self) -> float:
        """Returns the share of blocks that requests hold, 0 … 1, in the fullest group."""
        return max(pool.usage for pool in self._pools)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def reserve(self, request_id: int, num_tokens: int) -> bool:
        """Reserves blocks for `num_tokens` tokens in every group. False: there is no room, and
        nothing changed."""
        held = self.capacity.get(request_id)
        if held is not None and held >= num_tokens:
            return True
        tables, missing = self._missing(request_id, num_tokens)
        if not self._are_free(missing):
            return False
        for group, (table, count) in enumerate(zip(tables, missing, strict=True)):
            if count > 0:
                table.extend(self._allocate(group, count))
        self._tables[request_id] = tables
        self._versions[request_id] = next(self._clock)
        self._measure(request_id)
        return True

    def _measure(self, request_id: int) -> None:
        """Notes how many tokens a request has blocks for, in every group."""
        self.capacity[request_id] = self.page_size * min(map(len, self._tables[request_id]))

    def _allocate(self, group: int, count: int) -> list[int]:
        """Takes blocks of one group, and zeroes those that may hold NaN."""
        pool = self._pools[group]
        blocks = pool.allocate(count)
        for key in pool.take_evicted():
            self._forget(key)
        self.zero(group, pool.take_suspects(blocks))
        return blocks

    def _forget(self, key: bytes) -> None:
        """Drops what is known of a block that can no longer be found in every group."""
        self._donors.drop(key)
        if self.state_copies is not None:
            self.state_copies.drop(key)

    def has_room(self, request_id: int, num_tokens: int) -> bool:
        """Whether `reserve` would succeed."""
        return self._are_free(self._missing(request_id, num_tokens)[1])

    def _are_free(self, counts: Sequence[int]) -> bool:
        """Whether that many blocks of each group are free."""
        return all([n <= pool.num_free for n, pool in zip(counts, self._pools, strict=True)])

    def _missing(self, request_id: int, num_tokens: int) -> tuple[list[array[int]], list[int]]:
        """Returns its block tables, and how many blocks each lacks (none if <= 0)."""
        tables = self._tables.get(request_id) or [array("i") for _ in self._pools]
        return tables, [self.blocks_for(num_tokens) - len(table) for table in tables]

    def trim(self, request_id: int, num_tokens: int) -> None:
        """Gives back the blocks past the first `num_tokens` tokens."""
        tables, keep = self._tables[request_id], self.blocks_for(num_tokens)
        for table, pool in zip(tables, self._pools, strict=True):
            if len(table) > keep:
                pool.free(_held(table[keep:]))
                del table[keep:]
                self._versions[request_id] = next(self._clock)
        self._measure(request_id)

    def release_behind(self, request_id: int, first: int, num_unseen: int = 0) -> None:
        """Gives back the blocks behind the windows of the rows at `first` and later.

        Args:
            first: lowest position of any row that a pass launched from now on has.
            num_unseen: how many tokens at the start had no logits (a prompt's). NaN in their rows
                would go unnoticed, so their blocks are zeroed (see `scrub`).
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
                self._clean(g, unseen)
                self._pools[g].free(blocks)
                self._versions[request_id] = next(self._clock)

    def free(self, request_id: int) -> None:
        """Gives back all blocks of a request, if it has any."""
        tables = self._tables.pop(request_id, None)
        self._versions.pop(request_id, None)
        self.capacity.pop(request_id, None)
        if tables:
            for table, pool in zip(tables, self._pools, strict=True):
                pool.free(_held(table)[::-1])  # a block is evicted before those that it follows

    def start_over(self) -> None:
        """Gives back every block, zeroed and without its key, after an exception."""
        for group, pool in enumerate(self._pools):
            self.zero(group, pool.unclean)
        self._pools = [BlockPool(pool.num_blocks, pool.num_evicted) for pool in self._pools]
        self._forget_all()
        self._tables, self._versions, self.capacity = {}, {}, {}
        self._copies = [[] for _ in self._pools]

    def _forget_all(self) -> None:
        self._donors = self._no_donors()
        if self.state_copies is not None:
            self.state_copies.clear()

    def _no_donors(self) -> Donors:
        return Donors(least=max(1, self.page_size // 4))

    def release_memory(self) -> None:
        """Frees the storage, for good."""
        self.groups, self.states = (), None

    def owner_of(self, request_id: int) -> int | None:
        """Returns the rank that has the request's blocks; None: blocks are of all requests."""
        return None

    def version(self, request_id: int) -> int:
        """Returns a number that changes whenever one of the request's block tables does."""
        return self._versions.get(request_id, 0)

    def versions(self, request_ids: Sequence[int]) -> Iterable[int]:
        """Returns `version` of each."""
        return map(self._versions.get, request_ids, itertools.repeat(0))

    def scrub(self, request_id: int) -> None:
        """Zeroes a request's blocks after it wrote NaN.

        Masked reads multiply stale values by zero, and 0 * NaN would poison the next request that
        gets the blocks. No later request finds them.
        """
        for group, table in enumerate(self._tables.get(request_id, [])):
            pool, blocks = self._pools[group], _held(table)
            for block in blocks:
                key = pool.forget(block)
                if key is not None:
                    self._forget(key)
            self._clean(group, blocks)
        if self.state_copies is not None:
            self.state_copies.drop_of(request_id)

    def _clean(self, group: int, blocks: list[int]) -> None:
        """Zeroes blocks that may hold NaN, now or, where they may be read, when they are handed out
        again."""
        pool = self._pools[group]
        read = {b for b in blocks if pool.has_key(b) or pool.num_holders(b) > 1}
        pool.suspect(read)
        self.zero(group, [block for block in blocks if block not in read] if read else blocks)

    def zero(self, group: int, blocks: list[int]) -> None:
        """Zeroes blocks of a group."""
        if blocks:
            index = rows_to_tensor(blocks, torch.int64, self.device)
            for cache in (self.groups[group].k_cache, self.groups[group].v_cache):
                as_bytes(cache).index_fill_(1, index, 0)

    def table_of(self, request_id: int) -> Sequence[Sequence[int]]:
        """Returns a request's block table of each group."""
        return self._tables[request_id]

    def block_tables(self, request_ids: list[int]) -> list[Tensor]:
        """Returns per group [B, M] int32 on the host, padded with NULL_BLOCK; M is the longest's
        length."""
        result = []
        for g in range(len(self._pools)):
            rows = [self.table_of(r)[g] for r in request_ids]
            width = max((len(row) for row in rows), default=1) or 1
            padded = [[*row, *[NULL_BLOCK] * (width - len(row))] for row in rows]
            result.append(torch.tensor(padded, dtype=torch.int32).view(len(rows), width))
        return result

    # -- prefixes ------------------------------------------------------------------------------
    def chain(
        self,
        salt: str | None = None,
        content: Content = no_content,
        max_published: int | None = None,
    ) -> PrefixChain:
        """Returns an empty chain of keys for a request's blocks."""
        ahead = self.reuse.tokens_ahead
        return PrefixChain(self.page_size, ahead, salt, content, self._epoch, max_published)

    def is_current(self, chain: PrefixChain) -> bool:
        """Whether the chain was begun after the last `reset_prefixes`."""
        return chain.epoch == self._epoch

    def find(self, query: PrefixQuery) -> PrefixHit:
        """Looks up the longest beginning of a sequence that every group still holds."""
        return self._search.longest(query)

    @property
    def _search(self) -> PrefixSearch:
        donors = self._donors if self.reuse.partial else None
        return PrefixSearch(self.page_size, self._pools, self.windows, donors)

    def fits(self, chain: PrefixChain, hit: PrefixHit, num_tokens: int, spare: int = 0) -> bool:
        """Whether `adopt` would succeed and leave `spare` blocks of each group free."""
        return self._search.has_room(chain, hit, self.blocks_for(num_tokens), spare)

    def adopt(self, request_id: int, chain: PrefixChain, hit: PrefixHit, num_tokens: int) -> None:
        """Begins a request's tables with what was found, and reserves blocks for `num_tokens`.

        `fits` must have said that there is room. Rows of blocks that are shared in part are there
        after `make_copies`, which must come before the next launch.
        """
        tables: list[array[int]] = []
        for group, pool in enumerate(self._pools):
            blocks = pool.find_all(self._search.seen_keys(chain, hit, group))
            pool.hold(blocks)
            tables.append(array("i", [NULL_BLOCK] * (hit.num_blocks - len(blocks)) + blocks))
        sources = []
        if hit.source is not None:
            for pool in self._pools:
                source = pool.find(hit.source)
                assert source is not None
                pool.hold([source])
                sources.append(source)
        self._tables[request_id] = tables
        self._versions[request_id] = next(self._clock)
        reserved = self.reserve(request_id, num_tokens)
        assert reserved, "fits() must be asked first"
        num_rows = hit.num_tokens - hit.num_blocks * self.page_size
        for group, source in enumerate(sources):
            target = tables[group][hit.num_blocks]
            self._copies[group].append(BlockCopy(source, target, num_rows))
        chain.publish_up_to(hit.num_blocks)

    def make_copies(self) -> None:
        """Copies what requests that were adopted share in part, of all of them at once.

        Many prompts that start together have the same few tokens before them. Copied one by one
        they would take the host longer than all else of their start.
        """
        for group, copies in enumerate(self._copies):
            if copies:
                self.copy(group, copies)
                self._pools[group].free([copy.source for copy in copies])
        self._copies = [[] for _ in self._pools]

    def publish(self, request_id: int, chain: PrefixChain, num_tokens: int) -> None:
        """Lets other requests find the request's whole blocks among its first `num_tokens` tokens.

        Nothing may write to them any more, and the step that wrote them must be launched.
        """
        if chain.max_published is not None:
            num_tokens = min(num_tokens, chain.max_published)
        count = min(num_tokens // self.page_size, len(chain.keys))
        if count <= chain.num_published or not self.is_current(chain):
            return
        tables = self._tables[request_id]
        for i in range(chain.num_published, count):
            in_all = True
            for table, pool in zip(tables, self._pools, strict=True):
                if table[i] == NULL_BLOCK:
                    in_all = False
                else:
                    pool.publish(table[i], chain.keys[i])
            if in_all and self.reuse.partial:
                self._donors.add(chain, i)
        chain.publish_up_to(count)

    def reset_prefixes(self) -> None:
        """Forgets all keys. Running requests keep their blocks, which no request finds."""
        self._epoch += 1
        for pool in self._pools:
            pool.forget_all()
        self._forget_all()

    def copy(self, group: int, copies: Sequence[BlockCopy]) -> None:
        """Copies rows of blocks of a group, on the device.

        Later rows of a block are another request's, and may hold NaN.
        """
        page = self.page_size
        rows = np.concatenate([np.arange(copy.num_rows) for copy in copies])
        counts = [copy.num_rows for copy in copies]
        sources = page * np.repeat([copy.source for copy in copies], counts) + rows
        targets = page * np.repeat([copy.target for copy in copies], counts) + rows
        index = to_device(torch.from_numpy(np.stack([sources, targets])), self.device)
        kv = self.groups[group]
        for cache in (as_bytes(kv.k_cache), as_bytes(kv.v_cache)):
            layers, blocks, _, *sizes = cache.shape
            flat = cache.view(layers, blocks * page, *sizes)
            flat.index_copy_(1, index[1], flat.index_select(1, index[0]))

    def num_found(self, chain: PrefixChain) -> int:
        """Returns how many blocks from the beginning on all groups without a window have."""
        return self._search.num_whole(chain)

    def keep_state(self, request_id: int, keys: Sequence[bytes], slot: int) -> None:
        """Copies what a slot holds at the end of blocks with these keys, for later requests.

        Such blocks may be an earlier request's, whose like this one computed again.
        """
        if self.state_copies is not None and keys[-1] not in self.state_copies:
            self.copy_state(slot, self.state_copies.add(keys, request_id))
            for pool in self._pools:
                pool.refresh(keys)

    def take_over_state(self, key: bytes, slot: int) -> None:
        """Copies what was kept at the end of the block with this key to a slot."""
        assert self.state_copies is not None
        self.copy_state(self.state_copies.use(key), slot)

    def copy_state(self, source: int, target: int) -> None:
        """Copies rows of what layers with linear attention keep."""
        assert self.states is not None
        self.states.copy(source, target)

    @property
    def num_known_blocks(self) -> int:
        """Returns the blocks that can be found, of the group with most of them."""
        return max(pool.num_keys for pool in self._pools)

    @property
    def num_evicted_blocks(self) -> int:
        return max(pool.num_evicted for pool in self._pools)

    def check_integrity(self) -> None:
        """Raises KVCacheError unless every block has as many holders as tables hold it. For tests.

        A block that two tables hold must not be written, so each holds it at the same index.
        """
        for g, pool in enumerate(self._pools):
            held: Counter[int] = Counter()
            index_of: dict[int, int] = {}
            for tables in self._tables.values():
                for i, block in enumerate(tables[g]):
                    if block == NULL_BLOCK:
                        continue
                    held[block] += 1
                    if index_of.setdefault(block, i) != i:
                        raise KVCacheError(f"KV group {g}: block {block} is held at two positions.")
            pool.check(dict(held))
        for request_id, tables in self._tables.items():
            tokens = self.page_size * min(map(len, tables))
            if self.capacity.get(request_id, tokens) != tokens:
                raise KVCacheError(
                    f"Request {request_id} has blocks for {tokens} tokens, and "
                    f"capacity says {self.capacity[request_id]}."
                )


def _held(table: Sequence[int]) -> list[int]:
    """Returns the blocks of a table that were not given back."""
    return [block for block in table if block != NULL_BLOCK]
