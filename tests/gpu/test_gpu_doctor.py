"""Drafters along whole texts on CUDA, as the doctor runs them: the CPU's logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loading import ON_CPU, UNPACKED
from tiny import tiny_model_dir
from tiny_copied import Copied
from tiny_gemma import assistant_dir, gemma_dir
from tiny_heads import MASK_TOKEN, p_eagle_dir, pard_dir
from tiny_trained import load_target
from torch import Tensor

from trtspec.checkpoints.heads.load import load_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.checkpoints.weights import load_decoder
from trtspec.doctor import Diagnosis, diagnose, texts_of
from trtspec.doctor.draft_model import DraftModel, unroll_model
from trtspec.train.unroll import teach, unroll

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = [[i + 1, 2 * i + 3, 50 + i] for i in range(8)]
WRITTEN = [[(11 * i + 5 * j) % 97 for j in range(12)] for i in range(8)]


def _pair(kind: str, path: Path) -> tuple[Path, Path]:
    if kind.startswith("gemma"):
        return gemma_dir(path, kind, seed=1), assistant_dir(path, kind)
    drafter = p_eagle_dir(path) if kind == "p_eagle" else pard_dir(path)
    return tiny_model_dir(path, seed=1, num_hidden_layers=8), drafter


@torch.no_grad()
def _logits(kind: str, pair: tuple[Path, Path], device: torch.device) -> list[Tensor]:
    options = replace(ON_CPU, device=device)
    target, texts = load_decoder(pair[0], options), texts_of(PROMPTS, WRITTEN, device)
    if kind == "pard":
        model = DraftModel(load_decoder(pair[1], options), MASK_TOKEN)
        steps = unroll_model(model, texts, 3)
        return [model.compute_logits(s.hidden[s.rows], s.step).cpu() for s in steps]
    head_kind = "mtp" if kind.startswith("gemma") else "eagle"
    kept = replace(options, kv_group=1)
    head = load_head(pair[1], target, HeadRequest(kind=head_kind, num_mtp_layers=1), kept)
    teacher = teach(target, head, texts)
    steps = unroll(head, texts, teacher.hidden, 3, teacher.keys)
    return [head.compute_logits(s.hidden[s.rows], s.step).cpu() for s in steps]


@pytest.mark.parametrize("kind", ["p_eagle", "pard", "gemma3_text", "gemma4_text"])
def test_steps_are_those_of_the_cpu(kind: str, tmp_path: Path) -> None:
    pair = _pair(kind, tmp_path)
    ours, theirs = (_logits(kind, pair, torch.device(name)) for name in ("cuda", "cpu"))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)


def _examined(pair: tuple[Path, Path], copied: Copied, device: torch.device) -> Diagnosis:
    target = load_decoder(pair[0], replace(UNPACKED, device=device))
    return diagnose(target, pair[1], None, copied.texts.to(device))


@pytest.mark.parametrize("kind", ["p_eagle", "pard", "gemma4_text"])
def test_an_examination(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a drafter that is accepted: every trial does as on the CPU."""
    pair = _pair(kind, tmp_path)
    copied = Copied(load_target(pair[0]), num_documents=70)
    if kind == "pard":
        copied.follow_model(pair[1], MASK_TOKEN)
    else:
        copied.follow_head(pair[1], "mtp" if kind.startswith("gemma") else "eagle")
    for place in ("exam", "draft_model"):
        monkeypatch.setattr(f"trtspec.doctor.{place}.teach", copied.teach)
    ours, theirs = (_examined(pair, copied, torch.device(name)) for name in ("cuda", "cpu"))
    assert ours.as_loaded is not None and theirs.as_loaded is not None and ours.is_well
    assert min(ours.as_loaded.conditional[1:]) > 0.8
    assert ours.changes == theirs.changes == [] and ours.tried
    assert [finding.name for finding in ours.tried] == [finding.name for finding in theirs.tried]
    places = theirs.as_loaded.judged[0]
    for one, other in zip(ours.tried, theirs.tried, strict=True):
        for right, expected in zip(one.result.right, other.result.right, strict=True):
            assert abs(right - expected) <= 0.02 * places, one.name  # near ties may fall otherwise
