"""Modules that moved still import by their old names."""

from __future__ import annotations

import importlib
import sys

import pytest

from trtspec._moved import MOVED

_NEEDS_TRITON = [old for old, homes in MOVED.items() if any("triton" in home for home in homes)]


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_module_gives_the_names_of_its_homes(old: str) -> None:
    if old in _NEEDS_TRITON or old.startswith("attention."):
        pytest.importorskip("triton", reason="needs triton")
    sys.modules.pop(f"trtspec.{old}", None)
    if not MOVED[old]:  # a package whose modules went to several rooms
        importlib.import_module(f"trtspec.{old}")
        return
    with pytest.warns(DeprecationWarning, match=rf"trtspec\.{old} has moved: import"):
        module = importlib.import_module(f"trtspec.{old}")
    for home in MOVED[old]:
        for name, value in vars(importlib.import_module(f"trtspec.{home}")).items():
            if callable(value) and value.__module__ == f"trtspec.{home}":
                assert getattr(module, name) is value


def test_what_is_set_on_an_old_module_is_set_in_its_home(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(DeprecationWarning):
        sys.modules.pop("trtspec.models.zoo", None)
        old = importlib.import_module("trtspec.models.zoo")
    home = importlib.import_module("trtspec.checkpoints.zoo")
    monkeypatch.setattr(old, "MANIFEST", "other.json")
    assert home.MANIFEST == "other.json"
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        old.nothing_of_this_name  # noqa: B018


def test_other_names_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("trtspec.models.never_was")
