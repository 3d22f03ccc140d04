"""`OnePassWorker`: all K drafts from one pass, which reads mask tokens in their places."""

from __future__ import annotations

from torch import Tensor

from ..config import DecodingBaseConfig
from ..distributed.logits import ShardedLogits, gather_logits
from ..metadata.attention import AttentionMetadata
from .base import SpecWorkerBase
from .protocols import DraftInputs


class OnePassWorker(SpecWorkerBase):
    """Base of the workers of masked drafters (`masked.py`) and of block drafters (`dflash.py`)."""

    drafts_with_network = drafts_in_one_pass = True
    reads_final_states = False  # where the drafter has captured layers

    def __init__(self, config: DecodingBaseConfig, mask_token_id: int):
        super().__init__(config)
        self.mask_token_id = mask_token_id

    def drafts(
        self,
        inputs: DraftInputs,
        meta: AttentionMetadata,
        last_positions: Tensor,
        logits: Tensor | ShardedLogits,
        d2t: Tensor | None,
    ) -> Tensor:
        """Draws the drafts: last_positions [B], logits [P * B, Vd] -> [B, K] int32."""
        batch, sampler = last_positions.shape[0], self.draft_sampler(inputs)
        if sampler is None and inputs.spec_metadata.guided is None:
            proposals = self.propose(logits, d2t, None, last_positions, 0).split(batch)
        else:  # noise, memory and grammars follow each draft's depth
            proposals = tuple(
                self.propose(part, d2t, sampler, last_positions, depth)
                for depth, part in enumerate(gather_logits(logits).split(batch))
            )
        return self.finish_drafts(inputs, proposals, last_positions, meta.max_seq_len)
