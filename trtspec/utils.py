"""What every room may need: cache paths, copies to the device, names of before."""

from __future__ import annotations

import importlib
import math
import os
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import ConfigError

_ALIGNMENT = 64  # bytes, as torch aligns tensors on the CPU


def cache_dir() -> Path:
    """`$TRTSPEC_CACHE`, or `~/.cache/trtspec`. Not created here.

    Raises:
        ConfigError: it begins with the home directory of a user who has none.
    """
    chosen = os.environ.get("TRTSPEC_CACHE") or "~/.cache/trtspec"
    try:
        return Path(chosen).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"The cache directory {chosen!r} is not known ({error}). Set TRTSPEC_CACHE to a "
            "directory that can be written."
        ) from error


def replace_text(path: Path, text: str) -> None:
    """Writes a file as a whole: readers, and writers beside this one, never see a part of it.

    Raises:
        OSError: the directory cannot be made or written. The old file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def set_usual_mode(path: Path) -> None:
    """Gives a file the mode that `open` gives new ones: safetensors' are their owner's alone.

    Raises:
        OSError: the directory cannot be written.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        beside.touch()  # the umask itself can only be read by setting it, for all threads
        mode = stat.S_IMODE(beside.stat().st_mode)
        if stat.S_IMODE(path.stat().st_mode) != mode:  # some file systems have one mode for all
            path.chmod(mode)
    finally:
        beside.unlink(missing_ok=True)


def module_command(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Returns the command that runs a module as a program, and the environment for it.

    It imports from where this process does, and from nowhere else: -m alone would put the working
    directory first, whose files may be called as modules are.
    """
    path = os.pathsep.join(map(str, sys.path))
    command = [sys.executable, "-P", "-m", module, *arguments]
    return command, {**os.environ, "PYTHONPATH": path}


def renamed(module: str, names: dict[str, str]) -> Callable[[str], Any]:
    """Returns a module's `__getattr__` for old names of what it holds.

    Args:
        names: old name -> what took its place, in the same module or `package.module.name`.
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"{module}.{name} is now {names[name]}."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        home, _, new = names[name].rpartition(".")
        return getattr(importlib.import_module(home or module), new)

    return __getattr__


def to_device(host: Tensor, device: torch.device | str) -> Tensor:
    """Copies a CPU tensor; on CUDA through pinned memory, so that the host does not wait."""
    if torch.device(device).type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def rows_to_tensor(values: list[Any], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Host values -> device tensor, without waiting for the device."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates zeros. On the CPU, the system gives each page when it is first read or written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    # torch.zeros writes every page, which takes seconds for a large cache.
    memory = torch.from_numpy(np.zeros(size + _ALIGNMENT, dtype=np.uint8))
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + size].view(dtype).view(shape)
