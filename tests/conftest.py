"""Makes `tests/helpers` importable, Triton kernels runnable on CPU, and whole products optional."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import compress
from pathlib import Path
from zlib import crc32

import pytest
import torch

WHOLE = 3000
"""Tests that a run of all files has at least."""

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

if not torch.cuda.is_available():  # before triton is imported: kernels run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with suppress(ImportError):
        from interpreter import patch_interpreter

        patch_interpreter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="run whole products of parameters (make test-all)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--full"):  # read by tests/helpers/matrix.py, here and in workers
        os.environ["TRTSPEC_FULL_TESTS"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out two thirds of the slow tests and cases; the next commits run those.

    A run of some files has all of them, and so have `--full` and a GPU.
    """
    if config.getoption("--full") or len(items) < WHOLE:
        return
    turn = _number_of_commits()
    is_left_out = [
        item.get_closest_marker("slow")
        and not item.get_closest_marker("gpu")
        and (crc32(item.nodeid.encode()) + turn) % 3 > 0
        for item in items
    ]
    config.hook.pytest_deselected(items=list(compress(items, is_left_out)))
    items[:] = [item for item, out in zip(items, is_left_out, strict=True) if not out]


def _number_of_commits() -> int:
    """Returns 0 outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-list", "--count", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return 0
    return int(done.stdout) if done.returncode == 0 else 0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports make hundreds of thousands of objects that stay: none is looked through until all
    are there."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keeps what torch, transformers and the collected tests made out of later collections, each of
    which would look through a million objects that stay."""
    gc.collect()
    gc.freeze()
