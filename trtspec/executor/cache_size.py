"""Sizes the KV cache: blocks of each group, and the longest sequence that they hold."""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import KvCacheConfig
from ..errors import ConfigError, shown
from ..metadata.attention import NUM_RESERVED_BLOCKS
from ..state.kv_cache import KVGroupSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheNeeds:
    """Upper bounds of what an engine's passes hold."""

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    rows: int  # K + 1, of a verification pass
    extra_kv: int  # rows that drafting writes past those
    rewritten: int  # rows that drafting computes again, before those
    page_size: int
    bytes_of_slots: int = 0  # that layers with linear attention keep, copies too
    num_state_copies: int = 0  # of slots

    @property
    def users_of_slots(self) -> str:
        """What takes `bytes_of_slots`, for people."""
        users = f"max_batch_size={self.max_batch_size}"
        if self.num_state_copies:
            users += f" and {self.num_state_copies} copies (KvCacheConfig.num_state_copies)"
        return users

    def behind_window(self, window: int, num_requests: int) -> int:
        """Returns the most blocks that `num_requests` requests hold at once, windows considered.

        In the terms of the ledger in `state/kv_cache.py`: keys that the first row sees, steps whose
        tokens are not read (one in flight and the next), drafting, and the blocks' unused ends.
        Parts of prompts share one pass.
        """
        each = window + self.rewritten + 2 * self.rows + self.extra_kv + 2 * self.page_size
        return self.blocks_for(num_requests * each + self.max_num_tokens)

    def blocks_for(self, num_tokens: int) -> int:
        return max(1, -(-num_tokens // self.page_size))

    def blocks_of_group(self, spec: KVGroupSpec, num_tokens: int) -> int:
        """Returns a group's blocks, reserved ones left out, in a cache of `num_tokens` over all
        requests."""
        blocks = self.blocks_for(num_tokens)
        if spec.window is None:
            return blocks
        return min(blocks, self.behind_window(spec.window, self.max_batch_size))


def size_cache(
    config: KvCacheConfig, specs: Sequence[KVGroupSpec], needs: CacheNeeds, device: torch.device
) -> list[int]:
    """Returns the blocks of each group, reserved ones included.

    Raises:
        ConfigError: memory cannot hold `max_tokens`, or a full batch has more requests than the
            cache has tokens.
    """
    tokens = config.max_tokens
    if tokens is None:
        tokens = needs.max_batch_size * needs.max_seq_len
        free = _free_memory(config, device)
        _check_slots(needs, free)
        tokens = _tokens_within(free - needs.bytes_of_slots, specs, needs, tokens)
    else:
        memory = _memory(device) - needs.bytes_of_slots
        _check_slots(needs, _memory(device))
        if _bytes(specs, needs, tokens) > memory:
            most = _tokens_within(memory, specs, needs, memory)
            beside = ""
            if needs.bytes_of_slots:
                beside = (
                    f" beside {needs.bytes_of_slots / 2**30:.1f} GiB of linear attention for "
                    f"{needs.users_of_slots}"
                )
            raise ConfigError(
                f"KvCacheConfig.max_tokens={shown(tokens)}: {memory / 2**30:.1f} GiB hold at "
                f"most {most}{beside}. Lower it, or leave it out."
            )
    blocks = [needs.blocks_of_group(spec, tokens) for spec in specs]
    unwindowed = needs.blocks_for(tokens)
    for g, (spec, count) in enumerate(zip(specs, blocks, strict=True)):
        if count < unwindowed:
            saved = (unwindowed - count) * needs.page_size * spec.bytes_per_token()
            logger.info(
                "KV group %d, of a window of %s tokens, has %d blocks in place of %d: %.1f MiB "
                "less.",
                g,
                spec.window,
                count,
                unwindowed,
                saved / 2**20,
            )
    held = min(blocks) * needs.page_size
    if needs.max_batch_size > held:
        raise ConfigError(
            f"max_batch_size={needs.max_batch_size}, but the KV cache holds {held} tokens, of "
            "which each request that runs needs one at least. Lower it, or raise "
            "KvCacheConfig.max_tokens."
        )
    return [count + NUM_RESERVED_BLOCKS for count in blocks]


def _check_slots(needs: CacheNeeds, memory: float) -> None:
    if needs.bytes_of_slots > memory:
        each = needs.bytes_of_slots / (needs.max_batch_size + 1 + needs.num_state_copies)
        rows = int(memory / 2 / each)
        cure = "Free memory, or use a smaller model."
        if rows > needs.num_state_copies:
            cure = f"Lower max_batch_size to {rows - needs.num_state_copies} or fewer."
        elif rows > 0:
            cure = f"Lower KvCacheConfig.num_state_copies to {rows - 1} or fewer."
        raise ConfigError(
            f"{needs.users_of_slots}: layers with linear attention keep {each / 2**20:.1f} MiB of "
            f"each, and {memory / 2**20:.1f} MiB are there for that and the KV cache. {cure}"
        )


def longest_sequence(
    num_blocks: Sequence[int], specs: Sequence[KVGroupSpec], needs: CacheNeeds
) -> int:
    """Returns the tokens that a lone request can grow to; warns where that is below
    `max_seq_len`."""
    longest = needs.max_seq_len
    for spec, count in zip(specs, num_blocks, strict=True):
        count -= NUM_RESERVED_BLOCKS
        if spec.window is None or count < needs.behind_window(spec.window, 1):
            longest = min(longest, count * needs.page_size)
    if longest < needs.max_seq_len:
        logger.warning(
            "The KV cache holds %d tokens: max_seq_len is lowered from %d to that.",
            longest,
            needs.max_seq_len,
        )
    return longest


def _tokens_within(
    memory: float, specs: Sequence[KVGroupSpec], needs: CacheNeeds, most: int
) -> int:
    """Returns how many tokens, up to `most`, fit into a cache of `memory` bytes."""
    if _bytes(specs, needs, most) <= memory:
        return most
    return bisect_right(range(1, most), memory, key=lambda count: _bytes(specs, needs, count))


def _bytes(specs: Sequence[KVGroupSpec], needs: CacheNeeds, num_tokens: int) -> int:
    blocks = [(spec, needs.blocks_of_group(spec, num_tokens)) for spec in specs]
    return sum(count * needs.page_size * spec.bytes_per_token() for spec, count in blocks)


def _free_memory(config: KvCacheConfig, device: torch.device) -> float:
    """Returns the bytes that the cache may take if the config sets no size."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * config.free_gpu_memory_fraction
    return _free_host_memory() / 4


def _memory(device: torch.device) -> int:
    """Returns the bytes that no cache can be larger than.

    For a GPU this is all of its memory: what torch's allocator holds does not count as free.
    """
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else _free_host_memory()


def _free_host_memory() -> int:
    """Returns bytes: what Linux calls available, elsewhere half of the physical memory."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
