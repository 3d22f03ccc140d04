"""Rotary position embedding (Su et al., 2021), the half-split ("NeoX") layout."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(cos_sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rotations of one pass, made once and used by every layer.

    Args:
        cos_sin: [T, D] float32, the cosines of the D/2 frequencies, then the sines.

    Returns:
        (cos, sin), each [T, 1, D] in `dtype`; the first half of sin is negated.
    """
    cos, sin = cos_sin.to(dtype)[:, None].chunk(2, dim=-1)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [T, H, D] by `rotation`'s (cos, sin)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
