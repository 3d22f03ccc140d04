"""A causal convolution along the rows of each block, with weights that depend on the row.

    out[i, c] = sum over taps t of (base[t, c] + dynamic[i, t, g(c)]) * x[i - t, c]

Channels of one group share a dynamic weight, g(c) = c // (H / G). Rows before a block's first one
count as zeros. Source: DFlash2 (z-lab), https://github.com/z-lab/dflash.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch.dispatch import kernels


def convolve_blocks(
    x: Tensor, base: Tensor, dynamic: Tensor, block: int, residual: Tensor | None = None
) -> Tensor:
    """Returns residual + the convolution of x, [T, H], in a tensor of its own.

    Args:
        x: [T, H], the rows of T / block blocks. base: [taps, H].
        dynamic: [T, taps, G], G divides H; its rows may lie apart.
        block: rows of a block.
        residual: [T, H]; None adds nothing.
    """
    is_trained = torch.is_grad_enabled() and any(t.requires_grad for t in (x, base, dynamic))
    triton = None if is_trained else kernels("layer.triton_convolution", x)
    if triton is not None:
        return triton.convolve_blocks(x, base, dynamic, block, residual)
    wide = torch.promote_types(x.dtype, torch.float32)  # rounded once, as the kernel does
    (size, groups), taps = (x.shape[1], dynamic.shape[2]), base.shape[0]
    blocks = x.to(wide).view(-1, block, size)
    shared = dynamic.to(wide).repeat_interleave(size // groups, dim=2)  # [T, taps, H]
    weights = (base.to(wide) + shared).view(-1, block, taps, size)
    out = blocks * weights[:, :, 0]
    for tap in range(1, min(taps, block)):
        before = blocks[:, :-tap] * weights[:, tap:, tap]
        out = out + torch.nn.functional.pad(before, (0, 0, tap, 0))
    out = out.view(-1, size)
    return (out if residual is None else residual.to(wide) + out).to(x.dtype)
