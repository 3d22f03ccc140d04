"""What layers with linear attention keep of each request, by slot, on the device.

It has a fixed size, whatever the length of the text. Behind the slots are rows for copies of them
(`state_copies.py`). A request begins with zeros, at position 0, or with a copy. So nothing is
cleared when a slot gets another request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..metadata.recurrent import DeltaMemory, RecurrentPass
from ..ops.step.recurrent import begin_pass


@dataclass(frozen=True)
class RecurrentStates:
    """S slots, one scratch slot and N rows for copies."""

    layers: tuple[DeltaMemory, ...]  # of each such layer, in their order
    taken_in: Tensor
    """[S+1+N] int64: how many of its tokens a slot's matrices have taken in. It is not copied: a
    part of a prompt comes next, and writes it."""

    @staticmethod
    def of(layers: tuple[DeltaMemory, ...]) -> RecurrentStates:
        """Returns the states of these layers, of which there is one at least."""
        matrices = layers[0].matrices
        taken_in = torch.zeros(len(matrices), dtype=torch.int64, device=matrices.device)
        return RecurrentStates(layers, taken_in)

    def begin_pass(self, slots: Tensor, ends: Tensor, firsts: Tensor) -> RecurrentPass:
        """Notes what a pass takes in, and returns what its layers read.

        Args:
            slots, ends, firsts: as of `ops.step.recurrent.begin_pass`.
        """
        firsts, before = begin_pass(self.taken_in, slots, ends, firsts)
        return RecurrentPass(self.layers, slots, firsts, before)

    def copy(self, source: int, target: int) -> None:
        """Copies what one row holds to another. It does not wait."""
        of_floats = [memory.matrices for memory in self.layers]
        of_model = [kept for _, *others in self.layers for kept in others]
        for kept in (of_floats, of_model):  # tensors of one dtype are copied at once
            torch._foreach_copy_([x[target] for x in kept], [x[source] for x in kept])
