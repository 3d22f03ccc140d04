"""A trained DFlash head, sabotaged: the doctor names each mistake, and none of the good head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir
from unrolled import CAPTURED, F32, TRAIN_CONFIG, VOCAB, GreedyTexts, load_target

from trtspec.doctor import Diagnosis, diagnose
from trtspec.train.new_head import NewHead, create_head
from trtspec.train.records import Sequences
from trtspec.train.trainer import Trainer

BLOCK = 8
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


class Case:
    def __init__(self, path: Path):
        target_dir = tiny_model_dir(path, seed=1, num_hidden_layers=8)
        self.target, self.head_dir = load_target(target_dir), path / "head"
        data = GreedyTexts(target_dir, count=12, length=32)
        data.batches = lambda batch_size, first: iter(  # type: ignore[method-assign]
            lambda: data.take(torch.arange(12)), None
        )
        spec = NewHead(
            kind="dflash", num_layers=2, layers_to_capture=CAPTURED, block_size=BLOCK,
            mask_token_id=VOCAB,
        )  # fmt: skip
        head = create_head(spec, self.target, None, F32, seed=5)
        config = replace(
            TRAIN_CONFIG, max_steps=150, num_steps=BLOCK - 1, step_decay=1.0, num_anchors=16,
            evaluate_every=150, log_every=150, checkpoint_every=150,
        )  # fmt: skip
        self.texts: Sequences = data.take(torch.arange(12))
        Trainer(self.target, head, data, [self.texts], config, self.head_dir).train()

    def diagnose(self, tmp_path: Path, change: Change) -> Diagnosis:
        out = tmp_path / "sabotaged"
        shutil.copytree(self.head_dir, out, ignore=shutil.ignore_patterns("*.pt", "*.jsonl"))
        raw = json.loads((out / "config.json").read_text())
        tensors = load_file(out / "model.safetensors")
        change(raw, tensors)
        raw.pop("training", None)
        (out / "config.json").write_text(json.dumps(raw))
        save_file({n: t.contiguous() for n, t in tensors.items()}, out / "model.safetensors")
        return diagnose(self.target, out, None, self.texts)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("dflash"))


def _nested(**fields: Any) -> Change:
    return lambda raw, tensors: raw["dflash_config"].update(fields)


def _top(**fields: Any) -> Change:
    return lambda raw, tensors: raw.update(fields)


def _rope(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    raw["rope_theta"] = 100.0
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0}


def _norms(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if "norm" in name:
            tensors[name] = tensors[name] - 1


def test_a_good_head_has_nothing(case: Case, tmp_path: Path) -> None:
    diagnosis = case.diagnose(tmp_path, lambda raw, tensors: None)
    assert diagnosis.as_loaded is not None and diagnosis.as_loaded.acceptance_length > 3
    assert not diagnosis.changes and not diagnosis.problems


SABOTAGES: list[tuple[Change, str, str]] = [
    (_nested(target_layer_ids=[0, 2, 3]), "one too early", "target_layer_ids=[1, 3, 4]"),
    (_nested(target_layer_ids=[2, 4, 5]), "one too late", "target_layer_ids=[1, 3, 4]"),
    (_nested(target_layer_ids=[4, 3, 1]), "captured layers", "target_layer_ids=[1, 3, 4]"),
    (_nested(mask_token_id=5), f"the mask token should be {VOCAB}", f"= {VOCAB}, now 5"),
    (_nested(causal=True), "rows of a block should see each other both ways", '"is_causal": false'),
    (_rope, "rope_theta should be the target's", "now 100"),
    (_norms, "norms are written around 0", "add 1"),
    (_top(block_size=4), "blocks should have 8 rows", '"block_size": 8'),
]


@pytest.mark.parametrize(("change", "name", "cure"), SABOTAGES)
def test_every_sabotage_is_named(
    case: Case, tmp_path: Path, change: Change, name: str, cure: str
) -> None:
    diagnosis = case.diagnose(tmp_path, change)
    assert diagnosis.changes, [f"{f.name}: {f.result.conditional}" for f in diagnosis.tried]
    first = diagnosis.changes[0]
    assert name in first.name and cure in first.cure
