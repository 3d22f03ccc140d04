"""Training's unrolled steps against the head's formula from the text alone, and against serving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafting import make_case
from loading import HEAD_ON_CPU
from tiny import tiny_model_dir
from torch import Tensor
from unrolled import CAPTURED, F32, STEPS, VOCAB, load_target, padded_texts

from trtspec import LLM, EagleDecodingConfig, MTPDecodingConfig, SamplingParams
from trtspec.attention.dense import DensePass
from trtspec.checkpoints.heads.load import load_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.errors import ConfigError
from trtspec.models.drafters.base import DraftHead
from trtspec.train.create_head import create_head, trainable
from trtspec.train.losses import Objective, conditional_acceptance, judge, score
from trtspec.train.new_head import NewHead
from trtspec.train.records import DraftStep, Sequences
from trtspec.train.save_head import save_head
from trtspec.train.unroll import teach, unroll

CASES = ["eagle3", "eagle3_flags", "eagle3_before_fc", "eagle1", "mtp_eagle", "mtp_eagle_pre_norm",
         "mimo", "mtp_vanilla", "mtp_vanilla_own_ends", "mimo_vanilla"]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_step_of_every_row_is_the_formula(tmp_path: Path, name: str) -> None:
    case = make_case(name, tiny_model_dir(tmp_path, seed=1, num_hidden_layers=8), tmp_path, STEPS)
    target, config = load_target(case.target), case.config
    vanilla = isinstance(config, MTPDecodingConfig) and config.use_mtp_vanilla
    assert isinstance(config, EagleDecodingConfig | MTPDecodingConfig)
    head = load_head(
        config.speculative_model or case.target,
        target,
        HeadRequest(
            kind="eagle" if isinstance(config, EagleDecodingConfig) else "mtp",
            num_mtp_layers=STEPS if vanilla else 1,
            norm_output=getattr(config, "mtp_feeds_post_norm", None),
        ),
        HEAD_ON_CPU,
    )
    texts = padded_texts([[9, 4, 6], [16], [2, 3]], 20)
    teacher = teach(target, head, texts)
    counted, width = 0, texts.input_ids.shape[1]
    steps = list(unroll(head, texts, teacher.hidden, STEPS))
    logits = [head.compute_logits(s.hidden, s.step) for s in steps]
    for n in range(texts.input_ids.shape[0]):
        for document in set(texts.document_ids[n].tolist()) - {-1}:
            places = (texts.document_ids[n] == document).nonzero()[:, 0].tolist()
            ids, row = texts.input_ids[n, places].tolist(), n * width + places[0]
            hidden = case.hidden(ids)
            theirs = teacher.hidden[row : row + len(ids)].double()
            torch.testing.assert_close(theirs, hidden, atol=1e-4, rtol=1e-4)
            for t in range(len(ids) - 2):
                following = [*ids[t + 2 :], *[0] * STEPS][:STEPS]
                expected = case.naive.chain(ids[: t + 2], hidden, following)
                for s in range(STEPS):
                    inside = t + 2 + s < len(ids)
                    wanted = inside and bool(texts.loss_mask[n, places[0] + t + 2 + s])
                    assert bool((steps[s].rows == row + t).any()) == wanted
                    if inside:
                        ours = logits[s][row + t].double()
                        torch.testing.assert_close(ours, expected[s], atol=1e-4, rtol=1e-4)
                        counted += 1
    assert counted > 60
    assert all(torch.equal(s.teacher_rows, s.rows + s.step + 1) for s in steps)


@torch.no_grad()
@pytest.mark.parametrize("variation", [0.0, 0.9])
def test_the_loss_is_the_definition(tmp_path: Path, variation: float) -> None:
    """Cross-entropy with the target's distribution over the draft vocabulary, in float64, and its
    total variation."""
    target = load_target(tiny_model_dir(tmp_path, seed=1, num_hidden_layers=6))
    ids = torch.tensor(sorted(range(0, VOCAB, 2)))
    head = create_head(NewHead(layers_to_capture=CAPTURED), target, ids, F32, seed=3)
    texts = padded_texts([[12], [7, 5]], 12)
    teacher = teach(target, head, texts)
    scores = []
    for step in unroll(head, texts, teacher.hidden, 2):
        result = score(head, step, teacher, variation=variation)
        scores.append(result)
        total, count, right = 0.0, 0, 0
        for row, judged_by in zip(step.rows.tolist(), step.teacher_rows.tolist(), strict=True):
            ours = head.compute_logits(step.hidden[row : row + 1], 0)[0].double()
            choice = int(teacher.choices[judged_by])
            right += int(ids[ours.argmax()]) == choice
            if choice not in ids.tolist():
                continue
            p = teacher.logits[judged_by].double().softmax(-1)
            total -= (1 - variation) * float((p * ours.log_softmax(-1)).sum())
            total += variation * float((p - ours.softmax(-1)).abs().sum()) / 2
            count += 1
        assert count and abs(float(result.loss) - total / count) < 1e-4
        assert int(result.is_right.sum()) == right
    whole, _ = judge(
        head, unroll(head, texts, teacher.hidden, 2), teacher, Objective(0.8, variation=variation)
    )
    assert abs(float(whole) - float(scores[0].loss + 0.8 * scores[1].loss)) < 1e-5
    (right0, all0), (_right1, all1) = conditional_acceptance(scores)
    assert all0 == len(scores[0].is_counted.nonzero()) and right0 >= all1


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@pytest.mark.parametrize("format", ["raw", "speculators"])
@pytest.mark.parametrize("heads", [6, 10])
def test_a_new_head_is_saved_as_it_computes(
    tmp_path: Path, kind: str, format: str, heads: int
) -> None:
    """What the loader reads back proposes what the head proposed in training. 10 heads do not
    divide the hidden size, as GLM-4.5's 96 do not: a Llama's config must not either."""
    target_dir = tiny_model_dir(
        tmp_path, "qwen3", seed=1, num_hidden_layers=6, num_attention_heads=heads, head_dim=8
    )
    target = load_target(target_dir)
    spec = NewHead(kind=kind, layers_to_capture=CAPTURED if kind == "eagle3" else None)
    head = create_head(spec, target, torch.arange(0, VOCAB, 2), F32, seed=3)
    for parameter in trainable(head).values():  # as bf16 holds them, for the comparison
        parameter.data = parameter.data.bfloat16().float()
    out = tmp_path / "head"
    if kind == "mtp" and format == "speculators":
        with pytest.raises(ConfigError, match="allowed: raw"):
            save_head(head, target.config, out, format=format)
        return
    save_head(head, target.config, out, format=format, notes={"why": "test"})
    again = load_head(
        out,
        target,
        HeadRequest(kind="eagle" if kind == "eagle3" else "mtp", num_mtp_layers=1),
        HEAD_ON_CPU,
    )
    assert again.layers_to_capture == head.layers_to_capture
    texts = padded_texts([[12]], 12)
    hidden = teach(target, head, texts).hidden
    for ours, theirs in zip(unroll(head, texts, hidden, 3), unroll(again, texts, hidden, 3),
                            strict=True):  # fmt: skip
        torch.testing.assert_close(
            head.compute_logits(ours.hidden, ours.step),
            again.compute_logits(theirs.hidden, theirs.step), atol=1e-5, rtol=1e-5,
        )  # fmt: skip
    config = (
        EagleDecodingConfig(max_draft_len=2, speculative_model=out)
        if kind == "eagle3"
        else MTPDecodingConfig(num_nextn_predict_layers=2, speculative_model=out)
    )
    outputs = LLM(target_dir, config, device="cpu", dtype="float32").generate(
        [[3, 4, 5]], SamplingParams(max_tokens=8, ignore_eos=True)
    )
    assert len(outputs[0].outputs[0].token_ids) == 8


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("format", ["raw", "speculators"])
def test_a_window_hides_in_training_what_it_hides_in_serving(
    tmp_path: Path, format: str, window: int
) -> None:
    """Of the text and, where it is shorter than the drafts, of the head's own earlier steps."""
    target_dir = tiny_model_dir(tmp_path, seed=1, num_hidden_layers=6)
    target = load_target(target_dir)
    spec = NewHead(num_layers=1, layers_to_capture=CAPTURED, sliding_window=window)
    head = create_head(spec, target, torch.arange(0, VOCAB, 2), F32, seed=3)
    for parameter in trainable(head).values():
        parameter.data = parameter.data.bfloat16().float()
    save_head(head, target.config, tmp_path / "head", format=format)
    config = EagleDecodingConfig(max_draft_len=4, speculative_model=tmp_path / "head")
    llm = LLM(target_dir, config, device="cpu", dtype="float32", disable_overlap_scheduler=True)
    request = llm.executor.enqueue([3, 4, 5, 6], SamplingParams(max_tokens=16, ignore_eos=True))
    seen, matters = 0, False
    while llm.executor.has_work:
        llm.executor.step()
        if not request.is_generation:
            continue
        drafts = llm.executor.state.next_tokens[request.slot, 1:].tolist()
        ids = torch.tensor([[*request.token_ids, *drafts]])
        texts = padded_texts([[ids.shape[1]]], ids.shape[1])
        texts.input_ids.copy_(ids)
        hidden, row = teach(target, head, texts).hidden, len(request.token_ids) - 2
        found = [
            [int(head.compute_logits(s.hidden[row : row + 1], s.step).argmax()) for s in steps]
            for steps in (unroll(head, texts, hidden, 4), _unroll_whole(head, texts, hidden, 4))
        ]
        assert [2 * i for i in found[0]] == drafts
        matters, seen = matters or found[0] != found[1], seen + 1
    assert seen > 3 and matters


def _unroll_whole(head: DraftHead, texts: Sequences, hidden: Tensor, steps: int) -> list[DraftStep]:
    """The steps of the same head without its window."""
    attention, found = head.get_submodule("layers.0.self_attn"), []
    attention.window, kept = None, attention.window  # type: ignore[assignment]
    found = list(unroll(head, texts, hidden, steps))
    attention.window = kept  # type: ignore[assignment]
    return found


def test_gradients_reach_every_parameter_and_the_target_none(tmp_path: Path) -> None:
    target = load_target(tiny_model_dir(tmp_path, seed=1, num_hidden_layers=6))
    for spec, steps in ((NewHead(layers_to_capture=CAPTURED), 3), (NewHead(kind="mtp"), 3),
                        (NewHead(kind="mtp", num_layers=3), 3)):  # fmt: skip
        head = create_head(spec, target, torch.arange(VOCAB // 2), F32, seed=3)
        texts = padded_texts([[12], [12]], 12)
        teacher = teach(target, head, texts)
        loss = sum(score(head, s, teacher).loss for s in unroll(head, texts, teacher.hidden, steps))
        assert isinstance(loss, Tensor)
        loss.backward()
        parameters = trainable(head)
        missing = [n for n, p in parameters.items() if p.grad is None or not p.grad.any()]
        assert parameters and not missing, missing
        assert all(p.grad is None for p in target.parameters())


def test_dense_attention_is_causal_within_a_document() -> None:
    documents = torch.tensor([[0, 0, 1, 1, -1]])
    q, k, v = (torch.randn(5, 2, 4) for _ in "qkv")
    out = DensePass(documents).attend(q, k, v, 0, None)
    again_v = v.clone()
    again_v[1] += 5  # seen by rows 1 of its own document alone
    changed = (DensePass(documents).attend(q, k, again_v, 0, None) != out).flatten(1).any(1)
    assert changed.tolist() == [False, True, False, False, False]
