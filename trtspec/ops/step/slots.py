"""Maps rows' positions to slots of the paged KV cache, with the length guard."""

from __future__ import annotations

import torch
from torch import Tensor

from ...metadata.attention import NULL_BLOCK, AttentionMetadata


def guard_positions(positions: Tensor, max_seq_len: int) -> tuple[Tensor, Tensor]:
    """Clamps positions, any int, at or past `max_seq_len` to 0.

    Returns:
        (positions int64, inside bool) of the same shape. `inside` is False for clamped rows, which
        must write nowhere (slot -1). At position 0 such a row attends to length 1.
    """
    inside = positions < max_seq_len
    return torch.where(inside, positions, 0).to(torch.int64), inside


def slot_mapping(block_table: Tensor, positions: Tensor, inside: Tensor, page_size: int) -> Tensor:
    """Returns KV slots [B, R] int64 of guarded positions [B, R] int64; block table [B, M] int32.

    -1 where `inside` is False or no block is allocated for the position.
    """
    page, width = positions // page_size, block_table.shape[1]
    if not width:
        return torch.full_like(positions, -1)
    block = block_table.gather(1, page.clamp(max=width - 1)).to(torch.int64)
    valid = inside & (block != NULL_BLOCK) & (page < width)
    return torch.where(valid, block * page_size + positions % page_size, -1)


def draft_step_metadata(
    meta: AttentionMetadata, positions: Tensor, extra_kv: int
) -> AttentionMetadata:
    """Returns metadata of a draft pass over `positions` [B, R] int64 (any, guarded here).

    Args:
        extra_kv: how far `positions` may lie beyond `meta.max_kv_len` at most.
    """
    positions, inside = guard_positions(positions, meta.max_seq_len)
    slots = tuple(
        slot_mapping(table, positions, inside, group.page_size)
        for table, group in zip(meta.block_tables, meta.kv_groups, strict=True)
    )
    return meta.for_rows(positions, slots, extra_kv)
