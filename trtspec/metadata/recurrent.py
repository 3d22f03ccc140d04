"""What layers with linear attention keep, and what a pass reads of it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DeltaMemory(NamedTuple):
    """What one layer keeps of each slot (`ops/layer/delta_rule.py`): S slots, one scratch slot, and
    perhaps rows for copies."""

    matrices: Tensor  # [S+1, Hv, Dk, Dv] float32
    mixed: Tensor  # [S+1, R, C], model dtype: by position modulo R
    gates: Tensor  # [S+1, R, 2 * Hv], model dtype


class RecurrentPass(NamedTuple):
    """What such layers read in one pass of B requests, G of them generations."""

    layers: tuple[DeltaMemory, ...]
    slots: Tensor  # [B] int64
    firsts: Tensor  # [G] int64, position of each generation's first row
    taken_in: Tensor  # [G] int64, tokens that the generations' matrices have taken in before
