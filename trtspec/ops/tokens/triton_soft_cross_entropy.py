"""The Triton kernel of `soft_cross_entropy.py`."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch
from ..layer.triton_norm import Rows


def draft_loss_(
    logits: Tensor, teacher: Tensor, rows: Tensor, counts: Tensor, variation: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As its twin."""
    count, vocab = logits.shape
    loss = torch.empty(count, dtype=torch.float32, device=logits.device)
    best = torch.empty(count, dtype=torch.int64, device=logits.device)
    chance = torch.empty_like(loss)
    _draft_loss_kernel[(count,)](
        Rows.of(logits),
        Rows.of(teacher),
        rows,
        counts,
        loss,
        best,
        chance,
        vocab,
        float(variation),
        VARIES=variation > 0,
        # A thread for every element, or two warps would hold the same one while it is overwritten.
        BLOCK=min(4096, max(256, triton.next_power_of_2(vocab))),
        num_warps=8,
        **dependent_launch(logits),
    )
    return loss, best, chance


@triton.jit
def _draft_loss_kernel(
    logits,
    teacher,
    rows_ptr,
    counts_ptr,
    loss_ptr,
    best_ptr,
    chance_ptr,
    vocab,
    variation,
    VARIES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, read twice: normalizers and the best token, then loss and gradient.

    With total variation it is read a third time: its gradient needs a sum over the row.
    """
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    z_ptr = logits.x + row * logits.row
    t_ptr = teacher.x + tl.load(rows_ptr + row) * teacher.row
    counts = tl.load(counts_ptr + row)
    v = tl.arange(0, BLOCK)
    z_max, t_max = float("-inf"), float("-inf")
    z_sum, t_sum = 0.0, 0.0
    best, chosen = 0, 0.0
    for start in range(0, vocab, BLOCK):
        inside = start + v < vocab
        z = tl.load(z_ptr + start + v, mask=inside, other=float("-inf")).to(tl.float32)
        t = tl.load(t_ptr + start + v, mask=inside, other=float("-inf")).to(tl.float32)
        new = tl.max(z, 0)
        if new > z_max:
            best = start + tl.argmax(z, 0)
        z_max, z_sum = _added(z_max, z_sum, z, new)
        new = tl.max(t, 0)
        if new > t_max:
            chosen = tl.sum(tl.where(v == tl.argmax(t, 0), z, 0.0), 0)
        t_max, t_sum = _added(t_max, t_sum, t, new)
    normalizer, t_normalizer = z_max + tl.log(z_sum), t_max + tl.log(t_sum)
    cross = tl.zeros([BLOCK], tl.float32)
    apart, signs = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        inside = start + v < vocab
        z = tl.load(z_ptr + start + v, mask=inside, other=0.0).to(tl.float32)
        t = tl.load(t_ptr + start + v, mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.exp(t - t_normalizer)
        cross += tl.where(p == 0, 0.0, p * z)  # z may be -inf
        difference = tl.where(inside, tl.exp(z - normalizer) - p, 0.0)
        if VARIES:
            apart += tl.abs(difference)
            signs += (difference + p) * _sign(difference)
        else:
            gradient = tl.where(counts, difference, 0.0)
            tl.store(z_ptr + start + v, gradient.to(logits.x.dtype.element_ty), mask=inside)
    loss = normalizer - tl.sum(cross, 0)
    if VARIES:
        loss = (1 - variation) * loss + variation * 0.5 * tl.sum(apart, 0)
        mean_sign = tl.sum(signs, 0)
        for start in range(0, vocab, BLOCK):
            inside = start + v < vocab
            z = tl.load(z_ptr + start + v, mask=inside, other=0.0).to(tl.float32)
            t = tl.load(t_ptr + start + v, mask=inside, other=float("-inf")).to(tl.float32)
            q = tl.exp(z - normalizer)
            difference = q - tl.exp(t - t_normalizer)
            of_variation = 0.5 * q * (_sign(difference) - mean_sign)
            gradient = (1 - variation) * difference + variation * of_variation
            gradient = tl.where(counts, gradient, 0.0)
            tl.store(z_ptr + start + v, gradient.to(logits.x.dtype.element_ty), mask=inside)
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0))
    tl.store(best_ptr + row, best)
    tl.store(chance_ptr + row, tl.exp(chosen - normalizer))


@triton.jit
def _added(best, total, x, best_of_x):
    """Returns the largest logit, and the sum of powers over it, with those of a block `x`."""
    new = tl.maximum(best, best_of_x)
    base = tl.where(new == float("-inf"), 0.0, new)  # a block may be all -inf
    return new, total * tl.exp(best - base) + tl.sum(tl.exp(x - base), 0)


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, 0.0) - tl.where(x < 0, 1.0, 0.0)
