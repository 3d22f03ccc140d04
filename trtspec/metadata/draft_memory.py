"""`DraftMemory`: what drafts were drawn from, kept by slot for the step that judges them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError


@dataclass(frozen=True)
class DraftMemory:
    """S slots and one scratch slot; K drafts; Vd tokens of the drafter.

    log q of draft token j is (logits[j] - best) / T - log_sum. Drafts that are certain were not
    drawn: their q is 1, whatever the tensors hold.
    """

    logits: Tensor  # [S+1, K, Vd] in the drafter's dtype, before temperature
    best: Tensor  # [S+1, K] float32, the largest of them
    log_sum: Tensor  # [S+1, K] float32, log of the sum of exp((logits - best) / T)
    log_q: Tensor  # [S+1, K] float32, of the drafts themselves
    target_ids: Tensor | None  # [Vd] int64; None: the drafter's vocabulary is the target's
    draft_ids: Tensor | None  # [V] int32, the inverse, -1 where the drafter lacks the token
    are_certain: Tensor  # [S+1] bool, whether the slot's drafts are

    @staticmethod
    def allocate(
        num_slots: int,
        max_draft_len: int,
        vocab_size: int,
        target_vocab_size: int,
        d2t: Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> DraftMemory:
        """Allocates the memory, all zeros.

        Args:
            vocab_size: Vd <= V. target_vocab_size: V.
            d2t: [Vd] offsets from draft to target ids, no two to the same one. None: the drafter's
                tokens are the target's, or the first of them.
        """
        shape = num_slots + 1, max_draft_len
        best, log_sum, log_q = torch.zeros(3, *shape, device=device)
        logits = torch.zeros(*shape, vocab_size, dtype=dtype, device=device)
        target_ids = draft_ids = None
        if d2t is None and vocab_size != target_vocab_size:
            d2t = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        if d2t is not None:
            all_draft_ids = torch.arange(vocab_size, device=d2t.device)
            target_ids = d2t + all_draft_ids
            draft_ids = torch.full(
                (target_vocab_size,), -1, dtype=torch.int32, device=device
            ).index_copy(0, target_ids, all_draft_ids.to(torch.int32))
        are_certain = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)
        return DraftMemory(logits, best, log_sum, log_q, target_ids, draft_ids, are_certain)

    def require_slots(self, num_slots: int) -> None:
        """Raises ConfigError if the memory has fewer slots."""
        held = self.best.shape[0] - 1
        if held < num_slots:
            raise ConfigError(
                f"What drafts are drawn from was kept for {held} slots, and now there are "
                f"{num_slots}: call worker.remember_drafts for as many before the first step."
            )
