"""`JoinedPasses`: generations in captured passes over prompts, their sizes, and what they save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...models.decoder import Decoder
from ...ops.launch.machine import BYTES_PER_SECOND, FLOPS, SECONDS_PER_LAYER
from .context_inputs import ContextInputs, seconds_of_row

SHARE_OF_PROMPTS, SHARE_OF_GENERATIONS = 0.15, 0.2
"""Of what a joined pass saves: what the padding of its prompts and of its generations may cost.

There are more sizes of generations, and any of them may meet any prompt.
"""
MOST_TIMES = 4
"""A size has room for less than this many times what there is, if a smaller one is to be had:
attention is cut by how many requests a graph has room for."""


def seconds_of_pass(target: Decoder) -> float:
    """Returns what a pass takes however few rows it has, by estimate.

    It reads the weights of the layers and the lm_head, and each layer has some kernels.
    """
    modules = target.layers, target.lm_head
    read = {id(weight): weight.nbytes for module in modules for weight in module.parameters()}
    return sum(read.values()) / BYTES_PER_SECOND + len(target.layers) * SECONDS_PER_LAYER


class JoinedShape(NamedTuple):
    """What a joined pass has room for, and how much more that is than two passes would have."""

    prompts: ContextInputs
    num_beside: int  # generations
    unused_tokens: int
    unused_generations: int


class JoinedPasses:
    """Sizes of joined passes. They are few, since each needs a graph, as far as padding is cheap.

    Args:
        batch_sizes: of captured steps, ascending.
        context_tokens: of captured passes over prompts, ascending.
        rows: of a generation, at most.
    """

    def __init__(
        self, target: Decoder, batch_sizes: Sequence[int], context_tokens: Sequence[int], rows: int
    ):
        self.seconds_of_pass = seconds_of_pass(target)
        self._seconds_of_token = seconds_of_row(target)
        logits = 2 * sum(weight.numel() for weight in target.lm_head.parameters()) / FLOPS
        self._seconds_of_row = self._seconds_of_token + logits
        tokens = SHARE_OF_PROMPTS * self.seconds_of_pass / self._seconds_of_token
        generations = SHARE_OF_GENERATIONS * self.seconds_of_pass / self._seconds_of_row / rows
        self.context_tokens = frozenset(_sparse(context_tokens, tokens))
        self.batch_sizes = _sparse(batch_sizes, generations, least_times=2)

    def size_for(self, count: int) -> int:
        """Returns the smallest size that holds `count` generations: there is one."""
        return next(size for size in self.batch_sizes if size >= count)

    def seconds_saved(self, shape: JoinedShape, rows: int) -> float:
        """Returns what one pass in place of two saves, by estimate. It may be below zero.

        Args:
            rows: of a generation.
        """
        of_prompts = shape.unused_tokens * self._seconds_of_token
        of_generations = shape.unused_generations * rows * self._seconds_of_row
        return self.seconds_of_pass - of_prompts - of_generations


def _sparse(sizes: Sequence[int], most_unused: float, least_times: int = 1) -> list[int]:
    """Returns some of these ascending sizes, the largest among them.

    Any other size has a larger one among them. That is larger by `most_unused` at most and by less
    than `MOST_TIMES` times, or by less than `least_times` times.
    """
    kept: list[int] = []
    for size in reversed(sizes):
        if not kept:
            kept = [size]
        elif kept[0] >= least_times * size and (
            kept[0] - size > most_unused or kept[0] >= MOST_TIMES * size
        ):
            kept.insert(0, size)
    return kept
