"""EAGLE-3: one head, used K times inside the target's step.

Rows of one request (p = position of the step's first row, n = tokens accepted, K drafts):

    pass 0      all rows of the target's pass, at p …     token = the one after each row, hidden =
                                                          the target's at the row
                row n-1 proposes; rows past it are of rejected drafts, overwritten next step.
                An EAGLE-3 head of one layer (`keeps_rows`) computes row n-1 alone, once the keys
                and values of all rows are written. With prompts a head of one layer writes them
                first, and then reads row n-1 alone.
    pass i >= 1 one row, at p + n - 1 + i                 token = proposal i, hidden = pass i-1's

A drafter that keeps no KV (`advances_positions` is False) reads one row per request at every pass.
Pass 0 reads the last accepted token with the target's hidden state before it; later passes read as
above. All of them see the target's KV up to p + n - 1 and nothing later, so they share metadata.

Pass 0 rewrites the KV that drafting wrote from its feedback. So the head's KV is computed from the
target's hidden state as soon as that is known (docs/architecture.md has a worked trace). A step
that drafts nothing leaves the head's rows for later, or writes their keys and values: those of a
head with several layers by a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from ..acceptance.draw import DraftSampler
from ..errors import ConfigError
from ..metadata.accepted_path import certain_rows
from ..metadata.attention import AttentionMetadata, KeptRows
from ..ops.step.rows import (
    draft_step,
    draft_steps,
    finish_drafts,
    gather_rows,
    shift_for_drafting,
    start_chain,
)
from .base import SpecWorkerBase
from .heads import (
    best_tokens,
    draft_source,
    has_text_alone,
    merged_embeds,
    nothing_drafted,
    one_layer,
    read_undrafted,
    shifted_input_ids,
)
from .protocols import DraftInputs, DraftModel, both_outputs


@dataclass(frozen=True)
class DraftChain:
    """What one draft pass leaves to the next."""

    model: DraftModel
    meta: AttentionMetadata  # of the target's pass
    positions: Tensor  # [B] int64, of the last accepted token
    hidden: Tensor  # [B, H], feedback that the next pass reads
    proposals: tuple[Tensor, ...]  # each [B] int32
    sampler: DraftSampler | None = None
    fixed_meta: AttentionMetadata | None = None  # of all passes, if positions do not advance
    next_metas: tuple[AttentionMetadata, ...] = ()  # of the passes still to run, if they advance

    def draft_tokens(self, max_draft_len: int) -> Tensor:
        """Returns the drafts [B, K] int32, -1 past the maximum length and where no pass ran."""
        return finish_drafts(self.proposals, self.positions, self.meta.max_seq_len, max_draft_len)


class FirstRows(NamedTuple):
    """What pass 0 reads."""

    ids: Tensor  # [T] int64, the token after each row of the target's pass
    proposing: Tensor  # [B] int64, the rows that read the last accepted tokens
    positions: Tensor  # [B] int64, of those tokens
    kept: KeptRows | None = None
    """The rows that propose, as a pass of their own. None: with prompts, or at a fixed position."""


class Eagle3OneModelWorker(SpecWorkerBase):
    """Modes EAGLE3_ONE_MODEL, and EAGLE3, whose passes the executor launches one by one."""

    drafts_with_network = True
    reads_final_states = False  # where the head has captured layers
    can_read_late = True

    @property
    def num_extra_kv_tokens(self) -> int:
        return self.max_draft_len - 1

    @property
    def num_extra_kv_tokens_at_rest(self) -> int:
        return 0

    @property
    def num_tokens_ahead(self) -> int:
        return 1  # a row reads the token after its own

    def draft(self, inputs: DraftInputs) -> Tensor:
        if inputs.step.draft_len == 0:
            self.skip_passes(inputs)
            return nothing_drafted(inputs)
        chain = self.first_pass(inputs)
        for _ in range(1, inputs.step.draft_len):
            chain = self.next_pass(chain)
        return self.finish_drafts(inputs, chain.proposals, chain.positions, chain.meta.max_seq_len)

    def skip_passes(self, inputs: DraftInputs) -> None:
        """Does in place of the draft passes what the head needs where nothing is drafted."""
        if inputs.draft_model is not None and getattr(
            inputs.draft_model, "advances_positions", True
        ):
            read_undrafted(self, inputs)

    def first_pass(self, inputs: DraftInputs) -> DraftChain:
        """Runs pass 0, which reads the target's rows. The last accepted one proposes."""
        model, meta, hidden_states = source = draft_source(inputs)
        if getattr(model, "mask_hidden", None) is not None:
            raise ConfigError(
                "The head drafts in parallel and was not trained to read its own proposals: make "
                "the worker with create_worker(config, head.config.mask_token_id)."
            )
        path, further = inputs.path, inputs.step.draft_len - 1
        next_metas: Sequence[AttentionMetadata] = ()
        if meta.num_contexts:
            certain = certain_rows(meta)
            first = FirstRows(
                shifted_input_ids(self, inputs, meta),
                path.last_rows(certain),
                path.next_positions(meta.position_ids[certain]),
            )
            if further > 0 and model.advances_positions:
                # Pass 1 is at the last accepted token's position, and reads the token after.
                next_metas = draft_steps(meta, first.positions, self.max_draft_len, further)
        elif model.advances_positions:  # the same in one launch
            start = start_chain(meta, path.tokens, path.lens, self.max_draft_len, further + 1)
            own, *next_metas = start.passes
            kept = KeptRows(start.proposing, own)
            first = FirstRows(start.ids, start.proposing, start.positions, kept)
        else:
            rows = meta.position_ids, meta.rows_per_generation
            first = FirstRows(*shift_for_drafting(path.tokens, path.lens, *rows))
        if not model.advances_positions:
            (last,) = gather_rows(first.proposing, hidden_states)
            projected = model.project_target_hidden(last)
            proposing, hidden, fixed_meta = _read_proposing_rows(model, meta, first, projected)
        else:
            proposing, hidden = _read_all_rows(inputs, source, first)
            fixed_meta = None
        chain = DraftChain(
            model=model,
            meta=meta,
            positions=first.positions,
            hidden=hidden,
            proposals=(),
            sampler=self.draft_sampler(inputs),
            fixed_meta=fixed_meta,
            next_metas=tuple(next_metas),
        )
        return self._propose(chain, proposing)

    def next_pass(self, chain: DraftChain) -> DraftChain:
        """Runs the next pass, one row per request: the last proposal with the last feedback."""
        passes, ids = len(chain.proposals), chain.proposals[-1]
        meta = chain.fixed_meta
        if meta is None:
            meta, *rest = chain.next_metas
            chain = replace(chain, next_metas=tuple(rest))
        out, feedback = both_outputs(
            chain.model(ids, meta.position_ids, chain.hidden, meta, step=passes)
        )
        return self._propose(replace(chain, hidden=feedback), out)

    def _propose(self, chain: DraftChain, hidden: Tensor) -> DraftChain:
        """Returns the chain with one more proposal, from hidden [B, H]."""
        depth, proposal = len(chain.proposals), None
        if self.takes_best_alone(chain.sampler):
            proposal = best_tokens(chain.model, hidden, depth)
        if proposal is None:
            logits = chain.model.compute_logits(hidden, depth)
            proposal = self.propose(logits, chain.model.d2t, chain.sampler, chain.positions, depth)
        return replace(chain, proposals=(*chain.proposals, proposal))


def _read_all_rows(
    inputs: DraftInputs, source: tuple[DraftModel, AttentionMetadata, Tensor], first: FirstRows
) -> tuple[Tensor, Tensor]:
    """Runs pass 0 over all rows of the target's pass.

    Returns:
        (what `compute_logits` reads, the feedback), both [B, H], of the rows that propose.
    """
    model, meta, hidden_states = source
    projected = model.project_target_hidden(hidden_states)
    head = one_layer(model)
    if head is not None and meta.num_contexts and has_text_alone(meta, inputs):
        # Of a prompt one row proposes. The others leave keys and values behind, nothing else.
        head.write_kv_of_projected(first.ids, meta.position_ids, projected, meta)
        (projected,) = gather_rows(first.proposing, projected)
        proposing, feedback, _ = _read_proposing_rows(model, meta, first, projected)
        return proposing, feedback
    embeds = merged_embeds(inputs)
    if first.kept is not None and getattr(model, "keeps_rows", False):
        kept: dict[str, Any] = {**embeds, "kept": first.kept}
        return both_outputs(model(first.ids, meta.position_ids, projected, meta, 0, **kept))
    out = both_outputs(model(first.ids, meta.position_ids, projected, meta, step=0, **embeds))
    proposing, feedback = gather_rows(first.proposing, *out)
    return proposing, feedback


def _read_proposing_rows(
    model: DraftModel, meta: AttentionMetadata, first: FirstRows, projected: Tensor
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Runs pass 0 over one row per request, at the position of the last key that it sees.

    Args:
        projected: [B, H], of these rows.

    Returns:
        (what `compute_logits` reads [B, H], the feedback [B, H], the rows' metadata).
    """
    tokens, positions = first.ids[first.proposing][:, None], first.positions[:, None]
    ids, step = draft_step(meta, tokens, positions, 0, advance=-1)
    return *both_outputs(model(ids, step.position_ids, projected, step, step=0)), step
