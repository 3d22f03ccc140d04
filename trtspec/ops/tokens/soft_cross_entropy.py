"""Cross-entropy of a linear layer's logits with a teacher's distribution, and its gradient.

    loss(row) = logsumexp(z) - sum_i p_i z_i,   z = hidden W^T,   p = softmax(teacher)
    dloss/dz  = softmax(z) - p

The gradient is computed with the loss, some rows at a time. So the logits of all rows never exist
together, and are not computed again for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..launch.dispatch import kernels

ROWS = 4096  # rows whose logits are computed at a time


def linear_soft_cross_entropy(
    hidden: Tensor, weight: Tensor, teacher: Tensor, rows: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the loss summed over the rows that count, differentiable in `hidden` and `weight`.

    Args:
        hidden: [R, H]. weight: [V, H], the same dtype.
        teacher: [T, V], the teacher's logits. rows: [R] int64, the teacher's row of each row.
        counts: [R] bool.

    Returns:
        (the sum [] float32, the best token of every row [R] int64, the lowest of equal ones).
    """
    if not torch.is_grad_enabled():  # autograd's `needs_input_grad` ignores this
        hidden, weight = hidden.detach(), weight.detach()
    total, best = _LinearSoftCrossEntropy.apply(hidden, weight, teacher, rows, counts)
    return total, best


class _LinearSoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, teacher: Tensor, rows: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        best = torch.empty_like(rows)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for start in range(0, len(rows), ROWS):
            part = slice(start, start + ROWS)
            logits = hidden[part] @ weight.t()
            loss, best[part] = soft_cross_entropy_(logits, teacher, rows[part], counts[part])
            total += loss.sum()
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += logits.t() @ hidden[part]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        grads = (None if g is None else (g.float() * grad).to(g.dtype) for g in ctx.saved_tensors)
        return *grads, None, None, None


def soft_cross_entropy_(
    logits: Tensor, teacher: Tensor, rows: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (losses [R] float32, best tokens [R] int64); overwrites `logits` [R, V] by the
    gradient.

    Rows that do not count have loss and gradient 0. Arguments as above.
    """
    triton = kernels("tokens.triton_soft_cross_entropy", logits.detach())
    if triton is not None:
        return triton.soft_cross_entropy_(logits, teacher, rows, counts)
    best = logits.argmax(-1)
    student, p = logits.float(), teacher[rows].softmax(-1, dtype=torch.float32)
    normalizer = student.logsumexp(-1)
    loss = (normalizer - (p * student).sum(-1)).masked_fill_(~counts, 0.0)
    gradient = (student - normalizer[:, None]).exp_().sub_(p)
    logits.copy_(gradient.masked_fill_(~counts[:, None], 0.0))
    return loss, best
