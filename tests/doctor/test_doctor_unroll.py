"""Drafters run along whole texts against their formula from the text alone: heads that draft in
parallel, assistants, draft models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import HEAD_ON_CPU
from masked import MASKED_CASES, make_masked_case
from tiny import tiny_model_dir
from tiny_gemma import assistant_dir, gemma_dir
from tiny_gemma_assistant import assistant_case
from tiny_heads import MASK_TOKEN
from torch import Tensor
from unrolled import load_target, padded_texts

from trtspec.checkpoints.heads.load import load_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.doctor.draft_model import DraftModel, unroll_model
from trtspec.models.drafters.clustered_head import LOWEST
from trtspec.train.records import DraftStep, Sequences
from trtspec.train.unroll import teach, unroll

STEPS = 3
Run = tuple[list[DraftStep], list[Tensor], Any]


@torch.no_grad()
def _run_head(target_dir: Path, head_dir: Path, kind: str, texts: Sequences) -> Run:
    target = load_target(target_dir)
    head = load_head(
        head_dir,
        target,
        HeadRequest(kind=kind, num_mtp_layers=1),
        HEAD_ON_CPU,
    )
    teacher = teach(target, head, texts)
    steps = list(unroll(head, texts, teacher.hidden, STEPS, teacher.keys))
    return steps, [head.compute_logits(s.hidden, s.step) for s in steps], teacher


@torch.no_grad()
def _run_model(draft_dir: Path, mask: int | None, texts: Sequences) -> Run:
    drafter = DraftModel(load_target(draft_dir), mask)
    steps = list(unroll_model(drafter, texts, STEPS))
    return steps, [drafter.compute_logits(s.hidden, s.step) for s in steps], None


def _documents(texts: Sequences) -> Iterator[tuple[int, list[int]]]:
    """(row of the first token, ids) of each."""
    length = texts.input_ids.shape[1]
    for n in range(texts.input_ids.shape[0]):
        for document in set(texts.document_ids[n].tolist()) - {-1}:
            places = (texts.document_ids[n] == document).nonzero()[:, 0].tolist()
            yield n * length + places[0], texts.input_ids[n, places].tolist()


def _compare(run: Run, texts: Sequences, chain: Any) -> None:
    """chain: (a document, known tokens, the tokens after them) -> the draft logits."""
    steps, logits, _ = run
    counted = 0
    for first, ids in _documents(texts):
        for t in range(len(ids) - 2):
            following = [*ids[t + 2 :], *[0] * STEPS][:STEPS]
            expected = chain(ids, t + 2, following)
            for s in range(min(STEPS, len(ids) - 2 - t)):
                ours = logits[s][first + t].double()
                theirs, computed = expected[s].double(), ours > LOWEST  # of clustered logits few
                assert int(computed.sum()) in (24, len(ours))
                torch.testing.assert_close(
                    ours[computed], theirs[computed], atol=1e-4, rtol=1e-4
                )  # fmt: skip
                counted += 1
    assert counted > 60
    assert all(torch.equal(s.teacher_rows, s.rows + s.step + 1) for s in steps)


@pytest.mark.parametrize("name", MASKED_CASES)
def test_drafts_of_one_pass(tmp_path: Path, name: str) -> None:
    target = tiny_model_dir(tmp_path, seed=1, num_hidden_layers=8)
    case, texts = (
        make_masked_case(name, target, tmp_path, STEPS),
        padded_texts([[9, 4, 6], [16], [2, 3]], 20),
    )
    directory = case.config.speculative_model
    if name == "pard":
        run = _run_model(directory, MASK_TOKEN, texts)
        _compare(run, texts, lambda ids, n, after: case.naive.chain(ids[:n], None, after))
        return
    run = _run_head(target, directory, "eagle", texts)
    hidden: dict[tuple[int, ...], Tensor] = {}

    def chain(ids: list[int], known: int, following: list[int]) -> list[Tensor]:
        key = tuple(ids)
        if key not in hidden:
            hidden[key] = case.hidden(ids)
        return case.naive.chain(ids[:known], hidden[key], following)

    _compare(run, texts, chain)


def test_a_draft_model_one_by_one(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory, texts = tiny_model_dir(tmp_path, seed=2), padded_texts([[9, 4, 6], [16], [2, 3]], 20)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()

    @torch.inference_mode()
    def chain(ids: list[int], known: int, following: list[int]) -> Tensor:
        text = torch.tensor([[*ids[:known], *following]])
        return model(text).logits[0, known - 1 :]

    _compare(_run_model(directory, None, texts), texts, chain)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "gemma4_small"])
def test_assistants(tmp_path: Path, family: str) -> None:
    """Documents longer than the window of 7, several in a row."""
    sizes: dict[str, Any] = {}
    clusters = None
    if family == "gemma4_small":  # whose last layers have no keys; logits of 3 clusters of 12
        sizes, clusters = {"vocab_size": 96, "vocab_size_per_layer_input": 96}, (12, 3)
    target = gemma_dir(tmp_path, family, seed=1, **sizes)
    pair = (
        target,
        assistant_dir(tmp_path, family, clusters=clusters, vocab_size=sizes.get("vocab_size", 97)),
    )
    case, texts = assistant_case(pair, STEPS), padded_texts([[12, 3], [14]], 16)
    run = _run_head(*pair, "mtp", texts)
    _compare(run, texts, lambda ids, n, after: case.naive.chain(ids[:n], None, after))
