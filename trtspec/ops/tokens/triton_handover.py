"""Copies to and from the host in Triton. Twin: `handover.py`.

The device addresses page-locked memory itself. So a copy is a kernel: no copy engine must start.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def write_to_host(tensor: Tensor, host: Tensor) -> None:
    """As its twin."""
    _copy(tensor.contiguous(), host[: tensor.shape[0]])


def read_from_host(tensor: Tensor, host: Tensor) -> None:
    """As its twin."""
    _copy(host[: tensor.shape[0]], tensor)


def _copy(source: Tensor, target: Tensor) -> None:
    assert source.shape == target.shape and source.is_contiguous() and target.is_contiguous()
    if (count := source.numel()) > 0:
        _copy_kernel[(triton.cdiv(count, BLOCK),)](source, target, count, BLOCK)


@triton.jit
def _copy_kernel(source, target, count, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    tl.store(target + entry, tl.load(source + entry, mask=inside), mask=inside)
