"""Noise in Triton, bit for bit that of `noise.py`."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def uniform(seed, position, stream, index):
    """seed, position, stream: scalars. index: which entries, any shape."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    position32 = position.to(tl.uint32)
    first = _mix(_mix(low + (position32 + 1) * 0x9E3779B1) ^ high)
    offset = (stream + 1).to(tl.uint32) * 0x85EBCA6B
    second = _mix(first + offset) ^ _mix(high ^ position32)
    first = _mix(first ^ _mix(second))
    x = index.to(tl.uint32) * 0x9E3779B1 + first
    x = ((x ^ (x >> 16)) * 0x7FEB352D) ^ second
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return ((x >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def exponential(uniform):
    """-log(uniform). Near 1, where the fast logarithm is coarse and the race is won, a series."""
    rest = 1.0 - uniform
    series = 0.2 + rest * (1.0 / 6.0)
    series = rest * (1.0 + rest * (0.5 + rest * (1.0 / 3.0 + rest * (0.25 + rest * series))))
    return tl.where(rest < 0.0625, series, -tl.log(uniform))
