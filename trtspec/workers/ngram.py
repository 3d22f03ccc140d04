"""Prompt lookup: drafts are copied from the sequence so far, which is kept by slot."""

from __future__ import annotations

from torch import Tensor

from ..config import NGramDecodingConfig
from ..ops.tokens.ngram import propose_ngrams
from .history import HistoryWorker
from .protocols import DraftInputs
from .texts import add_accepted


class NGramWorker(HistoryWorker):
    """Mode NGRAM. State: every slot's tokens so far (prompt and output) and their number."""

    config: NGramDecodingConfig
    reads_final_states = False

    def draft(self, inputs: DraftInputs) -> Tensor:
        if inputs.step.draft_len == 0:
            add_accepted(inputs)
            return self.no_drafts(inputs)
        history, lens = self.add_accepted(inputs)
        config = self.config
        assert config.min_matching_ngram_size is not None
        return propose_ngrams(
            history,
            lens,
            config.max_draft_len,
            config.max_matching_ngram_size,
            config.min_matching_ngram_size,
            config.is_use_oldest,
        )
