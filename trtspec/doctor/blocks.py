"""The mistakes that DFlash, DFlash2 and DSpark heads are known for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..checkpoints.heads.dflash_config import default_target_layers
from ..models.config import DecoderConfig
from ..models.decoder import Attention
from ..models.drafters.base import DraftHead
from ..models.drafters.convolved import BlockConvolution, ConvolvedLayer
from ..models.drafters.dflash import DFlashHead
from ..train.new_head import block_rows
from .captures import capture_trials
from .masks import mask_token_trials, reading
from .trials import Change, Trial

USUAL_BLOCKS = (4, 8, 10, 16, 32)


def block_trials(
    head: DraftHead, target: DecoderConfig, special_tokens: Mapping[int, str]
) -> list[Trial]:
    """Returns what is tried with a head that drafts blocks, beside RoPE and its vocabulary."""
    assert isinstance(head, DFlashHead)
    usual = default_target_layers(head.num_layers, target.num_layers)
    captures = capture_trials(
        head.layers_to_capture,
        target.num_layers,
        "target_layer_ids",
        ("DFlash's own", usual) if len(usual) == len(head.layers_to_capture) else None,
    )
    return [
        *captures,
        *mask_token_trials(head.config.mask_token_id or 0, special_tokens, reading),
        *_sight(head),
        *_lengths(head),
        *_scales(head, target),
        *_positions(),
        *_biases(head),
        *_paths(head),
        *_convolutions(head),
    ]


def defect_of_block(head: DFlashHead, trained: Sequence[float] | None) -> str | None:
    """Whether a block is not the one of training.

    Args:
        trained: acceptance of each of its drafts at the end of training, if it says so.
    """
    now = head.config.trained_draft_len
    if trained is None or len(trained) == now:
        return None
    return (
        f"the head was trained with {len(trained)} drafts a block, and its config.json gives it "
        f"{now}: block_size or sample_from_anchor is wrong there."
    )


def defect_of_bias(head: DFlashHead) -> str | None:
    """What is certainly wrong with DSpark's bias, though no trial can undo it."""
    markov = head.markov_head
    if markov is None:
        return None
    for name in ("markov_w1", "markov_w2"):
        if not bool(getattr(markov, name).weight.any()):
            return (
                f"markov_head.{name} is zero everywhere, which a trained one is not: copy the head "
                "again from its source."
            )
    return None


def _sight(head: DFlashHead) -> list[Trial]:
    """Which rows of its block a row sees."""
    now, trials = head.config.sees_ahead, []
    for sees, what in ((True, "each other both ways"), (False, "earlier rows alone")):
        sight = (sees,) * len(now)
        if sight == now:
            continue

        def look(head: DFlashHead, sight: tuple[bool, ...] = sight) -> None:
            rows = block_rows(head.config)
            _widen(
                head, [rows * (after - before) for before, after in zip(now, sight, strict=True)]
            )
            head.config = replace(head.config, sees_ahead=sight)

        trials.append(
            Trial(
                f"rows of a block should see {what}",
                f'"is_causal": {str(not sees).lower()} in config.json',
                look,
            )
        )
    return trials


def _widen(head: DFlashHead, by: Sequence[int]) -> None:
    """Widens the windows of layers that have one, by layer, as the loader does: where rows see
    later ones, by a block. Windows that are counted from each row stay."""
    if head.config.windows_by_row:
        return
    for i, rows in enumerate(by):
        attention = head.layers[i].self_attn
        assert isinstance(attention, Attention)
        if attention.window is not None:
            attention.window = attention.window + rows


def _lengths(head: DFlashHead) -> list[Trial]:
    """How long a block is, and which of its rows propose.

    Drafts that a shorter block has not are read from its last row, and so are wrong.
    """
    now, anchor = block_rows(head.config), head.samples_from_anchor

    def resized(rows: int) -> Change:
        def change(head: DFlashHead) -> None:
            _widen(head, [rows * sees for sees in head.config.sees_ahead])

        return change

    def other_anchor(head: DFlashHead) -> None:
        config, drafts = head.config, now - anchor  # the block stays as long as it is
        head.config = replace(config, samples_from_anchor=not anchor, trained_draft_len=drafts)

    return [
        Trial(
            f"the last token's row should {'not ' if anchor else ''}propose",
            f'"sample_from_anchor": {str(not anchor).lower()} in config.json',
            other_anchor,
            sets={"block": now},
        ),
        *(
            Trial(
                f"blocks should have {length} rows",
                f'"block_size": {length} in config.json, now {now}',
                resized(length - now),
                sets={"block": length},
            )
            for length in USUAL_BLOCKS
            if length != now
        ),
    ]


def _scales(head: DFlashHead, target: DecoderConfig) -> list[Trial]:
    is_scaled = (head.embedding_scale or 1.0) != 1
    other = 1.0 if is_scaled else math.sqrt(target.hidden_size)

    def scale_embedding(head: DFlashHead) -> None:
        head.embedding_scale = other

    of_embedding = Trial(
        f"the target's embedding should {'not ' if is_scaled else ''}be scaled",
        f'"input_embedding_scale": {other:.6g} in config.json, now {head.embedding_scale or 1:.6g}',
        scale_embedding,
    )
    return [of_embedding] if head.shares_embedding else []


def _positions() -> list[Trial]:
    return [
        Trial(
            f"blocks are rotated one position too {way}",
            "here, as in DFlash, a block's first row has the position of the token that it reads: "
            "train the head so",
            sets={"position_offset": offset},
        )
        for way, offset in (("far", -1), ("little", 1))
    ]


def _biases(head: DFlashHead) -> list[Trial]:
    """DSpark's bias, of other weights."""
    if head.markov_head is None:
        return []

    def weights(head: DFlashHead) -> tuple[nn.Parameter, nn.Parameter]:
        assert head.markov_head is not None and head.markov_head.markov_w2.weight is not None
        return head.markov_head.markov_w1.weight, head.markov_head.markov_w2.weight

    def swap(head: DFlashHead) -> None:
        one, other = weights(head)
        one.data, other.data = other.data, one.data

    def drop(head: DFlashHead) -> None:
        _, weight = weights(head)
        weight.data = torch.zeros_like(weight)

    trials = [
        Trial(
            "DSpark's bias has wrong weights: drafts are better without it",
            "copy markov_head.markov_w1 and markov_head.markov_w2 again from the head's source",
            drop,
        )
    ]
    one, other = weights(head)
    if one.shape == other.shape:
        trials.append(
            Trial(
                "DSpark's bias is transposed",
                "swap the tensors markov_head.markov_w1.weight and markov_head.markov_w2.weight",
                swap,
            )
        )
    return trials


def _paths(head: DFlashHead) -> list[Trial]:
    """DFlash2's path, by other tables."""
    if head.candidate_selector is None:
        return []

    def swap(head: DFlashHead) -> None:
        selector = head.candidate_selector
        assert selector is not None
        one, other = selector.predecessor_codebook, selector.successor_codebook
        one.data, other.data = other.data, one.data

    def drop(head: DFlashHead) -> None:
        assert head.candidate_selector is not None
        book = head.candidate_selector.predecessor_codebook
        book.data = torch.zeros_like(book)

    return [
        Trial(
            "DFlash2's path has wrong weights: drafts are better without it",
            "copy the tensors of candidate_selector again from the head's source",
            drop,
        ),
        Trial(
            "DFlash2's codebooks are swapped",
            "swap the tensors candidate_selector.predecessor_codebook and .successor_codebook",
            swap,
        ),
    ]


def _convolutions(head: DFlashHead) -> list[Trial]:
    """DFlash2's convolutions, of kernels in another order: [before or behind, taps, channels]."""
    if not isinstance(head.layers[0], ConvolvedLayer):
        return []

    def flipped(dim: int) -> Change:
        def change(head: DFlashHead) -> None:
            for convolution in head.modules():
                if isinstance(convolution, BlockConvolution):
                    _flip(convolution, dim)

        return change

    return [
        Trial(
            f"DFlash2's convolutions have their {what} in the wrong order",
            f"reverse dimension {dim} of every base_kernel, and of kernel_projection.weight where "
            "its rows are viewed as [2, taps, groups]",
            flipped(dim),
        )
        for dim, what in ((0, "kernels before and behind"), (1, "taps"))
    ]


def _flip(convolution: BlockConvolution, dim: int) -> None:
    kernel, projection = convolution.base_kernel, convolution.kernel_projection.weight
    assert projection is not None
    kernel.data = kernel.data.flip(dim)
    rows = projection.data.view(*convolution.shape, -1)
    projection.data = rows.flip(dim).reshape(projection.shape)
