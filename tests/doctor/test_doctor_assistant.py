"""Gemma-4 assistants, MTP layers and EAGLE heads where RoPE differs by kind of layer: the target's
choices are those that the drafter makes when it is used rightly (`tiny_copied.py`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_copied import Copied
from tiny_gemma import ROPES, F, NaiveAssistant, S, assistant_dir, edit_config, gemma_dir
from tiny_heads import eagle3_dir
from tiny_step import FULL, SLIDING, THETA, step_dir
from tiny_trained import load_target

from trtspec.doctor import diagnose
from trtspec.doctor.diagnosis import Diagnosis

Pair = tuple[Path, Path]
DOCUMENTS = 70


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("pair")
    return gemma_dir(path, "gemma3_text", seed=1), assistant_dir(path)


@pytest.fixture(scope="module")
def naive(pair: Pair) -> NaiveAssistant:
    found = NaiveAssistant(pair[1], pair[0])
    read, known = found.read, dict[Any, Any]()

    def read_once(text: list[int]) -> Any:
        key = (*text, found.flags.get("before_norm"))
        if key not in known:
            known[key] = read(text)
        return known[key]

    found.read = read_once  # type: ignore[method-assign]
    return found


def _examine(
    copied: Copied, head: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None = None
) -> Diagnosis:
    monkeypatch.setattr("trtspec.doctor.exam.teach", copied.teach)
    return diagnose(copied.target, head, kind, copied.texts)


MADE_OTHERWISE = {  # how the assistant was meant to be used -> what the doctor must say
    "the target's embedding should not be scaled": {"unscaled": True},
    "the target's hidden state should be read before its final norm": {"before_norm": True},
    "the hidden state should be fed on before the final norm": {"feeds_unnormed": True},
    "the target's hidden state should be read at every draft": {"feeds_nothing": True},
    "queries are rotated one position too far": {"offset": -1},
    "queries are rotated one position too little": {"offset": 1},
    "positions should advance with the drafts": {"advances": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE_OTHERWISE)
def test_an_assistant_made_for_another_use(
    pair: Pair, naive: NaiveAssistant, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = Copied(load_target(pair[0]), DOCUMENTS)
    monkeypatch.setattr(naive, "flags", MADE_OTHERWISE[name])
    copied.follow(naive.chain)
    diagnosis = _examine(copied, pair[1], monkeypatch)
    assert [change.name for change in diagnosis.changes] == [name], _table(diagnosis)
    assert diagnosis.changes[0].cure and diagnosis.changes[0].result.conditional[2] > 0.95


def _table(diagnosis: Diagnosis) -> list[Any]:
    return [diagnosis.as_loaded, [(f.name, f.result.conditional) for f in diagnosis.tried]]


@pytest.mark.slow
def test_a_good_assistant_and_a_spoilt_one(
    pair: Pair, naive: NaiveAssistant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = Copied(load_target(pair[0]), DOCUMENTS)
    copied.follow(naive.chain)
    diagnosis = _examine(copied, pair[1], monkeypatch)
    assert diagnosis.is_well and not diagnosis.changes, diagnosis.verdict
    assert diagnosis.as_loaded is not None and diagnosis.as_loaded.conditional[2] > 0.95
    assert any("Another RoPE or window is not tried" in note for note in diagnosis.notes)
    spoilt = tmp_path / "spoilt"
    shutil.copytree(pair[1], spoilt)
    tensors = load_file(spoilt / "model.safetensors")
    weight = tensors["pre_projection.weight"]
    tensors["pre_projection.weight"] = weight.roll(weight.shape[1] // 2, dims=1)
    save_file(tensors, spoilt / "model.safetensors")
    diagnosis = _examine(copied, spoilt, monkeypatch)
    assert "concatenated in the other order" in diagnosis.verdict
    assert diagnosis.changes[0].cure == "swap the two halves of the columns of pre_projection"


def test_kinds_of_layers_swapped_in_an_assistant(pair: Pair, tmp_path: Path) -> None:
    """The keys are the target's, so this is seen before anything is tried."""
    swapped = {S: ROPES[F], F: ROPES[S]}
    assistant, texts = assistant_dir(tmp_path, rope_parameters=swapped), None
    diagnosis = diagnose(load_target(pair[0]), assistant, None, texts)  # type: ignore[arg-type]
    assert "rotates its queries by" in diagnosis.verdict and not diagnosis.is_well


# -- layers of several kinds -------------------------------------------------------------------
def _attentive(directory: Path, *prefixes: str) -> Path:
    """What a random head proposes hardly depends on its attention; now it does."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, weight in tensors.items():
        if name.startswith(prefixes) and name.endswith("o_proj.weight"):
            weight *= 8
        if name.startswith(prefixes) and name.endswith("k_proj.weight"):
            weight *= 4
        if name.startswith(prefixes) and name.endswith("k_norm.weight"):  # around 0
            weight.copy_(4 * (weight + 1) - 1)
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def _step_copy(source: Path, tmp_path: Path, thetas: dict[str, float]) -> Path:
    out = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
    shutil.copytree(source, out)
    raw = json.loads((out / "config.json").read_text())
    return edit_config(out, rope_theta=[thetas[kind] for kind in raw["layer_types"]])


@pytest.mark.slow
def test_mtp_layers_of_two_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _attentive(step_dir(tmp_path), *(f"model.layers.{i}." for i in range(4, 8)))
    copied = Copied(load_target(source), DOCUMENTS)
    copied.follow_head(source, "mtp")  # the first layer, which slides, for every draft
    good = _examine(copied, source, monkeypatch, "mtp")
    assert good.is_well and not good.changes, good.verdict
    assert any("rotary_dim" in note for note in good.notes)
    right = "rope_theta of its sliding_attention layers should be the target's sliding_attention"
    for thetas in ({FULL: THETA[FULL], SLIDING: 3.0}, {FULL: THETA[SLIDING], SLIDING: THETA[FULL]}):
        head = _step_copy(source, tmp_path, thetas)
        diagnosis = _examine(copied, head, monkeypatch, "mtp")
        assert [change.name for change in diagnosis.changes] == [f"{right} layers', 10000"]
        assert f"now {thetas[SLIDING]:g}" in diagnosis.changes[0].cure
    names = [finding.name for finding in diagnosis.tried]
    assert "RoPE of the head's two kinds of layers is swapped" in names


@pytest.mark.slow
def test_mtp_layers_with_a_draft_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _attentive(step_dir(tmp_path), *(f"model.layers.{i}." for i in range(4, 8)))
    copied = Copied(load_target(source), DOCUMENTS)
    copied.follow_head(source, "mtp", num_mtp_layers=3)
    good = _examine(copied, source, monkeypatch)
    assert good.is_well and not good.changes, good.verdict
    serve = "serve it with MTPDecodingConfig(use_mtp_vanilla=True)"
    assert any(serve in note for note in good.notes)
    assert any("Of its 4 MTP layers the first 3" in note for note in good.notes)
    swapped = _step_copy(source, tmp_path, {FULL: THETA[SLIDING], SLIDING: THETA[FULL]})
    diagnosis = _examine(copied, swapped, monkeypatch)
    assert "RoPE of the head's two kinds of layers is swapped" in diagnosis.verdict
    assert any(serve in note for note in diagnosis.notes)
    reversed_, file = _step_copy(source, tmp_path, THETA), "model.safetensors"
    tensors = load_file(reversed_ / file)
    for name in [name for name in tensors if name.endswith("eh_proj.weight")]:
        tensors[name] = tensors[name].roll(tensors[name].shape[1] // 2, dims=1)
    save_file(tensors, reversed_ / file, metadata={"format": "pt"})
    diagnosis = _examine(copied, reversed_, monkeypatch)
    assert "concatenated in the other order" in diagnosis.changes[0].name, diagnosis.verdict
    assert diagnosis.changes[-1].result.conditional[2] > 0.95, "all layers are mended"
    assert any(serve in note for note in diagnosis.notes)


@pytest.mark.slow
def test_an_eagle3_head_for_a_target_of_two_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = gemma_dir(tmp_path, "gemma3_text", seed=1)
    captures = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}
    right = eagle3_dir(tmp_path, config={**captures, "rope_parameters": ROPES[F]})
    wrong = edit_config(shutil.copytree(_attentive(right, "mid"), tmp_path / "wrong"), **{
        "rope_parameters": None, "rope_theta": None,
    })  # fmt: skip
    copied = Copied(load_target(target), DOCUMENTS)
    copied.follow_head(right, "eagle")
    assert _examine(copied, right, monkeypatch).is_well
    diagnosis = _examine(copied, wrong, monkeypatch)
    name = "rope_theta should be the target's full_attention layers', 5000"
    assert [change.name for change in diagnosis.changes] == [name], _table(diagnosis)
    assert "'factor': 4.0" in diagnosis.changes[0].cure
    torch.testing.assert_close(diagnosis.changes[0].result.conditional[2], 1.0)
