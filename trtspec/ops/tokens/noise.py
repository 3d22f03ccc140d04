"""Noise as a hash of (seed, position, stream, index), the same whatever shares the batch.

It is counter-based as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), with
a 32-bit finaliser instead of Philox. One row of a 128k vocabulary costs a dozen elementwise
operations and no state. The code below computes in int64 with masks, which is the same arithmetic
as uint32 in the kernels.
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
    first, second = _row_keys(seeds, positions, stream)
    index = size
    if isinstance(index, int):
        index = torch.arange(index, device=seeds.device, dtype=torch.int64)
    x = _multiply(index, 0x9E3779B1) + first[:, None]
    x &= _MASK  # in place from here on: fresh memory costs more than the arithmetic
    x ^= x >> 16
    x.mul_(0x7FEB352D).bitwise_and_(_MASK).bitwise_xor_(second[:, None])
    x ^= x >> 15
    x.mul_(0x846CA68B).bitwise_and_(_MASK)
    x ^= x >> 16
    return _to_open_interval(x)


def _to_open_interval(x: Tensor) -> Tensor:
    """Maps 32-bit integers held in int64 to float32 in (0, 1)."""
    return (x >> 9).to(torch.float32).add_(0.5).mul_(2.0**-23)


def gumbel_noise(seeds: Tensor, positions: Tensor, stream: int, size: int | Tensor) -> Tensor:
    """Draws [R, size] float32 standard Gumbel: argmax(logits + noise) samples softmax(logits)."""
    return uniform_noise(seeds, positions, stream, size).log_().neg_().log_().neg_()
