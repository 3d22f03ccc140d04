"""Drafting with multi-token-prediction layers.

`MTPEagleWorker` uses one layer K times, as EAGLE-3 uses its head. `MTPWorker` ("vanilla") uses K
layers once each, as DeepSeek-V3 trains them. At position i depth k reads the output of depth k-1
and the token k+1 positions later:

    depth 0   h_i = target's hidden state    token t[i+1]   proposes t[i+2]
    depth k   h_i = depth k-1's output       token t[i+k+1] proposes t[i+k+2]

All depths run over the same rows. Each depth reads the ids of the one before, shifted left by one,
with that depth's proposal at the end.

Some rows before the step read drafts that were not verified then: K-1 of them, the window. They are
computed again, from target hidden states and tokens that are kept per slot. So each depth's KV
always follows from the accepted tokens, whatever was rejected.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from ..errors import ConfigError
from ..metadata.attention import AttentionMetadata
from ..ops.step.slots import slot_mapping
from ..ops.step.window import update_window
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

    @property
    def num_tokens_ahead(self) -> int:
        return self.max_draft_len  # the deepest layer's

    def allocate_state(
        self,
        num_slots: int,
        max_seq_len: int,
        device: torch.device,
        *,
        hidden_size: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Tensor]:
        if not hidden_size and self.window:
            raise ConfigError(
                "MTPWorker keeps hidden states of earlier rows: give "
                "allocate_state(…, hidden_size=…, dtype=…) those of the target."
            )
        state = super().allocate_state(num_slots, max_seq_len, device)
        rows, width = num_slots + 1, self.window
        state["window_hidden"] = torch.zeros(rows, width, hidden_size, dtype=dtype, device=device)
        state["window_tokens"] = torch.zeros(rows, width, dtype=torch.int64, device=device)
        return state

    def draft(self, inputs: DraftInputs) -> Tensor:
        model, meta, hidden_states = draft_source(inputs)
        step = inputs.step
        slots, reread = step.slot_ids, step.reread_embeds
        window_hidden, window_tokens = step.state["window_hidden"], step.state["window_tokens"]
        if self.window and reread is None and step.next_inputs_embeds is not None:
            raise ConfigError(
                "MTPWorker computes K-1 rows before each context again: for prompts that hold "
                "embeddings set spec_metadata.reread_embeds too."
            )
        rows = _Rows(meta, self.window, None if reread is None else reread.rope_positions)
        hidden = rows.join(window_hidden[slots], model.project_target_hidden(hidden_states))
        ids = rows.join(window_tokens[slots], shifted_input_ids(self, inputs, meta))
        last = inputs.path.last_rows(rows.certain)  # [B], the rows that propose
        update_window(hidden, ids, last, slots, window_hidden, window_tokens)

        # [B], of the last accepted token
        positions = inputs.path.next_positions(rows.metadata.position_ids[rows.certain])
        proposals: list[Tensor] = []
        sampler = self.draft_sampler(inputs)
        embeds_of_depths = (step.next_inputs_embeds,) if reread is None else reread.of_depths
        for depth in range(self.max_draft_len):  # every depth, so that none lacks KV later
            embeds = embeds_of_depths[depth] if depth < len(embeds_of_depths) else None
            merged = {} if embeds is None else {"inputs_embeds": embeds}
            out, hidden = both_outputs(
                model(ids, rows.metadata.position_ids, hidden, rows.metadata, depth, **merged)
            )
            if depth < step.draft_len:
                logits = model.compute_logits(out[last], depth)
                proposal = self.propose(logits, model.d2t, sampler, positions, depth)
            else:  # what deeper rows compute from token 0 is computed again in the next step
                proposal = torch.zeros_like(inputs.num_accepted_tokens)
            proposals.append(proposal)
            ids = torch.roll(ids, -1)
            ids[last] = proposal.to(ids.dtype)
        return self.finish_drafts(inputs, proposals, positions, meta.max_seq_len)


class _Rows:
    """The rows of the target's pass with each request's window in front of them.

    A context that starts at position s has min(window, s) window rows, which the host knows; rows
    that came from the prefix cache are none of them. A generation always has all: rows before
    position 0 write nowhere, and the last K-1 rows of a prompt are always computed.

    Args:
        rope_positions: [3, rows] int64 of contexts' rows here, where prompts have axes (M-RoPE). A
            generation's window is treated as text. So after a prompt that ends in an image the
            first drafts come from rows with the ids and positions of its placeholder tokens.
    """

    def __init__(self, meta: AttentionMetadata, window: int, rope_positions: Tensor | None = None):
        if meta.last_context_rows is not None:
            raise ConfigError(
                "MTPWorker needs the rows of each context on the host, and attn_metadata has "
                "last_context_rows: leave it None, with context_lens as they are. Passes that read "
                "prompts cannot be captured in mode MTP."
            )
        device = meta.position_ids.device
        self.num_seqs, self.rows = meta.num_seqs, meta.rows_per_generation
        self.order: Tensor | None = None  # row here -> row of [windows of all, rows of the pass]
        zeros = (0,) * meta.num_contexts
        starts, computed_from = meta.context_starts or zeros, meta.context_firsts or zeros
        window_lens = [  # of the contexts
            min(window, start - first) for start, first in zip(starts, computed_from, strict=True)
        ]
        if meta.num_contexts:
            order, certain, firsts = _mixed_rows(meta, window, window_lens)
            self.order = to_device(torch.tensor(order, dtype=torch.int64), device)
            self.certain = to_device(torch.tensor(certain, dtype=torch.int64), device)  # [B]
            first_rows = to_device(torch.tensor(firsts, dtype=torch.int64), device)
        else:  # arange on the device: nothing to send
            seqs = torch.arange(meta.num_seqs, device=device)
            self.certain, first_rows = seqs * (window + self.rows) + window, seqs * self.rows
        self.metadata = self._metadata(meta, window, first_rows, window_lens, rope_positions)

    def join(self, windows: Tensor, pass_rows: Tensor) -> Tensor:
        """Puts windows [B, W, …] in front of each request's rows of the pass [T, …]."""
        windows = windows.to(pass_rows.dtype)
        if self.order is None:
            parts = [windows, pass_rows.view(self.num_seqs, self.rows, *pass_rows.shape[1:])]
            return torch.cat(parts, dim=1).flatten(0, 1)
        return torch.cat([windows.flatten(0, 1), pass_rows])[self.order]

    def _metadata(
        self,
        meta: AttentionMetadata,
        window: int,
        firsts: Tensor,
        window_lens: list[int],
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
        starts = meta.context_starts or (0,) * meta.num_contexts
        return replace(
            meta,
            context_lens=tuple(n + w for n, w in zip(meta.context_lens, window_lens, strict=True)),
            context_starts=tuple(s - w for s, w in zip(starts, window_lens, strict=True)),
            rows_per_generation=meta.rows_per_generation + window,
            position_ids=self.join(positions, meta.position_ids),
            rope_position_ids=self._rope_positions(meta, positions, rope_positions),
            images=(),
            slot_mappings=slots,
            derived={},
        )

    def _rope_positions(
        self, meta: AttentionMetadata, positions: Tensor, of_contexts: Tensor | None
    ) -> Tensor | None:
        """Returns rotary positions [rows] or [3, rows] int64; positions: [B, W], the windows'."""
        of_pass, deltas = meta.rope_position_ids, meta.rope_deltas
        if of_pass is None or deltas is None:
            return None
        windows = (positions + deltas[:, None]).clamp_min(0)
        if of_pass.dim() == 1:
            return self.join(windows, of_pass)
        joined = self.join(windows[..., None].expand(-1, -1, 3), of_pass.T).T
        if of_contexts is not None:
            joined = torch.cat([of_contexts, joined[:, of_contexts.shape[1] :]], dim=1)
        return joined


def _mixed_rows(
    meta: AttentionMetadata, window: int, window_lens: list[int]
) -> tuple[list[int], list[int], list[int]]:
    """Returns the order of rows of contexts and generations together.

    Also returns the certain row of each request in it, and the first row of each request in the
    target's pass.
    """
    window_rows = window_lens + [window] * meta.num_generations
    pass_rows = [*meta.context_lens, *[meta.rows_per_generation] * meta.num_generations]
    starts = list(accumulate(pass_rows, initial=0))
    order: list[int] = []
    certain: list[int] = []
    for i, (before, count) in enumerate(zip(window_rows, pass_rows, strict=True)):
        order += range((i + 1) * window - before, (i + 1) * window)
        begin = meta.num_seqs * window + starts[i]
        order += range(begin, begin + count)
        certain.append(len(order) - (1 if i < meta.num_contexts else count))
    return order, certain, starts[:-1]
