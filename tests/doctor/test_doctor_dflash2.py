"""Perfect DFlash2 heads (`helpers/perfect_blocks.py`), sabotaged: each mistake is named."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import UNPACKED_HEAD
from oracle import Oracle
from perfect_blocks import PERIOD, PerfectBlocks
from safetensors.torch import load_file, save_file
from unrolled import load_target

from trtspec.checkpoints.heads.load import load_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.doctor import Diagnosis, diagnose
from trtspec.doctor.exam import HeadExam
from trtspec.models.decoder import Decoder
from trtspec.train.records import Sequences

PERFECT = PerfectBlocks()
BLOCK, LENGTH = 4, 40
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
SELECTOR = "candidate_selector"


class Case:
    def __init__(self, path: Path, kind: str):
        self.path, self.kind = path, kind
        target_dir = PERFECT.target(path / "target", kind)
        self.target: Decoder = load_target(target_dir)
        rng, oracle, rows = random.Random(3), Oracle(target_dir), []
        for _ in range(16):
            prompt = rng.sample(range(PERFECT.mask), PERIOD)
            rows.append(prompt + oracle.extend(prompt, LENGTH - PERIOD))
        ids = torch.tensor(rows)
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, :PERIOD] = False
        positions = torch.arange(LENGTH).expand_as(ids)
        self.texts = Sequences(ids, mask, torch.zeros_like(ids), positions)

    def diagnose(self, change: Change, name: str) -> Diagnosis:
        out = PERFECT.head(self.path / name, self.kind, "dflash2", BLOCK)
        raw = json.loads((out / "config.json").read_text())
        tensors = load_file(out / "model.safetensors")
        change(raw, tensors)
        (out / "config.json").write_text(json.dumps(raw))
        save_file({n: t.contiguous() for n, t in tensors.items()}, out / "model.safetensors")
        return diagnose(self.target, out, None, self.texts)


def _same(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Changes nothing."""


def _swap_books(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    one, other = f"{SELECTOR}.predecessor_codebook", f"{SELECTOR}.successor_codebook"
    tensors[one], tensors[other] = tensors[other], tensors[one]


def _noisy_books(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for i, name in enumerate(("predecessor", "successor")):
        noise = torch.Generator().manual_seed(i)
        book = tensors[f"{SELECTOR}.{name}_codebook"]
        tensors[f"{SELECTOR}.{name}_codebook"] = 9 * torch.randn(book.shape, generator=noise)


def _turn(dim: int) -> Change:
    def change(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("base_kernel")]:
            tensors[name] = tensors[name].flip(dim)

    return change


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["period", "permutation"])
def test_a_good_head_has_nothing(tmp_path: Path, kind: str) -> None:
    diagnosis = Case(tmp_path, kind).diagnose(_same, "good")
    assert diagnosis.as_loaded is not None and diagnosis.as_loaded.acceptance_length == BLOCK
    assert not diagnosis.changes and not diagnosis.problems


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "change", "name"), [
    ("permutation", _swap_books, "codebooks are swapped"),
    ("period", _noisy_books, "better without it"),
    ("period", _turn(1), "taps in the wrong order"),
    ("period", _turn(0), "kernels before and behind in the wrong order"),
])  # fmt: skip
def test_what_undoes_a_sabotage_is_tried(
    tmp_path: Path, kind: str, change: Change, name: str
) -> None:
    """These heads are so simple that other changes help some of them as much."""
    diagnosis = Case(tmp_path, kind).diagnose(change, "bad")
    assert diagnosis.as_loaded is not None and diagnosis.as_loaded.acceptance_length < 2
    undone = next(finding.result for finding in diagnosis.tried if finding.name.endswith(name))
    assert undone.acceptance_length == BLOCK
    assert diagnosis.changes and diagnosis.changes[0].result.acceptance_length == BLOCK
    if kind == "permutation":
        assert name in diagnosis.changes[0].name


def test_a_longer_block_is_no_cure_for_a_draft_less(tmp_path: Path) -> None:
    """Once the last token's row does not propose, blocks of 4 rows have 3 drafts, where 4 were
    examined. A head that goes on beyond its block would gain by a longer one."""
    case = Case(tmp_path, "period")
    out = PERFECT.head(tmp_path / "head", "period", "dflash2", BLOCK)
    raw = json.loads((out / "config.json").read_text())
    raw["dflash_config"]["sample_from_anchor"] = True
    (out / "config.json").write_text(json.dumps(raw))
    options = UNPACKED_HEAD
    head = load_head(out, case.target, HeadRequest(), options)
    exam = HeadExam(case.target, head, case.texts, None, {})
    lengths = [trial for trial in exam.trials() if "block_size" in trial.cure]
    assert [trial.sets["block"] for trial in lengths] == [8, 10, 16, 32]
    (kept,) = [t for t in exam.trials() if t.name == "the last token's row should not propose"]
    before = exam.evaluate(kept).result.acceptance_length
    exam.keep(kept)
    assert exam.evaluate(None).result.acceptance_length == before
    assert not [trial.cure for trial in exam.trials() if "block_size" in trial.cure]
