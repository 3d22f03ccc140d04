"""Comparing a text's end with all its positions, in Triton. Twin: `suffix.py`."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch

BLOCK = 512


def match_lens(history: Tensor, lens: Tensor, last: Tensor) -> Tensor:
    """As its twin."""
    rows, size = history.shape
    history, last = history.contiguous(), last.contiguous()
    found = torch.empty((rows, size), dtype=torch.int32, device=history.device)
    _match_lens_kernel[(triton.cdiv(size, BLOCK), rows)](
        history,
        lens.contiguous(),
        last,
        found,
        size,
        last.shape[1],
        BLOCK,
        **dependent_launch(history),
    )
    return found


@triton.jit
def _match_lens_kernel(
    history_ptr, lens_ptr, last_ptr, found_ptr, size, longest, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A block of positions of one text. It ends where no position agrees any more."""
    after_previous(PDL)
    row = tl.program_id(1).to(tl.int64)
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    run = (position < tl.load(lens_ptr + row) - 1) & (position < size)
    found = tl.zeros((BLOCK,), tl.int32)
    j, is_any = 0, tl.max(run.to(tl.int32), 0)
    while is_any * (longest - j) > 0:
        token = tl.load(last_ptr + row * longest + j)
        run = run & (position >= j) & (token >= 0)
        earlier = tl.load(history_ptr + row * size + position - j, mask=run, other=-1)
        run = run & (earlier == token)
        found += run.to(tl.int32)
        j += 1
        is_any = tl.max(run.to(tl.int32), 0)
    tl.store(found_ptr + row * size + position, found, mask=position < size)
