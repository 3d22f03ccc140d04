"""Modules that moved still import by their old names."""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys

import pytest

from trtspec._moved import MOVED, MovedModules

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


def test_an_old_module_lists_the_names_of_its_homes() -> None:
    with pytest.warns(DeprecationWarning):
        sys.modules.pop("trtspec.outputs", None)
        names: dict[str, object] = {}
        exec("from trtspec.outputs import *", names)
    home = importlib.import_module("trtspec.api.outputs")
    assert names["RequestOutput"] is home.RequestOutput
    assert "RequestOutput" in dir(sys.modules["trtspec.outputs"])


def test_an_old_module_runs_its_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m trtspec.ops.native`, which compiles the kernels."""
    seen: list[str] = []
    monkeypatch.setattr(runpy, "run_module", lambda name, *_, **__: seen.append(name))
    spec = importlib.util.find_spec("trtspec.ops.native")
    assert spec is not None and isinstance(spec.loader, MovedModules)
    exec(spec.loader.get_code("trtspec.ops.native"))
    assert seen == ["trtspec.native"]


@pytest.mark.parametrize(
    "module, old, new",
    [
        ("checkpoints.heads.masked", "parse_parallel", "checkpoints.heads.masked.parse_masked"),
        ("executor.build", "DEFAULT_CUDA_GRAPHS", "config.DEFAULT_CUDA_GRAPHS"),
        ("executor.build", "DEFAULT_DRAFT_LEN", "executor.drafters.DEFAULT_DRAFT_LEN"),
        ("executor.build", "MAX_BATCH_SIZE", "config.MAX_BATCH_SIZE"),
        ("executor.drafting", "ask_drafter", "executor.host_drafts.ask_drafter"),
        ("metadata.sampling", "to_device", "utils.to_device"),
        ("models.kv_layout", "KVPlace", "models.kv_layout.KVLocation"),
        ("models.kv_layout", "kv_places", "models.kv_layout.kv_locations"),
        ("executor.step_launch", "StepLaunch", "executor.device_step.PartialLaunch"),
        ("state.lookup", "Lookup", "state.prefix_search.PrefixSearch"),
        ("state.lookup", "Sought", "state.prefix_search.PrefixQuery"),
        ("train.data", "pack", "train.packing.pack"),
        ("train.data", "draft_vocabulary", "train.draft_vocabulary.draft_vocabulary"),
        ("train.new_head", "create_head", "train.create_head.create_head"),
        ("train.new_head", "begin_with", "train.earlier_head.begin_with"),
        ("train.new_head", "save_head", "train.save_head.save_head"),
        ("workers.base", "certain_rows", "metadata.accepted_path.certain_rows"),
        ("workers.base", "is_text", "workers.heads.has_text_alone"),
        ("workers.base", "keep_first_rows_of_contexts", "workers.heads.skip_kv_of_first_rows"),
    ],
)
def test_old_names_give_what_took_their_place(module: str, old: str, new: str) -> None:
    home, _, name = new.rpartition(".")
    with pytest.warns(DeprecationWarning):
        if module in MOVED:
            sys.modules.pop(f"trtspec.{module}", None)
        value = getattr(importlib.import_module(f"trtspec.{module}"), old)
    assert value is getattr(importlib.import_module(f"trtspec.{home}"), name)
