"""Packages that load names when first used: type checkers are told of the same names."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest


@pytest.mark.parametrize("package", ["trtspec", "trtspec.config", "trtspec.metadata"])
def test_type_checkers_see_the_names_that_load(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = [alias.asname for node in block.body for alias in node.names]  # type: ignore[attr-defined]
    assert sorted(seen) == module.__all__ == dir(module)
    assert all(getattr(module, name) is not None for name in seen)
