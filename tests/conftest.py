"""Makes `tests/helpers` importable, Triton kernels runnable on CPU, and whole products optional."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

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
