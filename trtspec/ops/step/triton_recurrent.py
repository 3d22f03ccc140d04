"""The Triton kernel of `recurrent.py`."""

# mypy: disallow-untyped-defs=False
# (kernels are Triton's language, not Python's)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch
from .triton_rows import ints

REQUESTS = 128
"""That a program notes."""


def begin_pass(
    taken_in: Tensor, slots: Tensor, ends: Tensor, firsts: Tensor
) -> tuple[Tensor, Tensor]:
    """As its twin; `ends` is contiguous."""
    count = firsts.shape[0]
    dense, before = ints(slots, count), ints(slots, count)
    total = slots.shape[0]
    _begin_pass_kernel[(triton.cdiv(total, REQUESTS),)](
        taken_in,
        slots,
        ends,
        firsts,
        firsts.stride(0),
        dense,
        before,
        ends.shape[0],
        total,
        BLOCK=REQUESTS,
        num_warps=4,
        **dependent_launch(slots),
    )
    return dense, before


@triton.jit
def _begin_pass_kernel(
    taken_in_ptr,
    slots_ptr,
    ends_ptr,
    firsts_ptr,
    stride,
    dense_ptr,
    before_ptr,
    contexts,
    total,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some requests, contexts first."""
    after_previous(PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_context = i < contexts
    is_generation = (i >= contexts) & (i < total)
    slot = tl.load(slots_ptr + i, mask=i < total, other=0)
    first = tl.load(firsts_ptr + (i - contexts) * stride, mask=is_generation, other=0)
    end = tl.load(ends_ptr + i, mask=is_context, other=0)
    before = tl.load(taken_in_ptr + slot, mask=is_generation, other=0)
    tl.store(dense_ptr + i - contexts, first, mask=is_generation)
    tl.store(before_ptr + i - contexts, before, mask=is_generation)
    tl.store(taken_in_ptr + slot, tl.where(is_context, end, first + 1), mask=i < total)
