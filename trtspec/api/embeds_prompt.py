"""`EmbedsPrompt`: a prompt with embeddings in place of some tokens."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import RequestError


@dataclass(frozen=True, eq=False)
class EmbedsPrompt:
    """Token ids and embeddings from an encoder, as a multimodal model's processor gives them.

    Target and draft heads read the embeddings. Penalties, n-grams and draft models read the ids of
    the placeholders. Within an image attention goes both ways in models that were trained so
    (Gemma 3, the larger Gemma 4), and is causal in the others.

    Args:
        prompt_token_ids: n ids; at an image's positions its placeholder.
        prompt_embeds: [m, D] of any float dtype, D the model's hidden size, in the prompt's order.
        is_embed: [n] bool, the m positions of the embeddings; None is all of them. A model with
            per-layer inputs refuses None: its layers read ids too, the padding token's here.
        mrope_positions: [3, n] int, time, height and width of each token, for models with M-RoPE
            (transformers' `get_rope_index`); None counts the tokens. Output follows the largest.
        mm_token_type_ids: [n] int, what a token stands for: 0 text, 1 image, 2 video, 3 sound, as
            transformers' processors return it (Gemma 3's calls it `token_type_ids`). Only attention
            within images reads it: each run of 1 or of 2 is an image. None: each run of embeddings
            is one.

    Raises:
        RequestError: shapes or dtypes do not fit each other.
    """

    prompt_token_ids: Sequence[int]
    prompt_embeds: Tensor
    is_embed: Tensor | None = None
    mrope_positions: Tensor | None = None
    mm_token_type_ids: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.prompt_token_ids, Sequence):
            raise RequestError(
                f"prompt_token_ids={_form(self.prompt_token_ids)}: give a list of token ids."
            )
        count, embeds = len(self.prompt_token_ids), self.prompt_embeds
        if not isinstance(embeds, Tensor) or embeds.dim() != 2 or not embeds.is_floating_point():
            raise RequestError(
                f"prompt_embeds={_form(embeds)}: give a float tensor [m, hidden size]."
            )
        mask, positions = self.is_embed, self.mrope_positions
        if mask is not None and (
            not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (count,)
        ):
            raise RequestError(
                f"is_embed={_form(mask)}: give a bool tensor [{count}], one for each token."
            )
        num_positions = count if mask is None else int(mask.sum())
        if num_positions != len(embeds):
            raise RequestError(
                f"prompt_embeds has {len(embeds)} rows for {num_positions} tokens: give one for "
                "each token, or say with is_embed where they stand."
            )
        types = self.mm_token_type_ids
        if types is not None and not (_is_int_tensor(types, (count,)) and bool((types >= 0).all())):
            raise RequestError(
                f"mm_token_type_ids={_form(types)}: give an int tensor [{count}], of 0 for text, 1 "
                "for an image, 2 for a video's, 3 for sound."
            )
        if positions is None:
            return
        if not _is_int_tensor(positions, (3, count)) or bool((positions < 0).any()):
            raise RequestError(
                f"mrope_positions={_form(positions)}: give an int tensor [3, {count}] of "
                "positions >= 0."
            )

    @property
    def positions(self) -> Tensor:
        """Returns the positions in the prompt of the embeddings, [m] int64."""
        if self.is_embed is None:
            return torch.arange(len(self.prompt_token_ids))
        return self.is_embed.cpu().nonzero().flatten()

    @property
    def places(self) -> Tensor:
        """The old name of `positions`."""
        warnings.warn(
            "EmbedsPrompt.places is deprecated: read EmbedsPrompt.positions.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.positions

    @property
    def images(self) -> tuple[tuple[int, int], ...]:
        """Returns the first position and the end of each image.

        There are none without `is_embed` and `mm_token_type_ids`.
        """
        kinds, mask = self.mm_token_type_ids, self.is_embed
        if kinds is not None:
            mask = (kinds == 1) | (kinds == 2)
        if mask is None:
            return ()
        none = torch.zeros(1, dtype=torch.int32)
        edges = torch.diff(mask.cpu().int(), prepend=none, append=none)
        starts, ends = ((edges == sign).nonzero().flatten().tolist() for sign in (1, -1))
        return tuple(zip(starts, ends, strict=True))

    @property
    def rope_delta(self) -> int:
        """Returns the rotary position of the first output token, less its position."""
        if self.mrope_positions is None:
            return 0
        return int(self.mrope_positions.max()) + 1 - len(self.prompt_token_ids)


def _is_int_tensor(value: object, shape: tuple[int, ...]) -> bool:
    kinds = (torch.int32, torch.int64)
    return isinstance(value, Tensor) and value.dtype in kinds and value.shape == shape


def _form(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return repr(value)
