"""Trained DFlash and DSpark heads, sabotaged: each mistake is named, and none of the good heads."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_cases import WINDOWS
from loading import UNPACKED_HEAD
from matrix import full, thinned
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir
from tiny_dflash import dflash_dir
from unrolled import (
    CAPTURED,
    F32,
    TRAIN_CONFIG,
    VOCAB,
    GreedyTexts,
    load_target,
    padded_texts,
)

from trtspec.checkpoints.heads.load import load_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.doctor import Diagnosis, diagnose, exam
from trtspec.doctor.blocks import block_trials
from trtspec.models.drafters.dflash import DFlashHead
from trtspec.train import unroll as unroll_module
from trtspec.train.blocks import Block
from trtspec.train.create_head import create_head
from trtspec.train.losses import score
from trtspec.train.new_head import NewHead
from trtspec.train.records import Sequences
from trtspec.train.trainer import Trainer
from trtspec.train.unroll import Use, teach, unroll

BLOCK = 8
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


class Case:
    """A head trained on the texts by which it is judged. Its target may scale embeddings.

    With `shift` context row t reads token t + shift: 1 is right. `qk_norms` fixes the weights of
    the norms of queries and keys.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        scale: float | None = None,
        shift: int | None = None,
        qk_norms: float | None = None,
        steps: int = 100,
    ):
        target_dir = tiny_model_dir(path, seed=1, num_hidden_layers=8)
        self.target, self.head_dir, self.scale = load_target(target_dir), path / "head", scale
        data = GreedyTexts(target_dir, count=12, length=20)
        data.batches = lambda batch_size, first: iter(  # type: ignore[method-assign]
            lambda: data.take(torch.arange(12)), None
        )
        spec = NewHead(
            kind=kind,
            num_layers=2,
            layers_to_capture=CAPTURED,
            block_size=BLOCK,
            mask_token_id=VOCAB,
            context_embeddings=shift is not None,
        )
        head = create_head(spec, self.target, None, F32, seed=5)
        assert isinstance(head, DFlashHead)
        head.embedding_scale = scale
        fixed = {}
        if qk_norms is not None:
            for name, weight in head.named_parameters():
                if name.endswith(("q_norm.weight", "k_norm.weight")):
                    fixed[name] = weight.data.fill_(qk_norms)
                    weight.requires_grad_(False)
        config = replace(
            TRAIN_CONFIG,
            max_steps=steps,
            num_steps=BLOCK if kind == "dspark" else BLOCK - 1,
            step_decay=1.0,
            variation=0.0,
            num_anchors=6,
            evaluate_every=steps,
            log_every=steps,
            checkpoint_every=steps,
        )
        self.texts: Sequences = data.take(torch.arange(12))
        trainer = Trainer(self.target, head, data, [self.texts], config, self.head_dir)
        with pytest.MonkeyPatch.context() as patch:
            wrong = functools.partial(Block, shift=shift)
            if shift is not None:
                patch.setattr(unroll_module, "Block", lambda a, p, _, n: wrong(a, p, num_rows=n))
            trainer.train()
        if fixed:  # what is not trained is not written
            file = self.head_dir / "model.safetensors"
            save_file({**load_file(file), **fixed}, file)

    def diagnose(self, tmp_path: Path, change: Change, keeps_notes: bool = False) -> Diagnosis:
        out = tmp_path / "sabotaged"
        shutil.copytree(self.head_dir, out, ignore=shutil.ignore_patterns("*.pt", "*.jsonl"))
        raw = json.loads((out / "config.json").read_text())
        tensors = load_file(out / "model.safetensors")
        change(raw, tensors)
        if not keeps_notes:
            raw.pop("training", None)
        (out / "config.json").write_text(json.dumps(raw))
        save_file({n: t.contiguous() for n, t in tensors.items()}, out / "model.safetensors")
        return diagnose(self.target, out, None, self.texts)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return functools.cache(lambda kind: Case(tmp_path_factory.mktemp(kind), kind))


@pytest.fixture(scope="module", params=thinned(["dflash", "dspark"], 2))
def case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(request.param)


@pytest.fixture(scope="module")
def dspark(cases: Callable[[str], Case]) -> Case:
    return cases("dspark")


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


def _rows_of_neighbours(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """As Meta's checkpoints and GGUF files have them."""
    for name in [n for n in tensors if n.endswith(("q_proj.weight", "k_proj.weight"))]:
        halves = tensors[name].unflatten(0, (-1, 2, raw["head_dim"] // 2))
        tensors[name] = halves.transpose(1, 2).flatten(0, 2)


def _lost_norms(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in [n for n in tensors if "q_norm" in n or "k_norm" in n]:
        tensors[name] = torch.ones_like(tensors[name])


def _no_norms(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in [n for n in tensors if "q_norm" in n or "k_norm" in n]:
        del tensors[name]


def test_a_good_head_has_nothing(case: Case, tmp_path: Path) -> None:
    diagnosis = case.diagnose(tmp_path, lambda raw, tensors: None)
    assert diagnosis.as_loaded is not None and diagnosis.as_loaded.acceptance_length > 3
    assert not diagnosis.changes and not diagnosis.problems


def test_drafts_behind_a_wrong_one_are_not_computed(
    dspark: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []

    def count(head: Any, step: Any, *args: Any, **options: Any) -> Any:
        computed.append(len(step.rows))
        return score(head, step, *args, **options)

    monkeypatch.setattr(exam, "score", count)
    loaded = dspark.diagnose(tmp_path, _nested(mask_token_id=5)).as_loaded
    assert loaded is not None and computed[:BLOCK] == loaded.judged
    assert loaded.judged[-1] < loaded.judged[0] / 2


@pytest.mark.parametrize("field", [{"num_hidden_layers": 1}, {"markov_rank": 0}])
def test_a_field_that_leaves_tensors_over_is_named(
    dspark: Case, tmp_path: Path, field: dict[str, int]
) -> None:
    verdict = dspark.diagnose(tmp_path, _top(**field)).verdict
    assert "have no place" in verdict and next(iter(field)) in verdict


WINDOWED_ALL = {
    "layer_types": ["sliding_attention"] * 2, "sliding_window": 2, "use_sliding_window": True,
    "is_causal": False,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("size", [6, BLOCK, 10])
def test_a_block_that_training_had_not_is_named(dspark: Case, tmp_path: Path, size: int) -> None:
    diagnosis = dspark.diagnose(tmp_path, _top(block_size=size), keeps_notes=True)
    said = " ".join([diagnosis.verdict, *diagnosis.remarks])
    is_named = f"trained with 8 drafts a block, and its config.json gives it {size}:" in said
    assert (is_named, diagnosis.is_well) == (size != BLOCK, size == BLOCK), said


SABOTAGES: list[tuple[Change, str, str]] = [
    (_nested(target_layer_ids=[0, 2, 3]), "one too early", "target_layer_ids=[1, 3, 4]"),
    (_nested(target_layer_ids=[4, 3, 1]), "captured layers", "target_layer_ids=[1, 3, 4]"),
    (_nested(mask_token_id=5), f"the mask token should be {VOCAB}", f"= {VOCAB}, now 5"),
    (_nested(causal=True), "rows of a block should see each other both ways", '"is_causal": false'),
    (_rope, "rope_theta should be the target's", "now 100"),
    (_norms, "norms are written around 0", "add 1"),
    (_rows_of_neighbours, "a RoPE that rotates neighbours", "write the even rows, then the odd"),
    (_top(block_size=16), "blocks should have 8 rows", '"block_size": 8'),
    (_top(block_size=4), "blocks should have 8 rows", '"block_size": 8'),
    (_top(**WINDOWED_ALL), "the head's layers should have no window", "shortest window is now 10"),
]
if full():  # as the first one's
    late = _nested(target_layer_ids=[2, 4, 5]), "one too late", "target_layer_ids=[1, 3, 4]"
    SABOTAGES.append(late)


@pytest.mark.slow
@pytest.mark.parametrize(("change", "name", "cure"), SABOTAGES)
def test_every_sabotage_is_named(
    case: Case, tmp_path: Path, change: Change, name: str, cure: str
) -> None:
    diagnosis = case.diagnose(tmp_path, change)
    assert diagnosis.changes, [f"{f.name}: {f.result.conditional}" for f in diagnosis.tried]
    first = diagnosis.changes[0]
    assert name in first.name and cure in first.cure


@pytest.mark.slow
def test_lost_norms_of_queries_and_keys_are_named(tmp_path: Path) -> None:
    case = Case(tmp_path, "dspark", qk_norms=2.5, steps=60)
    for number, lose in enumerate((_lost_norms, _no_norms)):
        diagnosis = case.diagnose(tmp_path / str(number), lose)
        assert diagnosis.changes, [f"{f.name}: {f.result.conditional}" for f in diagnosis.tried]
        first = diagnosis.changes[0]
        assert first.name.startswith("q_norm and k_norm are lost"), diagnosis.verdict
        assert "copy q_norm.weight and k_norm.weight of every layer again" in first.cure
        assert any(note.startswith("q_norm and k_norm may be lost") for note in diagnosis.remarks)
    good = case.diagnose(tmp_path / "good", lambda raw, tensors: None)
    assert good.is_well and not any("norm" in text for text in (good.verdict, *good.remarks))
    assert not any("q_norm" in finding.name for finding in good.tried)


@pytest.mark.slow
def test_norms_that_training_left_at_1_are_no_mistake(tmp_path: Path) -> None:
    case = Case(tmp_path, "dspark", qk_norms=1.0, steps=60)
    diagnosis = case.diagnose(tmp_path, lambda raw, tensors: None, keeps_notes=True)
    assert diagnosis.is_well and not diagnosis.changes, diagnosis.verdict
    assert any("If the head was trained with such norms" in note for note in diagnosis.remarks)


def _noise(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """As if the bias had never been loaded."""
    for i, name in enumerate(BIAS):
        generator = torch.Generator().manual_seed(i)
        tensors[name] = torch.randn(tensors[name].shape, generator=generator).bfloat16()


def _swap(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    one, other = BIAS
    tensors[one], tensors[other] = tensors[other], tensors[one]


BIAS = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "name", "cure"),
    [
        (_noise, "drafts are better without it", "copy markov_head.markov_w1 and"),
        (_swap, "DSpark's bias is transposed", "swap the tensors markov_head.markov_w1.weight"),
    ],
)
def test_a_wrong_bias_is_named(
    dspark: Case, tmp_path: Path, change: Change, name: str, cure: str
) -> None:
    diagnosis = dspark.diagnose(tmp_path, change)
    assert diagnosis.changes, [f"{f.name}: {f.result.conditional}" for f in diagnosis.tried]
    first = diagnosis.changes[0]
    assert name in first.name and cure in first.cure
    assert not diagnosis.is_well


@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(BIAS, 2))
def test_a_bias_of_zeros_is_named(dspark: Case, tmp_path: Path, name: str) -> None:
    def empty(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.zeros_like(tensors[name])

    diagnosis = dspark.diagnose(tmp_path, empty)
    assert f"{name.removesuffix('.weight')} is zero everywhere" in diagnosis.verdict
    assert not diagnosis.is_well


@pytest.mark.slow
@pytest.mark.parametrize("kind", thinned(["dflash", "dspark"], 2))
def test_a_missing_embedding_scale_is_named(tmp_path: Path, kind: str) -> None:
    case = Case(tmp_path, kind, scale=math.sqrt(48))
    assert case.target.config.hidden_size == 48
    diagnosis = case.diagnose(tmp_path, lambda raw, tensors: None)
    change = diagnosis.changes[0]
    assert "the target's embedding should be scaled" in change.name
    assert '"input_embedding_scale": 6.9282 in config.json, now 1' in change.cure
    cured = case.diagnose(tmp_path / "cured", _top(input_embedding_scale=6.9282))
    assert not cured.changes and cured.as_loaded is not None
    assert cured.as_loaded.right == change.result.right


@pytest.mark.slow
def test_a_scale_of_the_config_is_named(dspark: Case, tmp_path: Path) -> None:
    diagnosis = dspark.diagnose(tmp_path, _nested(input_embedding_scale=7))
    change = diagnosis.changes[0]
    assert "the target's embedding should not be scaled" in change.name
    assert '"input_embedding_scale": 1 in config.json, now 7' in change.cure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shift", "name"), [(1, None), *thinned([(0, "a row's own token"), (2, "after the next")], 2)]
)
def test_a_wrong_token_beside_a_state_is_named(
    tmp_path: Path, shift: int, name: str | None
) -> None:
    diagnosis = Case(tmp_path, "dspark", shift=shift).diagnose(tmp_path, lambda raw, tensors: None)
    if name is None:
        assert not diagnosis.changes and not diagnosis.problems
    else:
        assert name in diagnosis.changes[0].name


# -- trials change what the loader would -------------------------------------------------------
WINDOWED = {**WINDOWS, "sliding_window_non_causal": True}


@pytest.mark.parametrize(
    ("config", "name", "cured"),
    [
        (WINDOWS, "rows of a block should see each other both ways", {"is_causal": False}),
        (WINDOWED, "rows of a block should see earlier rows alone", {"is_causal": True}),
        (WINDOWED, "blocks should have 8 rows", {"block_size": 8}),
    ],
)
def test_windows_are_those_of_the_cured_config(
    tmp_path: Path, config: dict[str, Any], name: str, cured: dict[str, Any]
) -> None:
    """A window reaches back from a block's start where rows see ahead, else from each row."""
    target = load_target(tiny_model_dir(tmp_path, num_hidden_layers=8))
    options = UNPACKED_HEAD
    texts = padded_texts([[24], [20, 4]], 24)
    found = []
    for number, inner in enumerate((config, {**config, **cured})):
        path = dflash_dir(tmp_path / str(number), inner={"block_size": 4, **inner})
        head = load_head(path, target, HeadRequest(), options)
        trials = {t.name: t for t in block_trials(head, target.config, {})}
        setting = Use(block=None)
        if number == 0:
            trials[name].change(head)
            setting = replace(setting, **trials[name].sets)
        elif "block_size" in cured:
            setting = replace(setting, block=cured["block_size"])
        hidden = teach(target, head, texts).hidden
        found.append([s.hidden for s in unroll(head, texts, hidden, 3, use=setting)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
