"""Qwen3-Next and Qwen3.5: logits against transformers, their checkpoints, and what the memory of
linear attention allows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import edit_tensors, set_config
from loading import ON_CPU, UNPACKED, UNPACKED_HEAD
from matrix import config_of, cpu_engine, make_drafters
from oracle import VOCAB, Oracle, logit_error, prompt_tensors, random_prompts
from safetensors.torch import load_file
from thread_ranks import ThreadRanks
from tiny import prefill_metadata, tiny_model_dir
from tiny_heads import eagle3_dir, mtp_model_dir
from tiny_trained import trained_head
from torch import Tensor

from trtspec import (
    LLM,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    EmbedsPrompt,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
)
from trtspec.attention.dense import DensePass
from trtspec.checkpoints.heads.load import load_head, read_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.checkpoints.hf_config import load_config
from trtspec.checkpoints.weights import load_decoder
from trtspec.cli.inspect_head import describe_head
from trtspec.distributed.parallel import Parallel
from trtspec.doctor import diagnose
from trtspec.errors import CheckpointError, ConfigError, RequestError
from trtspec.train.new_head import NewHead, head_config

LINEAR, FULL = "linear_attention", "full_attention"
FAMILIES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True},
    {"layer_types": [FULL, LINEAR, LINEAR, FULL], "num_hidden_layers": 4, "attention_bias": True},
    {"linear_num_key_heads": 1, "linear_value_head_dim": 16, "layer_types": [LINEAR, FULL, LINEAR]},
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fields", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    path = tiny_model_dir(tmp_path, family, **fields)
    error, spread = logit_error(path, prompt_tensors(VOCAB))
    assert spread > 0.5 and error < 4e-5 * spread  # norms of twice the usual size


# -- checkpoints ---------------------------------------------------------------------------------
def _logits(path: Path) -> Tensor:
    model = load_decoder(path, ON_CPU)
    ids = torch.arange(3, 60) % VOCAB
    whole = DensePass(torch.zeros(1, len(ids), dtype=torch.int64))
    logits = model.compute_logits(model(ids, torch.arange(len(ids)), whole))
    assert isinstance(logits, Tensor)
    return logits


def _stacked(prefix: str) -> Callable[[dict[str, Tensor]], None]:
    """Puts all experts of a layer into one tensor."""

    def stack(tensors: dict[str, Tensor]) -> None:
        gates, ups, downs = (
            [tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(8)]
            for part in ("gate", "up", "down")
        )
        pairs = zip(gates, ups, strict=True)
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{prefix}.down_proj"] = torch.stack(downs)

    return stack


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "qwen3_5_moe_text")
    expected = _logits(path)
    for layer in range(3):
        edit_tensors(path, _stacked(f"model.layers.{layer}.mlp.experts"))
    assert torch.equal(_logits(path), expected)
    edit_tensors(path, lambda t: t.update({"model.layers.1.mlp.experts.down_proj": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"lacks 8 of \d+ tensors"):
        load_decoder(path, ON_CPU)


def test_experts_of_mtp_layers_in_one_tensor(tmp_path: Path) -> None:
    path = mtp_model_dir(tmp_path, layout="qwen3_next", family="qwen3_5_moe_text", num_mtp_layers=1)

    def experts() -> Any:
        request = HeadRequest(kind="mtp", num_mtp_layers=1)
        head = load_head(path, load_decoder(path, UNPACKED), request, UNPACKED_HEAD)
        return head.layers[0].mlp.experts

    expected = experts()
    edit_tensors(path, _stacked("mtp.layers.0.mlp.experts"))
    assert torch.equal(experts().gate_up_proj, expected.gate_up_proj)
    assert torch.equal(experts().down_proj, expected.down_proj)


def test_the_text_part_of_a_checkpoint_with_images(tmp_path: Path) -> None:
    """With the M-RoPE settings of the public ones, which mean nothing for text."""
    path = tiny_model_dir(tmp_path, "qwen3_5_text")
    expected, raw = _logits(path), json.loads((path / "config.json").read_text())
    raw["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    outer = {"model_type": "qwen3_5", "text_config": raw, "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(outer))

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.blocks.0.attn.proj.weight"] = torch.ones(3, 3)
        tensors["mtp.fc.weight"] = torch.ones(3, 3)

    edit_tensors(path, rename)
    assert torch.equal(_logits(path), expected)
    llm = cpu_engine(path, None)
    prompt = EmbedsPrompt([5, 6, 7], torch.ones(3, 48))
    with pytest.raises(RequestError, match="mrope_interleaved"):
        llm.generate(prompt, SamplingParams(max_tokens=2))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": [LINEAR] * 3}, ["layer_types=", "'full_attention' for one at least"]),
        ({"layer_types": [LINEAR, FULL]}, ["`num_hidden_layers` (3)", "Copy it again"]),
        ({"layer_types": [LINEAR, "sliding_attention", FULL]}, ["layer_types="]),
        ({"linear_num_value_heads": 5}, ["linear_num_value_heads=5", "linear_num_key_heads=2"]),
        ({"linear_key_head_dim": 0}, ["linear_key_head_dim=0"]),
        ({"linear_conv_kernel_dim": 1}, ["linear_conv_kernel_dim=1", "2 … 16"]),
        ({"shared_expert_intermediate_size": 0}, ["shared_expert_intermediate_size=0"]),
        ({"mlp_only_layers": [1]}, ["mlp_only_layers=[1]"]),
        ({"attn_output_gate": False}, ["attn_output_gate=False"]),
        ({"mtp_use_dedicated_embeddings": True}, ["mtp_use_dedicated_embeddings=True"]),
        ({"output_gate_type": "sigmoid"}, ["output_gate_type='sigmoid'", "'swish'"]),
        ({"scoring_func": "sigmoid"}, ["scoring_func='sigmoid'", "'softmax'"]),
    ],
)  # fmt: skip
def test_configs_that_are_refused(tmp_path: Path, fields: dict[str, Any], words: list[str]) -> None:
    path = tiny_model_dir(tmp_path, "qwen3_next")
    set_config(path, **fields)
    with pytest.raises(CheckpointError) as refusal:
        load_config(path)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_mixture_that_always_normalises(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "qwen3_5_moe_text")
    set_config(path, norm_topk_prob=False)
    with pytest.raises(CheckpointError, match="norm_topk_prob=False"):
        load_config(path)


def test_a_head_for_a_target_of_experts_alone(tmp_path: Path) -> None:
    """It is as wide as what a row goes through."""
    path = tiny_model_dir(tmp_path, "qwen3_5_moe_text")
    set_config(path, intermediate_size=None)  # the public ones have none
    config = load_config(path)
    head = head_config(NewHead("eagle3", layers_to_capture=(0, 1, 2)), config, 9)
    assert head.decoder.intermediate_size == 3 * 24 + 32


def test_the_target_that_inspect_head_shows(tmp_path: Path) -> None:
    path = mtp_model_dir(tmp_path, layout="qwen3_next", family="qwen3_5_text")
    config = load_config(path)
    with ExitStack() as stack:
        report = read_head(path, config, stack, HeadRequest(kind="mtp", num_mtp_layers=1))
        shown = describe_head(report, config)
    assert not report.problems
    assert "linear" not in shown["Target"] and "full_attention" in shown["Target"]


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "qwen3_5_text")
    edit_tensors(
        path, lambda t: t.update({"model.layers.0.linear_attn.norm.weight": torch.ones(3)})
    )
    with pytest.raises(CheckpointError, match=r"norm.weight .*Check linear_value_head_dim"):
        load_decoder(path, ON_CPU)
    set_config(path, linear_key_head_dim=8)
    with pytest.raises(CheckpointError, match=r"in_proj_qkv.weight .*linear_num_key_heads"):
        load_decoder(path, ON_CPU)


# -- memory --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("linear")
    path = tiny_model_dir(folder, "qwen3_5_text", seed=3)
    oracle = Oracle(path)
    return path, oracle, make_drafters(folder, oracle)


@pytest.mark.parametrize("mode", ["none", "user_provided"])
def test_slots_may_hold_anything(target: Any, mode: str) -> None:
    """Prompts of one token and more, in slots and blocks that others had; NaN at first."""
    path, oracle, drafters = target
    llm = cpu_engine(path, config_of(mode, 3, drafters), max_batch_size=2, chunk=24)
    states = llm.executor.state.recurrent
    assert states is not None and len(states.layers) == 2
    for memory in states.layers:
        for tensor in memory:
            tensor.fill_(float("nan"))
    states.taken_in.fill_(1000)
    prompts = [[(7 * i + j) % VOCAB for j in range(n)] for i, n in enumerate([1, 2, 3, 4, 70, 9])]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=14, ignore_eos=True))
    expected = oracle.extend_all(prompts, 14)
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_drafts_that_are_all_rejected_or_none(target: Any) -> None:
    """K changes from step to step, and what is accepted too."""
    path, oracle, drafters = target
    llm = cpu_engine(path, config_of("user_provided", 7, drafters), overlap=False, max_seq_len=128)
    executor, params = llm.executor, SamplingParams(max_tokens=90, ignore_eos=True)
    requests = [executor.enqueue([5, 6, 7 + i], params) for i in range(3)]
    lens, rng = set(), random.Random(0)
    while executor.has_work:
        executor.runtime_draft_len = rng.choice([0, 7, rng.randrange(8)])
        lens.add(executor.runtime_draft_len)
        executor.step()
    assert lens >= {0, 1, 4, 7}
    for request in requests:
        assert request.output_token_ids == oracle.extend(request.prompt_token_ids, 90)


def test_nothing_of_an_earlier_prompt_is_taken_over(target: Any) -> None:
    path, oracle, _ = target
    llm = cpu_engine(path, None)
    prompt = [i % VOCAB for i in range(5, 45)]
    for _ in range(2):
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))
        assert output.cached_tokens == 0
        assert output.outputs[0].token_ids == oracle.extend(prompt, 8)


def test_whole_sequences_of_several_documents(target: Any) -> None:
    path, oracle, _ = target
    model, rng = load_decoder(path, ON_CPU), torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (2, 90), generator=rng)
    documents = torch.zeros(2, 90, dtype=torch.int64)
    documents[0, 70:], documents[1, 1:] = 1, 4
    positions = torch.cat([torch.arange(n) for n in (70, 20, 1, 89)])
    hidden = model(ids.flatten(), positions, DensePass(documents)).view(2, 90, -1)
    for row, span in ((0, slice(0, 70)), (0, slice(70, 90)), (1, slice(0, 1)), (1, slice(1, 90))):
        expected = oracle.model.model(ids[row, span][None]).last_hidden_state[0]
        torch.testing.assert_close(hidden[row, span], expected, atol=2e-4, rtol=1e-4)


def test_weights_that_are_changed_in_place(target: Any) -> None:
    path = target[0]
    llm, params = cpu_engine(path, None), SamplingParams(max_tokens=12, ignore_eos=True)
    texts = []
    for _ in range(2):
        (output,) = llm.generate([[5, 6, 7]], params)
        texts.append(output.outputs[0].token_ids)
        for layer in llm.executor.target.layers[:2]:
            layer.self_attn.conv1d.data.mul_(-1.7)
    assert texts[0] != texts[1]


def test_memory_is_counted(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtspec.executor.cache_size._free_host_memory", lambda: 40 << 20)
    path = target[0]
    small = cpu_engine(path, None, max_batch_size=8).executor
    large = cpu_engine(path, None, max_batch_size=400, max_num_tokens=400).executor
    assert large.kv_cache.num_blocks < 400 * 12 and small.kv_cache.num_blocks >= 8 * 12
    with pytest.raises(ConfigError, match=r"max_batch_size=2000 .* Lower max_batch_size to \d+"):
        cpu_engine(path, None, max_batch_size=2000, max_num_tokens=2000)
    with pytest.raises(ConfigError, match=r"at most \d+ beside .* max_batch_size=400"):
        cpu_engine(path, None, max_batch_size=400, max_num_tokens=400, pool=1 << 20)
    monkeypatch.setattr("trtspec.executor.cache_size._free_host_memory", lambda: 400_000)
    with pytest.raises(ConfigError, match=r"Lower KvCacheConfig.num_state_copies to \d+ or fewer"):
        cpu_engine(path, None, max_batch_size=1)
    monkeypatch.setattr("trtspec.executor.cache_size._free_host_memory", lambda: 20_000)
    with pytest.raises(ConfigError, match=r"max_batch_size=1 .* use a smaller model"):
        cpu_engine(path, None, max_batch_size=1)


# -- what is not offered -------------------------------------------------------------------------
def test_what_rows_that_follow_each_other_rule_out(target: Any) -> None:
    path = target[0]
    spec = NGramDecodingConfig(max_draft_len=3, max_verified_drafts=4)
    with pytest.raises(ConfigError, match="max_verified_drafts=4 does not work with linear"):
        cpu_engine(path, spec)
    with pytest.raises(ConfigError, match=r"linear_num_key_heads 2. Use one of 1, 2"):
        ThreadRanks(3).run(lambda comm: load_decoder(path, ON_CPU, Parallel(comm)))
    with pytest.raises(ConfigError, match=r"layer 0 has linear attention \(enable_attention_dp"):
        ThreadRanks(2).run(lambda comm: load_decoder(path, ON_CPU, Parallel(comm, 1, True)))


def test_a_loop_of_ones_own_gives_the_memory(target: Any) -> None:
    model = load_decoder(target[0], ON_CPU)
    meta, positions = prefill_metadata(model.config, [5])
    with pytest.raises(ConfigError, match=r"recurrent is None.*begin_pass"):
        model(torch.arange(5), positions, replace(meta, recurrent=None))


def test_draft_models_with_linear_attention_are_refused(target: Any) -> None:
    path = target[0]
    spec = DraftTargetDecodingConfig(max_draft_len=2, speculative_model=path)
    with pytest.raises(ConfigError, match=r"has linear attention.*cannot draft"):
        LLM(path, spec, device="cpu", dtype="float32")


def test_all_tensors_are_read(target: Any) -> None:
    """A weight that is changed changes the logits."""
    path = target[0]
    model = load_decoder(path, ON_CPU)
    names = {n for n in load_file(path / "model.safetensors") if "layers.1.linear_attn" in n}
    assert len(names) == 9 and model.config.linear_layers == (0, 1)


@pytest.mark.slow
def test_two_ranks_share_the_heads(tmp_path: Path) -> None:
    """With MTP layers, parts of prompts, and requests that are preempted."""
    path = mtp_model_dir(tmp_path, layout="qwen3_next", family="qwen3_next", num_mtp_layers=1)
    oracle, prompts = Oracle(path), random_prompts(6)
    config = MTPDecodingConfig(num_nextn_predict_layers=2)
    with cpu_engine(path, config, tensor_parallel_size=2, chunk=24, pool=88) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=14, ignore_eos=True))
        assert llm.executor.stats().num_preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, 14)


# -- training ------------------------------------------------------------------------------------
@pytest.mark.slow
def test_mtp_layers_that_learned_texts_draft_them(tmp_path: Path) -> None:
    """Along whole sequences the target and the layer, with its gates, read what they read in
    serving; the doctor finds nothing."""
    path = mtp_model_dir(
        tmp_path, layout="qwen3_next", family="qwen3_5_text", num_mtp_layers=1,
        num_hidden_layers=4, layer_types=[LINEAR, LINEAR, FULL, LINEAR],
    )  # fmt: skip
    trained = trained_head(path, path, "mtp", 250)
    llm = cpu_engine(path, MTPDecodingConfig(num_nextn_predict_layers=2))
    prompts = [[7 * i % 90 + 3, i + 3] for i in range(10)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=28, ignore_eos=True))
    said = [
        prompt + list(o.outputs[0].token_ids) for prompt, o in zip(prompts, outputs, strict=True)
    ]
    assert said == trained.texts.input_ids.tolist()
    length = llm.executor.stats().acceptance_length
    assert length is not None and length > 2.5
    verdict = diagnose(trained.target, path, "mtp", trained.texts).verdict
    assert verdict.startswith("No known mistake"), verdict


@pytest.mark.slow
def test_an_eagle3_head_that_learned_texts_drafts_them(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, FULL, LINEAR]}
    path = tiny_model_dir(tmp_path, "qwen3_5_text", seed=1, **layers)
    head = eagle3_dir(
        tmp_path, draft_vocab=None,
        config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
    )  # fmt: skip
    trained = trained_head(path, head, "eagle", 200)
    llm = cpu_engine(path, EagleDecodingConfig(max_draft_len=2, speculative_model=head))
    prompts = [[7 * i % 90 + 3, i + 3] for i in range(10)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=28, ignore_eos=True))
    said = [p + list(o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)]
    assert said == trained.texts.input_ids.tolist()
    length = llm.executor.stats().acceptance_length
    assert length is not None and length > 2.2
