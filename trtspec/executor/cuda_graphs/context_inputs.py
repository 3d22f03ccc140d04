"""The inputs of a context pass in a fixed shape, so that one captured graph serves many passes.

A pass of this shape has T token rows and C contexts. Unused rows belong to no context and write
nowhere. Unused contexts have no rows of their own and use the scratch slot. All that differs
between passes is one device tensor, which the host sends in one copy.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from ...layers.experts import Experts
from ...layers.linear import Linear
from ...models.decoder import Decoder
from ...ops.launch.machine import (
    FLOPS,
    FLOPS_FP8,
    FLOPS_FP32,
    LAUNCH_SECONDS_PER_LAYER,
    LAUNCH_SECONDS_PER_LAYER_FP8,
)
from ...ops.layer.fp8 import Fp8Weight
from ...state.kv_cache import KVCacheManager
from ..inputs import ContextRows, StepInputs
from ..pinned import PinnedBuffers
from ..request import ContextChunk

TOKENS_PER_CONTEXT = 16
"""Rows of a shape per context that it has; shorter prompts need a larger shape."""

MAX_PASSES = 8
"""Most captured passes over prompts in one step. Even with few rows each takes a tenth of an eager
one."""


def most_worth_capturing(target: Decoder) -> int:
    """Returns the rows that the GPU computes while the host launches a pass over prompts eagerly.

    With more a graph saves nothing, and its padding costs time. Both times are estimates.
    """
    launching = sum(
        LAUNCH_SECONDS_PER_LAYER_FP8 if _fp8_weights(layer) else LAUNCH_SECONDS_PER_LAYER
        for layer in target.layers
    )
    return int(launching / seconds_of_row(target))


def seconds_of_row(target: Decoder) -> float:
    """Returns what the GPU computes for at each row of a pass, by the operations of the layers'
    products."""
    full = FLOPS_FP32 if target.norm.weight.dtype == torch.float32 else FLOPS
    seconds = 0.0
    for i, layer in enumerate(target.layers):
        moe, codes = target.config.moe_of_layer(i), _fp8_weights(layer)
        packed = _shapes_of_packed(layer)
        for name, parameter in layer.named_parameters():
            if name.endswith("scales"):
                continue
            share = moe.experts_per_token / moe.num_experts if moe and ".experts." in name else 1
            flops = FLOPS_FP8 if id(parameter) in codes else full
            count = math.prod(packed.get(id(parameter), parameter.shape))
            seconds += 2 * count * share / flops
    return seconds


def _shapes_of_packed(layer: nn.Module) -> dict[int, tuple[int, ...]]:
    """Returns the shapes of a layer's weights of 4 bits, by the ids of their parameters."""
    shapes: dict[int, tuple[int, ...]] = {}
    for module in layer.modules():
        if isinstance(module, Linear) and (weight := module.four_bits) is not None:
            shapes[id(module.records)] = weight.shape
        elif isinstance(module, Experts) and (held := module.held) is not None:
            for parameter, stack in zip((module.gate_up_proj, module.down_proj), held, strict=True):
                if not isinstance(stack, Fp8Weight):
                    shapes[id(parameter)] = stack.shape
    return shapes


def _fp8_weights(layer: nn.Module) -> set[int]:
    """Returns the ids of a layer's weights whose products are computed in FP8."""
    return {
        id(module.weight)
        for module in layer.modules()
        if isinstance(module, Linear) and (weight := module.fp8) is not None and weight.by_rows
    }


ShapeFor = Callable[[Sequence[ContextChunk]], "ContextInputs | None"]


def deal_out(
    chunks: Sequence[ContextChunk], shape_for: ShapeFor, most_worth: int
) -> list[list[ContextChunk]]:
    """Deals parts of prompts out to passes that each have a shape, in their order.

    A part that is longer than every shape is cut. Returns [] where one eager pass serves them all:
    they have more than `most_worth` rows, or need more than `MAX_PASSES` passes, or there is no
    shape.
    """
    if shape_for(chunks) is not None:
        return [list(chunks)]
    if sum(chunk.num_tokens for chunk in chunks) > most_worth:
        return []
    passes: list[list[ContextChunk]] = []
    for piece in _cut(chunks, shape_for):
        if not passes or shape_for([*passes[-1], piece]) is None:
            if len(passes) == MAX_PASSES or shape_for([piece]) is None:
                return []
            passes.append([])
        passes[-1].append(piece)
    return passes


def _cut(chunks: Sequence[ContextChunk], shape_for: ShapeFor) -> Iterator[ContextChunk]:
    """Yields the parts, each cut into the longest pieces that have a shape, if any has one."""
    for chunk in chunks:
        while shape_for([chunk]) is None and (longest := _longest_piece(chunk, shape_for)):
            piece, chunk = chunk.cut(longest)
            yield piece
        yield chunk


def _longest_piece(chunk: ContextChunk, shape_for: ShapeFor) -> int:
    """Returns how many of a part's first tokens have a shape, of a part that has none."""

    def has_none(count: int) -> bool:
        return shape_for([replace(chunk, end=chunk.start + count)]) is None

    return bisect_left(range(1, chunk.num_tokens), True, key=has_none)


class ContextInputs:
    """Device tensors of one shape, and how to fill them.

    Args:
        num_tokens: T. max_batch_size: also the scratch slot's id; C is at most this.
    """

    def __init__(
        self, num_tokens: int, max_batch_size: int, max_seq_len: int, kv_cache: KVCacheManager,
        device: torch.device,
    ):  # fmt: skip
        self.num_tokens, self.scratch_slot = num_tokens, max_batch_size
        self.max_seq_len, self.kv_cache, self.device = max_seq_len, kv_cache, device
        self.num_contexts = min(max_batch_size, max(1, num_tokens // TOKENS_PER_CONTEXT))
        self.widths = [kv_cache.blocks_for(max_seq_len)] * len(kv_cache.groups)
        # ids, positions, contexts of the rows; slot, end, next prompt token, last row and block
        # tables of the contexts.
        self.size = 3 * num_tokens + (4 + sum(self.widths)) * self.num_contexts
        self.sent = torch.zeros(self.size, dtype=torch.int32, device=device)
        self._buffers = PinnedBuffers()
        self.fill([])

    def fits(self, num_tokens: int, num_chunks: int) -> bool:
        """Whether it has room for as many parts of prompts, of as many tokens together."""
        return num_tokens <= self.num_tokens and num_chunks <= self.num_contexts

    def holds(self, chunks: Sequence[ContextChunk]) -> bool:
        return self.fits(sum(chunk.num_tokens for chunk in chunks), len(chunks))

    def fill(self, chunks: Sequence[ContextChunk]) -> None:
        """Sends what a pass over these chunks reads. Without chunks all rows are padding."""
        tokens, contexts = self.num_tokens, self.num_contexts
        buffer, sent = None, torch.empty(self.size, dtype=torch.int32)
        if self.device.type == "cuda":
            buffer = self._buffers.take(self.size * sent.element_size())
            sent = buffer.tensor.view(torch.int32)[: self.size]
        host = sent.numpy()  # which writes small pieces faster than torch
        host.fill(0)
        ids, positions, rows = host[: 3 * tokens].reshape(3, tokens)
        slots, ends, following, last = host[3 * tokens :][: 4 * contexts].reshape(4, contexts)
        rows.fill(-1)
        slots.fill(self.scratch_slot)
        ends.fill(1)
        following.fill(-1)
        start = 0
        for i, chunk in enumerate(chunks):
            end = start + chunk.num_tokens
            ids[start:end] = chunk.token_ids
            positions[start:end] = np.arange(chunk.start, chunk.end)
            rows[start:end] = i
            slots[i], ends[i], last[i] = chunk.request.slot, chunk.end, end - 1
            following[i] = chunk.next_prompt_token
            start = end
        last[len(chunks) :] = min(start, tokens - 1)  # a padding row, if there is one
        tables = self.kv_cache.block_tables([chunk.request.request_id for chunk in chunks])
        offset = 3 * tokens + 4 * contexts
        for table, width in zip(tables, self.widths, strict=True):
            table_rows = host[offset : offset + contexts * width].reshape(contexts, width)
            table_rows[: len(chunks), : table.shape[1]] = table.numpy()
            offset += contexts * width
        self.sent.copy_(sent, non_blocking=True)
        if buffer is not None:
            buffer.event.record()
            self._buffers.give(buffer)

    def step_inputs(self, num_drafts: int, all_greedy: bool, has_filters: bool) -> StepInputs:
        """Returns what a step reads: views of the device tensor, and tensors computed from them."""
        tokens, contexts = self.num_tokens, self.num_contexts
        wide = self.sent[: 3 * tokens + 4 * contexts].to(torch.int64)
        ids, positions, rows = wide[: 3 * tokens].view(3, tokens)
        slots, ends, following, last = wide[3 * tokens :].view(4, contexts)
        tables, offset = [], 3 * tokens + 4 * contexts
        for width in self.widths:
            tables.append(self.sent[offset : offset + contexts * width].view(contexts, width))
            offset += contexts * width
        return StepInputs(
            slot_ids=slots,
            block_tables=tuple(tables),
            contexts=ContextRows(
                ids=ids,
                positions=positions,
                owners=rows,
                ends=ends,
                last_rows=last,
                next_prompt_tokens=following.to(torch.int32),
                lens=(tokens, *[0] * (contexts - 1)),
                starts=(0,) * contexts,
                is_padded=True,
            ),
            num_generations=0,
            num_drafts=num_drafts,
            max_kv_len=self.max_seq_len,
            request_ids=[-1] * contexts,
            all_greedy=all_greedy,
            has_filters=has_filters,
        )
