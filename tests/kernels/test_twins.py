"""Every op with a kernel: its twins have the same parameters, and a test compares them."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trtspec.ops
from trtspec.ops.launch.dispatch import TWINS, Twin

pytest.importorskip("triton", reason="needs triton")

ROOT = Path(__file__).parents[2]


def _twins() -> list[Twin]:
    for module in pkgutil.walk_packages(trtspec.ops.__path__, "trtspec.ops."):
        if "triton" not in module.name:
            importlib.import_module(module.name)
    return TWINS


@pytest.mark.parametrize("twin", _twins(), ids=lambda twin: twin.function.__name__)
def test_an_op_with_a_kernel(twin: Twin) -> None:
    names = [list(inspect.signature(f).parameters) for f in (twin.function, twin.kernel)]
    assert names[0] == names[1], "a call must mean the same to both"
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    name = twin.function.__name__
    assert any(re.search(rf"\b{n}\b", tests) for n in (name, *_callers(name))), f"no test of {name}"


@functools.cache
def _functions() -> list[tuple[str, set[str]]]:
    """Functions of `trtspec/ops` with the names that each reads."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "trtspec" / "ops").rglob("*.py")]
    return [
        (f.name, {node.id for node in ast.walk(f) if isinstance(node, ast.Name)})
        for tree in trees
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef)
    ]


def _callers(name: str) -> set[str]:
    """Functions of `trtspec/ops` that call this one."""
    return {function for function, read in _functions() if name in read}


def test_the_kernels_compile_for_hopper() -> None:
    """The interpreter knows neither types nor limits, and takes what the compiler refuses."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "tests/helpers/compile_ops.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["there"] == sorted(found["shared"]) and len(found["there"]) >= 23
    assert max(found["shared"].values()) <= 99 * 1024, found["shared"]  # also of small GPUs
