"""MXFP4 weights of experts (OCP Microscaling Formats 1.0): numbers of 4 bits (e2m1), of which 32
share a power of two (e8m0)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32  # columns that share a scale
BLOCK = 64  # columns whose codes lie together
LARGEST_SCALE = 128
"""A scale byte s is 2^(s - 127). Kernels multiply by 2^(s - 1), which must be a bf16. (Of s = 0 one
takes zero: such weights are smaller than 1e-37.)"""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits; the fourth is a sign


class Fp4Weight(NamedTuple):
    """A stack of weights [E, out, in], where 64 divides `in`.

    Of every 64 columns there are 32 bytes, and byte j has column j in its low bits and column
    32 + j in its high ones: each half is of one group, and its columns are in order.
    """

    codes: Tensor  # [E, out, in / 2] uint8
    scales: Tensor  # [E, out, groups] uint8, groups filled up to a multiple of 4

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, out, in)."""
        count, out, half = self.codes.shape
        return count, out, 2 * half

    def one(self, expert: int) -> Fp4Weight:
        """Returns one weight of the stack, as a stack."""
        return Fp4Weight(self.codes[expert : expert + 1], self.scales[expert : expert + 1])


def padded_groups(columns: int) -> int:
    """Returns how many scales a row has room for."""
    return -(-columns // (4 * GROUP)) * 4


def from_checkpoint(blocks: Tensor, scales: Tensor) -> Fp4Weight:
    """Returns the weights that `mxfp4.py` describes, in the order of `Fp4Weight`.

    Args:
        blocks: [E, out, in / 32, 16] uint8, two neighbours a byte. scales: [E, out, in / 32] uint8.
    """
    *stack, groups, _ = blocks.shape
    numbers = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [E, out, G, 32]
    first, second = numbers.unflatten(-2, (groups // 2, 2)).unbind(-2)  # [E, out, in / 64, 32]
    padding = scales.new_zeros(*stack, padded_groups(groups * GROUP) - groups)
    return Fp4Weight((first | second << 4).flatten(-2), torch.cat((scales, padding), dim=-1))


def dequantize(weight: Fp4Weight, dtype: torch.dtype) -> Tensor:
    """Returns the weights [E, out, in] in a float dtype."""
    table = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], device=weight.codes.device)
    blocks = weight.codes.unflatten(-1, (-1, BLOCK // 2))
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-2)  # [E, out, in / 64, 2, 32]
    groups = halves.flatten(-3, -2)  # [E, out, in / 32, 32]
    exponents = weight.scales[..., : groups.shape[-2]].int() - 127
    return torch.ldexp(table[groups.int()], exponents[..., None]).flatten(-2).to(dtype)
