"""Trained heads, each sabotaged in many ways: the doctor names each, and is silent on good ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import thinned
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir
from torch import Tensor
from unrolled import CAPTURED, F32, TRAIN_CONFIG, VOCAB, GreedyTexts, load_target

from trtspec.doctor import diagnose, texts_of
from trtspec.models.decoder import Decoder
from trtspec.train.create_head import create_head
from trtspec.train.new_head import NewHead
from trtspec.train.records import Sequences
from trtspec.train.trainer import Trainer

Tensors = dict[str, Tensor]
HIDDEN = 48
Change = Callable[[dict[str, Any], Tensors], None]
DRAFTED = torch.arange(0, VOCAB - 8)


class Case:
    def __init__(self, tmp_path: Path, kind: str):
        self.kind, self.target_dir = kind, tiny_model_dir(tmp_path, seed=1, num_hidden_layers=6)
        self.target: Decoder = load_target(self.target_dir)
        data = GreedyTexts(self.target_dir, count=16, length=40)
        data.batches = lambda batch_size, first: iter(  # type: ignore[method-assign]
            lambda: data.take(torch.arange(16)), None
        )
        ids = torch.cat([DRAFTED[::2], DRAFTED[1::2]]).sort().values + 3
        spec = NewHead(kind=kind, layers_to_capture=CAPTURED if kind == "eagle3" else None)
        head = create_head(spec, self.target, ids, F32, seed=5)
        self.head_dir = tmp_path / "head"
        config = replace(
            TRAIN_CONFIG, max_steps=100, num_steps=3, evaluate_every=100, log_every=100,
            checkpoint_every=100,
        )  # fmt: skip
        held_out = [data.take(torch.arange(16))]
        Trainer(self.target, head, data, held_out, config, self.head_dir).train()
        self.texts: Sequences = held_out[0]

    def sabotaged(self, tmp_path: Path, change: Change) -> Path:
        out = tmp_path / "sabotaged"
        shutil.copytree(self.head_dir, out, ignore=shutil.ignore_patterns("*.pt", "*.jsonl"))
        raw = json.loads((out / "config.json").read_text())
        tensors = load_file(out / "model.safetensors")
        change(raw, tensors)
        (out / "config.json").write_text(json.dumps(raw))
        save_file({n: t.contiguous() for n, t in tensors.items()}, out / "model.safetensors")
        return out


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("eagle3"), "eagle3")


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("mtp"), "mtp")


def _layers(*layers: int) -> Change:
    return lambda raw, tensors: raw["eagle_config"].update(
        eagle_aux_hidden_state_layer_ids=list(layers)
    )


def _flag(name: str) -> Change:
    return lambda raw, tensors: raw.update({name: True})


def _theta(raw: dict[str, Any], tensors: Tensors) -> None:
    raw.pop("rope_parameters")
    raw["rope_theta"] = 3.0


def _d2t(offset: int) -> Change:
    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        tensors["d2t"] = tensors["d2t"] + offset
        tensors.pop("t2d")

    return change


def _d2t_ids(raw: dict[str, Any], tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def _swap(pattern: str) -> Change:
    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        for name, weight in tensors.items():
            if any(f"{part}.weight" in name for part in pattern.split("|")):
                half = weight.shape[1] // 2
                tensors[name] = torch.cat([weight[:, half:], weight[:, :half]], dim=1)

    return change


def _norms_around_0(raw: dict[str, Any], tensors: Tensors) -> None:
    for name, weight in tensors.items():
        if "norm" in name:
            tensors[name] = weight - 1


def _rows_of_neighbours(raw: dict[str, Any], tensors: Tensors) -> None:
    """As Meta's checkpoints and GGUF files have them."""
    for name, weight in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = weight.unflatten(0, (-1, 2, raw["head_dim"] // 2))
            tensors[name] = halves.transpose(1, 2).flatten(0, 2)


def _rows_of_halves_twice(raw: dict[str, Any], tensors: Tensors) -> None:
    """A conversion of a head that needed none."""
    for name, weight in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            pairs = weight.unflatten(0, (-1, raw["head_dim"] // 2, 2))
            tensors[name] = pairs.transpose(1, 2).flatten(0, 2)


def _places(one: str, other: str) -> Change:
    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(f"{one}.weight")]:
            twin = name.replace(one, other)
            tensors[name], tensors[twin] = tensors[twin], tensors[name]

    return change


def _swap_input_norms(raw: dict[str, Any], tensors: Tensors) -> None:
    """Of the same head with norms that differ: so short a training leaves them alike."""
    for name, weight in tensors.items():
        if name.endswith("hidden_norm.weight"):
            tensors[name] = 4 * weight
        elif any(f"{part}_proj.weight" in name for part in "qkv"):
            weight[:, HIDDEN:] /= 4
    _places("input_layernorm", "hidden_norm")(raw, tensors)


def _transposed(*names: str) -> Change:
    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        for name, weight in tensors.items():
            if name.endswith(tuple(f"{part}.weight" for part in names)):
                tensors[name] = weight.T

    return change


def _noise(*names: str, shape: tuple[int, ...] | None = None) -> Change:
    """As an exporter leaves tensors that it makes and does not fill."""

    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(0)
        for part in names:
            found = [name for name in tensors if name.endswith(part)] or [part]
            for name in found:
                size = tensors[name].shape if name in tensors else shape
                assert size is not None
                tensors[name] = 0.5 * torch.randn(size, generator=generator)

    return change


def _scaled(part: str, factor: float) -> Change:
    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(f"{part}.weight")]:
            tensors[name] = tensors[name] * factor

    return change


def _fields(**fields: Any) -> Change:
    return lambda raw, tensors: raw.update(fields)


def _heads_of_half_the_size(raw: dict[str, Any], tensors: Tensors) -> None:
    for name, factor in (("num_attention_heads", 2), ("num_key_value_heads", 2)):
        raw[name] *= factor
    raw["head_dim"] //= 2


EAGLE3 = {
    "gate_proj and up_proj are in each other's place": _places("gate_proj", "up_proj"),
    "k_proj and v_proj are in each other's place": _places("k_proj", "v_proj"),
    "input_layernorm and hidden_norm are in each": _swap_input_norms,
    "fc is too large": _scaled("fc", 3),
    "fc is too small": _scaled("fc", 1 / 4),
    "embed_tokens has wrong weights: with the target's": _noise(
        "embed_tokens.weight", shape=(VOCAB + 1, HIDDEN)
    ),
    "lm_head has wrong weights, or d2t is another's": _noise("lm_head.weight"),
    "rms_norm_eps should be the target's": _fields(rms_norm_eps=0.9),
    "head_dim should be the target's": _heads_of_half_the_size,
    "captured one too early": _layers(0, 2, 3),
    "captured one too late": _layers(2, 4, 5),
    "reverse order": _layers(*reversed(CAPTURED)),
    "norm_before_residual": _flag("norm_before_residual"),
    "before the final norm": _flag("norm_output"),
    "other order": _swap("q_proj|k_proj|v_proj"),
    "rope_theta": _theta,
    "ids in place of offsets": _d2t_ids,
    "one token too high": _d2t(1),
    "one token too low": _d2t(-1),
    "for a RoPE that rotates neighbours": _rows_of_neighbours,
    "for a RoPE of halves twice": _rows_of_halves_twice,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(list(EAGLE3), 2))
def test_a_sabotaged_eagle3_head(eagle3: Case, tmp_path: Path, name: str) -> None:
    head = eagle3.sabotaged(tmp_path, EAGLE3[name])
    diagnosis = diagnose(eagle3.target, head, "eagle", eagle3.texts)
    assert name in diagnosis.verdict, diagnosis.verdict
    if not diagnosis.problems:
        assert len(diagnosis.changes) == 1 and diagnosis.changes[0].cure


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("other order", _swap("eh_proj")),
        ("rope_theta", _theta),
        ("enorm and hnorm are in each other's place", _places("enorm", "hnorm")),
        ("eh_proj is too large", _scaled("eh_proj", 3)),
        ("norms are written around 0", _norms_around_0),
        ("for a RoPE that rotates neighbours", _rows_of_neighbours),
    ],
)
def test_a_sabotaged_mtp_layer(mtp: Case, tmp_path: Path, name: str, change: Change) -> None:
    diagnosis = diagnose(mtp.target, mtp.sabotaged(tmp_path, change), "mtp", mtp.texts)
    assert name in diagnosis.verdict, diagnosis.verdict


def test_a_good_head(eagle3: Case, mtp: Case) -> None:
    for case, kind in ((eagle3, "eagle"), (mtp, "mtp")):
        diagnosis = diagnose(case.target, case.head_dir, kind, case.texts)
        assert diagnosis.verdict.startswith("Nothing is wrong"), diagnosis.verdict
        assert not diagnosis.changes and diagnosis.as_loaded is not None
        assert diagnosis.as_loaded.conditional[0] > 0.5


def test_a_part_that_does_harm(eagle3: Case, tmp_path: Path) -> None:
    head = eagle3.sabotaged(tmp_path, _noise("down_proj.weight"))
    verdict = diagnose(eagle3.target, head, "eagle", eagle3.texts).verdict
    assert verdict.startswith("the MLP has wrong weights: drafts are better without it"), verdict


def _lose_final_norm(raw: dict[str, Any], tensors: Tensors) -> None:
    tensors["norm.weight"] = torch.ones_like(tensors["norm.weight"])


def test_tensors_that_were_never_filled(eagle3: Case, tmp_path: Path) -> None:
    head = eagle3.sabotaged(tmp_path, _scaled("down_proj", 0))
    diagnosis = diagnose(eagle3.target, head, "eagle", eagle3.texts)
    said = " ".join([diagnosis.verdict, *diagnosis.remarks])
    assert "down_proj.weight is zero everywhere" in said
    lost = eagle3.sabotaged(tmp_path / "norm", _lose_final_norm)
    diagnosis = diagnose(eagle3.target, lost, "eagle", eagle3.texts)
    said = " ".join([diagnosis.verdict, *diagnosis.remarks])
    assert "norm.weight has one value everywhere" in said


@pytest.mark.parametrize("along", ["rows", "columns"])
def test_tensors_that_are_filled_in_part(eagle3: Case, tmp_path: Path, along: str) -> None:
    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        (name,) = (name for name in tensors if name.endswith("o_proj.weight"))
        weight = tensors[name] if along == "rows" else tensors[name].T
        weight[::2] = 0
        tensors[name] = weight if along == "rows" else weight.T

    head = eagle3.sabotaged(tmp_path, change)
    diagnosis = diagnose(eagle3.target, head, "eagle", eagle3.texts)
    assert not diagnosis.is_well
    assert f"Something is wrong: 24 of the 48 {along} of " in diagnosis.verdict


def test_values_that_overflow(eagle3: Case, tmp_path: Path) -> None:
    head = eagle3.sabotaged(tmp_path, _scaled("down_proj", 1e38))
    diagnosis = diagnose(eagle3.target, head, "eagle", eagle3.texts)
    assert "Values that the head computes are NaN or infinite in float32" in diagnosis.verdict
    assert not diagnosis.is_well and not diagnosis.tried


@pytest.mark.slow
def test_a_draft_vocabulary_of_other_tokens(eagle3: Case, tmp_path: Path) -> None:
    written, counts = eagle3.texts.input_ids[eagle3.texts.loss_mask].unique(return_counts=True)
    common = written[counts.argsort(descending=True)[: len(written) // 2]]

    def drop(raw: dict[str, Any], tensors: Tensors) -> None:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        kept = ~torch.isin(ids, common)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][kept]
        tensors["d2t"] = ids[kept] - torch.arange(int(kept.sum()))
        tensors.pop("t2d")
        raw["draft_vocab_size"] = int(kept.sum())

    diagnosis = diagnose(eagle3.target, eagle3.sabotaged(tmp_path, drop), "eagle", eagle3.texts)
    assert "The draft vocabulary is too small for these texts" in diagnosis.verdict


@pytest.mark.slow
def test_tokens_in_another_order(
    eagle3: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By d2t, or by the rows of lm_head: any order, which no trial knows."""

    def shuffle_map(raw: dict[str, Any], tensors: Tensors) -> None:
        rows = torch.arange(len(tensors["d2t"]))
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        tensors["d2t"] = (tensors["d2t"] + rows)[order] - rows

    def shuffle_rows(raw: dict[str, Any], tensors: Tensors) -> None:
        order = torch.randperm(len(tensors["d2t"]), generator=torch.Generator().manual_seed(0))
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]

    for name, change in (("map", shuffle_map), ("rows", shuffle_rows)):
        head = eagle3.sabotaged(tmp_path / name, change)
        verdict = diagnose(eagle3.target, head, "eagle", eagle3.texts).verdict
        assert verdict.startswith("lm_head has wrong weights, or d2t is another's"), verdict
        with monkeypatch.context() as patch:  # where the head's lm_head is unlike the target's
            patch.setattr("trtspec.doctor.heads.end_trials", lambda *arguments: [])
            verdict = diagnose(eagle3.target, head, "eagle", eagle3.texts).verdict
        assert verdict.startswith("The head's tokens mean other ones"), verdict


def test_two_mistakes_at_once(eagle3: Case, tmp_path: Path) -> None:
    def both(raw: dict[str, Any], tensors: Tensors) -> None:
        _flag("norm_before_residual")(raw, tensors)
        _d2t(1)(raw, tensors)

    diagnosis = diagnose(eagle3.target, eagle3.sabotaged(tmp_path, both), "eagle", eagle3.texts)
    assert "one token too high" in diagnosis.verdict and "norm_before_residual" in diagnosis.verdict


def test_two_mistakes_that_hide_each_other(eagle3: Case, tmp_path: Path) -> None:
    def both(raw: dict[str, Any], tensors: Tensors) -> None:
        _swap("q_proj|k_proj|v_proj")(raw, tensors)
        _d2t(1)(raw, tensors)

    diagnosis = diagnose(eagle3.target, eagle3.sabotaged(tmp_path, both), "eagle", eagle3.texts)
    assert "one token too high" in diagnosis.verdict and "other order" in diagnosis.verdict


def test_the_examined_head_is_left_as_it_was(eagle3: Case) -> None:
    first = diagnose(eagle3.target, eagle3.head_dir, "eagle", eagle3.texts)
    again = diagnose(eagle3.target, eagle3.head_dir, "eagle", eagle3.texts)
    assert [f.result.right for f in first.tried] == [f.result.right for f in again.tried]
    assert len({f.name for f in first.tried}) > 10


def test_texts() -> None:
    texts = texts_of([[1, 2], [3]], [[4], [5, 6, 7]], torch.device("cpu"))
    assert texts.input_ids.tolist() == [[1, 2, 4, 0], [3, 5, 6, 7]]
    assert texts.loss_mask.tolist() == [[False, False, True, False], [False, True, True, True]]
    assert texts.document_ids.tolist() == [[0, 0, 0, -1], [0, 0, 0, 0]]
