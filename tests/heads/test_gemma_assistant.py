"""Gemma-4 assistants against their formula, transformers' own module, and plain decoding."""

from __future__ import annotations

import json
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import Script, run_random_schedule
from matrix import covering, full
from oracle import VOCAB, Oracle
from oracle import random_prompts as executor_prompts
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir
from tiny_gemma import (
    BACKBONE,
    F,
    NaiveAssistant,
    S,
    assistant_dir,
    edit_config,
    gemma_dir,
    hf_assistant,
)
from tiny_gemma_assistant import assistant_case, assistant_config

from trtspec import (
    LLM,
    EagleDecodingConfig,
    KvCacheConfig,
    SamplingParams,
)
from trtspec.acceptance.forced import FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR
from trtspec.checkpoints.heads.load import read_head
from trtspec.checkpoints.hf_config import load_config
from trtspec.cli.inspect_head import describe_head
from trtspec.errors import CheckpointError, ConfigError
from trtspec.models.drafters.clustered_head import LOWEST
from trtspec.workers import eagle3

FAMILIES = ["gemma3_text", "gemma4_text", "gemma4_small"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Family -> (target, assistant)."""
    path = tmp_path_factory.mktemp("pairs")
    found = {
        f: (gemma_dir(path, f, seed=1, layers_weigh=4), assistant_dir(path, f)) for f in FAMILIES
    }
    found["clustered"] = (
        gemma_dir(path, "gemma4_small", seed=1, layers_weigh=4, vocab_size=96,
                  vocab_size_per_layer_input=96),
        assistant_dir(path, "gemma4_small", clusters=(12, 3), vocab_size=96),
    )  # fmt: skip
    return found


# -- the formula -------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [4, 20])  # within the window, and beyond
def test_the_formula_is_transformers(
    pairs: dict[str, tuple[Path, Path]], family: str, length: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Given the keys that the formula sees (transformers' mask shows one more, see the module)."""
    target, assistant = pairs[family]
    naive = NaiveAssistant(assistant, target)
    module = hf_assistant(assistant, torch.float64, monkeypatch)
    text, proposals = [(7 * i + 3) % VOCAB for i in range(length)], [11, 12, 13, 14]
    h, keys = naive.read(text[:-1])
    shared = {
        kind: tuple(x.transpose(0, 1)[None][:, :, -7 if kind == S else 0 :] for x in kv)
        for kind, kv in keys.items()
    }
    h, token = h[None, None], text[-1]
    for ours, proposal in zip(naive.chain(text, None, proposals), proposals, strict=True):
        e = naive.target.get_input_embeddings()(torch.tensor([[token]]))
        with torch.inference_mode():
            out = module(
                inputs_embeds=torch.cat([e, h], -1), shared_kv_states=shared,
                position_ids=torch.tensor([[length - 1]]),
            )  # fmt: skip
        torch.testing.assert_close(ours, out.logits[0, 0], atol=1e-5, rtol=1e-5)
        assert ours.std() > 0.5
        h, token = out.last_hidden_state, proposal


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES[1:], "clustered"])
def test_first_drafts_are_those_of_transformers_generate(
    pairs: dict[str, tuple[Path, Path]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its candidates after the prompt, before its cropping begins: positions, states, embedding."""
    from transformers import AutoModelForCausalLM
    from transformers.generation.candidate_generator import (
        SinglePositionMultiTokenCandidateGenerator,
    )

    target, assistant = pairs[family]
    module = hf_assistant(assistant, torch.float32, monkeypatch)
    module.generation_config.num_assistant_tokens = 4
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    prompts = [[5, 9, 2, 44], [90, 1, 17], [8, 7, 6, 5, 4]]
    llm = LLM(target, assistant_config(assistant, 4), device="cpu", dtype="float32", max_seq_len=64)
    for prompt in prompts:
        generator = SinglePositionMultiTokenCandidateGenerator(
            assistant_model=module, target_model_input_embeddings=model.get_input_embeddings(),
            generation_config=model.generation_config,
            input_ids=torch.tensor([prompt]), model_kwargs={},  # older versions ask for them
        )  # fmt: skip
        generator.main_model_max_length = 64
        with torch.inference_mode():
            outputs = model(
                torch.tensor([prompt]), output_hidden_states=True, return_shared_kv_states=True
            )
            text = torch.tensor([[*prompt, int(outputs.logits[0, -1].argmax())]])
            candidates, _ = generator.get_candidates(text, {}, outputs, False, len(prompt) - 1)
        request = llm.executor.enqueue(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
        llm.executor.step()
        left = llm.executor.state.next_tokens[request.slot].tolist()
        assert left == candidates[0, len(prompt) :].tolist()
        llm.executor.run_until_done()


def test_logits_of_a_few_clusters(
    pairs: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' of the tokens in the three nearest of twelve clusters; the others' are low."""
    target, assistant = pairs["clustered"]
    head: Any = LLM(target, assistant_config(assistant, 2), device="cpu", dtype="float32").executor
    module = hf_assistant(assistant, torch.float32, monkeypatch)
    hidden = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    ours = head.draft_model.compute_logits(hidden, 0)
    with torch.inference_mode():
        theirs = module.masked_embedding(hidden[None], module.lm_head.weight)[0]
    chosen = ours > LOWEST
    assert chosen.sum(1).tolist() == [3 * 8] * 40
    assert torch.equal(chosen, theirs > theirs.min())
    torch.testing.assert_close(ours[chosen], theirs[chosen], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["strict", "rejection"])
def test_drafting_from_a_few_clusters(pairs: dict[str, tuple[Path, Path]], rule: str) -> None:
    """Greedy text is the target's; at a temperature nothing else is ever drawn."""
    target, assistant = pairs["clustered"]
    params = [
        SamplingParams(max_tokens=20, temperature=t, seed=1, ignore_eos=True) for t in (0.0, 2.0)
    ]
    texts = []
    for config in (None, assistant_config(assistant, 3, acceptance=rule)):
        llm = LLM(target, config, device="cpu", dtype="float32", max_seq_len=64)
        outputs = llm.generate([[5, 9, 2, 44], [5, 9, 2, 44]], params)
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0][0] == texts[1][0] and len(texts[1][1]) == 20
    memory = llm.executor.worker.draft_memory
    assert (memory is not None) == (rule == "rejection")
    if memory is not None:
        drawn = memory.logits[:2].gather(2, memory.logits[:2].argmax(-1, keepdim=True))
        assert (drawn > LOWEST).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("masked_embedding.token_ordering"), "token_ordering is missing"),
        (lambda t: t["masked_embedding.token_ordering"].fill_(3), "each token of 0 … 95 once"),
        (
            lambda t: t.pop("masked_embedding.centroids.weight"),
            "missing: masked_embedding.centroids.weight",
        ),
    ],
)
def test_clusters_refused(
    tmp_path: Path, pairs: dict[str, tuple[Path, Path]], change: Any, message: str
) -> None:
    assistant = assistant_dir(tmp_path, "gemma4_small", clusters=(12, 3), vocab_size=96)
    tensors = load_file(assistant / "model.safetensors")
    change(tensors)
    save_file(tensors, assistant / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        LLM(pairs["clustered"][0], assistant_config(assistant, 2), device="cpu")


def test_an_lm_head_that_is_the_targets_keeps_its_clusters(
    tmp_path: Path, pairs: dict[str, tuple[Path, Path]]
) -> None:
    """Of an assistant as wide as its target; here the file has the tied weight twice."""
    target, _ = pairs["clustered"]
    assistant = assistant_dir(
        tmp_path, "gemma4_small", clusters=(12, 3), vocab_size=96, hidden_size=BACKBONE
    )
    tensors = load_file(assistant / "model.safetensors")
    theirs = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = theirs
    tensors["lm_head.weight"] = theirs.clone()
    save_file(tensors, assistant / "model.safetensors", metadata={"format": "pt"})
    head: Any = LLM(target, assistant_config(assistant, 2), device="cpu", dtype="float32").executor
    logits = head.draft_model.compute_logits(torch.ones(1, BACKBONE), 0)
    assert int((logits > LOWEST).sum()) == 3 * 8
    edit_config(assistant, use_ordered_embeddings=False)
    with pytest.raises(CheckpointError, match="use_ordered_embeddings"):
        LLM(target, assistant_config(assistant, 2), device="cpu")


RECOMPUTED = [*product(FAMILIES[:2], [True, False], [4]), ("gemma4_small", True, 4)]
SHORT = [("gemma3_text", False, 1), ("gemma4_text", True, 2)]
RECOMPUTED += product(FAMILIES[:2], [True, False], [1, 2]) if full() else SHORT


@pytest.mark.slow
@pytest.mark.parametrize(("family", "one_model", "k"), RECOMPUTED)
def test_draft_logits_equal_recomputation(
    pairs: dict[str, tuple[Path, Path]], family: str, one_model: bool, k: int
) -> None:
    """At every step of random schedules: chunks, preemption, rejections of every length."""
    compared, executor = run_random_schedule(assistant_case(pairs[family], k, one_model), k, seed=k)
    assert compared > 30
    assert set(executor.statistics.accepted_lens) == set(range(k + 1))


def test_draft_logits_up_to_the_maximum_length(pairs: dict[str, tuple[Path, Path]]) -> None:
    compared, _ = run_random_schedule(
        assistant_case(pairs["gemma3_text"], 8), 8, seed=3, max_seq_len=36
    )
    assert compared > 30


def test_every_position_of_the_model_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rotation of a row at the target's last position is one past that: all drafts are taken,
    so that a step ends there."""
    monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, "3")
    target = gemma_dir(tmp_path, "gemma3_text", seed=1, max_position_embeddings=24)
    assistant = assistant_dir(tmp_path)
    llm = LLM(target, assistant_config(assistant, 3), device="cpu", dtype="float32")
    output = llm.generate([[3, 4, 5, 6]], SamplingParams(max_tokens=50, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 20 and output.error is None


def test_drafting_can_be_turned_down_and_up(pairs: dict[str, tuple[Path, Path]]) -> None:
    case = assistant_case(pairs["gemma3_text"], 3)
    llm = LLM(case.target, case.config, device="cpu", dtype="float32", max_seq_len=96)
    script, executor = Script(llm, case, seed=0), llm.executor
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    request = executor.enqueue([5, 6, 7], params)
    script.requests = {request.request_id: request}
    wanted = 0
    while executor.has_work:
        executor.runtime_draft_len = wanted = (wanted + 3) % 4
        executor.step()
        if request.is_generation:
            proposals = script.proposals[request.request_id]
            left = executor.state.next_tokens[request.slot, 1:].tolist()
            assert left == proposals[:wanted] + [-1] * (3 - wanted)
            logits = script.logits[request.request_id]
            naive = case.naive.chain(request.token_ids, None, proposals[: len(logits)])  # type: ignore[arg-type]
            for ours, theirs in zip(logits, naive, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=2e-5)


# -- the engine --------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def oracles(pairs: dict[str, tuple[Path, Path]]) -> dict[str, Oracle]:
    return {family: Oracle(target) for family, (target, _) in pairs.items()}


@pytest.mark.slow
@covering(**{
    "family,one_model": [*product(FAMILIES[:2], [True, False]), ("gemma4_small", True)],
    "chunked": [False, True], "overlap": [False, True], "pool": [512, 100],
})  # fmt: skip
def test_greedy_equals_transformers(
    pairs: dict[str, tuple[Path, Path]], oracles: dict[str, Oracle],
    family: str, one_model: bool, chunked: bool, overlap: bool, pool: int,
) -> None:  # fmt: skip
    target, assistant = pairs[family]
    llm = LLM(
        target, assistant_config(assistant, 3, one_model), device="cpu", dtype="float32",
        max_batch_size=4, max_seq_len=96, max_num_tokens=24 if chunked else 96,
        enable_chunked_prefill=chunked, disable_overlap_scheduler=not overlap,
        kv_cache_config=KvCacheConfig(max_tokens=pool, tokens_per_block=4),
    )  # fmt: skip
    prompts = executor_prompts(5)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    expected = oracles[family].extend_all(prompts, 20)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert (llm.stats().num_preemptions > 0) == (pool == 100)
    llm.executor.kv_cache.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["strict", "exact_match", "rejection", "block"])
def test_sampled(pairs: dict[str, tuple[Path, Path]], rule: str) -> None:
    """The first two rules draw the target's own tokens; the others keep what drafts came from."""
    target, assistant = pairs["gemma3_text"]
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True)
    texts = []
    for config in (None, assistant_config(assistant, 3, acceptance=rule)):
        llm = LLM(target, config, device="cpu", dtype="float32", max_seq_len=64)
        outputs = llm.generate(executor_prompts(4, longest=20), params)
        texts.append([output.outputs[0].token_ids for output in outputs])
    keeps = rule in ("rejection", "block")
    assert keeps or texts[0] == texts[1]
    assert all(len(text) == 20 for text in texts[1])
    assert (llm.executor.worker.draft_memory is not None) == keeps


def test_metadata_is_built_once_and_no_kv_is_kept(
    pairs: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, assistant = pairs["gemma3_text"]
    llm = LLM(target, assistant_config(assistant, 4), device="cpu", dtype="float32", max_seq_len=64)
    calls, made, executor = [], eagle3.draft_step, llm.executor
    monkeypatch.setattr(eagle3, "draft_step", lambda *a, **b: (calls.append(1), made(*a, **b))[1])
    executor.enqueue([3, 4, 5], SamplingParams(max_tokens=12, ignore_eos=True))
    steps = 0
    while executor.has_work:
        executor.step()
        steps += 1
    assert len(calls) == steps
    head: Any = executor.draft_model
    assert head.kv_group_specs(torch.float32) == [] and len(executor.kv_cache.groups) == 2
    assert [head.kv_group_of_layer(i) for i in range(3)] == [0, 0, 1]
    layers = [layer.self_attn.cache_layer for layer in head.layers]
    assert layers == [2, 2, 0]  # the last of three sliding layers, the one full layer


# -- what does not fit -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 8}, "has head_dim=8, the target's layer 3, whose keys it reads, has 16"),
        ({"num_key_value_heads": 3}, "has num_kv_heads=3.* has 2"),
        ({"sliding_window": 8}, "sliding_window=8.* has 7"),
        ({"vocab_size": 96}, "vocab_size is 96, the target's 97"),
        (
            {"rope_parameters": {
                S: {"rope_type": "default", "rope_theta": 300.0},
                F: {"rope_type": "default", "rope_theta": 5000.0},
            }},
            "Layer 2 rotates its queries by .*the target's layer 2",
        ),
    ],
)  # fmt: skip
def test_pairs_that_do_not_fit(
    tmp_path: Path, pairs: dict[str, tuple[Path, Path]], change: dict[str, Any], message: str
) -> None:
    assistant = assistant_dir(tmp_path, **change)
    with pytest.raises(CheckpointError, match=message) as error:
        LLM(pairs["gemma3_text"][0], assistant_config(assistant, 2), device="cpu")
    assert "Use the assistant made for this target" in str(error.value)


def test_a_target_of_another_width_or_without_such_layers(tmp_path: Path) -> None:
    target = tiny_model_dir(tmp_path, hidden_size=24, head_dim=16)
    with ExitStack() as stack:
        problems = read_head(assistant_dir(tmp_path), load_config(target), stack).problems
    assert f"width {BACKBONE} (backbone_hidden_size), the target's are 24 wide" in problems[0]
    assert "target's last sliding-attention layer, but the target has none" in problems[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"use_ordered_embeddings": True, "num_centroids": 5, "centroid_intermediate_top_k": 2},
            "num_centroids=5 does not divide",
        ),
        ({"use_ordered_embeddings": True, "num_centroids": 0}, "num_centroids=0.*in 1 … 97"),
        (
            {
                "use_ordered_embeddings": True,
                "num_centroids": 97,
                "centroid_intermediate_top_k": 98,
            },
            "centroid_intermediate_top_k=98.*in 1 … 97",
        ),
        ({"backbone_hidden_size": None}, "backbone_hidden_size=None; it must be"),
        ({"text_config": None}, "text_config=None"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_configs_refused(
    tmp_path: Path, pairs: dict[str, tuple[Path, Path]], change: dict[str, Any], message: str
) -> None:
    assistant = edit_config(assistant_dir(tmp_path), **change)
    with pytest.raises(CheckpointError, match=message):
        LLM(pairs["gemma3_text"][0], assistant_config(assistant, 2), device="cpu")


def test_text_configs_refused(tmp_path: Path, pairs: dict[str, tuple[Path, Path]]) -> None:
    assistant = assistant_dir(tmp_path)
    text = json.loads((assistant / "config.json").read_text())["text_config"]
    for name, value, message in (
        ("num_kv_shared_layers", 1, "num_kv_shared_layers=1; all 3 layers"),
        ("hidden_size_per_layer_input", 8, "hidden_size_per_layer_input=8.*has none"),
        ("use_double_wide_mlp", True, "use_double_wide_mlp=True.*has none"),
    ):
        edit_config(assistant, text_config=text | {name: value})
        with pytest.raises(CheckpointError, match=message):
            LLM(pairs["gemma3_text"][0], assistant_config(assistant, 2), device="cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("post_projection.weight", "tensors are missing: post_projection.weight"),
        ("model.layers.1.layer_scalar", "tensors are missing: layers.1.layer_scalar"),
        ("masked_embedding.centroids.weight", "have no place in Gemma-4 assistant"),
    ],
)
def test_tensors_are_checked(
    tmp_path: Path, pairs: dict[str, tuple[Path, Path]], name: str, message: str
) -> None:
    assistant = assistant_dir(tmp_path)
    tensors = load_file(assistant / "model.safetensors")
    if tensors.pop(name, None) is None:
        tensors[name] = torch.zeros(2, 2)
    save_file(tensors, assistant / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        LLM(pairs["gemma3_text"][0], assistant_config(assistant, 2), device="cpu")


def test_wrong_modes(pairs: dict[str, tuple[Path, Path]]) -> None:
    target, assistant = pairs["gemma3_text"]
    with pytest.raises(CheckpointError, match=r"not an EAGLE head.*MTPDecodingConfig"):
        LLM(target, EagleDecodingConfig(max_draft_len=2, speculative_model=assistant), device="cpu")
    with pytest.raises(ConfigError, match="use_mtp_vanilla=True is about MTP layers"):
        LLM(target, assistant_config(assistant, 2, use_mtp_vanilla=True), device="cpu")
    with pytest.raises(ConfigError, match="mtp_feeds_post_norm=False is about MTP layers"):
        LLM(target, assistant_config(assistant, 2, mtp_feeds_post_norm=False), device="cpu")


def test_what_people_are_told(pairs: dict[str, tuple[Path, Path]]) -> None:
    target, assistant = pairs["gemma4_text"]
    with ExitStack() as stack:
        report = read_head(assistant, load_config(target), stack)
        facts = describe_head(report, load_config(target))
    assert not report.problems and facts["Format"] == "Gemma-4 assistant"
    assert facts["Keys and values"] == "the target's, of its last layer of the same kind"
    assert facts["Layers read"] == "0 → 2 (sliding), 1 → 2 (sliding), 2 → 3 (full)"
    assert "scaled by 6.9282" in facts["Input"] and "the same for all drafts" in facts["Position"]
    assert facts["RoPE"].splitlines() == [
        "sliding_attention (layers 0, 1): default, theta 300",
        "full_attention (layer 2): proportional, theta 900, rotates 0.5 of a head",
    ]
    assert "full_attention: proportional, theta 900" in facts["Target"]
    attention = facts["Attention"].splitlines()
    assert "head_dim 8" in attention[0] and attention[0].endswith("window 7")
    assert "3 KV heads, head_dim 16" in attention[1] and "window" not in attention[1]
