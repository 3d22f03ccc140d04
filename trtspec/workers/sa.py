"""Mode SA: suffix lookup alone."""

from __future__ import annotations

from torch import Tensor

from ..config import SADecodingConfig
from .base import SpecWorkerBase
from .lookup import SuffixLookup
from .protocols import DraftInputs


class SAWorker(SpecWorkerBase):
    """Mode SA. State: the lookup's."""

    config: SADecodingConfig
    lookup: SuffixLookup
    reads_final_states = False

    def __init__(self, config: SADecodingConfig):
        super().__init__(config)
        self.lookup = SuffixLookup(config, config.max_draft_len)

    def draft(self, inputs: DraftInputs) -> Tensor:
        found = self.lookup.find(inputs)
        return self.no_drafts(inputs) if found is None else found.tokens
