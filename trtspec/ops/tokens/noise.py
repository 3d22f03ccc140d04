"""Noise as a hash of (seed, position, stream, index), the same whatever shares the batch.

It is counter-based as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), with
a 32-bit finaliser instead of Philox. One row of a 128k vocabulary costs a dozen elementwise
operations and no state. Kernels compute in uint32. The code below does the same arithmetic: keys of
rows in int64 with masks, their numbers in int32, whose products and sums wrap to the same bits.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


class NoiseStream(IntEnum):
    """Uses of noise. Two uses at one position are independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPTANCE = 2
    FORCED = 3


def _multiply(x: Tensor, factor: int) -> Tensor:
    """Returns x * factor mod 2^32 for x in [0, 2^32) held in int64 (wrapping does no harm)."""
    return (x * factor) & _MASK


def _mix(x: Tensor) -> Tensor:
    x = _multiply(x ^ (x >> 16), 0x7FEB352D)
    x = _multiply(x ^ (x >> 15), 0x846CA68B)
    return x ^ (x >> 16)


def of_depth(stream: NoiseStream, depth: int) -> int:
    """Returns the substream of the draft at this depth of a step, 0 for the first."""
    return int(stream) + (len(NoiseStream) * (depth + 1))


def _row_keys(seeds: Tensor, positions: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """Hashes a 64-bit seed, a position and a stream to two 32-bit keys per row."""
    low, high = seeds & _MASK, (seeds >> 32) & _MASK
    positions = positions.to(torch.int64)
    first = _mix(_mix(low + _multiply(positions + 1, 0x9E3779B1) & _MASK) ^ high)
    second = _mix((first + 0x85EBCA6B * (int(stream) + 1)) & _MASK) ^ _mix(high ^ positions)
    first = _mix((first ^ _mix(second)) & _MASK)
    return first, second & _MASK


def uniform_noise(seeds: Tensor, positions: Tensor, stream: int, size: int | Tensor) -> Tensor:
    """Draws [R, size] float32 in the open interval (0, 1): odd multiples of 2^-24, exact in fp32.

    With one bit more the largest would round to 1, whose Gumbel noise is infinite. Then a token of
    probability zero would be drawn once in a few hundred tokens.

    Args:
        seeds: [R] int64, any value.
        positions: [R] int, the position of the token to be chosen.
        stream: a `NoiseStream`, or one of `of_depth`.
        size: numbers per row; entry j is the same for every size > j. A tensor names the entries,
            int64 [size], or [R, size] if they differ from row to row.
    """
    first, second = (keys.to(torch.int32)[:, None] for keys in _row_keys(seeds, positions, stream))
    index = size
    if isinstance(index, int):
        index = torch.arange(index, device=seeds.device)
    x = index.to(torch.int32) * _signed(0x9E3779B1) + first
    x ^= _shifted(x, 16)  # in place from here on: fresh memory costs more than the arithmetic
    x.mul_(0x7FEB352D).bitwise_xor_(second)
    x ^= _shifted(x, 15)
    x.mul_(_signed(0x846CA68B))
    x ^= _shifted(x, 16)
    return _to_open_interval(x)


def _to_open_interval(x: Tensor) -> Tensor:
    """Maps int32 x, taken as uint32, to float32 in (0, 1)."""
    return _shifted(x, 9).to(torch.float32).add_(0.5).mul_(2.0**-23)


def _signed(factor: int) -> int:
    """Returns the int32 with the bits of this uint32."""
    return factor - (1 << 32) if factor >= 1 << 31 else factor


def _shifted(x: Tensor, count: int) -> Tensor:
    """Returns int32 x as uint32, shifted to the right: zeros come in at the left."""
    return (x >> count).bitwise_and_((1 << (32 - count)) - 1)


def exponential_noise(seeds: Tensor, positions: Tensor, stream: int, size: int | Tensor) -> Tensor:
    """Draws [R, size] float32 standard exponential numbers, > 0: argmax(p / noise) samples p.

    It is the choice that the logarithms of p and `gumbel_noise` make, and never one of p = 0.
    """
    return uniform_noise(seeds, positions, stream, size).log_().neg_()


def gumbel_noise(seeds: Tensor, positions: Tensor, stream: int, size: int | Tensor) -> Tensor:
    """Draws [R, size] float32 standard Gumbel: argmax(logits + noise) samples softmax(logits)."""
    return exponential_noise(seeds, positions, stream, size).log_().neg_()
