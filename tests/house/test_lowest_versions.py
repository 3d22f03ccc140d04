"""`make test-lowest` installs the lower bounds of pyproject.toml, read by .ci/lowest.py."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "lowest.py"


def test_every_package_has_one_lower_bound() -> None:
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    names = [line.split("==")[0] for line in run.stdout.splitlines()]
    assert {"torch", "gguf", "pytest", "triton"} <= set(names)
    assert len(set(names)) == len(names), f"two extras disagree: {names}"


def test_a_requirement_without_a_lower_bound_is_refused() -> None:
    constraint = runpy.run_path(str(SCRIPT))["constraint"]
    assert constraint("triton>=3.6,<3.8") == "triton==3.6"
    for requirement in ("numpy", "numpy<3", "numpy>1.26"):
        with pytest.raises(SystemExit, match="write 'name>=lowest'"):
            constraint(requirement)
