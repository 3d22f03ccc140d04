"""Drafting with multi-token-prediction layers.

`MTPEagleWorker` uses one layer K times, as EAGLE-3 uses its head. `MTPWorker` ("vanilla") uses K
layers once each, as DeepSeek-V3 trains them: depth k reads, at position i, the output of depth
k-1 there and the token k+1 places on,

    depth 0   h_i = target's hidden state    token t[i+1]   proposes t[i+2]
    depth k   h_i = depth k-1's output       token t[i+k+1] proposes t[i+k+2]

so all depths run over the same rows, and depth k is the same ids shifted left once more, its own
last proposal at the end. The rows before the step's first one whose depths read tokens that were
still guesses then, K-1 of them, are computed again; their target hidden states and tokens are
kept per slot. So each depth's KV is always what the text says, whatever was rejected.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from ..errors import ConfigError
from ..metadata.attention import AttentionMetadata
from ..ops.step.rows import finish_drafts
from ..ops.step.slots import slot_mapping
from ..ops.tokens.greedy import update_window
from ..utils import to_device
from .base import SpecWorkerBase
from .eagle3 import Eagle3OneModelWorker
from .heads import draft_source, shifted_input_ids
from .protocols import DraftInputs, both_outputs


class MTPEagleWorker(Eagle3OneModelWorker):
    """Modes MTP_EAGLE_ONE_MODEL and, passes driven by the executor, MTP_EAGLE."""


class MTPWorker(SpecWorkerBase):
    """Mode MTP: layer k drafts token k.

    State: `window_hidden` [S+1, K-1, D] and `window_tokens` [S+1, K-1] int64: the target's hidden
    states of the last K-1 positions and the token after each, the newest last.
    """

    drafts_with_network = True
    state_names = ("window_hidden", "window_tokens")

    @property
    def window(self) -> int:
        return self.max_draft_len - 1

    @property
    def num_rewritten_tokens(self) -> int:
        return self.window

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
        rows, width = num_slots + 1, self.window
        state["window_hidden"] = torch.zeros(rows, width, hidden_size, dtype=dtype, device=device)
        state["window_tokens"] = torch.zeros(rows, width, dtype=torch.int64, device=device)
        return state

    def draft(self, inputs: DraftInputs) -> Tensor:
        model, meta, hidden_states = draft_source(inputs)
        given, slots = inputs.step, inputs.step.slot_ids
        window_hidden, window_tokens = given.state["window_hidden"], given.state["window_tokens"]
        reread = given.reread_embeds
        if self.window and reread is None and given.next_inputs_embeds is not None:
            raise ConfigError(
                "MTPWorker computes K-1 rows before each context again: for prompts that hold "
                "vectors set spec_metadata.reread_embeds too."
            )
        rows = _Rows(meta, self.window, None if reread is None else reread.rope_positions)
        hidden = rows.join(window_hidden[slots], model.project_target_hidden(hidden_states))
        ids = rows.join(window_tokens[slots], shifted_input_ids(self, inputs, meta))
        last = inputs.path.last_rows(rows.certain)  # [B], they propose
        update_window(hidden, ids, last, slots, window_hidden, window_tokens)

        # [B], of the last accepted token
        positions = inputs.path.next_positions(rows.metadata.position_ids[rows.certain])
        proposals: list[Tensor] = []
        sampler = self.draft_sampler(inputs)
        vectors = (given.next_inputs_embeds,) if reread is None else reread.of_depths
        for step in range(self.max_draft_len):  # every depth: its KV is kept whole
            embeds = vectors[step] if step < len(vectors) else None
            merged = {} if embeds is None else {"inputs_embeds": embeds}
            out, hidden = both_outputs(
                model(ids, rows.metadata.position_ids, hidden, rows.metadata, step, **merged)
            )
            if step < given.draft_len:
                logits = model.compute_logits(out[last], step)
                proposal = self.propose(logits, model.d2t, sampler, positions, step)
            else:  # what deeper rows compute from this guess is computed again next time
                proposal = torch.zeros_like(inputs.num_accepted_tokens)
            proposals.append(proposal)
            ids = torch.roll(ids, -1)
            ids[last] = proposal.to(ids.dtype)
        return finish_drafts(proposals, positions, meta.max_seq_len, self.max_draft_len)


class _Rows:
    """The rows of the target's pass with each request's window in front of them.

    A context that starts at position s has min(window, s) window rows, which the host knows. A
    generation always has all: those before its text begins write nowhere.

    Args:
        rope_positions: [3, rows] int64 of contexts' rows here, where prompts have axes. A
            generation's window is taken for text: after a prompt that ends in an image the first
            drafts are from rows that stand, and read, as its placeholder would.
    """

    def __init__(self, meta: AttentionMetadata, window: int, rope_positions: Tensor | None = None):
        assert meta.last_context_rows is None, "contexts of unknown length"
        device = meta.position_ids.device
        self.num_seqs, self.rows = meta.num_seqs, meta.rows_per_generation
        self.order: Tensor | None = None  # row here -> row of [windows of all, rows of the pass]
        starts = meta.context_starts or (0,) * meta.num_contexts
        per_context = [min(window, start) for start in starts]
        if meta.num_contexts:
            order, certain, firsts = _mixed_rows(meta, window, per_context)
            self.order = to_device(torch.tensor(order, dtype=torch.int64), device)
            self.certain = to_device(torch.tensor(certain, dtype=torch.int64), device)  # [B]
            first_rows = to_device(torch.tensor(firsts, dtype=torch.int64), device)
        else:  # nothing to send: the device counts by itself
            seqs = torch.arange(meta.num_seqs, device=device)
            self.certain, first_rows = seqs * (window + self.rows) + window, seqs * self.rows
        self.metadata = self._metadata(meta, window, first_rows, per_context, rope_positions)

    def join(self, windows: Tensor, own: Tensor) -> Tensor:
        """windows [B, W, …] and the pass's rows [T, …] -> rows in this order."""
        windows = windows.to(own.dtype)
        if self.order is None:
            parts = [windows, own.view(self.num_seqs, self.rows, *own.shape[1:])]
            return torch.cat(parts, dim=1).flatten(0, 1)
        return torch.cat([windows.flatten(0, 1), own])[self.order]

    def _metadata(
        self,
        meta: AttentionMetadata,
        window: int,
        firsts: Tensor,
        per_context: list[int],
        rope_positions: Tensor | None,
    ) -> AttentionMetadata:
        before = torch.arange(-window, 0, device=firsts.device)
        positions = meta.position_ids[firsts][:, None] + before  # [B, W]
        inside = positions >= 0
        positions = positions.clamp_min(0)
        slots = tuple(
            self.join(slot_mapping(table, positions, inside, group.page_size), mapping)
            for table, group, mapping in zip(
                meta.block_tables, meta.kv_groups, meta.slot_mappings, strict=True
            )
        )
        contexts = meta.num_contexts
        return replace(
            meta,
            context_lens=tuple(n + w for n, w in zip(meta.context_lens, per_context, strict=True)),
            context_starts=tuple(
                s - w
                for s, w in zip(meta.context_starts or (0,) * contexts, per_context, strict=True)
            ),
            rows_per_generation=meta.rows_per_generation + window,
            position_ids=self.join(positions, meta.position_ids),
            rope_position_ids=self._turning(meta, positions, rope_positions),
            images=(),
            slot_mappings=slots,
            derived={},
        )

    def _turning(
        self, meta: AttentionMetadata, positions: Tensor, of_contexts: Tensor | None
    ) -> Tensor | None:
        """[rows] or [3, rows] int64; positions: [B, W], the windows' places."""
        own, deltas = meta.rope_position_ids, meta.rope_deltas
        if own is None or deltas is None:
            return None
        windows = (positions + deltas[:, None]).clamp_min(0)
        if own.dim() == 1:
            return self.join(windows, own)
        turning = self.join(windows[..., None].expand(-1, -1, 3), own.T).T
        if of_contexts is not None:
            turning = torch.cat([of_contexts, turning[:, of_contexts.shape[1] :]], dim=1)
        return turning


def _mixed_rows(
    meta: AttentionMetadata, window: int, per_context: list[int]
) -> tuple[list[int], list[int], list[int]]:
    """For contexts and generations together: the order of rows, the certain row of each request
    in it, and the first row of each request in the target's pass."""
    before = per_context + [window] * meta.num_generations
    own = [*meta.context_lens, *[meta.rows_per_generation] * meta.num_generations]
    starts = list(accumulate(own, initial=0))
    order: list[int] = []
    certain: list[int] = []
    for i, (kept, count) in enumerate(zip(before, own, strict=True)):
        order += range((i + 1) * window - kept, (i + 1) * window)
        begin = meta.num_seqs * window + starts[i]
        order += range(begin, begin + count)
        certain.append(len(order) - (1 if i < meta.num_contexts else count))
    return order, certain, starts[:-1]
