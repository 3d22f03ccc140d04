"""A P-EAGLE head, trained to draft with masks and then spoilt in one way each; PARD models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir
from tiny_heads import MASK_TOKEN, VOCAB, p_eagle_dir, pard_dir
from tiny_trained import Change, Tensors, Trained, greedy_texts, load_target, trained_head

from trtspec.doctor import diagnose
from trtspec.doctor.diagnosis import Diagnosis
from trtspec.train.evaluation import Evaluation

CAPTURED = [1, 3, 4]
EAGLE_CONFIG = {"eagle_aux_hidden_state_layer_ids": CAPTURED}


@pytest.fixture(scope="module")
def p_eagle(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    path = tmp_path_factory.mktemp("p_eagle")
    target = tiny_model_dir(path, seed=1, num_hidden_layers=6)
    config = {"eagle_config": EAGLE_CONFIG, "pad_token_id": MASK_TOKEN}
    head = p_eagle_dir(path, draft_vocab=VOCAB, num_layers=1, config=config)
    return trained_head(target, head, "eagle", steps=70, rate=1e-2)


def _raw(**fields: Any) -> Change:
    return lambda raw, tensors: raw.update(fields)


def _layers(*layers: int) -> Change:
    return _raw(eagle_config={"eagle_aux_hidden_state_layer_ids": list(layers)})


def _scale(factor: float) -> Change:
    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        tensors["mask_hidden"] *= factor

    return change


def _another_mask(raw: dict[str, Any], tensors: Tensors) -> None:
    """Of another head."""
    generator = torch.Generator().manual_seed(0)
    tensors["mask_hidden"] = 3 * torch.randn(1, 144, generator=generator)


def _reverse_mask(raw: dict[str, Any], tensors: Tensors) -> None:
    tensors["mask_hidden"] = torch.cat(tensors["mask_hidden"].chunk(3, dim=1)[::-1], dim=1)


def _reverse_fc(raw: dict[str, Any], tensors: Tensors) -> None:
    """A conversion that turned the blocks of both round."""
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(3, dim=1)[::-1], dim=1)
    _reverse_mask(raw, tensors)


def _swap(raw: dict[str, Any], tensors: Tensors) -> None:
    for name, weight in tensors.items():
        if name.startswith("layers.0.") and name.endswith(("q_proj.weight", "k_proj.weight",
                                                           "v_proj.weight")):  # fmt: skip
            tensors[name] = weight.roll(weight.shape[1] // 2, dims=1)


def _d2t(raw: dict[str, Any], tensors: Tensors) -> None:
    """Tokens 3 … 92 are drafted; the map says 4 … 93."""
    tensors["lm_head.weight"] = tensors["lm_head.weight"][3:93]
    tensors["d2t"] = torch.full((90,), 4)
    raw["draft_vocab_size"] = 90


MISTAKES = {
    f"the mask token should be {MASK_TOKEN}, pad_token_id of its config.json": _raw(ptd_token_id=2),
    "mask_hidden is too large, 10 times": _scale(10),
    "mask_hidden is too small, 10 times": _scale(0.1),
    "mask_hidden has the captured layers' parts in reverse order": _reverse_mask,
    "mask_hidden is not what it was trained to be: zeros do better": _another_mask,
    "captured layers are in reverse order": _reverse_fc,
    "captured layers should be in the order [1, 3, 4]": _layers(4, 1, 3),
    "layers are captured one too late": _layers(2, 4, 5),
    "norm_before_residual is wrong": _raw(norm_before_residual=True),
    "side by side in the other order": _swap,
    "rope_theta should be the target's": _raw(rope_theta=3.0),
    "d2t maps one token too high": _d2t,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_spoilt_head(p_eagle: Trained, tmp_path: Path, name: str) -> None:
    head = p_eagle.sabotaged(tmp_path, MISTAKES[name])
    diagnosis = diagnose(p_eagle.target, head, None, p_eagle.texts)
    assert name in diagnosis.verdict, (diagnosis.verdict, _table(diagnosis))
    assert len(diagnosis.changes) == 1 and diagnosis.changes[0].cure and not diagnosis.is_well


def _table(diagnosis: Diagnosis) -> list[Any]:
    return [(f.name, f.result.conditional) for f in diagnosis.tried]


def test_a_good_head(p_eagle: Trained) -> None:
    diagnosis = diagnose(p_eagle.target, p_eagle.directory, "eagle", p_eagle.texts)
    assert diagnosis.is_well and not diagnosis.changes and diagnosis.reads_masks
    assert diagnosis.as_loaded is not None
    assert min(diagnosis.as_loaded.conditional) > 0.9 and len(diagnosis.as_loaded.conditional) == 3
    names = [finding.name for finding in diagnosis.tried]
    assert len(names) == len(set(names)) > 20
    assert not any("fed on" in name for name in names), "nothing is fed on"


def test_the_verdict_names_the_draft_that_suffers(p_eagle: Trained, tmp_path: Path) -> None:
    head = p_eagle.sabotaged(tmp_path, _raw(ptd_token_id=2))
    diagnosis = diagnose(p_eagle.target, head, None, p_eagle.texts)
    assert "acceptance of the second draft is 0." in diagnosis.verdict


def test_masks_that_cannot_be_mended(p_eagle: Trained, tmp_path: Path) -> None:
    lost = diagnose(p_eagle.target, p_eagle.sabotaged(tmp_path, _scale(0)), None, p_eagle.texts)
    assert any(note.startswith("mask_hidden is zero everywhere") for note in lost.remarks)
    untrained = Diagnosis(as_loaded=Evaluation([280, 30, 0], [280, 270, 30]), reads_masks=True)
    assert untrained.verdict.startswith("Something is wrong at the masks: the first draft")
    assert "accepted 1.00 of the time, and after a right one the second 0.11" in untrained.verdict
    assert not untrained.is_well
    assert Diagnosis(as_loaded=untrained.as_loaded).is_well, "it may be weak, one token a pass"


@pytest.mark.slow
def test_a_tokenizer_names_the_token(p_eagle: Trained, tmp_path: Path) -> None:
    head = p_eagle.sabotaged(tmp_path, _raw(ptd_token_id=2, pad_token_id=None))
    tokenizer = SimpleNamespace(
        all_special_tokens=["<s>"], all_special_ids=[1],
        added_tokens_decoder={MASK_TOKEN: "<|reserved_0|>"},
    )  # fmt: skip
    diagnosis = diagnose(p_eagle.target, head, None, p_eagle.texts, tokenizer=tokenizer)
    assert "the mask token should be 93, <|reserved_0|> of the tokenizer" in diagnosis.verdict
    tokenizer.added_tokens_decoder = {i: f"<{i}>" for i in range(40, 90)}
    diagnosis = diagnose(p_eagle.target, head, None, p_eagle.texts, tokenizer=tokenizer)
    assert any("special tokens 32 were tried" in note for note in diagnosis.notes)


def test_no_more_drafts_than_it_was_trained_for(p_eagle: Trained, tmp_path: Path) -> None:
    head = p_eagle.sabotaged(tmp_path, _raw(num_depths=2))
    as_loaded = diagnose(p_eagle.target, head, None, p_eagle.texts).as_loaded
    assert as_loaded is not None and len(as_loaded.conditional) == 2


# -- draft models ------------------------------------------------------------------------------
def test_a_draft_model(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path, seed=1)
    target, texts = load_target(directory), greedy_texts(directory)
    diagnosis = diagnose(target, directory, None, texts)
    assert diagnosis.is_well and diagnosis.as_loaded is not None and not diagnosis.tried
    assert diagnosis.as_loaded.conditional == [1.0, 1.0, 1.0]
    assert any("own settings" in note for note in diagnosis.notes)
    other = diagnose(target, tiny_model_dir(tmp_path, seed=5), None, texts)
    assert other.as_loaded is not None and other.as_loaded.conditional[0] < 0.3
    wide = diagnose(target, tiny_model_dir(tmp_path, vocab_size=101), None, texts)
    assert (
        "draft model does not fit its target: The draft model's vocabulary has 101" in wide.verdict
    )
    assert "Choose a draft model" in wide.verdict and not wide.is_well


def test_a_draft_model_whose_values_are_not_finite(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path, seed=1)
    target, texts = load_target(directory), greedy_texts(directory)
    file = tiny_model_dir(tmp_path, seed=1) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    diagnosis = diagnose(target, file.parent, None, texts)
    assert "Values that the draft model computes are NaN or infinite" in diagnosis.verdict
    diagnosis = diagnose(load_target(file.parent), directory, None, texts)
    assert "Values that the target computes are NaN or infinite" in diagnosis.verdict


def test_tokenizers_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_model_dir(tmp_path, seed=1)

    def vocab(**ids: int) -> Any:
        return SimpleNamespace(get_vocab=lambda: ids, all_special_tokens=[], all_special_ids=[],
                               added_tokens_decoder={})  # fmt: skip

    monkeypatch.setattr("trtspec.doctor.load_tokenizer", lambda path: vocab(a=1, b=2, c=3))
    texts: Any = None
    diagnosis = diagnose(
        load_target(directory), directory, "draft", texts, tokenizer=vocab(a=1, b=3, c=2)
    )
    assert "map 2 tokens to different ids ('b' 2 and 3, 'c' 3 and 2)" in diagnosis.verdict
    padded = diagnose(
        load_target(directory), tiny_model_dir(tmp_path, seed=1, vocab_size=104), "draft",
        greedy_texts(directory), tokenizer=vocab(a=1, b=2, c=3),
    )  # fmt: skip
    assert not padded.problems and padded.as_loaded is not None
    assert not any("not compared" in note for note in padded.notes)


def test_a_pard_model_with_another_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's choices are what the model proposes with the right mask."""
    from tiny_copied import Copied

    directory = pard_dir(tmp_path, pad_token_id=MASK_TOKEN)
    copied = Copied(load_target(tiny_model_dir(tmp_path, seed=1)), 70)
    copied.follow_model(directory, MASK_TOKEN)
    monkeypatch.setattr("trtspec.doctor.draft_model.teach", copied.teach)
    good = diagnose(copied.target, directory, None, copied.texts)
    assert good.is_well and not good.changes and good.reads_masks, good.verdict
    raw = json.loads((directory / "config.json").read_text()) | {"pard_token": 7}
    (directory / "config.json").write_text(json.dumps(raw))
    diagnosis = diagnose(copied.target, directory, None, copied.texts)
    assert "the mask token should be 93, pad_token_id of its config" in diagnosis.verdict
    assert "now 7" in diagnosis.changes[0].cure
