"""The records of running a head along sequences: what it reads, and one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


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

    def rows_of_step(self, step: int) -> Tensor:
        """Returns rows [R] int64 on the device whose proposal at a step is for a token that the
        target wrote."""
        sequences = self.on_host or self
        same = ahead(sequences.document_ids, step + 2, -2) == sequences.document_ids
        counted = same & ahead(sequences.loss_mask, step + 2, False) & (sequences.document_ids >= 0)
        rows = counted.flatten().nonzero()[:, 0]
        if self.input_ids.is_cuda and not rows.is_cuda:
            rows = rows.pin_memory()
        return rows.to(self.input_ids.device, non_blocking=True)


@dataclass(frozen=True)
class DraftStep:
    """One step along all sequences."""

    step: int
    hidden: Tensor  # [T, H], what the head's `compute_logits` reads; of a DFlash head by anchor
    rows: Tensor  # [R] int64, its rows whose proposal counts: it is the target's text
    teacher_rows: Tensor  # [R] int64, the target's rows that judge them
    drafted_from: Tensor  # [R] int64, the sequences' rows that proposed them: `rows`, or anchors


def ahead(x: Tensor, count: int, fill: int | bool) -> Tensor:
    """Shifts x [N, L] left by `count`, with `fill` at the end."""
    count = min(count, x.shape[1])
    return F.pad(x[:, count:], (0, count), value=fill)
