"""Every slot's tokens so far, and the base of drafters that look things up in them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import DecodingBaseConfig
from .base import SpecWorkerBase
from .protocols import DraftInputs
from .texts import STATE_NAMES, SlotTexts, add_accepted, allocate_texts, gather_texts


class HistoryWorker(SpecWorkerBase):
    """Keeps every slot's tokens so far (prompt and output) and their number."""

    state_names = STATE_NAMES

    def __init__(self, config: DecodingBaseConfig | None = None):
        super().__init__(config)
        self._slot_texts = SlotTexts()

    @property
    def slot_texts(self) -> SlotTexts:
        return self._slot_texts

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

    def add_accepted(self, inputs: DraftInputs) -> tuple[Tensor, Tensor]:
        """Adds a step's accepted tokens to its requests' texts.

        Returns:
            the texts [B, L] int32, which may hold anything past their ends, and their lengths [B]
            int64, at most L. A worker that drafts nothing in this step needs
            `texts.add_accepted` alone.
        """
        lens = add_accepted(inputs)
        return gather_texts(inputs, self.max_draft_len), lens
