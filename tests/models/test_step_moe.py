"""Step-3.5 with experts: stacked tensors, limits of SwiGLU, and dense MTP layers behind them, as in
the public checkpoint (45 layers, experts in 3 … 44, MTP layers 45 … 47)."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import run_random_schedule
from loading import ON_CPU, UNPACKED
from safetensors.torch import load_file, save_file
from tiny import prefill_metadata
from tiny_step import (
    EXPERT_INNER,
    EXPERTS,
    FULL,
    MOE,
    MTP_TYPES,
    SIZE,
    SLIDING,
    VOCAB,
    WINDOW,
    NaiveStepMTP,
    StepCase,
    StepOracle,
    step_config,
    step_dir,
)
from torch import Tensor

from trtspec import LLM, KvCacheConfig, MTPDecodingConfig, NGramDecodingConfig, SamplingParams
from trtspec.checkpoints.heads.load import read_head
from trtspec.checkpoints.hf_config import load_config, parse_config
from trtspec.checkpoints.weights import load_decoder
from trtspec.errors import CheckpointError

pytest.importorskip("transformers.models.step3p7", reason="transformers is too old for an oracle")
MTP = MTPDecodingConfig(num_nextn_predict_layers=3, use_mtp_vanilla=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return step_dir(tmp_path_factory.mktemp("step"), WINDOW, **MOE)


@pytest.fixture(scope="module")
def oracle(target: Path) -> StepOracle:
    return StepOracle(target)


def _logits(path: Path, texts: list[list[int]]) -> Tensor:
    model = load_decoder(path, ON_CPU)
    meta, positions = prefill_metadata(model.config, [len(text) for text in texts], page_size=4)
    with torch.inference_mode():
        ids = torch.cat([torch.tensor(text) for text in texts])
        return model.compute_logits(model(ids, positions, meta))


def _texts(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


VARIANTS: list[dict[str, Any]] = [
    {},
    {"use_moe_router_bias": False, "swiglu_limits": None, "swiglu_limits_shared": None},
    {"moe_layers_enum": [0, 3], "moe_top_k": 1, "swiglu_limits": [7.0, 0, 0, 0.3]},
    {"mtp_types": (), "moe_layers_enum": "0,1,2,3", "swiglu_limits": [None] * 4,
     "swiglu_limits_shared": [0.3] * 4, "need_fp32_gate": False},
]  # fmt: skip


@pytest.mark.parametrize("changes", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    path, texts = step_dir(tmp_path, WINDOW, **{**MOE, **changes}), _texts(30, 7)
    oracle = StepOracle(path)
    expected = torch.cat([oracle.logits(text) for text in texts])
    assert expected.std() > 0.5
    torch.testing.assert_close(_logits(path, texts), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["swiglu_limits", "swiglu_limits_shared"])
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_every_limit_is_applied(target: Path, tmp_path: Path, name: str, layer: int) -> None:
    """A tighter one in a layer shows in the logits, but for experts' in a layer without experts."""
    raw = json.loads((target / "config.json").read_text())
    raw[name][layer] = 0.01
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(target / "model.safetensors")
    texts = _texts(9)
    before, after = _logits(target, texts), _logits(tmp_path, texts)
    if (name, layer) == ("swiglu_limits", 0):
        assert torch.equal(before, after)
    else:
        assert (before - after).abs().max() > 0.01
    expected = StepOracle(tmp_path).logits(texts[0])
    torch.testing.assert_close(after, expected, atol=1e-4, rtol=1e-4)


def test_draft_logits_equal_recomputation(target: Path, oracle: StepOracle) -> None:
    """The MTP layers are dense, the second with a limit of its own; see `test_step_mtp.py`."""
    case: Any = StepCase(target, MTP, NaiveStepMTP(target, WINDOW), oracle)
    compared, executor = run_random_schedule(case, 3, seed=3)
    assert compared > 30 and set(executor.statistics.accepted_lens) == {0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    "spec", [None, MTP, NGramDecodingConfig(max_draft_len=3, min_matching_ngram_size=1)],
    ids=["plain", "mtp", "ngram"],
)  # fmt: skip
def test_greedy_equals_transformers(
    target: Path, oracle: StepOracle, spec: Any, chunked: bool
) -> None:
    llm = LLM(
        target, spec, device="cpu", dtype="float32", max_batch_size=3, max_seq_len=96,
        max_num_tokens=16 if chunked else 128, enable_chunked_prefill=chunked,
        kv_cache_config=KvCacheConfig(max_tokens=512, tokens_per_block=4),
    )  # fmt: skip
    prompts = _texts(25, 9, 14, 3)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    expected = oracle.extend_all(prompts, 24)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    llm.executor.kv_cache.check_integrity()


# -- reading the checkpoint --------------------------------------------------------------------
def test_the_public_configuration() -> None:
    """Step-3.5-Flash's own lists: its last two layers are clamped, its MTP layers dense."""
    types = [FULL, SLIDING, SLIDING, SLIDING] * 12
    limits: dict[str, list[float]] = {
        "swiglu_limits": [0.0] * 48,
        "swiglu_limits_shared": [0.0] * 48,
    }
    for name, limit in (("swiglu_limits", 7.0), ("swiglu_limits_shared", 16.0)):
        limits[name][43] = limits[name][44] = limit
    raw = step_config(
        512, mtp_types=types[45:], num_hidden_layers=45, layer_types=types,
        rope_theta=[5e6 if kind == FULL else 1e4 for kind in types],
        partial_rotary_factors=[0.5 if kind == FULL else 1.0 for kind in types],
        **{**MOE, "moe_num_experts": 288, "moe_top_k": 8, **limits,
           "moe_layers_enum": ",".join(str(i) for i in range(3, 45))},
    )  # fmt: skip
    config = parse_config(raw, Path("config.json"))
    assert len(config.type_fields) == 6 and len(config.layer_types) == 48
    mixtures = [config.moe_of_layer(i) for i in range(48)]
    assert [i for i, moe in enumerate(mixtures) if moe is not None] == list(range(3, 45))
    found = [(moe.swiglu_limit, moe.shared_swiglu_limit) for moe in mixtures if moe is not None]
    assert found == [(None, None)] * 40 + [(7.0, 16.0)] * 2
    assert all(config.of_layer(i).swiglu_limit is None for i in range(48))


@pytest.mark.parametrize("enum", ["1,2,3", "1,2,3,5"])
def test_mtp_layers_have_experts_only_where_they_are_named(tmp_path: Path, enum: str) -> None:
    path = step_dir(tmp_path, WINDOW, **{**MOE, "moe_layers_enum": enum})
    with ExitStack() as stack:
        report = read_head(path, load_config(path), stack)
    assert report.config is not None and not report.problems
    decoder = report.config.decoder
    mixtures = [decoder.moe_of_layer(i) is not None for i in range(4)]
    assert mixtures == [False, enum == "1,2,3,5", False, False]
    limits = [decoder.of_layer(i).swiglu_limit for i in range(4)]
    assert limits == [None, None if mixtures[1] else 0.4, None, None]
    assert decoder.layer_types[0] == MTP_TYPES[0]


def test_routers_stay_in_float32(target: Path) -> None:
    model = load_decoder(target, replace(UNPACKED, dtype=torch.bfloat16))
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    gate = "layers.2.mlp.gate."
    assert dtypes[f"{gate}weight"] == dtypes[f"{gate}e_score_correction_bias"] == torch.float32
    assert dtypes["layers.2.mlp.experts.gate_up_proj"] == torch.bfloat16


def test_stacks_in_fp8_are_their_dequantised_twins(tmp_path: Path) -> None:
    """Blocks of 16 x 32 on experts of 24 x 48: they end with each expert."""
    path = step_dir(tmp_path, WINDOW, **MOE)
    twin, blocks = tmp_path / "twin", (16, 32)
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(0)
    same = dict(tensors)
    for name, stack in list(tensors.items()):
        if ".moe." not in name or stack.dim() != 3:
            continue
        grid = [-(-n // b) for n, b in zip(stack.shape[1:], blocks, strict=True)]
        scales = 0.5 + torch.rand(len(stack), *grid, generator=generator)
        quantized, same[name] = stack.to(torch.float8_e4m3fn), torch.empty_like(stack)
        for e, i, j in itertools.product(*map(range, scales.shape)):
            block = e, slice(16 * i, 16 * i + 16), slice(32 * j, 32 * j + 32)
            same[name][block] = quantized[block].float() * scales[e, i, j]
        tensors[name], tensors[f"{name}_scale_inv"] = quantized, scales
    twin.mkdir()
    raw = json.loads((path / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(raw))
    save_file(same, twin / "model.safetensors")
    save_file(tensors, path / "model.safetensors")
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(blocks)}
    (path / "config.json").write_text(json.dumps(raw))
    ours, exact = (load_decoder(p, UNPACKED).parameters() for p in (path, twin))
    assert all(torch.equal(p, q) for p, q in zip(ours, exact, strict=True))
    tensors["model.layers.2.moe.up_proj.weight_scale_inv"] = torch.ones(EXPERTS, 2, 1)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"\[6, 2, 1\] .*\[6, 24, 48\] .*must be \[6, 2, 2\]"):
        load_decoder(path, ON_CPU)


def test_fewer_mtp_layers_than_the_lists_go_on_for() -> None:
    """As when a file's num_nextn_predict_layers is lowered."""
    raw = step_config(WINDOW, **{**MOE, "swiglu_limits": [1.0] * 8})
    config = parse_config({**raw, "num_nextn_predict_layers": 1}, Path("config.json"))
    whole = parse_config(raw, Path("config.json"))
    assert len(raw["layer_types"]) == 8 and len(config.layer_types) == 5
    assert config.layer_types == whole.layer_types[:5]


# -- refusals ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_layers_enum": None}, ["moe_layers_enum=None", '"3,4,5"', "Copy"]),
        ({"moe_layers_enum": "1,8"}, ["moe_layers_enum='1,8'", "0 … 7"]),
        ({"moe_layers_enum": "1,x"}, ["moe_layers_enum='1,x'"]),
        ({"moe_layers_enum": [True]}, ["moe_layers_enum=[True]"]),
        ({"moe_num_experts": 0}, ["moe_num_experts=0", "1 … 4096"]),
        ({"moe_num_experts": None}, ["moe_num_experts=None"]),
        ({"moe_top_k": 7}, ["moe_top_k=7", "1 … 6"]),
        ({"moe_intermediate_size": 2.5}, ["moe_intermediate_size=2.5"]),
        ({"share_expert_dim": 0}, ["share_expert_dim=0"]),
        ({"moe_router_activation": "softmax"}, ["'softmax'", "allowed is 'sigmoid'"]),
        ({"norm_expert_weight": False}, ["norm_expert_weight=False", "allowed is True"]),
        ({"moe_router_scaling_factor": 0}, ["moe_router_scaling_factor=0", "a number > 0"]),
        ({"swiglu_limits": [1.0] * 3}, ["swiglu_limits=", "at least 4 numbers"]),
        ({"swiglu_limits": 7.0}, ["swiglu_limits=7.0", "null or a list"]),
        ({"swiglu_limits_shared": [0, 0, 0, -1.0]}, ["swiglu_limits_shared=[0, 0, 0, -1.0]"]),
        ({"swiglu_limits_shared": [0, 0, 0, "16"]}, ["swiglu_limits_shared=", "Copy"]),
        ({"swiglu_limits_shared": [0, 0, 0, float("nan")]}, ["swiglu_limits_shared="]),
    ],
)  # fmt: skip
def test_configs_that_are_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as refusal:
        parse_config(step_config(WINDOW, **{**MOE, **changes}), Path("config.json"))
    assert all(word in str(refusal.value) for word in words), refusal.value


STACK = "model.layers.1.moe.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(STACK), ["lacks 1 of", STACK]),
        (lambda t: t.pop("model.layers.2.moe.router_bias"), ["lacks 1 of", "router_bias"]),
        (lambda t: t.pop("model.layers.2.share_expert.up_proj.weight"), ["lacks 1", "share_exp"]),
        (lambda t: t.update({STACK: torch.zeros(EXPERTS + 1, EXPERT_INNER, SIZE)}),
         [STACK, "[7, 24, 48]", "[6, 24, 48]", "moe_intermediate_size"]),
        (lambda t: t.update({"model.layers.0.moe.router_bias": torch.zeros(EXPERTS)}),
         ["holds 1 tensors", "moe_layers_enum"]),
    ],
)  # fmt: skip
def test_weights_that_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], words: list[str]
) -> None:
    path = step_dir(tmp_path, WINDOW, **MOE)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError) as refusal:
        load_decoder(path, ON_CPU)
    assert all(word in str(refusal.value) for word in words), refusal.value
