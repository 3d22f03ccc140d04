"""Runs a head step after step along whole sequences, as drafting does, beside the target.

Row t of a sequence x, at step s: the head reads token x[t+1+s] and proposes x[t+2+s]. The target's
choice for that position is its logits at row t+1+s. At step 0 the head reads the target's hidden
states at t, later its feedback.

At step s a head that is used repeatedly has position t+s. Two kinds stay at position t: vanilla
MTP, whose layers are used once each over the same rows (docs/decisions/005), and Gemma-4
assistants, which read the target's keys.

A P-EAGLE head reads, at step s > 0, its mask token and its mask state in place of a token and of
feedback. When drafting, one pass has the rows of all steps: a mask sees the sequence up to row t
and the masks before it. That is what step s sees of the earlier steps here.

A DFlash or DSpark head drafts in blocks behind anchors (`blocks.py`), all steps in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.dense import DensePass
from ..distributed.logits import gather_logits
from ..metadata.spec import CapturedHiddenStates, SpecMetadata
from ..models.decoder import Decoder
from ..models.drafters.base import DraftHead
from ..models.drafters.dflash import DFlashHead
from ..models.drafters.eagle import Eagle3Head
from ..models.drafters.mtp import MTPHead
from ..ops.tokens.soft_cross_entropy import ROWS
from ..utils import renamed
from .blocks import DEFAULT_ANCHORS, Anchors, Block, unroll_blocks
from .records import DraftStep, Sequences, Teacher, ahead


@dataclass(frozen=True)
class Use:
    """How a head is used along sequences. The defaults are drafting's; the doctor tries others."""

    shift: int = 1  # row t reads token t + shift + s at step s; of blocks, context row t + shift
    position_offset: int = 0
    advances: bool | None = None  # step s is at position t + s; None: as the head does
    feeds_back: bool = True  # otherwise each step reads the target's states again
    anchors: Anchors = DEFAULT_ANCHORS  # of a DFlash head's blocks
    block: int | None = None  # rows of such a block; None is what the steps need


DRAFTING = Use()


@torch.no_grad()
def teach(target: Decoder, head: DraftHead, sequences: Sequences) -> Teacher:
    """Runs the target along the sequences."""
    ids, positions = sequences.input_ids.flatten(), sequences.positions.flatten()
    spec = SpecMetadata(1, 0, 0, num_tokens=len(ids))
    layers = head.layers_to_capture
    if layers:
        size = target.config.hidden_size
        buffer = target.embed_tokens.weight.new_empty(len(ids), len(layers) * size)
        spec.captured = CapturedHiddenStates(layers, buffer)
    keys = DensePass(sequences.document_ids)
    final = target(ids, positions, keys, capture=spec)
    kept = None if head.d2t is None else torch.arange(len(head.d2t), device=ids.device) + head.d2t
    choices, logits = [], []
    for part in final.split(ROWS):
        of_part = gather_logits(target.compute_logits(part))
        choices.append(of_part.argmax(-1))
        logits.append(of_part if kept is None else of_part[:, kept])
    hidden, chosen = spec.draft_hidden_states(final, len(ids)), torch.cat(choices)
    assert hidden is not None
    draftable = torch.ones_like(chosen, dtype=torch.bool)
    if kept is not None:
        in_draft = torch.zeros(target.config.vocab_size, dtype=torch.bool, device=ids.device)
        in_draft.index_fill_(0, kept, True)  # an assignment would wait for the host
        draftable = in_draft[chosen]
    read = None if head.advances_positions else keys
    return Teacher(hidden, chosen, torch.cat(logits), draftable, read)


def unroll(
    head: DraftHead,
    sequences: Sequences,
    hidden: Tensor,
    num_steps: int,
    target_keys: DensePass | None = None,
    use: Use = DRAFTING,
) -> Iterator[DraftStep]:
    """Yields the head's steps, 0 … num_steps - 1, differentiable where gradients are on.

    Args:
        hidden: [T, n * D], `Teacher.hidden`.
        target_keys: `Teacher.keys`.
        use: drafting's, unless the doctor tries a mistake.
    """
    if isinstance(head, DFlashHead):
        block = Block(use.anchors, use.position_offset, use.shift, use.block)
        yield from unroll_blocks(head, sequences, hidden, num_steps, block)
        return
    advances = use.advances
    if advances is None:
        is_vanilla = isinstance(head, MTPHead) and len(head.layers) > 1
        advances = head.advances_positions and not is_vanilla
    length = sequences.input_ids.shape[1]
    last_position = head.rope_tables.num_positions - 1
    keys = DensePass(sequences.document_ids) if target_keys is None else target_keys
    state = first = head.project_target_hidden(hidden)
    for step in range(num_steps):
        ids = ahead(sequences.input_ids, step + use.shift, 0).flatten()
        if step and isinstance(head, Eagle3Head) and head.mask_hidden is not None:
            assert head.config.mask_token_id is not None
            ids = torch.full_like(ids, head.config.mask_token_id)
            state = head.mask_hidden.expand(len(ids), -1)
        offset = use.position_offset + (step if advances else 0)
        positions = (sequences.positions + offset).clamp(0, last_position)
        out, fed_back = head(ids, positions.flatten(), state, keys, step)
        state = fed_back if use.feeds_back else first
        rows = sequences.rows_of_step(step)
        if length > 1:
            yield DraftStep(
                step=step,
                hidden=out,
                rows=rows,
                counted=torch.ones_like(rows, dtype=torch.bool),
                teacher_rows=rows + step + 1,
                drafted_from=rows,
            )


__getattr__ = renamed(
    __name__,
    {
        "Texts": "trtspec.train.records.Sequences",
        "StepScore": "trtspec.train.losses.StepScore",
        "score": "trtspec.train.losses.score",
        "conditional_acceptance": "trtspec.train.losses.conditional_acceptance",
    },
)
