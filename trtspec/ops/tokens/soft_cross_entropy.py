"""Losses of a linear layer's logits against a teacher's distribution, and their gradients.

    z = hidden W^T,   q = softmax(z),   p = softmax(teacher)
    cross-entropy     logsumexp(z) - sum_i p_i z_i     gradient by z: q - p
    total variation   sum_i |q_i - p_i| / 2            gradient by z: q (s - sum_i q_i s_i) / 2,
                                                       s = sign(q - p)

A row's loss is (1 - share) * cross-entropy + share * total variation. A bias of the logits is a
second product, added to the first.

The gradient is computed with the loss, some rows at a time. So the logits of all rows never exist
together, and are not computed again for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..launch.dispatch import kernels

ROWS = 4096  # rows whose logits are computed at a time


class RowLosses(NamedTuple):
    """What is known of each row of logits."""

    loss: Tensor  # [R] float32, 0 where it does not count
    best: Tensor  # [R] int64, the best token, the lowest of equal ones
    chance: Tensor  # [R] float32, q of the teacher's best token


class FoundRows(NamedTuple):
    """`RowLosses`, and each row's best tokens."""

    loss: Tensor
    best: Tensor
    chance: Tensor
    candidates: Tensor  # [R, C] int64


class Product(NamedTuple):
    """x W^T, a part of the logits."""

    x: Tensor  # [R, H]
    weight: Tensor  # [V, H], the same dtype


@dataclass(frozen=True)
class Judgement:
    """How rows of logits are judged.

    Args:
        teacher: [T, V], the teacher's logits. rows: [R] int64, the teacher's row of each row.
        counts: [R] bool.
        variation: the share of total variation in the loss.
        group: rows that follow each other and are weighed together; it divides R.
        weigh: (chances, counts), both [R / group, group] -> their weights in the sum, float32.
        candidates: C, how many of each row's best tokens are wanted.
    """

    teacher: Tensor
    rows: Tensor
    counts: Tensor
    variation: float = 0.0
    group: int = 1
    weigh: Callable[[Tensor, Tensor], Tensor] | None = None
    candidates: int = 0


def linear_loss(products: list[Product], judgement: Judgement) -> tuple[Tensor, FoundRows]:
    """Returns the weighted sum of the rows' losses, differentiable in the products, and the rows'.

    Args:
        products: one or two, whose sum is the logits.
    """
    tensors = [tensor for product in products for tensor in product]
    if not torch.is_grad_enabled():  # autograd's `needs_input_grad` ignores this
        tensors = [tensor.detach() for tensor in tensors]
    total, *of_rows = _LinearLoss.apply(judgement, *tensors)
    return total, FoundRows(*of_rows)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, judgement: Judgement, *tensors: Tensor) -> tuple[Tensor, ...]:
        products = [Product(*tensors[i : i + 2]) for i in range(0, len(tensors), 2)]
        hidden, rows, group = products[0].x, judgement.rows, judgement.group
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        losses, chances = (total.new_empty(len(rows)) for _ in range(2))
        found = RowLosses(losses, torch.empty_like(rows), chances)
        candidates = rows.new_empty(len(rows), judgement.candidates)
        grads: list[Tensor | None] = [None] * len(tensors)
        for i, (x, wanted) in enumerate(zip(tensors, ctx.needs_input_grad[1:], strict=True)):
            if wanted:  # a weight's is a sum over parts, kept in float32
                grads[i] = torch.zeros_like(x, dtype=torch.float32 if i % 2 else x.dtype)
        at_once = max(1, ROWS // group) * group
        for start in range(0, len(rows), at_once):
            part = slice(start, start + at_once)
            logits = products[0].x[part] @ products[0].weight.t()
            for x, weight in products[1:]:
                logits.addmm_(x[part], weight.t())
            counts = judgement.counts[part]
            if judgement.candidates:
                candidates[part] = logits.topk(judgement.candidates).indices
            judged = draft_loss_(logits, judgement.teacher, rows[part], counts, judgement.variation)
            for whole, of_part in zip(found, judged, strict=True):
                whole[part] = of_part
            weights = None
            if judgement.weigh is not None:
                shape = -1, group
                weights = judgement.weigh(judged.chance.view(shape), counts.view(shape)).flatten()
            total += judged.loss.sum() if weights is None else judged.loss @ weights
            _add_gradients(grads, products, part, logits, weights)
        grads = [g if g is None else g.to(t.dtype) for g, t in zip(grads, tensors, strict=True)]
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(*found, candidates)
        return total, *found, candidates

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        return None, *(None if g is None else (g.float() * grad).to(g.dtype) for g in saved)


def _add_gradients(
    grads: list[Tensor | None],
    products: list[Product],
    part: slice,
    by_logits: Tensor,
    weights: Tensor | None,
) -> None:
    """Adds a part's to the gradients of the products' tensors, where they are wanted.

    Args:
        by_logits: [r, V], the gradient of unweighted losses. weights: [r].
    """
    for i, (x, weight) in enumerate(products):
        of_x, of_weight = grads[2 * i], grads[2 * i + 1]
        if of_x is not None:
            torch.mm(by_logits, weight, out=of_x[part])
            if weights is not None:
                of_x[part] *= weights[:, None]
        if of_weight is not None:
            rows = x[part] if weights is None else (x[part] * weights[:, None]).to(x.dtype)
            of_weight += by_logits.t() @ rows


def draft_loss_(
    logits: Tensor, teacher: Tensor, rows: Tensor, counts: Tensor, variation: float = 0.0
) -> RowLosses:
    """Judges each row; overwrites `logits` [R, V] by the gradient of its loss.

    Rows that do not count have loss and gradient 0. Arguments as in `Judgement`.
    """
    triton = kernels("tokens.triton_soft_cross_entropy", logits.detach())
    if triton is not None:
        return RowLosses(*triton.draft_loss_(logits, teacher, rows, counts, variation))
    best = logits.argmax(-1)
    z, judges = logits.float(), teacher[rows]
    p, normalizer = judges.softmax(-1, dtype=torch.float32), z.logsumexp(-1)
    chosen = z.gather(1, judges.argmax(-1, keepdim=True))[:, 0]
    loss = normalizer - (p * z).masked_fill_(p == 0, 0.0).sum(-1)  # z may be -inf
    q = (z - normalizer[:, None]).exp_()
    difference = q - p
    if variation:
        sign = difference.sign()
        of_variation = 0.5 * q * (sign - (q * sign).sum(-1, keepdim=True))
        loss = (1 - variation) * loss + variation * 0.5 * difference.abs().sum(-1)
        difference = difference.mul_(1 - variation).add_(of_variation, alpha=variation)
    logits.copy_(difference.masked_fill_(~counts[:, None], 0.0))
    chance = (chosen - normalizer).exp_()
    return RowLosses(loss.masked_fill_(~counts, 0.0), best, chance)
