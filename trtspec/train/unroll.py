"""A head used step after step along whole texts, as drafting uses it, and what the target says.

Row t of a text x, at step s: the head reads token x[t+1+s] and proposes x[t+2+s]; the target's own
choice for that place is its logits at row t+1+s. At step 0 the head reads the target's hidden
states at t, later what its own step before returned. It stands at position t+s if it is used again
and again; at t if its layers are used once each (vanilla MTP), whose steps are passes over the same
rows (docs/decisions/005).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..attention.dense import DensePass
from ..metadata.spec import CapturedHiddenStates, SpecMetadata
from ..models.decoder import Decoder
from ..models.draft_head import DraftHead
from ..models.mtp import MTPHead

ROWS_OF_LOGITS = 4096  # at a time, where the whole vocabulary is made for each


@dataclass(frozen=True)
class Texts:
    """A batch of packed texts; tensors on the target's device."""

    input_ids: Tensor  # [N, L] int64
    loss_mask: Tensor  # [N, L] bool, tokens that the target wrote
    document_ids: Tensor  # [N, L] int, -1 is padding
    positions: Tensor  # [N, L] int64, within the document

    def to(self, device: torch.device) -> Texts:
        tensors = (self.input_ids, self.loss_mask, self.document_ids, self.positions)
        return Texts(*(t.to(device, non_blocking=True) for t in tensors))


@dataclass(frozen=True)
class Teacher:
    """What the target makes of a batch; T = N * L rows."""

    hidden: Tensor  # [T, n * D], what the head reads: captured layers, or the final states
    choices: Tensor  # [T] int64, the greedy token after each row
    logits: Tensor  # [T, Vd], over the head's vocabulary, model dtype


@dataclass(frozen=True)
class DraftStep:
    """One step along all texts."""

    step: int
    hidden: Tensor  # [T, H], what the head's `compute_logits` reads
    rows: Tensor  # [R] int64, rows whose proposal counts: it is the target's text
    teacher_rows: Tensor  # [R] int64, the target's rows that judge them


@torch.no_grad()
def teach(target: Decoder, head: DraftHead, texts: Texts) -> Teacher:
    """Runs the target along the texts."""
    ids, positions = texts.input_ids.flatten(), texts.positions.flatten()
    spec = SpecMetadata(1, 0, 0, num_tokens=len(ids))
    layers = head.layers_to_capture
    if layers:
        size = target.config.hidden_size
        buffer = target.embed_tokens.weight.new_empty(len(ids), len(layers) * size)
        spec.captured = CapturedHiddenStates(layers, buffer)
    final = target(ids, positions, DensePass(texts.document_ids), capture=spec)
    kept = None if head.d2t is None else torch.arange(len(head.d2t), device=ids.device) + head.d2t
    choices, logits = [], []
    for part in final.split(ROWS_OF_LOGITS):
        whole = target.compute_logits(part)
        choices.append(whole.argmax(-1))
        logits.append(whole if kept is None else whole[:, kept])
    hidden = spec.draft_hidden_states(final, len(ids))
    assert hidden is not None
    return Teacher(hidden, torch.cat(choices), torch.cat(logits))


def unroll(
    head: DraftHead, texts: Texts, hidden: Tensor, num_steps: int, shift: int = 1
) -> Iterator[DraftStep]:
    """The head's steps, 0 … num_steps - 1. Differentiable where gradients are on.

    Args:
        hidden: [T, n * D], `Teacher.hidden`.
        shift: row t reads token t + shift + s; other than 1 is a mistake, for the doctor to try.
    """
    advances = not (isinstance(head, MTPHead) and len(head.layers) > 1)
    length = texts.input_ids.shape[1]
    last_position = head.cos_sin.shape[0] - 1
    keys, state = DensePass(texts.document_ids), head.project_target_hidden(hidden)
    for step in range(num_steps):
        ids = _ahead(texts.input_ids, step + shift, 0).flatten()
        positions = (texts.positions + (step if advances else 0)).clamp_max(last_position)
        out, state = head(ids, positions.flatten(), state, keys, step)
        same = _ahead(texts.document_ids, step + 2, -2) == texts.document_ids
        counted = same & _ahead(texts.loss_mask, step + 2, False) & (texts.document_ids >= 0)
        rows = counted.flatten().nonzero()[:, 0]
        if length > 1:
            yield DraftStep(step, out, rows, rows + step + 1)


def _ahead(x: Tensor, places: int, fill: int | bool) -> Tensor:
    """x [N, L] moved left, `fill` at the end."""
    places = min(places, x.shape[1])
    return F.pad(x[:, places:], (0, places), value=fill)


@dataclass(frozen=True)
class StepScore:
    """A step's loss and how its proposals fare with the target's greedy choice."""

    loss: Tensor  # [], mean over rows; 0 without rows
    is_right: Tensor  # [T] bool, False outside `rows`
    is_counted: Tensor  # [T] bool


def score(head: DraftHead, step: DraftStep, teacher: Teacher, with_loss: bool = True) -> StepScore:
    """Soft cross-entropy with the target's distribution over the head's vocabulary.

    Rows whose greedy token the head cannot draft have no loss, but count as wrong.
    """
    device = step.hidden.device
    total, num_rows = torch.zeros((), device=device), torch.zeros((), device=device)
    is_right = torch.zeros(step.hidden.shape[0], dtype=torch.bool, device=device)
    is_counted = torch.zeros_like(is_right)
    is_counted[step.rows] = True
    parts = step.rows.split(ROWS_OF_LOGITS), step.teacher_rows.split(ROWS_OF_LOGITS)
    for rows, teacher_rows in zip(*parts, strict=True):
        hidden, choices = step.hidden[rows], teacher.choices[teacher_rows]
        with torch.no_grad():
            proposals = head.compute_logits(hidden, step.step).argmax(-1)
            if head.d2t is not None:
                proposals = proposals + head.d2t[proposals]
            is_right[rows] = proposals == choices
        if with_loss:
            theirs = teacher.logits[teacher_rows]
            best = theirs.argmax(-1)
            draftable = choices == (best if head.d2t is None else best + head.d2t[best])
            # Made again in the backward pass: logits of every step at once would not fit.
            total = total + checkpoint(
                _cross_entropy, head, hidden, step.step, theirs, draftable, use_reentrant=False
            )
            num_rows = num_rows + draftable.sum()
    return StepScore(total / num_rows.clamp_min(1), is_right, is_counted)


def _cross_entropy(
    head: DraftHead, hidden: Tensor, step: int, theirs: Tensor, counts: Tensor
) -> Tensor:
    """Sum over the rows that count, [] float32."""
    logits = head.compute_logits(hidden, step).float()
    each = -(theirs.float().softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return (each * counts).sum()


@torch.no_grad()
def conditional_acceptance(scores: list[StepScore]) -> list[tuple[int, int]]:
    """Per step: (proposals right, rows whose earlier steps were all right)."""
    alive: Tensor | None = None
    result = []
    for each in scores:
        alive = each.is_counted if alive is None else alive & each.is_counted
        right = alive & each.is_right
        result.append((int(right.sum()), int(alive.sum())))
        alive = right
    return result
