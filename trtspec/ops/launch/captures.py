"""What all captures of CUDA graphs share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns one stream for all captures of all engines: cuBLAS holds 32 MiB per stream, for
    good. "cuda" is the current device."""
    return _stream_of(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _stream_of(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keeps the garbage collector from destroying a graph while another is captured.

    CUDA would fail that capture. An engine is no reference cycle, but a caller's cycle may hold
    one, and other libraries have graphs too (docs/decisions/011).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
