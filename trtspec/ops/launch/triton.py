"""Programmatic dependent launch for Triton's kernels.

A kernel's blocks are placed while the kernel before runs, and wait there
(csrc/include/trtspec/common.cuh has the rule).
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """Returns launch arguments for a kernel that calls `after_previous(PDL)`."""
    allowed = x.is_cuda and _has_dependent_launch(x.device.index)
    return {"PDL": allowed, "launch_pdl": allowed}


@cache
def _has_dependent_launch(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Waits for the kernel before, whose output may be read after this call.

    Every block must call it, or the next kernel could start before earlier ones are done. Data that
    is older than the kernel before may be read earlier, past L1 (".cg"): that kernel has waited too
    before it let this one start. (But for attention that runs beside another kernel: csrc's
    common.cuh.)
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
