"""Runs the blocks of a DFlash or DSpark head behind anchors of whole sequences, as drafting does.

An anchor is a row whose token is the last one known. Row 0 of its block reads that token, row j the
mask token, at the j-th position after it. Step s is what the block proposes for the token s + 1
places after the anchor; the target's choice there is its logits s places after it. DSpark's bias
and DFlash2's path read the text's own token before the one proposed: what was drafted, where that
was right.

Every anchor has a row in every step. Rows that nothing judges are marked, not left out, so the host
need not know how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.blocks import BlockPass
from ..models.drafters.dflash import DFlashHead
from .records import DraftStep, Sequences, ahead, without_waiting


@dataclass(frozen=True)
class Anchors:
    """Which rows of a batch are anchors: `count` of each sequence, drawn by `seed`."""

    count: int = 64
    seed: int = 0

    def draw(self, sequences: Sequences) -> Tensor:
        """Returns anchors [N, A] int64 on the sequences' device, in the order of rows.

        Each row before a token that the target wrote is as likely as another, also where the
        answer ends before the block does. A sequence with fewer such rows has some others.
        """
        source = sequences.on_host or sequences
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.rand(source.input_ids.shape, generator=generator)
        is_judged = source.counts_ahead(1).cpu()
        order = (is_judged + noise).argsort(dim=1, descending=True)[:, : self.count]
        return without_waiting(order.sort(dim=1).values, sequences.input_ids.device)


DEFAULT_ANCHORS = Anchors()


@dataclass(frozen=True)
class Block:
    """How blocks are run. The defaults are drafting's; the doctor tries others."""

    anchors: Anchors = DEFAULT_ANCHORS
    position_offset: int = 0
    shift: int = 1  # row t of the context reads token t + shift, if it reads one
    num_rows: int | None = None  # None is what the steps need; later steps of fewer are its last


def unroll_blocks(
    head: DFlashHead,
    sequences: Sequences,
    hidden: Tensor,
    num_steps: int,
    how: Block = Block(),
) -> Iterator[DraftStep]:
    """Yields the steps of one pass, 0 … num_steps - 1, differentiable where gradients are on.

    Rows of a step are the anchors, [N * A].

    Args:
        hidden: [T, n * Ht], the target's captured states.
        num_steps: at most what the head was made for.
    """
    assert head.config.mask_token_id is not None
    first = 0 if head.samples_from_anchor else 1
    block, length = how.num_rows or num_steps + first, sequences.input_ids.shape[1]
    places = how.anchors.draw(sequences)
    offsets = torch.arange(block, device=places.device)
    ids = torch.full((*places.shape, block), head.config.mask_token_id, device=places.device)
    ids[..., 0] = sequences.input_ids.gather(1, places)
    most = head.rope_tables.num_positions - 1
    positions = sequences.positions.gather(1, places)[..., None] + offsets + how.position_offset
    following = ahead(sequences.input_ids, how.shift, 0).flatten()
    context = head.context_of(hidden, sequences.positions.flatten().clamp(max=most), following)
    meta = BlockPass(
        sequences.document_ids,
        places,
        block,
        context,
        head.config.sees_ahead,
        head.config.windows_by_row,
    )
    out, _ = head(ids.flatten(), positions.clamp(0, most).flatten(), hidden, meta, step=0)
    by_place = out.view(-1, block, out.shape[-1])
    start = length * torch.arange(len(places), device=places.device)
    rows = (start[:, None] + places).flatten()  # of the batch, [N * A]
    every = torch.arange(len(rows), device=rows.device)
    markov, features = head.markov_head, None
    if markov is not None:
        state = markov.first_state(by_place[:, 0])
        if first:  # the anchor's own row proposes nothing, but is read
            _, state = markov.features(ids[..., 0].flatten(), by_place[:, 0], state)
    for step in range(num_steps):
        of_step = by_place[:, min(first + step, block - 1)]
        before = sequences.input_ids.gather(1, (places + step).clamp_max(length - 1)).flatten()
        if markov is not None:
            features, state = markov.features(before, of_step, state)
        yield DraftStep(
            step=step,
            hidden=of_step,
            rows=every,
            counted=sequences.counts_ahead(step + 1).gather(1, places).flatten(),
            teacher_rows=(rows + step).clamp_max(sequences.input_ids.numel() - 1),
            drafted_from=rows,
            features=features,
            before=before if head.candidate_selector is not None else None,
        )
