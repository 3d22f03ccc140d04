"""Products of some rows in bf16 with narrower weights, which csrc widens for tensor cores.

`csrc/include/trtspec/weight_tiles.cuh` has the kernel. `four_bits.py` and `fp8.py` launch it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import native

STEP = 128  # columns that are multiplied at once
TILE_ROWS = 32, 64, 128
"""Rows that a thread block multiplies at once."""
MAX_ROWS = 512
"""More rows than this are cuBLAS's, with the weight made float before."""
_ARRANGED = 2 * STEP + 4  # bytes of a row in a step: bf16, and their sum

Launch = Callable[[Tensor, Tensor, Tensor, bool], None]
"""x, room for it arranged, the result, whether the product is added to what is there -> nothing."""


def kernels(x: Tensor, residual: Tensor | None) -> Any:
    """Returns the module with the kernel if it serves these sizes, dtypes and this GPU, else None.

    Args:
        x: [T, in]. residual: [T, out], or None.
    """
    rows, columns = x.shape
    if not 0 < rows <= MAX_ROWS or columns % STEP or x.dtype != torch.bfloat16:
        return None
    if residual is not None and not _is_written(residual):
        return None
    return native.kernels(x) if x.is_cuda and native.is_hopper(x.device) else None


def _is_written(out: Tensor) -> bool:
    return out.stride(1) == 1 and out.stride(0) % 4 == 0 and out.data_ptr() % 8 == 0


def multiply(
    x: Tensor, outputs: int, residual: Tensor | None, bias: Tensor | None, launch: Launch
) -> Tensor:
    """Returns a product [T, outputs] plus bias.

    Args:
        x: [T, in], for which there are `kernels`.
        residual: [T, outputs], to which the product is added, in its memory; it is returned.
    """
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)  # of one row, too
    rows, columns = x.shape
    out = residual
    if out is None:
        out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tile = next((size for size in TILE_ROWS if rows <= size), TILE_ROWS[-1])
    shape = -(-rows // tile), tile, columns // STEP * _ARRANGED
    launch(x, torch.empty(shape, dtype=torch.uint8, device=x.device), out, residual is not None)
    return out if bias is None else out.add_(bias)
