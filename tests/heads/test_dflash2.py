"""DFlash2 heads: convolutions along a block, and a path through each row's best tokens.

Scores equal a recomputation in float64 that knows a request's text and nothing else, whatever the
walk took before; and what a walk takes is what that recomputation would.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_cases import DFLASH2_CASES, PathScript, make_dflash2_case
from drafting import Case, cases_by_k, run_random_schedule, run_with_changing_draft_len
from loading import UNPACKED_HEAD
from matrix import cpu_engine
from oracle import VOCAB, Oracle, random_prompts
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRanks
from tiny import tiny_model_dir
from tiny_dflash import DFLASH2, LAYERS, as_speculators, dflash_dir
from unrolled import STEPS, load_target, padded_texts

from trtspec import DFlashDecodingConfig, DSparkDecodingConfig, SamplingParams, cli
from trtspec.attention.blocks import BlockPass
from trtspec.checkpoints.heads.load import load_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.distributed.logits import ShardedLogits, top_tokens
from trtspec.errors import CheckpointError
from trtspec.models.drafters.dflash import DFlashHead
from trtspec.train.blocks import Anchors
from trtspec.train.unroll import Use, teach, unroll


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=8)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "k"), cases_by_k(DFLASH2_CASES, ["dflash2"]))
def test_scores_equal_recomputation(target_dir: Path, tmp_path: Path, name: str, k: int) -> None:
    case = make_dflash2_case(name, target_dir, tmp_path, k)
    compared, executor = run_random_schedule(case, k, k, PathScript)
    assert compared > 30
    assert set(executor.statistics.accepted_lens) == set(range(k + 1))
    assert k != 4 or executor.stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dflash2", "dflash2_anchor"])
def test_drafting_can_be_turned_down_and_up(target_dir: Path, tmp_path: Path, name: str) -> None:
    run_with_changing_draft_len(make_dflash2_case(name, target_dir, tmp_path, 3), PathScript)


def _path(case: Case, text: list[int], k: int) -> tuple[list[int], list[int]]:
    """The best path behind a text, in float64; and each row's best token by its logits alone."""
    hidden, flags = case.hidden(text[:-1]), case.naive.flags
    taken: list[int] = []
    for depth in range(k):
        scores = case.naive.chain(text, hidden, taken + [0] * (k - depth))
        taken.append(int(scores[depth].argmax()))
    case.naive.flags = flags | {"independent": True}
    alone = [int(row.argmax()) for row in case.naive.chain(text, hidden, taken)]
    case.naive.flags = flags
    return taken, alone


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dflash2", "dflash2_anchor"])
def test_drafts_are_the_best_path(target_dir: Path, tmp_path: Path, name: str) -> None:
    k = 4
    case = make_dflash2_case(name, target_dir, tmp_path, k)
    llm = cpu_engine(target_dir, case.config, chunk=24, overlap=False, pool=112)
    executor, prompts = llm.executor, random_prompts(5)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    requests = [executor.enqueue(prompt, params) for prompt in prompts]
    compared = differ = 0
    while executor.has_work:
        executor.step()
        for request in requests:
            if not request.is_generation:
                continue
            expected, alone = _path(case, request.token_ids, k)
            assert executor.state.next_tokens[request.slot, 1:].tolist() == expected
            compared, differ = compared + 1, differ + (expected != alone)
    assert compared > 40 and differ > compared // 2, "the token before has no say here"


@pytest.fixture(scope="module")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["strict", "exact_match", "rejection", "block"])
def test_texts_are_right_under_every_rule(
    target_dir: Path, oracle: Oracle, tmp_path: Path, rule: str
) -> None:
    head = dflash_dir(tmp_path, path={}, block=4)
    config = DFlashDecodingConfig(speculative_model=head, acceptance=rule)
    prompts = random_prompts(5)
    llm = cpu_engine(target_dir, config, chunk=24, pool=112)
    greedy = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    for prompt, output in zip(prompts, greedy, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, 20)
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
    sampled = llm.generate(prompts, params)
    if rule in ("strict", "exact_match"):  # whose seeded texts are those without speculation
        plain = cpu_engine(target_dir, None).generate(prompts, params)
        assert [o.outputs[0].token_ids for o in sampled] == [o.outputs[0].token_ids for o in plain]


def test_what_a_draft_was_drawn_from_is_remembered(target_dir: Path, tmp_path: Path) -> None:
    """Each stored distribution has the candidates alone, and the draft is one of them."""
    head = dflash_dir(tmp_path, path={"selector_top_k": 5}, block=4)
    config = DFlashDecodingConfig(speculative_model=head, acceptance="rejection")
    executor = cpu_engine(target_dir, config, overlap=False).executor
    params = SamplingParams(max_tokens=12, temperature=2.0, seed=3, ignore_eos=True)
    request, seen = executor.enqueue([5, 6, 7], params), set()
    while executor.has_work:
        executor.step()
        if not request.is_generation:
            continue
        memory = executor.worker.draft_memory
        assert memory is not None
        logits = memory.logits[request.slot]
        drafts = executor.state.next_tokens[request.slot, 1:].to(torch.int64)
        assert (logits > float("-inf")).sum(-1).tolist() == [5, 5, 5]
        log_q = (logits / 2.0).log_softmax(-1).gather(1, drafts[:, None])[:, 0]
        torch.testing.assert_close(log_q, memory.log_q[request.slot])
        seen |= set((logits.argmax(-1) != drafts).tolist())
    assert seen == {False, True}


# -- formats -----------------------------------------------------------------------------------
def _edited(head: Path, raw: dict[str, Any] | None = None, **nested: Any) -> Path:
    file = head / "config.json"
    fields = json.loads(file.read_text()) | (raw or {})
    fields["dflash_config"] = fields["dflash_config"] | nested
    file.write_text(json.dumps(fields))
    return head


@pytest.mark.slow
def test_the_formats_of_a_head_are_one(target_dir: Path, tmp_path: Path) -> None:
    head = dflash_dir(tmp_path, path={}, block=5)
    speculators, texts = as_speculators(head), []
    newer = _edited(dflash_dir(tmp_path / "newer", path={}), {"block_size": None}, block_size=5)
    modelopt = _edited(  # writes `block_size` twice, and the causality
        dflash_dir(tmp_path / "modelopt", path={}, block=5),
        {"is_causal": False, "layer_types": ["full_attention"] * 2, "rope_scaling": None},
        block_size=5, projector_type="dflash2", causal=False,
    )  # fmt: skip
    for path in (head, speculators, newer, modelopt):
        config = DFlashDecodingConfig(speculative_model=path)
        llm = cpu_engine(target_dir, config)
        model = llm.executor.draft_model
        assert isinstance(model, DFlashHead) and model.layers_to_capture == LAYERS
        assert model.candidate_selector is not None and llm.executor.max_draft_len == 4
        output = llm.generate([5, 6, 7], SamplingParams(max_tokens=24, ignore_eos=True))
        texts.append((output.outputs[0].token_ids, output.spec_stats.num_steps))
    assert texts[1:] == texts[:1] * 3


@pytest.mark.parametrize(
    ("raw", "nested", "said"),
    [
        ({}, {"selector_rank": None}, "selector_rank, which a DFlash2 head cannot do without"),
        ({}, {"conv_kernel_size": 10}, "conv_kernel_size=10; it must be an int in 1 … 9"),
        ({}, {"conv_group_size": 7}, "conv_group_size=7 does not divide hidden_size=48"),
        ({}, {"conv_group_size": 8}, "Check conv_kernel_size, conv_group_size and hidden_size"),
        ({}, {"conv_kernel_size": 3}, "Check conv_kernel_size and hidden_size"),
        ({}, {"selector_rank": 13}, "Check vocab_size and selector_rank"),
        ({}, {"selector_top_k": VOCAB + 1}, f"it must be an int in 1 … {VOCAB}"),
        ({"draft_vocab_size": 40}, {}, "drafts the target's whole vocabulary"),
        ({"num_target_layers": 36}, {}, "36, but the target has 8 layers. Use a head that was"),
        (
            {"architectures": ["DFlash2BeamDraftModel"]},
            {},
            r"architectures=.'DFlash2BeamDraftModel'. is no head's; allowed are DFlashDraftModel",
        ),
        ({}, {"projector_type": "domino"}, "projector_type 'domino'"),
        ({}, {"projector_type": "domino"}, "Domino's recurrent correction"),
        ({}, {"lilicorr_enabled": True}, "LiLiCorr's transformer"),
        ({"architectures": ["LiLiCorrDraftModel"]}, {}, "LiLiCorr's transformer"),
        ({"speculators_model_type": "domino"}, {}, "Domino's recurrent correction"),
        (
            {},
            {"output_multiplier": "two"},
            "output_multiplier='two'; it must be a number > 0 or null",
        ),
        ({"quantization_config": {"quant_algo": "W4A8_AWQ"}}, {}, "Use the unquantised checkpoint"),
    ],
)
def test_what_cannot_be_is_refused(
    target_dir: Path, tmp_path: Path, raw: dict[str, Any], nested: dict[str, Any], said: str
) -> None:
    head = _edited(dflash_dir(tmp_path, path={}), raw, **nested)
    with pytest.raises(CheckpointError, match=said):
        cpu_engine(target_dir, DFlashDecodingConfig(speculative_model=head))


def test_other_configs_and_tools_say_what_it_is(target_dir: Path, tmp_path: Path) -> None:
    head = dflash_dir(tmp_path, path={})
    with pytest.raises(CheckpointError, match="is a DFlash head, not a DSpark head"):
        cpu_engine(target_dir, DSparkDecodingConfig(speculative_model=head))
    as_dspark = _edited(dflash_dir(tmp_path / "both", markov="vanilla"), **DFLASH2)
    with pytest.raises(CheckpointError, match="DFlash2's parts"):
        cpu_engine(target_dir, DSparkDecodingConfig(speculative_model=as_dspark))


def test_inspect_head_shows_it(
    capsys: pytest.CaptureFixture[str], target_dir: Path, tmp_path: Path
) -> None:
    scales = {"output_multiplier": 0.25, "final_logit_softcapping": 20, "input_embedding_scale": 3}
    for head in (dflash_dir(tmp_path, path={}), dflash_dir(tmp_path, path={}, **scales)):
        assert cli.main(["inspect-head", str(head), "--target", str(target_dir), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["format"] == "DFlash2, z-lab's format" and not report["problems"]
        assert report["block"].startswith(
            "rows see each other both ways; the masks propose; convolutions of 2 rows, 16 channels "
            "in a group; a path through the best 16, rank 12"
        )
    assert report["block"].endswith("logits times 0.25; logits within ±20; embedding times 3")
    assert cli.main(["inspect-head", str(as_speculators(head)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "DFlash2, speculators format"


def test_along_whole_sequences(target_dir: Path, tmp_path: Path) -> None:
    """Blocks behind many anchors of a text at once, as in training; the rows have gradients."""
    case, k = make_dflash2_case("dflash2_three_taps", target_dir, tmp_path, STEPS), STEPS
    case.naive.flags["independent"] = True  # logits alone, before the choice
    assert isinstance(case.config, DFlashDecodingConfig)
    target = load_target(target_dir)
    options = UNPACKED_HEAD
    head = load_head(
        Path(str(case.config.speculative_model)), target, HeadRequest(kind="dflash"), options
    )
    texts = padded_texts([[9], [4, 6]], 12)
    hidden = teach(target, head, texts).hidden.requires_grad_()
    outputs = list(unroll(head, texts, hidden, k, use=Use(anchors=Anchors(count=1000))))
    for anchor in (3, 7, 12 + 2):  # of the first text, and of the first half of the second
        row, place = divmod(anchor, 12)
        ids = texts.input_ids[row].tolist()
        states = case.hidden(ids)
        naive = case.naive.chain(ids[: place + 1], states[:place], [0] * k)
        for depth, expected in enumerate(naive):
            logits = head.compute_logits(outputs[depth].hidden, depth)
            assert isinstance(logits, torch.Tensor)
            torch.testing.assert_close(logits[anchor].double(), expected, atol=1e-4, rtol=1e-4)
    outputs[-1].hidden[5].sum().backward()
    assert hidden.grad is not None and bool(hidden.grad.any())


@pytest.mark.parametrize("path", [None, {}])
@pytest.mark.parametrize("says_so", [False, True])
def test_a_quantised_head_is_never_cast(
    target_dir: Path, tmp_path: Path, path: dict[str, int] | None, says_so: bool
) -> None:
    """FP8 weights beside their scales, in ModelOpt's names; with and without a word about it.

    With it they are numbers times their scales.
    """
    head = dflash_dir(tmp_path, path=path)
    tensors, name = load_file(head / "model.safetensors"), "layers.0.mlp.down_proj.weight"
    scale = tensors[name].abs().amax() / 448
    tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale"] = scale
    save_file(tensors, head / "model.safetensors")
    if says_so:
        _edited(head, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}})
        llm = cpu_engine(target_dir, DFlashDecodingConfig(speculative_model=head))
        weight = llm.executor.draft_model.layers[0].mlp.down_proj
        out = weight(torch.eye(weight.in_features))
        torch.testing.assert_close(out.T, tensors[name].float() * scale, atol=1e-6, rtol=1e-6)
    else:
        with pytest.raises(
            CheckpointError, match=r"F8_E4M3 and a scale, but .* no quantization_con"
        ):
            cpu_engine(target_dir, DFlashDecodingConfig(speculative_model=head))
    # a weight of an allowed dtype beside a scale is no plain weight either
    tensors[name] = tensors[name].float()
    save_file(tensors, head / "model.safetensors")
    said = "it must be F8_E4M3" if says_so else "1 tensors have no place.*down_proj.weight_scale"
    with pytest.raises(CheckpointError, match=said):
        cpu_engine(target_dir, DFlashDecodingConfig(speculative_model=head))


def test_a_head_with_block_scales_is_made_float(target_dir: Path, tmp_path: Path) -> None:
    """FP8 in DeepSeek-V3's form, convolutions and choice included."""
    head, texts = dflash_dir(tmp_path, path={}, block=5), []
    tensors = load_file(head / "model.safetensors")
    quantised, plain = dict(tensors), dict(tensors)
    for name in [n for n, t in tensors.items() if n.endswith("proj.weight") or "projection" in n]:
        rows, columns = tensors[name].shape
        scale = 0.02 * (1 + torch.arange(-(-rows // 16) * -(-columns // 32)) % 3).float()
        scale = scale.view(-(-rows // 16), -1)
        wide = scale.repeat_interleave(16, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
        quantised[name] = (tensors[name] / wide).to(torch.float8_e4m3fn)
        quantised[f"{name}_scale_inv"] = scale
        plain[name] = quantised[name].float() * wide
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]}
    for given, raw in ((plain, None), (quantised, {"quantization_config": config})):
        save_file(given, head / "model.safetensors")
        llm = cpu_engine(target_dir, DFlashDecodingConfig(speculative_model=_edited(head, raw)))
        model = llm.executor.draft_model
        assert isinstance(model, DFlashHead)
        ids, positions = torch.tensor([5, 90, 90, 90, 90]), torch.arange(5)
        context = [(torch.zeros(3, 2, 8),) * 2] * 2
        blocks = BlockPass(torch.zeros(1, 3), torch.tensor([[1]]), 5, context, (True, True))
        with torch.no_grad():
            texts.append(model(ids, positions, torch.empty(0), blocks, 0)[0])
    torch.testing.assert_close(texts[0], texts[1], atol=1e-6, rtol=1e-6)
    assert texts[0].std() > 0.1


def test_the_best_tokens_of_sharded_logits() -> None:
    """The last of three ranks has fewer tokens than are asked for."""
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
    expected = logits.topk(4)
    parts = torch.nn.functional.pad(logits, (0, 2), value=9.0).chunk(3, dim=1)

    def of_rank(comm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return top_tokens(ShardedLogits(parts[comm.rank], 10, comm), 4)

    for values, ids in ThreadRanks(3).run(of_rank):
        assert torch.equal(values, expected.values) and torch.equal(ids, expected.indices)
    values, ids = top_tokens(logits, 40)
    assert ids.shape == (5, 10) and values.shape == (5, 10)
