"""Watches over freed KV blocks: poison in them, and a ledger of what rows see."""

from __future__ import annotations

import pytest
from torch import Tensor

from trtspec import (
    LLM,
)
from trtspec.attention.base import CachedLayer
from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.metadata.attention import NULL_BLOCK, NUM_RESERVED_BLOCKS, AttentionMetadata
from trtspec.state.blocks import BlockPool


def poison_free_blocks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that nobody holds or finds is NaN, a new one zeros, so that a read of what was given
    back spoils a row."""
    cache = llm.executor.kv_cache
    groups = dict(zip(map(id, cache._pools), cache.groups, strict=True))
    allocate, free = BlockPool.allocate, BlockPool.free

    def fill(pool: BlockPool, blocks: list[int], value: float) -> None:
        for cached in (groups[id(pool)].k_cache, groups[id(pool)].v_cache):
            cached[:, blocks] = value

    def poisoned(pool: BlockPool, blocks: list[int]) -> None:
        free(pool, blocks)
        lost = [b for b in blocks if not pool.num_holders(b) and not pool.has_key(b)]
        fill(pool, lost, float("nan"))

    def cleaned(pool: BlockPool, count: int) -> list[int]:
        blocks = allocate(pool, count)
        fill(pool, blocks, 0.0)
        return blocks

    monkeypatch.setattr(BlockPool, "free", poisoned)
    monkeypatch.setattr(BlockPool, "allocate", cleaned)


class Ledger:
    """Looks at every pass: each key that a row sees must have a block. Counts what is held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.num_rows = 0
        original = TorchAttention.attend

        def attend(
            backend: TorchAttention, q: Tensor, meta: AttentionMetadata, cached: CachedLayer
        ) -> Tensor:
            self.check(meta, cached.kv_group, cached.window)
            return original(backend, q, meta, cached)

        monkeypatch.setattr(TorchAttention, "attend", attend)

    def check(self, meta: AttentionMetadata, kv_group: int, window: int | None) -> None:
        page = meta.kv_groups[kv_group].page_size
        table = meta.block_tables[kv_group].tolist()
        rows = [i for i, n in enumerate(meta.context_lens) for _ in range(n)]
        counts = [meta.rows_per_generation] * meta.num_generations
        if meta.packed is not None:
            counts = meta.packed.starts.diff().tolist()
        for i, count in enumerate(counts):
            rows += [meta.num_contexts + i] * count
        slots = meta.slot_mappings[kv_group].tolist()
        for request, position, slot in zip(rows, meta.position_ids.tolist(), slots, strict=True):
            if position == 0 and slot < 0:  # guarded, or before the text begins
                continue
            assert slot >= 0, f"position {position} has nowhere to be written"
            first = 0 if window is None else max(0, position - window + 1)
            for block in range(first // page, position // page + 1):
                assert table[request][block] != NULL_BLOCK, f"block {block} for row {position}"
            self.num_rows += 1


def assert_nothing_leaked(llm: LLM) -> None:
    cache = llm.executor.kv_cache
    llm.executor.run_until_done()  # reads what was in flight when the last request ended
    cache.check_integrity()
    assert [pool.num_free + NUM_RESERVED_BLOCKS for pool in cache._pools] == [
        pool.num_blocks for pool in cache._pools
    ]
