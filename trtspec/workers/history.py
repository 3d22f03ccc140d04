"""Every slot's tokens so far, and the base of drafters that look things up in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import SpecWorkerBase
from .protocols import DraftInputs
from .texts import STATE_NAMES, add_accepted, admit_text, allocate_texts, gather_texts


class HistoryWorker(SpecWorkerBase):
    """Keeps every slot's tokens so far (prompt and output) and their number."""

    state_names = STATE_NAMES

    def allocate_state(
        self,
        num_slots: int,
        max_seq_len: int,
        device: torch.device,
        *,
        hidden_size: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Tensor]:
        state = super().allocate_state(num_slots, max_seq_len, device)
        return state | allocate_texts(num_slots, max_seq_len, self.max_draft_len, device)

    def admit(
        self,
        state: dict[str, Tensor],
        slot: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int | None = None,
    ) -> None:
        super().admit(state, slot, token_ids, num_prompt_tokens)
        admit_text(state, slot, token_ids)

    def add_accepted(self, inputs: DraftInputs) -> tuple[Tensor, Tensor]:
        """Adds a step's accepted tokens to its requests' texts.

        Returns:
            the texts [B, L] int32, which may hold anything past their ends, and their lengths [B]
            int64, at most L. A worker that drafts nothing in this step needs
            `texts.add_accepted` alone.
        """
        lens = add_accepted(inputs)
        return gather_texts(inputs, self.max_draft_len), lens
