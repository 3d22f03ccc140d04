"""What multi-head latent attention does beside matrix products (DeepSeek-V2, arXiv:2405.04434).

The cache holds one head per token, `[normed latent | rotated key]`; keys' and values' projections
out of the latent are applied to the queries and to the attention's result instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch.dispatch import triton_kernels
from ..launch.machine import INVARIANT_ROWS
from .norm import Norm, rms_norm
from .rope import Rope, apply_rope


def rope_and_write_latent(
    turning: Tensor, latent: Tensor, norm: Norm, rope: Rope, out: Tensor, k_slots: Tensor,
    slots: Tensor, scratch_slot: int, *, keeps_finite: bool = False,
) -> None:  # fmt: skip
    """Rotates queries into `out`, and puts latents and rotated keys into the paged cache.

    Args:
        turning: [T, H, R], what is rotated of the queries. out: [T, H, R].
        latent: [T, L + R], the latent before its norm, then the key before its rotation.
        k_slots: [slots, 1, L + R]; slots: [T] int64, -1 is `scratch_slot`.
        keeps_finite: NaN and infinities enter the cache as 0.
    """
    kernels = triton_kernels(latent)
    if kernels is not None:
        from .triton_latent import rope_and_write_latent as kernel

        kernel(turning, latent, norm, rope, out, k_slots, slots, scratch_slot, keeps_finite)
        return
    size = turning.shape[2]
    rotation = rope.rotation(latent.dtype)
    out.copy_(apply_rope(turning, *rotation))
    key = latent_key(latent, norm, rotation, size)
    if keeps_finite:
        key = torch.nan_to_num(key, 0.0, 0.0, 0.0)
    k_slots.index_copy_(0, torch.where(slots < 0, scratch_slot, slots), key)


def latent_key(latent: Tensor, norm: Norm, rotation: tuple[Tensor, Tensor], size: int) -> Tensor:
    """latent [T, L + R] -> what the cache keeps of it, [T, 1, L + R]; size is R."""
    latent, turning = latent.split([latent.shape[1] - size, size], dim=1)
    turned = apply_rope(turning[:, None], *rotation)
    return torch.cat([rms_norm(latent, norm)[:, None], turned], dim=-1)


def multiply_heads(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """x [T, H, A] times each head's weight [H, A, B], into out [T, H, B]."""
    x, rows = x.transpose(0, 1), x.shape[0]
    if x.device.type == "cpu" and x.dtype != torch.float32 and rows < INVARIANT_ROWS:
        # A row's bits must not depend on how many rows share the call, see linear.py.
        padded = torch.bmm(F.pad(x, (0, 0, 0, INVARIANT_ROWS - rows)), weight)
        out.copy_(padded[:, :rows].transpose(0, 1))
        return
    torch.bmm(x, weight, out=out.transpose(0, 1))
