"""DFlash: a block of K drafts in one pass, over keys and values made of the target's states.

Rows of one request (s = position of the step's first row, n tokens accepted, K' verified, K to be
drafted):

    context   all rows of the target's pass, at s … s+K'     keys and values alone, for all layers
    block     s+n …                                         [last token, K masks]; the masks propose

The context rows of rejected drafts are at s+n or later, where the block's rows overwrite them. The
block's own keys and values are overwritten in turn, by the next step's context. So a row sees
the target's states of the text, and its own block.

A head that samples from the anchor has one mask less: a row then proposes the token after its own,
and the last token's proposes too. A DSpark head chooses the drafts in turn: a bias by the token
before is added to each row's logits. A DFlash2 head walks through each row's best tokens, the
token before having a say. With K = 0 the context is read and nothing else, at once or later.
A head with `context_embeddings` reads the token after each context row too. The last accepted row's
is the block's first.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..distributed.logits import ShardedLogits, gather_logits, top_tokens
from ..metadata.attention import AttentionMetadata
from ..ops.step.rows import BlockShape, BlockStart, gather_rows, start_block
from ..ops.tokens.markov_walk import walk_markov
from ..ops.tokens.probability import walk_probabilities
from ..ops.tokens.walk import PathCandidates, candidate_scores, walk_candidates
from .heads import (
    draft_source,
    merged_embeds,
    nothing_drafted,
    read_undrafted,
    shifted_input_ids,
)
from .one_pass import OnePassWorker
from .protocols import BlockDraftModel, DraftInputs, both_outputs


class DFlashWorker(OnePassWorker):
    """Modes DFLASH and DSPARK."""

    can_read_late = True
    reads_next_tokens = False
    """Whether the head's context rows read the token after them, for `num_tokens_ahead`."""
    has_confidence = False
    """Whether the head says itself how likely its drafts are, as it was when it drafted last."""

    def num_proposals(self, inputs: DraftInputs) -> int:
        """Returns P, perhaps 0: the context is read in any case."""
        return inputs.step.draft_len

    @property
    def num_extra_kv_tokens(self) -> int:
        return self.max_draft_len + 1

    @property
    def num_extra_kv_tokens_at_rest(self) -> int:
        return 0

    @property
    def num_tokens_ahead(self) -> int:
        return int(self.reads_next_tokens)

    def draft(self, inputs: DraftInputs) -> Tensor:
        model, meta, hidden_states = draft_source(inputs)
        head = cast(BlockDraftModel, model)
        if inputs.step.missed is not None:
            read_undrafted(self, inputs)
            return nothing_drafted(inputs)
        if head.reads_next_tokens:
            ids, embeds = self.next_ids(inputs, meta), merged_embeds(inputs)
            head.read_context(hidden_states, meta.position_ids, meta, ids, **embeds)
        else:
            head.read_context(hidden_states, meta.position_ids, meta)
        if not self.num_proposals(inputs):
            return self.no_drafts(inputs)
        rows = self.start_block(inputs, meta, head.samples_from_anchor)
        ids, own = rows.ids, rows.meta
        out, _ = both_outputs(head(ids, own.position_ids, hidden_states, own, step=0))
        proposing = out  # of one request whose rows all propose: in turn
        if len(rows.tokens) > 1 or len(rows.proposing) < len(out):
            (proposing,) = gather_rows(rows.proposing, out)  # by proposal, then by request
        self.has_confidence = head.confidence_head is not None
        if head.markov_head is not None:
            drafts = self.drafts_in_turn(inputs, meta, rows, head, out, proposing)
        elif head.candidate_selector is not None:
            return self.drafts_of_path(inputs, meta, rows, head, proposing)
        else:
            logits = head.compute_logits(proposing, 0)
            drafts = self.drafts(inputs, meta, rows.last_positions, logits, head.d2t)
        if self.has_confidence and self.keeps_probabilities:
            self.add_confidence(head, proposing, rows.tokens[:, 0], drafts)
        return drafts

    def next_ids(self, inputs: DraftInputs, meta: AttentionMetadata) -> Tensor:
        """Returns the token after each row, [T] int32 or int64."""
        if meta.num_contexts:
            return shifted_input_ids(self, inputs, meta)
        return inputs.path.tokens_after_rows(slice(None), meta.rows_per_generation)

    def note_logits(self, logits: Tensor | ShardedLogits, batch: int) -> None:
        if not self.has_confidence:
            super().note_logits(logits, batch)

    def add_confidence(
        self, head: BlockDraftModel, proposing: Tensor, last: Tensor, drafts: Tensor
    ) -> None:
        """Notes how likely drafts are by DSpark's confidence head, which sees no draft itself.

        Args:
            proposing: [P * B, H]. last: [B] int, the last accepted tokens. drafts: [B, K] int32.
        """
        confidence, batch = head.confidence_head, len(last)
        assert confidence is not None
        before = torch.cat([last[None].to(drafts.dtype), drafts.T])[: len(proposing) // batch]
        before = before.flatten().clamp_min(0)  # -1 is beyond the longest text
        embeddings = proposing[:, :0]
        if head.markov_head is not None:
            embeddings = head.markov_head.embeddings(before)
        chances = confidence(proposing, embeddings).sigmoid().nan_to_num(0.0)
        self.add_probabilities(chances, batch)

    def drafts_in_turn(
        self,
        inputs: DraftInputs,
        meta: AttentionMetadata,
        rows: BlockStart,
        head: BlockDraftModel,
        out: Tensor,
        proposing: Tensor,
    ) -> Tensor:
        """Draws DSpark's drafts, each with a bias by the one before.

        Args:
            out: [B * R, H]. proposing: [P * B, H].
        """
        markov, sampler = head.markov_head, self.draft_sampler(inputs)
        assert markov is not None
        batch, before = rows.last_positions.shape[0], rows.tokens[:, 0]
        logits: Any = head.compute_logits(proposing, 0)
        tables, proposals = markov.tables(head.d2t), list[Tensor]()
        if tables is not None and sampler is None and inputs.spec_metadata.guided is None:
            taken = walk_markov(logits, before, tables)
            if self.keeps_probabilities and not self.has_confidence:
                found = walk_probabilities(logits, before, taken, tables)
                self.add_probabilities(found.flatten(), batch)
            proposals += taken.unbind(0)
            return self.finish_drafts(inputs, proposals, rows.last_positions, meta.max_seq_len)
        first = out.view(batch, -1, out.shape[-1])[:, 0]
        state = markov.first_state(first)
        if not head.samples_from_anchor:
            _, state = markov(before, first, state)
        for hidden, unbiased in zip(proposing.split(batch), logits.split(batch), strict=True):
            bias, state = markov(before, hidden, state)
            depth = len(proposals)
            before = self.propose(unbiased + bias, head.d2t, sampler, rows.last_positions, depth)
            proposals.append(before)
        return self.finish_drafts(inputs, proposals, rows.last_positions, meta.max_seq_len)

    def drafts_of_path(
        self,
        inputs: DraftInputs,
        meta: AttentionMetadata,
        rows: BlockStart,
        head: BlockDraftModel,
        proposing: Tensor,
    ) -> Tensor:
        """Walks through the candidates of a DFlash2 head: proposing [P * B, H] -> [B, K].

        What a sampled draft is drawn from has the candidates alone. With a grammar they are the
        best of what it allows.
        """
        selector, sampler = head.candidate_selector, self.draft_sampler(inputs)
        assert selector is not None
        before = rows.tokens[:, 0]
        batch = before.shape[0]
        logits = head.compute_logits(proposing, 0)
        candidates = selector.candidates(logits, proposing, batch)
        proposals: list[Tensor] = []
        is_guided = inputs.spec_metadata.guided is not None
        if sampler is None and not is_guided:
            self.note_logits(logits, batch)
            proposals += walk_candidates(candidates, before, selector.books).unbind(0)
            return self.finish_drafts(inputs, proposals, rows.last_positions, meta.max_seq_len)
        nothing = torch.full(
            (batch, logits.shape[1]), float("-inf"), dtype=logits.dtype, device=before.device
        )
        of_rows = gather_logits(logits).split(batch) if is_guided else ()
        for depth, of_draft in enumerate(zip(*candidates, strict=True)):
            given = PathCandidates(*of_draft)
            if is_guided:  # what it allows is known once the draft before is taken
                allowed = self.allowed(of_rows[depth], None, depth)
                unary, ids = top_tokens(allowed, given.ids.shape[1])
                given = PathCandidates(ids, unary, given.states)
            scores = candidate_scores(given, before, selector.books).to(logits.dtype)
            drawn_from = nothing.scatter(1, given.ids, scores)
            before = self.propose_allowed(drawn_from, None, sampler, rows.last_positions, depth)
            proposals.append(before)
        return self.finish_drafts(inputs, proposals, rows.last_positions, meta.max_seq_len)

    def start_block(
        self, inputs: DraftInputs, meta: AttentionMetadata, samples_from_anchor: bool
    ) -> BlockStart:
        """Returns the blocks' rows."""
        proposals, path = self.num_proposals(inputs), inputs.path
        rows = proposals if samples_from_anchor else proposals + 1
        block = BlockShape(rows, proposals, self.mask_token_id)
        return start_block(meta, path.tokens, path.lens, block, self.num_extra_kv_tokens)
