"""The records of running a head along sequences: what it reads, one step, and who judges it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.dense import DensePass


@dataclass(frozen=True)
class Sequences:
    """A batch of packed sequences; tensors on the target's device."""

    input_ids: Tensor  # [N, L] int64
    loss_mask: Tensor  # [N, L] bool, tokens that the target wrote
    document_ids: Tensor  # [N, L] int, -1 is padding
    positions: Tensor  # [N, L] int64, within the document
    on_host: Sequences | None = None  # a copy on the host, which can be read without waiting

    def to(self, device: torch.device) -> Sequences:
        tensors = (self.input_ids, self.loss_mask, self.document_ids, self.positions)
        ids, mask, documents, positions = (t.to(device, non_blocking=True) for t in tensors)
        return Sequences(ids, mask, documents, positions, on_host=self.on_host or self)

    def counts_ahead(self, count: int) -> Tensor:
        """Returns whether the token `count` rows further is of the same document and the target's,
        [N, L] bool."""
        same = ahead(self.document_ids, count, -2) == self.document_ids
        return same & ahead(self.loss_mask, count, False) & (self.document_ids >= 0)

    def rows_of_step(self, step: int) -> Tensor:
        """Returns rows [R] int64 on the device whose proposal at a step is for a token that the
        target wrote."""
        rows = (self.on_host or self).counts_ahead(step + 2).flatten().nonzero()[:, 0]
        return without_waiting(rows, self.input_ids.device)


def without_waiting(x: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host to a device, which reads it when it comes to it."""
    if device.type == "cuda" and not x.is_cuda:
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


@dataclass(frozen=True)
class Teacher:
    """The target's outputs for a batch; T = N * L rows."""

    hidden: Tensor  # [T, n * D], what the head reads: captured layers, or the final states
    choices: Tensor  # [T] int64, the greedy token after each row
    logits: Tensor  # [T, Vd], over the head's vocabulary, model dtype
    draftable: Tensor  # [T] bool, whether the head can propose the choice
    keys: DensePass | None = None  # of the target's layers, for a head that reads them


@dataclass(frozen=True)
class DraftStep:
    """One step along all sequences."""

    step: int
    hidden: Tensor  # [T, H], what the head's `compute_logits` reads; of a block head by anchor
    rows: Tensor  # [R] int64, its rows that propose
    counted: Tensor  # [R] bool, whether a proposal counts: it is for the target's text
    teacher_rows: Tensor  # [R] int64, the target's rows that judge them
    drafted_from: Tensor  # [R] int64, the sequences' rows that proposed them: `rows`, or anchors
    features: Tensor | None = None  # [T, rank], what DSpark's bias reads
    before: Tensor | None = None  # [T] int64, the token before the proposed one, for DFlash2's path


def ahead(x: Tensor, count: int, fill: int | bool) -> Tensor:
    """Shifts x [N, L] left by `count`, with `fill` at the end."""
    count = min(count, x.shape[1])
    return F.pad(x[:, count:], (0, count), value=fill)
