"""MXFP4 weights of experts (OCP Microscaling Formats 1.0): numbers of 4 bits (e2m1), of which 32
share a power of two (e8m0)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32  # columns that share a scale
BLOCK = 64  # columns whose codes lie together
LARGEST_SCALE = 128
"""A scale byte s is 2^(s - 127). Kernels multiply by 2^(s - 1), which must be a bf16. (Of s = 0 one
takes zero: such weights are smaller than 1e-37.)"""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits; the fourth is a sign


ROWS = 8  # rows whose codes lie together
Place = Callable[[Tensor, int, int], Tensor]
"""A number's code, its pair and its half -> its bits of a word."""


class Fp4Weight(NamedTuple):
    """A stack of weights [E, out, in], where 8 divides `out` and 64 `in`.

    The codes are in the order that kernels read: of 8 rows what they have in 64 columns lies
    together. There a row has 8 words. Word i has columns 4 i … 4 i + 3 and 32 + 4 i … 35 + 4 i,
    whose bits lie where few operations make bf16 of them (csrc/include/trtspec/fp4.cuh).
    """

    codes: Tensor  # [E, out / 8, in / 64, 8, 32] uint8
    scales: Tensor  # [E, out / 8, ceil(in / 128), 8, 4] uint8

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, out, in)."""
        count, rows, blocks = self.codes.shape[:3]
        return count, rows * ROWS, blocks * BLOCK

    def one(self, expert: int) -> Fp4Weight:
        """Returns one weight of the stack, as a stack."""
        return Fp4Weight(self.codes[expert : expert + 1], self.scales[expert : expert + 1])


def empty(shape: torch.Size, device: torch.device) -> Fp4Weight:
    """Returns room for weights [E, out, in]."""
    count, out, columns = shape
    of_eight = count, out // ROWS
    return Fp4Weight(
        torch.empty(
            (*of_eight, columns // BLOCK, ROWS, BLOCK // 2), dtype=torch.uint8, device=device
        ),
        torch.empty(
            (*of_eight, -(-columns // (2 * BLOCK)), ROWS, 4), dtype=torch.uint8, device=device
        ),
    )


def from_checkpoint(blocks: Tensor, scales: Tensor) -> Fp4Weight:
    """Returns the weights that `mxfp4.py` describes, in the order of `Fp4Weight`.

    Args:
        blocks: [E, out, in / 32, 16] uint8, two neighbours a byte. scales: [E, out, in / 32] uint8.
    """
    groups = scales.shape[-1]
    padding = scales.new_zeros(*scales.shape[:-1], -groups % 4)
    words = torch.cat((scales, padding), dim=-1).unflatten(-1, (-1, 4))  # [E, out, W, 4]
    return Fp4Weight(_by_eight(_in_order(blocks)), _by_eight(words))


def _by_eight(x: Tensor) -> Tensor:
    """[E, out, n, m] -> [E, out / 8, n, 8, m] in memory."""
    return x.unflatten(1, (-1, ROWS)).transpose(2, 3).contiguous()


def _in_order(blocks: Tensor) -> Tensor:
    """[..., in / 32, 16] -> [..., in / 64, 32]."""
    bytes_ = blocks.int().unflatten(-1, (8, 2)).unflatten(-3, (-1, 2))  # [..., in / 64, 2, 8, 2]
    word = torch.zeros((*bytes_.shape[:-3], 8), dtype=torch.int32, device=blocks.device)
    for pair in range(4):
        of_pair = bytes_[..., pair // 2, :, pair % 2]  # [..., in / 64, 8]: of each word one byte
        for half, code in enumerate((of_pair & 15, of_pair >> 4)):
            word |= place(code, pair, half)
    return word.view(torch.uint8)


def place(code: Tensor, pair: int, half: int) -> Tensor:
    """Returns a word's bits of one of its numbers, codes of e2m1 in int32 (fp4.cuh).

    Args:
        pair: of the word's four. half: which number of the pair.
    """
    sign, size = code >> 3, code & 7
    if pair < 3:
        return size << (16 * half + 6 + 3 * pair) | sign << (16 * half + 15 + 3 * pair) % 32
    return (size >> 1 | sign << 3 | (size & 1) << 4) << 16 * half


def taken(words: Tensor) -> Tensor:
    """Returns a word's numbers [..., 8] uint8 by pairs, of words in int32."""
    word = words.long() & 0xFFFFFFFF
    ring = word | word << 32
    moved = [ring, ring >> 3, ring >> 6, (word & 0x001B001B) * 0x1084]
    halves = torch.stack([bits >> 16 * half for bits in moved for half in (0, 1)], dim=-1)
    return (halves >> 12 & 8 | halves >> 6 & 7).to(torch.uint8)


def _out_of_order(codes: Tensor) -> Tensor:
    """[..., in / 64, 32] -> [..., in / 64, 64], each column's code."""
    numbers = taken(codes.contiguous().view(torch.int32))  # [..., in / 64, 8, 8]
    return numbers.unflatten(-1, (2, 4)).transpose(-3, -2).flatten(-3)


def dequantize(weight: Fp4Weight, dtype: torch.dtype) -> Tensor:
    """Returns the weights [E, out, in] in a float dtype."""
    table = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], device=weight.codes.device)
    numbers = _out_of_order(weight.codes.transpose(2, 3).flatten(1, 2))  # [E, out, in / 64, 64]
    groups = numbers.flatten(-2).unflatten(-1, (-1, GROUP))
    scales = weight.scales.transpose(2, 3).flatten(-2).flatten(1, 2)  # [E, out, groups]
    exponents = scales[..., : groups.shape[-2]].int() - 127
    return torch.ldexp(table[groups.int()], exponents[..., None]).flatten(-2).to(dtype)
