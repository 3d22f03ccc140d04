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
    """The module `triton_ops` for a CUDA tensor, None where the torch twin is to run: on CPU, and
    where a derivative is wanted, which the kernels do not have."""
    needs_gradient = x.requires_grad and torch.is_grad_enabled()
    return _module("triton_ops") if x.is_cuda and not needs_gradient else None


def sampling_kernels(logits: Tensor) -> Any:
    """The module `triton_sampling` for CUDA logits of a dtype that it reads, else None."""
    is_read = logits.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return _module("triton_sampling") if logits.is_cuda and is_read else None


def moe_kernels(x: Tensor) -> Any:
    """The module `triton_moe` as `triton_kernels` gives its own."""
    needs_gradient = x.requires_grad and torch.is_grad_enabled()
    return _module("triton_moe") if x.is_cuda and not needs_gradient else None


@cache
def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f".{name}", __package__)
    except ImportError as error:
        logger.warning("triton is not installed (%s): small operations run in torch.", error)
        return None
