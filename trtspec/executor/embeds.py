"""What prompts with embeddings add to a pass: embeddings of its rows, and rotary positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate

import torch
from torch import Tensor

from ..api.embeds_prompt import EmbedsPrompt
from ..errors import RequestError
from ..metadata.attention import ImageRows
from ..metadata.embeds import RereadEmbeds, RowEmbeds
from ..models.decoder import Decoder
from ..state.prefix import Content, no_content
from ..utils import rows_to_tensor, to_device
from .request import ContextChunk, Request


def check_embeds(
    prompt: EmbedsPrompt, target: Decoder, max_total_tokens: int, max_image_tokens: int
) -> None:
    """Raises RequestError where the prompt does not fit the target.

    Args:
        max_image_tokens: the largest image that fits into one pass beside one generation.
    """
    weight, tables = target.embed_tokens.weight, target.rope_tables
    if prompt.prompt_embeds.shape[1] != weight.shape[1]:
        raise RequestError(
            f"prompt_embeds is {prompt.prompt_embeds.shape[1]} wide, the model's hidden size is "
            f"{weight.shape[1]}: give embeddings of the model's own encoder."
        )
    if target.config.linear_layers and target.config.raw.get("is_text_part"):
        raise RequestError(
            "This prompt has embeddings. Images of Qwen3.5 have positions on three axes in turn "
            "(mrope_interleaved), which are not computed: its text model is used alone. Give ids."
        )
    if prompt.is_embed is None and target.per_layer_inputs is not None:
        raise RequestError(
            "is_embed is not given, but this model has per-layer inputs: its layers read each "
            "token's id too, and the padding token's at an image's positions. Say with is_embed "
            "where the embeddings are, and leave text to its ids."
        )
    if target.config.reads_images_whole:
        _check_images(prompt, max_image_tokens)
    if prompt.mrope_positions is not None:
        if not tables.has_axes:
            raise RequestError(
                "mrope_positions is given, but the model's config has no mrope_section: its tokens "
                "have one position each. Leave it out."
            )
        end = max_total_tokens + max(prompt.rope_delta, 0)
        if max(end, int(prompt.mrope_positions.max()) + 1) > tables.num_positions:
            raise RequestError(
                f"mrope_positions goes to {int(prompt.mrope_positions.max())}, and output follows: "
                f"the model has {tables.num_positions} positions. Shorten the prompt or max_tokens."
            )


def _check_images(prompt: EmbedsPrompt, most: int) -> None:
    if prompt.is_embed is None and prompt.mm_token_type_ids is None:
        raise RequestError(
            "is_embed and mm_token_type_ids are not given, but this model attends in both "
            "directions within an image: say with one of them where the images are."
        )
    largest = max((end - start for start, end in prompt.images), default=0)
    if largest > most:
        raise RequestError(
            f"An image of the prompt has {largest} tokens, which see each other in both directions "
            f"and so need one pass, beside one generation; there is room for {most}. Raise "
            f"max_num_tokens by {largest - most}."
        )


def kept_embeds(prompt: EmbedsPrompt, target: Decoder) -> EmbedsPrompt:
    """Copies the prompt to the host, in the target's dtype. Each pass is sent its part."""
    dtype = target.embed_tokens.weight.dtype
    mask, positions, kinds = prompt.is_embed, prompt.mrope_positions, prompt.mm_token_type_ids
    return replace(
        prompt,
        prompt_embeds=prompt.prompt_embeds.detach().to("cpu", dtype, copy=True),
        is_embed=None if mask is None else mask.cpu().clone(),
        mrope_positions=None if positions is None else positions.cpu().clone(),
        mm_token_type_ids=None if kinds is None else kinds.cpu().clone(),
    )


def content_of(request: Request) -> Content:
    """Returns what tells a prompt's embeddings, positions and images apart (`state/prefix.py`).

    An image that is read in both directions belongs, whole, to each block that has some of it.
    """
    prompt, images = request.embeds, request.images
    if prompt is None:
        return no_content
    embeds, places, axes = prompt.prompt_embeds, prompt.positions, prompt.mrope_positions

    def content(start: int, end: int) -> bytes:
        spans = [(first, stop) for first, stop in images if first < end and stop > start]
        first = min([start, *(span[0] for span in spans)])
        last = max([end, *(span[1] for span in spans)])
        begin, finish = (int(torch.searchsorted(places, bound)) for bound in (first, last))
        has_axes = axes is not None and _differ_from_text(prompt, start, end)
        if begin == finish and not spans and not has_axes:
            return b""
        digest = blake2b(repr((start, spans)).encode())
        digest.update(places[begin:finish].numpy().tobytes())
        digest.update(embeds[begin:finish].contiguous().view(torch.uint8).numpy().tobytes())
        if has_axes:
            digest.update(_axes(prompt, start, end).numpy().tobytes())
        return digest.digest()

    return content


def reusable_tokens(request: Request, num_rewritten: int) -> int | None:
    """Returns how many tokens at most have keys and values as a prompt's pass computes them.

    Vanilla MTP's first generation computes the prompt's last rows again, and as text: where an
    image is among them, the blocks from there on are this request's alone. None: all tokens.
    """
    prompt, end = request.embeds, len(request.prompt_token_ids)
    start = max(0, end - num_rewritten)
    if prompt is None or start == end:
        return None
    has_embeds = bool((prompt.positions >= start).any())
    as_text = torch.arange(start, end).repeat(3, 1) + prompt.rope_delta
    is_text = not has_embeds and torch.equal(_axes(prompt, start, end), as_text)
    return None if is_text else start


def _axes(prompt: EmbedsPrompt, start: int, end: int) -> Tensor:
    """Returns the rotary positions of [start, end), [3, n] int64; those of output follow the
    prompt's."""
    positions = torch.arange(start, end).repeat(3, 1)
    if prompt.mrope_positions is not None:
        known = prompt.mrope_positions[:, start:end]
        positions += prompt.rope_delta
        positions[:, : known.shape[1]] = known
    return positions


def _differ_from_text(prompt: EmbedsPrompt, start: int, end: int) -> bool:
    return not torch.equal(_axes(prompt, start, end), torch.arange(start, end).repeat(3, 1))


def row_embeds(
    chunks: Sequence[ContextChunk], ahead: int, device: torch.device, before: int = 0
) -> RowEmbeds | None:
    """Returns the embeddings of the tokens `ahead` positions after each row's.

    Args:
        before: how many rows are computed again in front of each chunk, at most all that the
            request has computed.
    """
    rows: list[int] = []
    values: list[Tensor] = []
    first = 0
    for chunk in chunks:
        start = max(chunk.request.num_reused, chunk.start - before)
        prompt = chunk.request.embeds
        if prompt is not None:
            positions = prompt.positions - ahead
            begin, end = (int(torch.searchsorted(positions, bound)) for bound in (start, chunk.end))
            rows += (positions[begin:end] - start + first).tolist()
            values.append(prompt.prompt_embeds[begin:end])
        first += chunk.end - start
    if not rows:
        return None
    return RowEmbeds(
        rows_to_tensor(rows, torch.int64, device), to_device(torch.cat(values), device)
    )


def reread_embeds(
    chunks: Sequence[ContextChunk], num_rewritten: int, device: torch.device
) -> RereadEmbeds | None:
    """Returns what each depth reads of vanilla MTP, which computes `num_rewritten` rows again.

    None: the prompts hold no embeddings.
    """
    if not num_rewritten or all(chunk.request.embeds is None for chunk in chunks):
        return None
    return RereadEmbeds(
        tuple(
            row_embeds(chunks, depth + 1, device, num_rewritten)
            for depth in range(num_rewritten + 1)
        ),
        context_rope_positions(chunks, device, num_rewritten),
    )


def image_rows(chunks: Sequence[ContextChunk]) -> tuple[ImageRows, ...]:
    """Returns the images that attend in both directions. A chunk has all of one, or none of it."""
    firsts = accumulate((chunk.num_tokens for chunk in chunks), initial=0)
    return tuple(
        ImageRows(i, first + start - chunk.start, end - start, position=start)
        for i, (chunk, first) in enumerate(zip(chunks, firsts, strict=False))
        for start, end in chunk.request.images
        if chunk.start <= start < chunk.end
    )


def context_rope_positions(
    chunks: Sequence[ContextChunk], device: torch.device, before: int = 0
) -> Tensor | None:
    """Returns the contexts' rotary positions, [3, rows] int64. None: all equal `position_ids`.

    Args:
        before: as in `row_embeds`.
    """
    if all(c.request.embeds is None or c.request.embeds.mrope_positions is None for c in chunks):
        return None
    parts = []
    for chunk in chunks:
        start = max(chunk.request.num_reused, chunk.start - before)
        if chunk.request.embeds is None:
            parts.append(torch.arange(start, chunk.end).repeat(3, 1))
        else:  # those of output too, which a preempted request reads again
            parts.append(_axes(chunk.request.embeds, start, chunk.end))
    return to_device(torch.cat(parts, dim=1), device)
