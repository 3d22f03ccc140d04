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
    return _kernels() if x.is_cuda and not (x.requires_grad and torch.is_grad_enabled()) else None


@cache
def _kernels() -> ModuleType | None:
    try:
        return importlib.import_module(".triton_ops", __package__)
    except ImportError as error:
        logger.warning("triton is not installed (%s): small operations run in torch.", error)
        return None
