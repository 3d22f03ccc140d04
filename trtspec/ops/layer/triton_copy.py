"""The Triton kernel of `copy.py`."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch


def copy_rows(rows: Tensor, to: Tensor) -> None:
    """As its twin."""
    count, size = rows.shape
    block = min(1024, triton.next_power_of_2(size))
    _copy_kernel[(count, triton.cdiv(size, block))](
        rows, rows.stride(0), to, to.stride(0), size, BLOCK=block, **dependent_launch(rows)
    )


@triton.jit
def _copy_kernel(from_ptr, from_row, to_ptr, to_row, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """BLOCK numbers of one row."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(from_ptr + row * from_row + d, mask=d < size)
    tl.store(to_ptr + row * to_row + d, x, mask=d < size)
