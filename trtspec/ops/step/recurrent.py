"""What layers with linear attention take in, noted as a pass begins. The kernel is in
`triton_recurrent.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch.dispatch import twin


@twin("step.triton_recurrent")
def begin_pass(
    taken_in: Tensor, slots: Tensor, ends: Tensor, firsts: Tensor
) -> tuple[Tensor, Tensor]:
    """Notes how many tokens each request's matrices will have taken in after a pass of C contexts
    and G generations: all of a context's, of a generation those up to the pass's first row.

    Args:
        taken_in: [S+1] int64, by slot; written.
        slots: [C + G] int64.
        ends: [C] int64, each context's tokens after the pass.
        firsts: [G] int64, position of each generation's first row; any stride.

    Returns:
        `firsts` without a stride, and what the generations' matrices have taken in before, [G]
        int64 both.
    """
    firsts = firsts.contiguous()
    before = taken_in[slots[ends.shape[0] :]]
    taken_in[slots] = torch.cat([ends, firsts + 1])
    return firsts, before
