"""`JoinedPasses`: generations in captured passes over prompts, how many and what that saves."""

from __future__ import annotations

from collections.abc import Sequence

from ...models.decoder import Decoder
from ...ops.launch.machine import BYTES_PER_SECOND
from .context_inputs import seconds_of_row


def seconds_of_weights(target: Decoder) -> float:
    """Returns how long reading the weights of the layers and the lm_head takes, by their bytes."""
    modules = target.layers, target.lm_head
    read = {id(weight): weight.nbytes for module in modules for weight in module.parameters()}
    return sum(read.values()) / BYTES_PER_SECOND


class JoinedPasses:
    """Numbers of generations that joined passes have room for. Few of these have graphs.

    They are powers of two, and the largest.

    Args:
        batch_sizes: of captured steps, ascending.
    """

    def __init__(self, target: Decoder, batch_sizes: Sequence[int]):
        self.sizes = [size for size in batch_sizes[:-1] if size & (size - 1) == 0]
        self.sizes.append(batch_sizes[-1])
        self.seconds_of_weights = seconds_of_weights(target)
        self._seconds_of_row = seconds_of_row(target)

    def size_for(self, count: int) -> int:
        """Returns the smallest size that holds `count` generations: there is one."""
        return next(size for size in self.sizes if size >= count)

    def seconds_saved(self, alone: int, rows: int) -> float:
        """Returns what one pass in place of two saves, by estimate. It may be below zero.

        The weights are read once. More padding is computed.

        Args:
            alone: the size of a captured step that holds the generations.
            rows: of each generation.
        """
        padding = (self.size_for(alone) - alone) * rows
        return self.seconds_of_weights - padding * self._seconds_of_row
