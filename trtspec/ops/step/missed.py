"""What a head has still to read: a step keeps a row of each request, and a pass takes them all.

The rows are `metadata/missed.py`'s. Kernels are in `triton_missed.py`. B requests, W rows of each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...metadata.missed import MissedRows
from ..launch.dispatch import twin
from .slots import slot_mapping

_KERNELS = "step.triton_missed"


class TakenRows(NamedTuple):
    """The rows of some requests as a pass reads them; T is B * W."""

    is_row: Tensor  # [T] bool
    hidden: Tensor  # [T, n * D]
    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, 0 where there is no row
    rotary: Tensor  # [T] int64, the positions of RoPE
    kv_lens: Tensor  # [T] int32: a row stands for itself
    slot_mappings: tuple[Tensor, ...]  # per KV group [T] int64, -1 where there is no row

    def rows_alone(self) -> TakenRows:
        """Returns the rows that are there. The host waits for how many there are."""
        kept = self.is_row
        return TakenRows(
            is_row=kept[kept],
            hidden=self.hidden[kept],
            tokens=self.tokens[kept],
            positions=self.positions[kept],
            rotary=self.rotary[kept],
            kv_lens=self.kv_lens[kept],
            slot_mappings=tuple(of_group[kept] for of_group in self.slot_mappings),
        )


@twin(_KERNELS)
def keep_missed(
    slot_ids: Tensor,
    position_ids: Tensor,
    kv_slots: Tensor,
    hidden: Tensor,
    tokens: Tensor,
    missed: MissedRows,
) -> None:
    """Keeps one row of each request, which a head has to read later.

    Args:
        slot_ids: [B] int64, in `missed`.
        position_ids, kv_slots: [B] int64; a row whose slot is -1 is not kept.
        hidden: [B, n * D], contiguous rows. tokens: [B] int32, any stride.
    """
    place = slot_ids, position_ids % missed.positions.shape[1]
    missed.hidden[place] = hidden
    missed.tokens[place] = tokens.to(torch.int64)
    missed.positions[place] = torch.where(kv_slots < 0, -1, position_ids)


@twin(_KERNELS)
def take_missed(
    slot_ids: Tensor,
    missed: MissedRows,
    rope_deltas: Tensor | None,
    block_tables: tuple[Tensor, ...],
    page_size: int,
) -> TakenRows:
    """Returns the rows of these requests, and forgets them.

    Args:
        slot_ids: [B] int64, in `missed`; different ones, but for a slot whose rows are in no block.
        rope_deltas: [S] int64, from a token's position to RoPE's; None: they are the same.
        block_tables: per KV group [B, M] int32.
        page_size: tokens of a block.
    """
    hidden, tokens, positions = (tensor[slot_ids] for tensor in missed)
    missed.positions.index_fill_(0, slot_ids, -1)
    is_row, positions = positions >= 0, positions.clamp_min(0)
    rotary = positions
    if rope_deltas is not None:
        rotary = (positions + rope_deltas[slot_ids][:, None]).clamp_min(0)
    slots = [slot_mapping(table, positions, is_row, page_size) for table in block_tables]
    return TakenRows(
        is_row=is_row.flatten(),
        hidden=hidden.flatten(0, 1),
        tokens=tokens.flatten(),
        positions=positions.flatten(),
        rotary=rotary.flatten(),
        kv_lens=(positions.flatten() + 1).to(torch.int32),
        slot_mappings=tuple(of_group.flatten() for of_group in slots),
    )
