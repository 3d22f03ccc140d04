"""Attention within images that goes both ways, for every backend.

A backend attends causally. The rows of an image are few, and the host knows where they are. They
are computed again in plain torch: each sees its sequence up to the image's end, within the layer's
window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..metadata.attention import AttentionMetadata, ImageRows
from ..ops.layer.kv_codes import look_up
from .base import AttentionBackend, CachedLayer
from .torch_sdpa import masked_attention


def attend(
    backend: AttentionBackend,
    q: Tensor,
    meta: AttentionMetadata,
    cached: CachedLayer,
    images_both_ways: bool,
) -> Tensor:
    """As `backend.attend`; with `images_both_ways` rows of `meta.images` see all of their image."""
    out = backend.attend(q, meta, cached)
    if not images_both_ways:
        return out
    for image in meta.images:
        key = "image", image, cached.kv_group, cached.window
        if key not in meta.derived:
            meta.derived[key] = _keys(image, meta, cached.kv_group, cached.window)
        slots, mask = meta.derived[key]
        rows = slice(image.first_row, image.first_row + image.num_rows)
        keys = look_up(cached.k_slots, slots, cached.k_scales, q.dtype)
        values = look_up(cached.v_slots, slots, cached.v_scales, q.dtype)
        attended = masked_attention(
            q[rows].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            mask,
            cached.scale,
            cached.softcap,
            cached.sinks,
        )
        out[rows] = attended[0].transpose(0, 1)
    return out


def _keys(
    image: ImageRows, meta: AttentionMetadata, kv_group: int, window: int | None
) -> tuple[Tensor, Tensor | None]:
    """Returns the slots [S] int64 of the keys that some row sees, and which row sees which.

    That is [n, S] bool, or None where every row sees all.
    """
    page, device = meta.kv_groups[kv_group].page_size, meta.position_ids.device
    first, end = image.position, image.position + image.num_rows
    begin = 0 if window is None else max(first - window + 1, 0)
    keys = torch.arange(begin, end, device=device)
    blocks = meta.block_tables[kv_group][image.context, keys // page].to(torch.int64)
    mask = None
    if window is not None and end > window:
        positions = torch.arange(first, end, device=device)
        mask = keys > positions[:, None] - window
    return blocks * page + keys % page, mask
