"""Packages whose names are loaded when first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        homes: module of the package -> the names that it gives.
    """
    home_of = {name: module for module, names in homes.items() for name in names}
    public = sorted(home_of)

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{home_of[name]}")
        value = getattr(module, name)
        setattr(importlib.import_module(package), name, value)
        return value

    return load, lambda: public, public
