"""Masks of the vocabulary in Triton. Twin: `bitmask.py`."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def mask_logits(logits: Tensor, masks: Tensor, d2t: Tensor | None) -> Tensor:
    """As its twin."""
    (rows, vocab), logits = logits.shape, logits.contiguous()
    out = torch.empty_like(logits)
    if rows:
        grid = (rows, triton.cdiv(vocab, BLOCK))  # the second holds 65,535 at most
        _mask_kernel[grid](logits, masks, d2t, out, vocab, masks.stride(0), BLOCK)
    return out


@triton.jit
def _mask_kernel(logits, masks, d2t, out, vocab, stride, BLOCK: tl.constexpr):
    """BLOCK logits of one row."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < vocab
    token = entry.to(tl.int64)
    if d2t is not None:
        token += tl.load(d2t + entry, mask=inside, other=0)
    word = tl.load(masks + row * stride + token // 32, mask=inside, other=0)
    value = tl.load(logits + row * vocab + entry, mask=inside, other=0.0)
    allowed = (word >> (token % 32).to(tl.int32)) & 1
    tl.store(out + row * vocab + entry, tl.where(allowed == 1, value, float("-inf")), mask=inside)
