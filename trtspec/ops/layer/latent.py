"""What multi-head latent attention does beside matrix products (DeepSeek-V2, arXiv:2405.04434).

The cache holds one head per token, `[normed latent | rotated key]`. The projections of keys and
values out of the latent are applied to the queries and to the attention's result instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch.dispatch import twin
from ..launch.machine import INVARIANT_ROWS
from .kv_codes import put
from .norm import Norm, rms_norm
from .rope import CacheWrite, Rope, apply_rope


@twin("layer.triton_latent")
def rope_and_write_latent(
    q: Tensor, latent: Tensor, norm: Norm, rope: Rope, out: Tensor, to: CacheWrite
) -> None:
    """Rotates queries into `out`, and writes latents and rotated keys to the paged cache.

    Args:
        q: [T, H, R], what is rotated of the queries. out: [T, H, R].
        latent: [T, L + R], the latent before its norm, then the key before its rotation.
        to: has k_slots [slots, 1, L + R].
    """
    rotation = rope.rotation(latent.dtype)
    out.copy_(apply_rope(q, *rotation))
    key = latent_key(latent, norm, rotation, q.shape[2])
    if to.keeps_finite:
        key = torch.nan_to_num(key, 0.0, 0.0, 0.0)
    put(to.k_slots, to.written_slots(), key, to.k_scales)


def latent_key(latent: Tensor, norm: Norm, rotation: tuple[Tensor, Tensor], size: int) -> Tensor:
    """Returns what the cache keeps of latent [T, L + R], [T, 1, L + R].

    Args:
        size: R, how many numbers are rotated.
    """
    latent, key = latent.split([latent.shape[1] - size, size], dim=1)
    rotated = apply_rope(key[:, None], *rotation)
    return torch.cat([rms_norm(latent, norm)[:, None], rotated], dim=-1)


def multiply_heads(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Writes x [T, H, A] times each head's weight [H, A, B] into out [T, H, B]."""
    x, rows = x.transpose(0, 1), x.shape[0]
    if x.device.type == "cpu" and x.dtype != torch.float32 and rows < INVARIANT_ROWS:
        # A row's bits must not depend on how many rows share the call, see layers/linear.py.
        padded = torch.bmm(F.pad(x, (0, 0, 0, INVARIANT_ROWS - rows)), weight)
        out.copy_(padded[:, :rows].transpose(0, 1))
        return
    torch.bmm(x, weight, out=out.transpose(0, 1))
