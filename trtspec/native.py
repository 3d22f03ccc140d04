"""The CUDA C++ kernels of `csrc/`: compiled on first use, kept in the cache directory.

They are loaded through apache-tvm-ffi.

    python -m trtspec.native [9.0a]     compiles ahead of time; needs nvcc, no GPU
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigError
from .utils import cache_dir

logger = logging.getLogger(__name__)

GENERATIONS = (9, 10)
"""Major compute capabilities served: Hopper, and Blackwell's data-centre parts. Kernels start
before their predecessors end, which older ones cannot, and take more shared memory than others
have."""


def kernels(x: Tensor) -> Any:
    """The compiled module for a CUDA tensor's device; None where the kernels cannot be had."""
    return _load(x.device.index) if x.is_cuda else None


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether a CUDA device is of Hopper's generation, whose warpgroups multiply together."""
    return torch.cuda.get_device_capability(device)[0] == 9


@cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a CUDA device has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _load(device: int) -> Any:
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in GENERATIONS:
        logger.info("No CUDA C++ kernels for capability %d.%d: Triton's serve.", *capability)
        return None
    try:
        return importlib.import_module("tvm_ffi").load_module(
            str(build("{}.{}a".format(*capability)))
        )
    except (ConfigError, ImportError, OSError, RuntimeError) as error:
        logger.warning("The kernels of csrc are not used, cuBLAS and Triton serve: %s", error)
        return None


def build(architecture: str) -> Path:
    """Compiles the kernels unless that was done before.

    Args:
        architecture: as nvcc names it, e.g. "9.0a".

    Returns:
        The shared library in the cache directory; its name carries a hash of the sources.

    Raises:
        ConfigError: apache-tvm-ffi or nvcc is missing, the cache cannot be written, or nvcc failed.
    """
    try:
        ffi = importlib.import_module("tvm_ffi.cpp")
        version = importlib.import_module("tvm_ffi").__version__
    except ImportError as error:
        raise ConfigError(
            f"apache-tvm-ffi is not installed ({error}): pip install 'trtspec[cuda]'."
        ) from error
    root = source_dir()
    sources = sorted(root.glob("*.cu"))
    digest = hashlib.sha256(f"{version} {torch.version.cuda} {architecture}".encode())
    for path in [*sources, *sorted(root.rglob("*.cuh")), *sorted(root.rglob("*.h"))]:
        digest.update(path.read_bytes())
    directory = cache_dir() / "kernels" / digest.hexdigest()[:16]
    library = directory / "trtspec_kernels.so"
    if library.exists():
        return library
    if torch.version.cuda is None:
        logger.warning("This torch has no CUDA: one that has does not find kernels built here.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _alone(directory):
            if library.exists():
                return library
            logger.info("Compiling the CUDA kernels, once: 100 s with two cores.")
            # Built aside and moved, so that no process finds an unfinished library.
            with (
                _environment(TVM_FFI_CUDA_ARCH_LIST=architecture, CUDA_HOME=_cuda_home()),
                TemporaryDirectory(dir=directory) as aside,
            ):
                built = ffi.build(
                    "trtspec_kernels",
                    cuda_files=[str(path) for path in sources],
                    extra_include_paths=[str(root / "include")],
                    build_directory=aside,
                )
                os.replace(built, library)
    except OSError as error:
        raise ConfigError(
            f"The CUDA kernels could not be built in {directory} ({error}): set TRTSPEC_CACHE to a "
            "directory that can be written, and install ninja and a C++ compiler."
        ) from error
    except RuntimeError as error:  # the compiler's own words
        raise ConfigError(
            f"nvcc could not build the CUDA kernels: {str(error).strip()[-2000:]}"
        ) from error
    return library


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process at a time, where the file system knows locks. Others wait for its library."""
    with open(directory / "lock", "w") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _cuda_home() -> str:
    """The directory of the CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if not any(homes):
        nvcc = shutil.which("nvcc")
        homes = [nvcc and str(Path(nvcc).resolve().parents[1]), "/usr/local/cuda"]
    for home in homes:
        if home and Path(home, "bin", "nvcc").exists() and list(Path(home).glob("lib*/libcudart*")):
            return home
    raise ConfigError(
        "nvcc and its libraries were not found: install a CUDA toolkit and set CUDA_HOME to its "
        f"directory (looked in {', '.join(filter(None, homes))})."
    )


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Environment variables for a while: apache-tvm-ffi reads its settings there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def source_dir() -> Path:
    """`csrc`, inside the package (in a checkout a link) or beside it."""
    package = Path(__file__).parent
    inside = package / "csrc"
    return inside if inside.is_dir() else package.parent / "csrc"


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        logger.info("%s", build(sys.argv[1] if len(sys.argv) > 1 else "9.0a"))
    except ConfigError as error:
        sys.exit(f"error: {error}")
