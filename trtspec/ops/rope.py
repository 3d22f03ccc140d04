"""Rotary position embedding (Su et al., 2021), the half-split ("NeoX") layout."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotates x [T, H, D] by cos_sin [T, D] float32 (cos of the D/2 frequencies, then sin)."""
    half = x.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half].to(x.dtype), cos_sin[:, None, half:].to(x.dtype)
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
