"""csrc's attention kernels on a CPU: their own code, with a GPU's threads as fibers (emulated/)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "emulated"
CSRC = Path(__file__).parents[2] / "csrc" / "include" / "trtspec"
FROM_CSRC = (
    "attend_group",
    "attend_tiles",
    "cluster_attention",
    "narrow_attention",
    "wide_attention",
)
SEEDS = 3


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels' headers, beside others in place of what has a GPU's instructions."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    root = tmp_path_factory.mktemp("emulated")
    headers = root / "trtspec"
    headers.mkdir()
    for name in FROM_CSRC:
        shutil.copy(CSRC / f"{name}.cuh", headers)
    for path in HERE.iterdir():
        shutil.copy(path, headers if path.suffix == ".cuh" else root)
    flags = "-std=c++20 -O1 -pthread -Wno-unknown-pragmas -I."
    command = [compiler, *flags.split(), "attention.cpp", "gpu.cpp", "-o", "attention"]
    made = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-3000:]
    return root / "attention"


@pytest.mark.parametrize("seed", [1, 1022, pytest.param(201, marks=pytest.mark.slow)])
def test_attention_is_that_of_float64(program: Path, seed: int) -> None:
    """With random sizes, orders of warps, and copies that come as late as they may."""
    result = subprocess.run(
        [program, str(seed), str(SEEDS)], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
