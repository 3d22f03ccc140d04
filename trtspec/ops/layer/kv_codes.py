"""Keys and values in FP8 (e4m3): a number is its code times the scale of its KV head.

What lies beyond ±448 scales is cut off there, infinities too. A head of a row that has a NaN is NaN
in all its codes: a kernel knows it by the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fp8 import FP8, LARGEST


def encode(x: Tensor, scales: Tensor) -> Tensor:
    """Returns the codes of keys or values [T, Hkv, D], to nearest.

    Args:
        scales: [Hkv] float32.
    """
    scaled = (x.float() / scales[:, None]).clamp(-LARGEST, LARGEST)
    return scaled.masked_fill(scaled.isnan().any(-1, keepdim=True), torch.nan).to(FP8)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the keys or values of codes [T, Hkv, D], rounded once."""
    return (codes.float() * scales[:, None]).to(dtype)


def as_bytes(numbers: Tensor) -> Tensor:
    """Returns codes as uint8, for operations that do not know FP8; other numbers as they are."""
    return numbers.view(torch.uint8) if numbers.dtype == FP8 else numbers


def put(cache: Tensor, slots: Tensor, x: Tensor, scales: Tensor | None) -> None:
    """Writes keys or values x [T, Hkv, D] to slots [T] of a layer's cache [slots, Hkv, D].

    Args:
        scales: [Hkv] float32 of a cache in FP8; None is one in x's dtype.
    """
    if scales is not None:
        x = encode(x, scales)
    as_bytes(cache).index_copy_(0, slots, as_bytes(x))


def look_up(
    cache: Tensor, slots: Tensor | slice, scales: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns the keys or values at some slots of a layer's cache, [n, Hkv, D] in `dtype`.

    Of a slice of a cache in `dtype` it is a view.
    """
    found = as_bytes(cache)
    found = found[slots] if isinstance(slots, slice) else found.index_select(0, slots)
    return found if scales is None else decode(found.view(FP8), scales, dtype)
