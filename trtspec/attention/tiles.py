"""Contexts are cut into tiles of query rows, one after another in each sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from ..metadata.attention import AttentionMetadata


def context_tiles(meta: AttentionMetadata, size: int) -> Tensor:
    """Returns the tiles of a pass's contexts: request, first row, number of rows (at most `size`).

    They are made once for a pass: [tiles, 3] int32 on the device.
    """
    key = "context tiles", size
    if key not in meta.derived and meta.last_context_rows is not None:
        meta.derived[key] = tiles_on_device(meta.last_context_rows, meta.num_context_tokens, size)
    if key not in meta.derived:
        tiles, start = [], 0
        for i, rows in enumerate(meta.context_lens):
            tiles += [(i, start + j, min(size, rows - j)) for j in range(0, rows, size)]
            start += rows
        tiles.reverse()  # a sequence's last tiles see most keys and had better begin first
        device = meta.position_ids.device
        host = torch.tensor(tiles, dtype=torch.int32, pin_memory=device.type == "cuda")
        meta.derived[key] = host.to(device, non_blocking=True)
    return meta.derived[key]


def tiles_on_device(last_rows: Tensor, num_rows: int, size: int) -> Tensor:
    """Returns the same tiles where the device alone knows the contexts' lengths.

    There are as many tiles as there can be at most; those left over have no rows.

    Args:
        last_rows: [C] int64, each context's last row.
        num_rows: of all contexts and the padding behind them.
    """
    ends = last_rows + 1
    lens = torch.diff(ends, prepend=ends.new_zeros(1))
    counts = (lens + size - 1) // size
    tile_ends = counts.cumsum(0)
    n = torch.arange(num_rows // size + len(ends) - 1, -1, -1, device=ends.device)
    request = torch.searchsorted(tile_ends, n, right=True).clamp_max(len(ends) - 1)
    before = (n - tile_ends[request] + counts[request]) * size  # the sequence's rows before a tile
    rows = (lens[request] - before).clamp(0, size)
    first = (ends[request] - lens[request] + before).clamp_max(num_rows - 1)
    return torch.stack([request, first, rows], dim=1).to(torch.int32)
