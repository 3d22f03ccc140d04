"""Draft models (DRAFT_TARGET), also those that propose all drafts in one pass (PARD).

A draft model is a language model with weights and a config of its own, so what can be wrong between
it and its target is the vocabulary and, of PARD, the mask token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.dense import DensePass
from ..checkpoints.heads.mtp_layouts import mtp_layout
from ..distributed.logits import gather_logits
from ..models.decoder import Decoder
from ..train.losses import StepScore, score
from ..train.records import DraftStep, Sequences
from ..train.unroll import teach
from .exam import Exam
from .masks import mask_token_trials
from .trials import Setting, Trial


class DraftModel(nn.Module):
    """A language model with what `teach` and `score` ask of a head."""

    d2t: Tensor | None = None
    layers_to_capture: tuple[int, ...] = ()
    advances_positions = True

    def __init__(self, model: Decoder, mask_token_id: int | None):
        super().__init__()
        self.model, self.mask_token_id = model, mask_token_id

    def compute_logits(self, hidden: Tensor, step: int) -> Tensor:
        return gather_logits(self.model.compute_logits(hidden))


class DraftModelExam(Exam):
    def __init__(
        self,
        target: Decoder,
        drafter: DraftModel,
        sequences: Sequences,
        special_tokens: Mapping[int, str],
    ):
        super().__init__(drafter)
        self.model, self.sequences, self.special_tokens = drafter, sequences, special_tokens
        self.teacher = teach(target, drafter, sequences)  # type: ignore[arg-type]

    def trials(self) -> list[Trial]:
        now = self.model.mask_token_id
        if now is None:
            return []

        def use(token: int) -> Any:
            def change(drafter: DraftModel) -> None:
                drafter.mask_token_id = token

            return change

        return mask_token_trials(now, self.special_tokens, use)

    def scores(self, setting: Setting) -> list[StepScore]:
        model: Any = self.model
        found = []
        for step in unroll_model(self.model, self.sequences, self.num_steps):
            self.see(step)
            found.append(score(model, step, self.teacher, with_loss=False))
        return found

    def read_states(self) -> Tensor:
        return self.teacher.hidden


def unroll_model(drafter: DraftModel, sequences: Sequences, num_steps: int) -> Iterator[DraftStep]:
    """A draft model's steps, counted as `unroll` counts a head's: row t of step s proposes token
    t + 2 + s, having read the text up to t + 1 and then drafts, or masks, before it."""
    model, mask = drafter.model, drafter.mask_token_id
    ids, keys = sequences.input_ids.flatten(), DensePass(sequences.document_ids)
    last_position = model.rope_tables.num_positions - 1
    out = model(ids, sequences.positions.flatten(), keys)
    for step in range(num_steps):
        if step and mask is not None:
            positions = (sequences.positions + step).clamp_max(last_position).flatten()
            out = model(torch.full_like(ids, mask), positions, keys)
        # The model proposes from its own last row: of the last token's, or of the last draft's.
        ahead = 1 if mask is not None else 1 + step
        rows = sequences.rows_of_step(step)
        yield DraftStep(
            step=step,
            hidden=out.roll(-ahead, 0),
            rows=rows,
            counted=torch.ones_like(rows, dtype=torch.bool),
            teacher_rows=rows + step + 1,
            drafted_from=rows,
        )


def is_language_model(names: set[str]) -> bool:
    """Whether tensors of these names are a whole model's, without draft layers in it."""
    ends = tuple(name.rsplit(".", 2)[-2:] for name in names if name.count("."))
    has_layers = any(name.endswith("layers.0.input_layernorm.weight") for name in names)
    heads = ["fc", "weight"] in ends or ["pre_projection", "weight"] in ends
    return has_layers and ["embed_tokens", "weight"] in ends and not heads and not mtp_layout(names)
