"""The loss of a head's steps, and whether its proposals match the target's greedy choice.

Other heads' steps are judged one after the other. A block's steps are judged together, since with
D-PACE a step's weight depends on the others of its block.

    exponential   w_s = decay^s                           (DFlash: decay = exp(-1 / gamma))
    d-pace        w_s = sum_{m >= s} C_m,  C_m = prod_{i <= m} (alpha + (1 - alpha) q_i)

q_i is the probability that the head gives to the target's token at step i. D-PACE
(arXiv:2605.18810) thus weighs a step by how much of the accepted length depends on it. A DFlash2
head's loss has a second part, that of its choice among candidates (`paths.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed.logits import gather_logits
from ..models.drafters.base import DraftHead
from ..models.drafters.clustered_head import ClusteredHead
from ..models.drafters.dflash import DFlashHead
from ..ops.tokens.soft_cross_entropy import ROWS, Judgement, Product, linear_loss
from ..ops.tokens.walk import walk_candidates
from .paths import PathRows, PathTables, path_losses
from .records import DraftStep, Teacher

CLUSTERED_ROWS = 64
"""Rows that are judged at once where each gathers an lm_head of its own, 2 MiB in bf16."""
POSITION_WEIGHTS = ("exponential", "d-pace")
DPACE_ALPHA = 0.5
DECAY = 0.8
"""Of heads whose steps follow each other."""


@dataclass(frozen=True)
class Objective:
    """What is minimized."""

    decay: float = DECAY  # a step's weight as a share of the weight of the one before
    uses_dpace: bool = False  # in the place of `decay`; of blocks alone
    variation: float = 0.0  # the share of total variation, the rest is cross-entropy
    selector: float = 1.0  # the weight of DFlash2's choice among candidates


@dataclass(frozen=True)
class StepScore:
    """A step's loss, and whether its proposals match the target's greedy choice."""

    loss: Tensor  # [], mean over rows; 0 without rows; without that of DFlash2's choice
    is_right: Tensor  # [T] bool, False where nothing was drafted from
    is_counted: Tensor  # [T] bool
    loss_share: Tensor  # [], of the rows that count, those that have a loss


def decay_of_block(num_rows: int) -> float:
    """Returns exp(-1 / gamma), gamma 4 for blocks of 8 rows, 5 for 10, 7 for 16 (DFlash's)."""
    gamma = num_rows / 2 if num_rows <= 10 else 5 + (num_rows - 10) / 3
    return math.exp(-1 / gamma)


def judge(
    head: DraftHead, steps: Iterable[DraftStep], teacher: Teacher, objective: Objective
) -> tuple[Tensor, list[StepScore]]:
    """Returns the loss of all steps, differentiable, and each step's score."""
    if isinstance(head, DFlashHead):
        return _judge_blocks(head, list(steps), teacher, objective)
    scores = [score(head, step, teacher, variation=objective.variation) for step in steps]
    loss = torch.zeros((), device=teacher.choices.device)
    for number, each in enumerate(scores):
        loss = loss + objective.decay**number * each.loss
    return loss, scores


def _judge_blocks(
    head: DFlashHead, steps: list[DraftStep], teacher: Teacher, objective: Objective
) -> tuple[Tensor, list[StepScore]]:
    judges = torch.stack([step.teacher_rows for step in steps], dim=1)  # [B, K]
    counts = torch.stack([step.counted for step in steps], dim=1) & teacher.draftable[judges]
    selector = head.candidate_selector
    share = 1 / counts.sum(0).clamp_min(1)  # [K]: a step's loss is a mean
    decays = objective.decay ** torch.arange(len(steps), device=share.device)

    def weigh(chances: Tensor, counts: Tensor) -> Tensor:
        weights = dpace_weights(chances, counts) if objective.uses_dpace else decays
        return (share * weights).expand_as(chances)

    judgement = Judgement(
        teacher=teacher.logits,
        rows=judges.flatten(),
        counts=counts.flatten(),
        variation=objective.variation,
        group=len(steps),
        weigh=weigh,
        candidates=0 if selector is None else selector.count,
    )
    hidden = torch.stack([step.hidden for step in steps], dim=1).flatten(0, 1)
    read = [step.features for step in steps if step.features is not None]
    features = torch.stack(read, dim=1).flatten(0, 1) if read else None
    total, found = linear_loss(_products(head, hidden, features, 0), judgement)
    losses, proposals = found.loss.view(counts.shape), found.best
    if selector is not None:
        before = torch.stack([step.before for step in steps if step.before is not None], dim=1)
        rows = PathRows(
            hidden=hidden,
            before=before.flatten(),
            candidates=found.candidates,
            choices=teacher.choices[judges.flatten()],
        )
        lm_head = head.lm_head_of_step(0).weight
        assert lm_head is not None, "the head's weights are packed"
        tables = PathTables(lm_head, selector.hidden_projection, selector.books)
        of_path, proposals = path_losses(rows, tables)
        weights = weigh(found.chance.view(counts.shape), counts) * counts
        total = total + objective.selector * (of_path.view(counts.shape) * weights).sum()
    best = proposals.view(counts.shape)
    scores = [
        _scored(head, step, teacher, best[:, i], losses[:, i].sum() * share[i])
        for i, step in enumerate(steps)
    ]
    return total, scores


def dpace_weights(chances: Tensor, counts: Tensor, alpha: float = DPACE_ALPHA) -> Tensor:
    """Returns D-PACE's weights of blocks' steps, all [B, K]; 0 where a step does not count."""
    smooth = (alpha + (1 - alpha) * chances).masked_fill(~counts, 1.0)
    reached = smooth.cumprod(-1) * counts
    return reached.flip(-1).cumsum(-1).flip(-1) * counts


def score(
    head: DraftHead,
    step: DraftStep,
    teacher: Teacher,
    with_loss: bool = True,
    variation: float = 0.0,
) -> StepScore:
    """Judges one step by the target's distribution over the head's vocabulary.

    Rows whose greedy token the head cannot draft have no loss, but count as wrong.
    """
    rows, judges = step.rows, step.teacher_rows
    hidden = step.hidden[rows]
    features = None if step.features is None else step.features[rows]
    loss = torch.zeros((), device=hidden.device)
    if with_loss:
        counts = teacher.draftable[judges] & step.counted
        judgement = Judgement(teacher.logits, judges, counts, variation)
        total, found = linear_loss(_products(head, hidden, features, step.step), judgement)
        loss, proposals = total / counts.sum().clamp_min(1), found.best
    if not with_loss or step.before is not None:
        is_clustered = isinstance(getattr(head, "lm_head", None), ClusteredHead)
        parts = [
            proposals_of(head, step, some)
            for some in rows.split(CLUSTERED_ROWS if is_clustered else ROWS)
        ]
        proposals = torch.cat(parts)
    return _scored(head, step, teacher, proposals, loss)


def proposals_of(head: DraftHead, step: DraftStep, rows: Tensor) -> Tensor:
    """Returns what some of a step's rows propose, [R], in the head's vocabulary."""
    if not len(rows):
        return rows
    hidden = step.hidden[rows]
    logits = head.compute_logits(hidden, step.step)
    if step.features is not None:
        assert isinstance(head, DFlashHead) and head.markov_head is not None
        logits = logits + head.markov_head.bias(step.features[rows])  # type: ignore[operator]
    if step.before is None:
        return gather_logits(logits).argmax(-1)
    assert isinstance(head, DFlashHead) and head.candidate_selector is not None
    selector = head.candidate_selector
    candidates = selector.candidates(logits, hidden, len(hidden))
    return walk_candidates(candidates, step.before[rows], selector.books)[0].to(torch.int64)


def _products(head: DraftHead, hidden: Tensor, features: Tensor | None, step: int) -> list[Product]:
    """Returns the products whose sum is the logits: the lm_head's, and of DSpark the bias."""
    if head.logits_norm is not None:
        hidden = head.logits_norm(hidden)
    layers = [(hidden, head.lm_head_of_step(step).weight)]
    if features is not None:
        assert isinstance(head, DFlashHead) and head.markov_head is not None
        layers.append((features, head.markov_head.markov_w2.weight))
    products = []
    for x, weight in layers:
        assert weight is not None, "the head's weights are packed"
        products.append(Product(x, weight))
    return products


def _scored(
    head: DraftHead, step: DraftStep, teacher: Teacher, proposals: Tensor, loss: Tensor
) -> StepScore:
    """proposals: [R], in the head's vocabulary."""
    if head.d2t is not None:
        proposals = proposals + head.d2t[proposals]
    is_counted = torch.zeros(len(teacher.choices), dtype=torch.bool, device=teacher.choices.device)
    is_right = torch.zeros_like(is_counted)
    is_counted[step.drafted_from] = step.counted
    is_right[step.drafted_from] = step.counted & (proposals == teacher.choices[step.teacher_rows])
    has_loss = step.counted & teacher.draftable[step.teacher_rows]
    loss_share = has_loss.sum() / step.counted.sum().clamp_min(1)
    return StepScore(loss, is_right, is_counted, loss_share)


@torch.no_grad()
def conditional_acceptance(scores: list[StepScore]) -> list[tuple[int, int]]:
    """Counts per step (proposals right, rows whose earlier steps were all right)."""
    alive: Tensor | None = None
    result = []
    for each in scores:
        alive = each.is_counted if alive is None else alive & each.is_counted
        right = alive & each.is_right
        result.append((int(right.sum()), int(alive.sum())))
        alive = right
    return result
