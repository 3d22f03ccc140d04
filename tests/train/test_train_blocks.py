"""A DFlash head along whole sequences: against its formula, and against what serving drafts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dflash_cases import (
    DFLASH2_CASES,
    DFLASH_CASES,
    DSPARK_CASES,
    make_dflash2_case,
    make_dflash_case,
    make_dspark_case,
)
from embeds import vl_model_dir
from loading import UNPACKED_HEAD
from tiny import tiny_model_dir
from torch import Tensor, nn
from unrolled import CAPTURED, F32, STEPS, VOCAB, GreedyTexts, load_target, padded_texts

from trtspec import LLM, DFlashDecodingConfig, DSparkDecodingConfig, SamplingParams
from trtspec.attention import blocks
from trtspec.checkpoints.heads.load import load_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.errors import ConfigError
from trtspec.layers.linear import Linear
from trtspec.models.decoder import Decoder
from trtspec.models.drafters.dflash import DFlashHead
from trtspec.ops.tokens.walk import Codebooks, PathCandidates, candidate_scores
from trtspec.train import paths
from trtspec.train.blocks import Anchors
from trtspec.train.create_head import create_head, fit_to_states, trainable
from trtspec.train.earlier_head import begin_with
from trtspec.train.losses import Objective, decay_of_block, dpace_weights, judge, score
from trtspec.train.new_head import NewHead, default_rank
from trtspec.train.paths import PathRows, PathTables, path_losses
from trtspec.train.records import DraftStep
from trtspec.train.save_head import save_head
from trtspec.train.trainer import TrainConfig, Trainer
from trtspec.train.unroll import Use, teach, unroll

EVERY = Anchors(count=1000)


def load(path: Path, target: Decoder) -> DFlashHead:
    options = UNPACKED_HEAD
    head = load_head(path, target, HeadRequest(), options)
    assert isinstance(head, DFlashHead)
    return head


def logits_of(head: DFlashHead, step: DraftStep) -> Tensor:
    logits = head.compute_logits(step.hidden, step.step)
    if step.features is not None:
        assert head.markov_head is not None
        logits = logits + head.markov_head.bias(step.features)
    assert isinstance(logits, Tensor)
    if step.before is None:
        return logits
    assert head.candidate_selector is not None  # what are not candidates is at -inf
    candidates = head.candidate_selector.candidates(logits, step.hidden, len(logits))
    scores = candidate_scores(
        PathCandidates(*(t[0] for t in candidates)), step.before, head.candidate_selector.books
    )
    return torch.full_like(logits, -math.inf).scatter(1, candidates.ids[0], scores)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*DFLASH_CASES, "dflash_windows_ahead", *DSPARK_CASES, *DFLASH2_CASES]
)
def test_every_step_of_every_block_is_the_formula(tmp_path: Path, name: str) -> None:
    target_dir = tiny_model_dir(tmp_path, seed=1, num_hidden_layers=8)
    make = make_dspark_case if name in DSPARK_CASES else make_dflash_case
    make = make_dflash2_case if name in DFLASH2_CASES else make
    case = make(name, target_dir, tmp_path, STEPS)
    target = load_target(target_dir)
    assert isinstance(case.config, DFlashDecodingConfig)
    head = load(Path(str(case.config.speculative_model)), target)
    texts = padded_texts([[9, 4, 6], [16], [2, 3]], 20)
    hidden = teach(target, head, texts).hidden
    places = EVERY.draw(texts)
    assert places.shape == texts.input_ids.shape  # every row is an anchor
    compared, width = 0, texts.input_ids.shape[1]
    for step in unroll(head, texts, hidden, STEPS, use=Use(anchors=EVERY)):
        logits = logits_of(head, step)
        teachers = dict(zip(step.rows.tolist(), step.teacher_rows.tolist(), strict=True))
        judged = {row: teachers[row] for row in step.rows[step.counted].tolist()}
        for n in range(len(texts.input_ids)):
            for document in set(texts.document_ids[n].tolist()) - {-1}:
                rows = (texts.document_ids[n] == document).nonzero()[:, 0].tolist()
                ids = texts.input_ids[n, rows].tolist()
                states = case.hidden(ids)
                for t, row in enumerate(rows):
                    anchor = n * width + row
                    following = t + 1 + step.step
                    inside = following < len(ids)
                    wanted = inside and bool(texts.loss_mask[n, rows[0] + following])
                    assert (anchor in judged) == wanted
                    if wanted:
                        assert judged[anchor] == anchor + step.step
                        proposals = [*ids[t + 1 : following], *([0] * STEPS)][:STEPS]
                        naive = case.naive.chain(ids[: t + 1], states[:t], proposals)[step.step]
                        ours = logits[anchor].double()
                        torch.testing.assert_close(ours, naive, atol=1e-4, rtol=1e-4)
                        compared += 1
    assert compared > 60


@pytest.mark.parametrize("name", ["dflash_windows", "dflash_windows_ahead", "dspark"])
def test_groups_of_blocks_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target_dir = tiny_model_dir(tmp_path, seed=1, num_hidden_layers=8)
    make = make_dspark_case if name in DSPARK_CASES else make_dflash_case
    target = load_target(target_dir)
    config = make(name, target_dir, tmp_path, STEPS).config
    assert isinstance(config, DFlashDecodingConfig)
    head = load(Path(str(config.speculative_model)), target)
    texts = padded_texts([[9, 5, 6], [18], [12, 8]], 20)
    hidden, found = teach(target, head, texts).hidden, []
    for group in (4, 32):  # of 12 blocks
        monkeypatch.setattr(blocks, "GROUP", group)
        steps = unroll(head, texts, hidden, STEPS, use=Use(anchors=Anchors(count=12)))
        found.append(torch.stack([step.hidden for step in steps]))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def test_anchors_are_before_what_the_target_wrote() -> None:
    texts = padded_texts([[30], [8, 6]], 32)
    texts.loss_mask[0] = torch.arange(32) >= 20
    places = Anchors(count=8, seed=1).draw(texts)
    assert places.shape == (2, 8) and (places.diff() > 0).all()
    assert ((places[0] >= 19) & (places[0] < 29)).all()  # the next token is to be judged
    assert (texts.document_ids[1, places[1]] >= 0).all()
    assert not torch.equal(places, Anchors(count=8, seed=2).draw(texts))
    assert torch.equal(places, Anchors(count=8, seed=1).draw(texts))


def test_ends_of_answers_are_drawn_as_often_as_their_middles() -> None:
    """A block behind such an anchor is longer than what is left of the answer."""
    texts = padded_texts([[20, 20]], 40)
    texts.loss_mask[:] = True
    counts = torch.zeros(40)
    for seed in range(400):
        counts[Anchors(count=10, seed=seed).draw(texts)[0]] += 1
    assert counts[19] == counts[39] == 0  # nothing of their document follows
    drawn = torch.cat([counts[:19], counts[20:39]])  # each 400 * 10 / 38 = 105 times, +- 9
    assert drawn.min() > 65 and drawn.max() < 150


CONFIGS = {
    "dflash": DFlashDecodingConfig,
    "dflash2": DFlashDecodingConfig,
    "dspark": DSparkDecodingConfig,
}


def block_of(kind: str) -> int:
    """Rows of a block of three drafts."""
    return 3 if kind == "dspark" else 4


def disturb(head: DFlashHead) -> None:
    """Gives what a new head's parts begin as values that matter."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in trainable(head).items():
        if "markov_w2" in name or "conv." in name or "codebook" in name:
            parameter.data.normal_(generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reads_next", "window"),
    [*((k, False, None) for k in CONFIGS), ("dspark", True, 5), ("dflash", False, 1)],
)
@pytest.mark.parametrize("format", ["raw", "speculators"])
def test_a_new_head_is_saved_as_it_computes(
    tmp_path: Path, format: str, kind: str, reads_next: bool, window: int | None
) -> None:
    """What the loader reads back proposes what the head proposed in training, and in serving."""
    target_dir = tiny_model_dir(tmp_path, seed=1, num_hidden_layers=6)
    target = load_target(target_dir)
    spec = NewHead(
        kind=kind,
        num_layers=2,
        layers_to_capture=CAPTURED,
        block_size=block_of(kind),
        mask_token_id=VOCAB,
        context_embeddings=reads_next,
        sliding_window=window,
    )
    head = create_head(spec, target, None, F32, seed=3)
    assert isinstance(head, DFlashHead)
    disturb(head)
    for parameter in trainable(head).values():  # as bf16 holds them, for the comparison
        parameter.data = parameter.data.bfloat16().float()
    save_head(head, target.config, tmp_path / "head", format=format, notes={"why": "test"})
    again = load(tmp_path / "head", target)
    assert again.layers_to_capture == CAPTURED and again.config.trained_draft_len == 3
    assert again.reads_next_tokens == reads_next
    assert again.config.decoder.layer_windows == head.config.decoder.layer_windows
    assert again.config.sees_ahead == head.config.sees_ahead
    widened = None if window is None else window + block_of(kind)
    assert again.config.decoder.window(1) == widened
    config = CONFIGS[kind](speculative_model=tmp_path / "head")
    llm = LLM(target_dir, config, device="cpu", dtype="float32", disable_overlap_scheduler=True)
    request = llm.executor.enqueue([3, 4, 5, 6], SamplingParams(max_tokens=20, ignore_eos=True))
    seen = 0
    while llm.executor.has_work:
        llm.executor.step()
        if not request.is_generation:
            continue
        drafts = llm.executor.state.next_tokens[request.slot, 1:].tolist()
        texts = padded_texts([[len(request.token_ids) + 3]], len(request.token_ids) + 3)
        texts.loss_mask[:] = True
        written = torch.tensor([*request.token_ids, *drafts])  # the bias reads what was drafted
        texts.input_ids[0, : len(written)] = written
        hidden = teach(target, head, texts).hidden
        anchor = len(request.token_ids) - 1
        for of_head in (head, again):
            steps = list(unroll(of_head, texts, hidden, 3, use=Use(anchors=EVERY)))
            assert [int(logits_of(of_head, s)[anchor].argmax()) for s in steps] == drafts
        seen += 1
    assert seen > 3


@pytest.mark.parametrize("kind", [*CONFIGS, "eagle3"])
@pytest.mark.parametrize("rope", ["three axes", "a part"])
def test_a_head_for_a_target_of_another_rotation_can_be_read(
    tmp_path: Path, kind: str, rope: str
) -> None:
    """Such a head was trained and saved, and the loader refused its RoPE."""
    if rope == "three axes":
        target_dir = vl_model_dir(tmp_path)
    else:
        partial = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        target_dir = tiny_model_dir(tmp_path, "glm4_moe", rope_parameters=partial)
    target, is_block = load_target(target_dir), kind in CONFIGS
    mask = VOCAB if is_block else None
    spec = NewHead(kind=kind, layers_to_capture=(0, 1), mask_token_id=mask)
    head = create_head(spec, target, torch.arange(VOCAB), F32, seed=3)
    for parameter in trainable(head).values():
        parameter.data = parameter.data.bfloat16().float()
    save_head(head, target.config, tmp_path / "head")
    options = UNPACKED_HEAD
    again = load_head(tmp_path / "head", target, HeadRequest(), options)
    texts = padded_texts([[20]], 20)
    hidden = teach(target, head, texts).hidden
    steps = zip(*(unroll(each, texts, hidden, 3) for each in (head, again)), strict=True)
    for ours, theirs in steps:
        torch.testing.assert_close(theirs.hidden, ours.hidden, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients_reach_every_parameter_and_the_target_none(tmp_path: Path, kind: str) -> None:
    target = load_target(tiny_model_dir(tmp_path, seed=1, num_hidden_layers=6))
    spec = NewHead(kind=kind, num_layers=2, block_size=4, mask_token_id=0, context_embeddings=True)
    head = create_head(spec, target, None, F32, seed=3)
    texts = padded_texts([[12], [12]], 12)
    teacher = teach(target, head, texts)
    assert isinstance(head, DFlashHead)
    if head.markov_head is not None:
        assert not head.markov_head.markov_w2.weight.any()  # the head begins without a bias
        head.markov_head.markov_w2.weight.data.fill_(0.1)
    loss, _ = judge(head, unroll(head, texts, teacher.hidden, 3), teacher, Objective(variation=0.5))
    loss.backward()
    parameters = trainable(head)
    missing = [n for n, p in parameters.items() if p.grad is None or not p.grad.any()]
    assert parameters and not missing, missing
    assert any("markov" in n for n in parameters) == (kind == "dspark")
    assert any("codebook" in n for n in parameters) == (kind == "dflash2")
    assert any("base_kernel" in n for n in parameters) == (kind == "dflash2")
    assert not any("embed_tokens" in n or "lm_head" in n for n in parameters)
    assert sum("context_embedding" in n for n in parameters) == 2
    assert all(p.grad is None for p in target.parameters())


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("uses_dpace", [False, True])
def test_the_loss_of_blocks_is_its_formula(tmp_path: Path, kind: str, uses_dpace: bool) -> None:
    """Steps judged together and one by one; documents end before some blocks do."""
    target = load_target(tiny_model_dir(tmp_path, seed=1, num_hidden_layers=6))
    spec = NewHead(kind=kind, block_size=block_of(kind), mask_token_id=0)
    head = create_head(spec, target, None, F32, seed=3)
    assert isinstance(head, DFlashHead)
    disturb(head)
    texts = padded_texts([[12, 3], [9]], 16)
    teacher = teach(target, head, texts)
    steps = list(unroll(head, texts, teacher.hidden, 3, use=Use(anchors=Anchors(count=9))))
    counted = torch.stack([step.counted for step in steps], 1)
    assert counted.any(0).all() and not counted.all(0).any()
    loss, scores = judge(
        head, steps, teacher, Objective(0.7, uses_dpace, variation=0.4, selector=0.3)
    )

    losses, chances, missing = [], [], 0
    for step in steps:
        theirs = teacher.logits[step.teacher_rows].double()
        logits = head.compute_logits(step.hidden, 0).double()
        if step.features is not None:
            logits = logits_of(head, step).double()
        p, q = theirs.softmax(-1), logits.softmax(-1)
        cross = -(p * logits.log_softmax(-1)).sum(-1)
        losses.append(0.6 * cross + 0.4 * (1 - torch.minimum(p, q).sum(-1)))
        chosen = theirs.argmax(-1, keepdim=True)
        chances.append(q.detach().gather(1, chosen)[:, 0])
        if step.before is not None:
            selector = head.candidate_selector
            assert selector is not None
            ids = logits.topk(selector.count).indices
            is_missing = ~(ids == chosen).any(1)
            missing += int(is_missing.sum())
            ids[is_missing, -1] = chosen[is_missing, 0]
            states = step.hidden @ selector.hidden_projection.weight.T
            context = selector.predecessor_codebook[step.before] * states
            scores_ = logits + (context @ selector.successor_codebook.T).double()
            among = scores_.gather(1, ids).logsumexp(1) - scores_.gather(1, chosen)[:, 0]
            losses[-1] = losses[-1] + 0.3 * among
    expected = torch.zeros((), dtype=torch.float64)
    for block in range(len(counted)):
        reached, parts = 1.0, []
        for step in range(3):
            if counted[block, step]:
                reached *= float(0.5 + 0.5 * chances[step][block])
            parts.append(reached * bool(counted[block, step]))
        for step in range(3):
            weight = sum(parts[step:]) if uses_dpace else 0.7**step
            if counted[block, step]:
                expected += weight * losses[step][block] / counted[:, step].sum()
    assert bool(missing) == (kind == "dflash2")  # choices that are not candidates among them
    torch.testing.assert_close(loss.double(), expected, atol=1e-4, rtol=1e-5)
    for step, each in zip(steps, scores, strict=True):
        alone = score(head, step, teacher, variation=0.4)
        torch.testing.assert_close(each.loss, alone.loss)
        assert torch.equal(each.is_right, alone.is_right)
        assert torch.equal(each.is_counted, alone.is_counted)
        assert int(each.is_counted.sum()) == int(step.counted.sum())


def test_a_new_head_hears_all_captured_layers_alike(tmp_path: Path) -> None:
    target = load_target(tiny_model_dir(tmp_path))
    captured = (0, 1, 2)
    spec = NewHead(kind="dspark", num_layers=1, layers_to_capture=captured, mask_token_id=5)
    head = create_head(spec, target, None, F32, 0)
    assert isinstance(head, DFlashHead) and head.fc.weight is not None
    width, before = target.config.hidden_size, head.fc.weight.clone()
    sizes = [1e-3, 1.0, 40.0]
    states = torch.cat([size * torch.randn(500, width) for size in sizes], dim=-1)
    fit_to_states(head, states)
    heard = [
        float((x @ weight.T).pow(2).mean().sqrt())
        for x, weight in zip(states.split(width, -1), head.fc.weight.split(width, -1), strict=True)
    ]
    assert max(heard) < 1.2 * min(heard)
    for part, earlier, size in zip(
        head.fc.weight.split(width, -1), before.split(width, -1), sizes, strict=True
    ):
        torch.testing.assert_close(part * size, earlier, rtol=0.1, atol=1e-6)


def test_weights_by_position() -> None:
    gammas = [-1 / math.log(decay_of_block(rows)) for rows in (2, 8, 10, 16)]
    assert gammas == pytest.approx([1, 4, 5, 7])
    every = torch.ones(2, 3, dtype=torch.bool)
    weights = dpace_weights(torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]), every)
    assert weights.tolist() == [[3.0, 2.0, 1.0], [0.875, 0.375, 0.125]]
    none = dpace_weights(torch.ones(1, 3), torch.tensor([[True, False, False]]))
    assert none.tolist() == [[1.0, 0.0, 0.0]]
    ranks = [default_rank(size) for size in (32, 576, 2048, 8192)]
    assert ranks == [16, 64, 256, 256]


def test_a_head_of_another_window_is_no_beginning(tmp_path: Path) -> None:
    target = load_target(tiny_model_dir(tmp_path, num_hidden_layers=6))
    spec = NewHead(kind="dflash", num_layers=2, block_size=4, mask_token_id=0)
    slides = replace(spec, sliding_window=6)
    whole, sliding = (create_head(s, target, None, F32, seed=3) for s in (spec, slides))
    save_head(sliding, target.config, tmp_path / "head")
    earlier = load(tmp_path / "head", target)
    with pytest.raises(ConfigError, match=r"\[6, 6\] there, .*give --sliding-window 6"):
        begin_with(whole, earlier)
    with pytest.raises(ConfigError, match=r"\[None, None\] there, .*leave --sliding-window out"):
        begin_with(sliding, whole)
    longer = create_head(replace(slides, block_size=8), target, None, F32, seed=4)
    begin_with(longer, earlier)  # with longer blocks the loader's window is another, the head's not
    for name, parameter in trainable(longer).items():
        expected = trainable(sliding)[name].data.bfloat16().float()
        assert torch.equal(parameter.data, expected), name


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    target = load_target(tiny_model_dir(tmp_path, num_hidden_layers=6))
    for token in (None, VOCAB + 1):
        with pytest.raises(ConfigError, match=f"mask_token_id={token} is not in the target's"):
            create_head(NewHead(kind="dflash", mask_token_id=token), target, None, F32, seed=3)
    latent = load_target(tiny_model_dir(tmp_path, "deepseek_v3"))
    with pytest.raises(ConfigError, match="latent attention"):
        create_head(
            NewHead(kind="dflash", layers_to_capture=(1,), mask_token_id=0),
            latent,
            None,
            F32,
            seed=3,
        )
    with pytest.raises(ConfigError, match="needs a target of 7 layers; it has 6"):
        create_head(
            NewHead(kind="dflash", num_layers=4, mask_token_id=0), target, None, F32, seed=3
        )
    head = create_head(NewHead(kind="dflash", mask_token_id=0), target, None, F32, seed=3)
    with pytest.raises(ConfigError, match="num_steps=6, but the head's block has 7"):
        Trainer(target, head, GreedyTexts.__new__(GreedyTexts), [], TrainConfig(), tmp_path)
    with pytest.raises(ConfigError, match=r"markov_rank is of DSpark heads, not of dflash"):
        NewHead(kind="dflash", markov_rank=4)
    with pytest.raises(ConfigError, match=r"context_embeddings is of block heads, not of mtp"):
        NewHead(kind="mtp", context_embeddings=True)
    with pytest.raises(ConfigError, match=r"sliding_window are for the other kinds"):
        NewHead(kind="mtp", sliding_window=8)
    with pytest.raises(ConfigError, match=r"NewHead\.sliding_window=0"):
        NewHead(kind="eagle3", sliding_window=0)
    with pytest.raises(ConfigError, match=r"NewHead\.block_size=1"):
        NewHead(kind="dflash", block_size=1)


def test_gradients_of_a_path_are_its_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts whose scores are computed again; of repeated tokens gradients are summed."""
    monkeypatch.setattr(paths, "ROWS", 4)
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    hidden, lm_head, first, second, weight = (
        random(*shape) for shape in ((10, 6), (20, 6), (20, 4), (20, 4), (4, 6))
    )
    before, choices = (torch.randint(20, (10,), generator=generator) for _ in range(2))
    candidates = torch.stack([torch.randperm(20, generator=generator)[:5] for _ in range(10)])
    candidates[:5, 2] = choices[:5]  # of the others the choice may be missing
    projection = Linear(6, 4, bias=False)
    projection.weight = nn.Parameter(weight.detach().clone())
    rows = PathRows(hidden=hidden, before=before, candidates=candidates, choices=choices)
    tables = PathTables(lm_head.detach(), projection, Codebooks(first, second))
    losses, proposals = path_losses(rows, tables)
    scale = torch.arange(1.0, 11.0, dtype=torch.float64)
    wanted = (hidden, projection.weight, first, second)
    ours = torch.autograd.grad((losses * scale).sum(), wanted)

    scores = hidden @ lm_head.detach().T + (first[before] * (hidden @ weight.T)) @ second.T
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(10):
        among = candidates[i].tolist()
        if int(choices[i]) in among:
            best = max(among, key=lambda token: float(scores[i, token].detach()))
            assert int(proposals[i]) == best
        else:
            among[-1] = int(choices[i])
            assert proposals[i] != choices[i] and proposals[i] in candidates[i]
        loss = scores[i, among].logsumexp(0) - scores[i, choices[i]]
        torch.testing.assert_close(losses[i], loss)
        expected = expected + scale[i] * loss
    theirs = torch.autograd.grad(expected, (hidden, weight, first, second))
    for own, formula in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, formula)
