"""Which implementation of an op: Triton's on CUDA where it is installed, else the torch twin."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def triton_kernels(x: Tensor) -> Any:
    """Returns `ops/layer/triton.py` for a CUDA tensor, and None where the torch twin is to run.

    The twin runs on CPU, and where a derivative is wanted: the kernels have none.
    """
    needs_gradient = x.requires_grad and torch.is_grad_enabled()
    return _module("layer.triton") if x.is_cuda and not needs_gradient else None


def sampling_kernels(logits: Tensor) -> Any:
    """Returns `ops/tokens/triton_sampled.py` for CUDA logits of a dtype it reads, else None."""
    is_read = logits.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return _module("tokens.triton_sampled") if logits.is_cuda and is_read else None


def moe_kernels(x: Tensor) -> Any:
    """Returns `ops/layer/triton_moe.py`, where `triton_kernels` gives one."""
    needs_gradient = x.requires_grad and torch.is_grad_enabled()
    return _module("layer.triton_moe") if x.is_cuda and not needs_gradient else None


@cache
def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"trtspec.ops.{name}")
    except ImportError as error:
        logger.warning("triton is not installed (%s): small operations run in torch.", error)
        return None
