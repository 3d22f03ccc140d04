"""Prompt lookup: drafts are copied from the sequence so far, which is kept by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import NGramDecodingConfig
from ..ops.tokens.ngram import propose_ngrams
from . import texts
from .base import SpecWorkerBase
from .protocols import DraftInputs


class NGramWorker(SpecWorkerBase):
    """Mode NGRAM. State: every slot's tokens so far (prompt and output) and their number."""

    config: NGramDecodingConfig
    state_names = texts.STATE_NAMES
    reads_final_states = False

    def __init__(self, config: NGramDecodingConfig):
        super().__init__(config)
        self._slot_texts = texts.SlotTexts()

    @property
    def slot_texts(self) -> texts.SlotTexts:
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
        return state | texts.allocate_texts(num_slots, max_seq_len, self.max_draft_len, device)

    def draft(self, inputs: DraftInputs) -> Tensor:
        lens = texts.add_accepted(inputs)
        if inputs.step.draft_len == 0:
            return self.no_drafts(inputs)
        config = self.config
        assert config.min_matching_ngram_size is not None
        return propose_ngrams(
            texts.gather_texts(inputs, self.max_draft_len),
            lens,
            config.max_draft_len,
            config.max_matching_ngram_size,
            config.min_matching_ngram_size,
            config.is_use_oldest,
        )
