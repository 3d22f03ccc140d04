"""Verifies more drafts of the requests whose drafts are likelier, with a fixed number of rows.

Sizes: G requests that generate, K' drafts of each, D of all that are verified: T = G + D rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..launch.dispatch import twin

_KERNELS = "step.triton_packing"


class PassRows(NamedTuple):
    """What a pass reads, by row."""

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64
    slot_mappings: tuple[Tensor, ...]  # per KV group [T] int64


class Packing(NamedTuple):
    """The rows of requests that verify different numbers of drafts."""

    rows: PassRows
    starts: Tensor  # [G+1] int32 as in `PackedRows`
    indices: Tensor  # [T] int64
    places: Tensor  # [G * (K'+1)] int64
    drafts: Tensor  # [G, K'] int32, -1 where a draft is not verified


@twin(_KERNELS)
def save_chances(slot_ids: Tensor, probabilities: tuple[Tensor, ...], chances: Tensor) -> None:
    """Keeps how likely it is that a draft and all before it are accepted, by slot.

    Args:
        slot_ids: [B] int64.
        probabilities: at most K, each [B] float32: of a draft, if those before it are accepted.
        chances: [S+1, K] float32: written, 0 behind the last draft.
    """
    chance = torch.ones_like(probabilities[0])
    chances[slot_ids] = 0.0
    for depth, probability in enumerate(probabilities):
        chance = chance * probability
        chances[slot_ids, depth] = chance


@twin(_KERNELS)
def pack_rows(
    slot_ids: Tensor, drafts: Tensor, chances: Tensor, rows: PassRows, num_verified: int
) -> Packing:
    """Chooses the D drafts that are likeliest to be accepted, and packs the rows to verify them.

    Of equals earlier drafts come first, then earlier requests. A request's drafts are verified up
    to some draft: later ones are never likelier. Whether a draft is among them depends on what is
    known before it, not on later ones. So no distribution changes, as long as its chance does not
    depend on which token it is.

    Args:
        slot_ids: [G] int64. drafts: [G, K'] int32, -1 for none.
        chances: [S+1, K] float32 in 0 … 1, as of `save_chances`. The last slot is scratch: drafts
            of rows that fill a graph's batch come last.
        rows: of all drafts, K'+1 of each request.
        num_verified: D, at most G * K'.
    """
    (batch, width), device = drafts.shape, drafts.device
    is_real = (drafts >= 0) & (slot_ids < chances.shape[0] - 1)[:, None]
    known = torch.where(is_real, chances[slot_ids, :width], -1.0)
    order = known.T.flatten().argsort(descending=True, stable=True)
    chosen = torch.zeros(batch * width, dtype=torch.int64, device=device)
    chosen[order[:num_verified]] = 1
    lens = chosen.view(width, batch).sum(0)
    ends = (lens + 1).cumsum(0)
    first = ends - lens - 1
    depth = torch.arange(width + 1, device=device)
    places = first[:, None] + torch.minimum(depth, lens[:, None])
    indices = (depth <= lens[:, None]).flatten().nonzero()[:, 0]
    return Packing(
        rows=PassRows(
            rows.input_ids[indices],
            rows.position_ids[indices],
            tuple(slots[indices] for slots in rows.slot_mappings),
        ),
        starts=torch.cat([first, ends[-1:]]).to(torch.int32),
        indices=indices,
        places=places.flatten(),
        drafts=torch.where(depth[:-1] < lens[:, None], drafts, -1),
    )
