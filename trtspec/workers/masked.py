"""Masked drafters: all K drafts from one pass, with mask tokens in place of earlier drafts.

Rows of one request in the pass (n tokens accepted, K' drafts verified, P proposed; a = position of
the first new token):

    row       0 … n-2          n-1      n … n+P-2   … K'+P-1
    reads     accepted drafts  bonus    masks       masks, of no use
    writes    KV that stays             KV that the next pass writes again
    proposes  -                1 … P

The rows have consecutive positions. A row attends to the sequence so far and to rows of this pass
before it. It never sees KV that masks or rejected drafts of an earlier pass left behind: that is at
a or later, and this pass writes each of those positions before a row attends to it. The number of
rows does not depend on n.

An earlier pass reads the prompt. Then the row of its last token drafts like the others.
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor

from ..errors import ConfigError
from ..metadata.accepted_path import certain_rows
from ..metadata.attention import AttentionMetadata
from ..ops.step.rows import MaskedRows, draft_step, gather_rows, masked_rows
from ..utils import renamed
from .heads import (
    draft_model_behind_prompts,
    draft_source,
    merged_embeds,
    one_layer,
    shifted_input_ids,
    skip_kv_of_first_rows,
)
from .one_pass import OnePassWorker
from .protocols import DraftInputs, MaskedDraftModel, both_outputs


class MaskedWorker(OnePassWorker):
    """Builds the pass's rows, for both kinds of masked drafter."""

    first_row_offset: ClassVar[int]
    """Position of the pass's first row, less that of the certain row
    (`metadata/accepted_path.py`)."""

    @property
    def num_extra_kv_tokens(self) -> int:
        return self.max_draft_len - 1 + self.first_row_offset

    @property
    def num_tokens_ahead(self) -> int:
        return 1 - self.first_row_offset

    def num_proposals(self, inputs: DraftInputs) -> int:
        """Returns P. It is at least 1: the pass always runs, so that the drafter lacks no KV."""
        return max(1, inputs.step.draft_len)

    def rows_of_pass(
        self, inputs: DraftInputs, meta: AttentionMetadata
    ) -> tuple[MaskedRows, Tensor, AttentionMetadata]:
        """Returns (the rows, their ids [B * R] int64, the pass's metadata)."""
        proposals = self.num_proposals(inputs)
        accepted_rows = meta.rows_per_generation if meta.num_generations else 1
        num_rows = accepted_rows + proposals - 1
        rows = masked_rows(
            inputs.accepted_tokens,
            inputs.num_accepted_tokens,
            meta.position_ids,
            certain_rows(meta),
            num_rows,
            proposals,
            self.mask_token_id,
            self.first_row_offset,
        )
        # A context's rows lie past its prompt's end, and max_kv_len may end there.
        ids, step = draft_step(meta, rows.tokens, rows.positions, extra_kv=num_rows)
        if self.first_row_offset == 0:
            step = skip_kv_of_first_rows(step, meta, inputs)
        return rows, ids, step


class MaskedEagle3Worker(MaskedWorker):
    """P-EAGLE (arXiv:2602.01469), an EAGLE-3 head.

    At mask rows it reads the mask token's embedding and a learned hidden state.
    """

    first_row_offset = 0  # a row reads the token after its own

    def draft(self, inputs: DraftInputs) -> Tensor:
        head, meta, hidden_states = draft_source(inputs)
        model = cast(MaskedDraftModel, head)
        mask_hidden: Tensor | None = getattr(model, "mask_hidden", None)
        if mask_hidden is None:
            raise ConfigError(
                "The head has no mask_hidden, which it would read at the masks: it drafts one "
                "token a pass. Make the worker with mask_token_id=None."
            )
        hidden, tokens = model.project_target_hidden(hidden_states), meta.num_context_tokens
        if tokens:
            ids = shifted_input_ids(self, inputs, meta)[:tokens]
            positions, states = meta.position_ids[:tokens], hidden[:tokens]
            prompts, embeds = meta.contexts_only(), merged_embeds(inputs)
            if (one := one_layer(model)) is not None:
                one.write_kv_of_projected(ids, positions, states, prompts, **embeds)
            else:
                model(ids, positions, states, prompts, step=0, **embeds)
        rows, ids, step = self.rows_of_pass(inputs, meta)
        states = torch.cat([hidden, mask_hidden[None]])  # row T is the masks'
        (hidden,) = gather_rows(rows.sources, states)
        out, _ = both_outputs(model(ids, step.position_ids, hidden, step, step=0))
        (proposing,) = gather_rows(rows.proposing, out)
        return self.drafts(
            inputs, meta, rows.last_positions, model.compute_logits(proposing, 0), model.d2t
        )


class MaskedDraftTargetWorker(MaskedWorker):
    """PARD (arXiv:2504.18583): a draft model fine-tuned to read mask tokens."""

    first_row_offset = 1  # a row reads the token at its position; the certain one was read before

    def draft(self, inputs: DraftInputs) -> Tensor:
        model, meta = draft_model_behind_prompts(inputs)
        rows, ids, step = self.rows_of_pass(inputs, meta)
        (proposing,) = gather_rows(rows.proposing, model(ids, step.position_ids, step))
        return self.drafts(inputs, meta, rows.last_positions, model.compute_logits(proposing), None)


__getattr__ = renamed(
    __name__,
    {
        "ParallelDraftTargetWorker": "MaskedDraftTargetWorker",
        "ParallelEagle3Worker": "MaskedEagle3Worker",
        "ParallelWorker": "MaskedWorker",
    },
)
