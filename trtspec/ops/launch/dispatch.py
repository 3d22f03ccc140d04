"""Which implementation of an op runs: Triton's on CUDA where it is installed, else torch's.

An op with a kernel is a torch function marked `@twin("folder.module")`; the function of the same
name and parameters in `trtspec/ops/folder/module.py` launches the kernel. The torch function is the
CPU path and the oracle of the kernel's tests.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Twin:
    """An op that has a kernel."""

    function: Callable[..., Any]  # torch's
    module: str  # under `trtspec.ops`, has Triton's by the same name

    @property
    def kernel(self) -> Callable[..., Any]:
        """Triton's function.

        Raises:
            ImportError: Triton is not installed.
        """
        module = importlib.import_module(f"trtspec.ops.{self.module}")
        return getattr(module, self.function.__name__)


TWINS: list[Twin] = []
"""Every op marked with `twin` in the modules imported so far."""


def twin(module: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Marks a torch function whose namesake in `trtspec.ops.{module}` launches a kernel.

    The kernel runs where `kernels` says so of the first tensor among the function's arguments.
    """

    def mark(function: Callable[P, T]) -> Callable[P, T]:
        TWINS.append(Twin(function, module))
        name = function.__name__

        @functools.wraps(function)
        def op(*args: P.args, **kwargs: P.kwargs) -> T:
            x = _first_tensor((*args, *kwargs.values()))
            served = None if x is None else kernels(module, x)
            chosen = function if served is None else getattr(served, name)
            return chosen(*args, **kwargs)

        return op

    return mark


def _first_tensor(values: Iterable[Any]) -> Tensor | None:
    """Returns the first tensor of these values, also inside tuples."""
    for value in values:
        found = _first_tensor(value) if isinstance(value, tuple) else value
        if isinstance(found, Tensor):
            return found
    return None


def kernels(module: str, x: Tensor) -> Any:
    """Returns `trtspec.ops.{module}` for a CUDA tensor, and None where the torch twin is to run.

    The twin runs on CPU, and where a derivative is wanted: the kernels have none.
    """
    needs_gradient = x.requires_grad and torch.is_grad_enabled()
    return _module(module) if x.is_cuda and not needs_gradient else None


def sampling_kernels(logits: Tensor) -> Any:
    """Returns `ops/tokens/triton_sampled.py` for CUDA logits of a dtype it reads, else None."""
    is_read = logits.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return _module("tokens.triton_sampled") if logits.is_cuda and is_read else None


@functools.cache
def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"trtspec.ops.{name}")
    except ImportError as error:
        logger.warning("triton is not installed (%s): small operations run in torch.", error)
        return None
