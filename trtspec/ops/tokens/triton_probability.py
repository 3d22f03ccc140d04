"""Triton's kernel of `probability.py`."""
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch

BLOCK = 4096  # logits that a program reads at a time


def best_probabilities(logits: Tensor) -> Tensor:
    """Reads each row once, by a program of its own."""
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _best_kernel[(rows,)](
        logits,
        *logits.stride(),
        size,
        out,
        BLOCK=min(BLOCK, max(16, triton.next_power_of_2(size))),
        num_warps=8,
        **dependent_launch(logits),
    )
    return out


@triton.jit
def _best_kernel(
    logit_ptr, row_stride, stride, size, out_ptr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, size, BLOCK):
        column = begin + lane
        entry = logit_ptr + row * row_stride + column.to(tl.int64) * stride
        score = tl.load(entry, mask=column < size, other=float("-inf")).to(tl.float32)
        score = tl.where(score == score, score, float("-inf"))
        new_best = tl.maximum(best, score)
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        total = total * tl.exp(best - base) + tl.exp(score - base)
        best = new_best
    highest = tl.max(best, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    whole = tl.sum(total * tl.exp(best - base), 0)
    has_any = whole > 0
    tl.store(out_ptr + row, tl.where(has_any, 1.0 / tl.where(has_any, whole, 1.0), 0.0))
