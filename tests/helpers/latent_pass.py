"""Metadata of a pass over a random latent cache."""

from __future__ import annotations

import random

import torch

from trtspec.metadata.attention import NUM_RESERVED_BLOCKS, AttentionMetadata, KVGroup
from trtspec.ops.step.slots import draft_step_metadata

ROTATED = 16


def make_latent_pass(
    spans: list[tuple[int, int]], latent: int, page: int, max_seq_len: int = 4096,
    dtype: torch.dtype = torch.float32, rotated: int = ROTATED, device: str | None = None,
) -> AttentionMetadata:  # fmt: skip
    """Generation rows (start, count), as many for each text, over a random latent cache of
    scattered blocks."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(len(spans) * 31 + latent)
    pages = [-(-(start + count) // page) for start, count in spans]
    total = NUM_RESERVED_BLOCKS + sum(pages)
    order = list(range(NUM_RESERVED_BLOCKS, total))
    random.Random(0).shuffle(order)
    table = torch.zeros(len(spans), max(pages) + 2, dtype=torch.int32)
    for i, count in enumerate(pages):
        table[i, :count] = torch.tensor([order.pop() for _ in range(count)])
    cache = torch.randn(2, total, page, 1, latent + rotated, generator=generator)
    cache[:, 0] = 0
    cache = cache.to(device, dtype)
    positions = torch.tensor([[start + r for r in range(spans[0][1])] for start, _ in spans])
    meta = AttentionMetadata(
        context_lens=(), num_generations=len(spans), rows_per_generation=spans[0][1],
        position_ids=positions.flatten().to(device),
        kv_lens=(positions[:, -1] + 1).to(torch.int32).to(device),
        max_kv_len=max(start + count for start, count in spans),
        kv_groups=(KVGroup(cache, cache[..., :latent]),), block_tables=(table.to(device),),
        slot_mappings=(torch.empty(0, dtype=torch.int64),), max_seq_len=max_seq_len,
    )  # fmt: skip
    return draft_step_metadata(meta, positions.to(device), 0)
