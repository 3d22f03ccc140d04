"""The mistakes that each kind of head is known for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..checkpoints.heads.eagle_config import MIN_LAYERS_FOR_DEFAULT, default_layers_to_capture
from ..models.config import DecoderConfig
from ..models.drafters.base import DraftHead, FeedbackHead
from ..models.drafters.dflash import DFlashHead
from ..models.drafters.eagle import Eagle3Head, Eagle3Layer
from ..models.drafters.gemma_assistant import KIND as ASSISTANT
from ..models.drafters.gemma_assistant import GemmaAssistant
from ..models.drafters.mtp import MTPHead, MTPLayer
from .blocks import block_trials, defect_of_bias, defect_of_block
from .captures import capture_trials, notes_on_captures
from .masks import mask_trials
from .queries import layout_trials, lost_norms, norm_trials
from .trials import (
    Trial,
    flip_norm_output,
    rope_trials,
    shift_trials,
    swap_halves,
    vocabulary_trials,
    window_trials,
)
from .weights import (
    Ends,
    config_trials,
    end_trials,
    harmful_trials,
    mixed_up_trials,
    norm_offset_trials,
    scale_trials,
)


@dataclass(frozen=True)
class Patient:
    """A head, and what its trials are made from."""

    head: DraftHead
    target: DecoderConfig
    mask_hidden: Tensor | None  # [1, n * Ht], as the checkpoint has it
    state_size: float  # the root mean square of what the head reads of the target
    special_tokens: Mapping[int, str]
    parts: nn.Module  # the head, and MTP layers that it does not use now
    ends: Ends | None = None  # of the target


def trials_of(patient: Patient) -> list[Trial]:
    """Returns everything that is tried with this head."""
    head, trials = patient.head, list[Trial]()
    if head.advances_positions:  # one that reads the target's keys must be rotated as they are
        trials += rope_trials(head, patient.target) + window_trials(head)
        trials += layout_trials(patient.parts) + norm_trials(head, patient.parts)
    if not isinstance(head, DFlashHead) or head.reads_next_tokens:
        trials += shift_trials()
    trials += _KINDS.get(head.config.kind, _Kind()).trials(patient)
    if head.d2t is not None:
        trials += vocabulary_trials(head.d2t)
    trials += _state_trials(patient) + _weight_trials(patient)
    return trials


def _state_trials(patient: Patient) -> list[Trial]:
    """The target's last state, before its final norm or after it."""
    head, captured = patient.head, patient.head.layers_to_capture
    if head.config.kind == ASSISTANT:  # has a trial of its own
        return []
    if not captured:
        return [
            Trial(
                "the target's hidden state should be read before its final norm",
                "here it is read after the norm: train the head so",
                sets={"before_norm": True},
            )
        ]
    if patient.target.num_layers - 1 not in captured:
        return []
    return [
        Trial(
            "the last layer's state should be read after the target's final norm",
            "here captured layers are read before the norm: train the head so",
            sets={"norms_last": True},
        )
    ]


def _weight_trials(patient: Patient) -> list[Trial]:
    """Trials of all kinds' weights. Those that leave a part out come last: where they are as good
    as others, the others say more."""
    head, parts = patient.head, patient.parts
    trials = norm_offset_trials(head, parts) + end_trials(head, parts, patient.ends)
    if not head.advances_positions:  # an assistant's config was compared with the target's
        return trials
    trials += config_trials(head, parts, patient.target)
    trials += mixed_up_trials(parts)
    if isinstance(head, FeedbackHead):  # a block head normalizes what it joins
        trials += scale_trials(parts)
    return trials + harmful_trials(parts)


def notes_on(patient: Patient) -> list[str]:
    """Returns what cannot be tried."""
    head, decoder = patient.head, patient.head.config.decoder
    notes = []
    if head.advances_positions and any(
        decoder.of_layer(i).rotary_dim is not None for i in range(decoder.num_layers)
    ):
        notes.append("How many dimensions of a head are rotated (rotary_dim) is not tried.")
    return notes + _KINDS.get(head.config.kind, _Kind()).notes(head)


def suspicion_of(patient: Patient) -> str | None:
    """Returns what may be wrong, though no trial can undo it."""
    if patient.mask_hidden is not None and not bool(patient.mask_hidden.any()):
        return (
            "mask_hidden is zero everywhere, which a trained one is not: copy the head again from "
            "its source."
        )
    lost = lost_norms(patient.head, patient.parts) if patient.head.advances_positions else None
    if lost is not None:
        return (
            f"q_norm and k_norm may be lost: {lost}. If the head was trained with such norms, copy "
            "it again from its source."
        )
    return None


def defect_of(patient: Patient, trained: Sequence[float] | None) -> str | None:
    """Returns what is certainly wrong, though no trial can undo it.

    Args:
        trained: acceptance of each draft at the end of training, if the head says so.
    """
    if not isinstance(patient.head, DFlashHead):
        return None
    return defect_of_bias(patient.head) or defect_of_block(patient.head, trained)


# -- EAGLE-3 and P-EAGLE -----------------------------------------------------------------------
def _eagle3_trials(patient: Patient) -> list[Trial]:
    head = patient.head
    assert isinstance(head, Eagle3Head)
    first = head.layers[0]
    assert isinstance(first, Eagle3Layer)

    def flip_residual(head: Eagle3Head) -> None:
        layer = head.layers[0]
        assert isinstance(layer, Eagle3Layer)
        layer.norm_before_residual = not layer.norm_before_residual

    now, num_layers, usual = head.layers_to_capture, patient.target.num_layers, None
    if len(now) == 3 and num_layers >= MIN_LAYERS_FOR_DEFAULT:
        usual = "EAGLE-3's own", default_layers_to_capture(num_layers)
    trials = capture_trials(now, num_layers, "eagle3_layers_to_capture", usual)
    trials.append(
        Trial(
            "norm_before_residual is wrong",
            f'"norm_before_residual": {str(not first.norm_before_residual).lower()} in config.json',
            flip_residual,
        )
    )
    if head.mask_hidden is None:  # a masked head has no feedback
        trials.append(
            Trial(
                _other_feedback(head),
                f'"norm_output": {str(not head.config.norm_output).lower()} in config.json',
                flip_norm_output,
            )
        )
    trials.append(
        Trial(
            "embedding and hidden state are side by side in the other order",
            "swap the two halves of the columns of q_proj, k_proj and v_proj of the first layer",
            lambda head: swap_halves(head.layers[0].self_attn.qkv_proj.weight),
        )
    )
    if patient.mask_hidden is not None:
        trials += mask_trials(head, patient.mask_hidden, patient.state_size, patient.special_tokens)
    return trials


def _eagle3_notes(head: DraftHead) -> list[str]:
    notes = ["norm_before_fc and fc_norm are not tried."]
    return notes + notes_on_captures(head.layers_to_capture)


# -- MTP layers --------------------------------------------------------------------------------
def _mtp_trials(patient: Patient) -> list[Trial]:
    head = patient.head
    assert isinstance(head, MTPHead)

    def reverse(head: MTPHead) -> None:
        for layer in patient.parts.modules():
            if isinstance(layer, MTPLayer):
                assert layer.eh_proj.weight is not None, "the head's weights are packed"
                swap_halves(layer.eh_proj.weight)

    return [
        Trial(
            "embedding and hidden state are concatenated in the other order",
            "swap the two halves of the columns of eh_proj (input_proj)",
            reverse,
        ),
        Trial(
            _other_feedback(head),
            f"MTPDecodingConfig(mtp_feeds_post_norm={not head.config.norm_output})",
            flip_norm_output,
        ),
    ]


def _other_feedback(head: DraftHead) -> str:
    where = "before" if head.config.norm_output else "after"
    return f"the hidden state should be fed on {where} the final norm"


# -- Gemma-4 assistants ------------------------------------------------------------------------
def _assistant_trials(patient: Patient) -> list[Trial]:
    head = patient.head
    assert isinstance(head, GemmaAssistant)
    scale = head.embedding_scale
    other = None if scale else math.sqrt(patient.target.hidden_size)

    def scale_embedding(head: GemmaAssistant) -> None:
        head.embedding_scale = other

    factor = 1 / scale if scale else other
    retrain = "here, as in transformers,"
    return [
        Trial(
            "embedding and hidden state are concatenated in the other order",
            "swap the two halves of the columns of pre_projection",
            lambda head: swap_halves(head.pre_projection.weight),
        ),
        Trial(
            f"the target's embedding should {'not ' if scale else ''}be scaled",
            f"multiply the first half of the columns of pre_projection by {factor:.6g}",
            scale_embedding,
        ),
        Trial(
            "the target's hidden state should be read before its final norm",
            f"{retrain} it is read after the norm: train the assistant so",
            sets={"before_norm": True},
        ),
        Trial(
            _other_feedback(head),
            f"{retrain} post_projection reads the state after the final norm: train it so",
            flip_norm_output,
        ),
        Trial(
            "the target's hidden state should be read at every draft",
            f"{retrain} post_projection's output takes its place: train the assistant so",
            sets={"feeds_back": False},
        ),
        Trial(
            "queries are rotated one position too far",
            f"{retrain} queries are rotated by the last token's position, which the target has "
            "not read: train the assistant so",
            sets={"position_offset": -1},
        ),
        Trial(
            "queries are rotated one position too little",
            f"{retrain} queries are rotated by the last token's position: train the assistant so",
            sets={"position_offset": 1},
        ),
        Trial(
            "positions should advance with the drafts",
            f"{retrain} all drafts of a step stand at one position: train the assistant so",
            sets={"advances": True},
        ),
    ]


@dataclass(frozen=True)
class _Kind:
    """What is tried with one kind of head, and what cannot be."""

    trials: Callable[[Patient], list[Trial]] = lambda patient: []
    notes: Callable[[DraftHead], list[str]] = lambda head: []


_BLOCKS = _Kind(
    lambda patient: block_trials(patient.head, patient.target, patient.special_tokens),
    lambda head: notes_on_captures(head.layers_to_capture),
)
_KINDS = {
    "dflash": _BLOCKS,
    "dspark": _BLOCKS,
    "eagle3": _Kind(_eagle3_trials, _eagle3_notes),
    "eagle": _Kind(
        lambda patient: [
            Trial(
                "embedding and hidden state are concatenated in the other order",
                "swap the two halves of the columns of fc",
                lambda head: swap_halves(head.fc.weight),
            )
        ]
    ),
    "mtp": _Kind(_mtp_trials),
    ASSISTANT: _Kind(
        _assistant_trials,
        lambda head: [
            "Another RoPE or window is not tried: the keys are the target's, and the assistant's "
            "config was compared with the target's when it was loaded."
        ],
    ),
}
"""`HeadConfig.kind` -> its row. A kind without one is tried with RoPE and shifts alone."""
