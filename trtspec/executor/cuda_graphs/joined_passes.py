"""`JoinedPasses`: generations in captured passes over prompts, their sizes, and what they save."""

from __future__ import annotations

from collections.abc import Sequence

from ...models.decoder import Decoder
from ...ops.launch.machine import BYTES_PER_SECOND, SECONDS_PER_LAYER
from .context_inputs import seconds_of_row

SHARE_OF_PROMPTS, SHARE_OF_GENERATIONS = 0.1, 0.2
"""Of what a joined pass saves: what the padding of its prompts and of its generations may cost.

There are more sizes of generations, and any of them may meet any prompt."""


def seconds_of_pass(target: Decoder) -> float:
    """Returns what a pass takes however few rows it has, by estimate.

    It reads the weights of the layers and the lm_head, and each layer has some kernels.
    """
    modules = target.layers, target.lm_head
    read = {id(weight): weight.nbytes for module in modules for weight in module.parameters()}
    return sum(read.values()) / BYTES_PER_SECOND + len(target.layers) * SECONDS_PER_LAYER


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
        self._seconds_of_row = seconds_of_row(target)
        most = self.seconds_of_pass / self._seconds_of_row  # rows
        self.batch_sizes = _sparse(batch_sizes, SHARE_OF_GENERATIONS * most / rows)
        self.context_tokens = frozenset(_sparse(context_tokens, SHARE_OF_PROMPTS * most))

    def size_for(self, count: int) -> int:
        """Returns the smallest size that holds `count` generations: there is one."""
        return next(size for size in self.batch_sizes if size >= count)

    def seconds_saved(self, padding: int) -> float:
        """Returns what one pass in place of two saves, by estimate. It may be below zero.

        Args:
            padding: rows that it has more than the two.
        """
        return self.seconds_of_pass - padding * self._seconds_of_row


def _sparse(sizes: Sequence[int], most: float) -> list[int]:
    """Returns some of ascending sizes: each size is one, or one is at most `most` larger."""
    kept: list[int] = []
    for size in reversed(sizes):
        if not kept or kept[0] - size > most:
            kept.insert(0, size)
    return kept
