"""Mixtures of experts: routing, experts and whole targets against transformers and float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import ON_CPU, UNPACKED
from matrix import MTP, Drafters, check_greedy, config_of, covering
from naive_experts import (
    BETWEEN,
    ROUTES,
    dense_weights,
    naive_experts,
    naive_route,
    random_experts,
)
from oracle import Oracle, logit_error, prompt_tensors
from safetensors.torch import load_file, save_file
from tiny import OF_FAMILY, tiny_model_dir
from tiny_gemma import edit_config
from tiny_heads import mtp_model_dir
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from trtspec import LLM, MTPDecodingConfig
from trtspec.checkpoints.hf_config import load_config
from trtspec.checkpoints.weights import load_decoder
from trtspec.errors import CheckpointError, ConfigError
from trtspec.layers.experts import Experts
from trtspec.layers.linear import Linear
from trtspec.layers.norm import RMSNorm
from trtspec.models.config import DecoderConfig, MoEConfig
from trtspec.models.decoder import feed_forward
from trtspec.models.drafters.mtp import mtp_decoder_config
from trtspec.models.moe import MoE
from trtspec.ops.experts.torch import grouped_experts, route, router_logits
from trtspec.train.create_head import create_head
from trtspec.train.new_head import NewHead

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("glm4_moe", {}),
    ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "n_group": 1, "topk_group": 1}),
    ("glm4_moe", {"n_shared_experts": 1, "norm_topk_prob": False, "first_k_dense_replace": 0}),
    ("glm4_moe", {"partial_rotary_factor": 0.25, "first_k_dense_replace": 2}),
    ("glm4_moe", {"partial_rotary_factor": 1.0, "first_k_dense_replace": 3}),
    ("glm4_moe", {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0,
                            "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5},
    }),
    ("glm4_moe", {
        "rope_parameters": {"rope_type": "proportional", "rope_theta": 1000.0,
                            "partial_rotary_factor": 0.25},
    }),
    ("qwen3_moe", {}),
    ("mixtral", {}),
    ("mixtral", {"sliding_window": 7, "num_experts_per_tok": 1}),
    ("minimax_m2", {}),
    ("minimax_m2", {"rotary_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 4}),
    ("qwen3_moe", {"norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 7}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    path = tiny_model_dir(tmp_path, family, **overrides)
    if "partial_rotary_factor" in overrides:
        assert load_config(path).rotary_dim == 16 * overrides["partial_rotary_factor"]
    error, spread = logit_error(path, prompt_tensors(97))
    assert spread > 0.5
    assert error < 1e-4


def test_tensors_of_no_shared_experts_are_left_out(tmp_path: Path) -> None:
    """As transformers writes them: without numbers."""
    path = tiny_model_dir(tmp_path, "glm4_moe", n_shared_experts=1)
    edit_config(path, n_shared_experts=0)
    tensors = load_file(path / "model.safetensors")
    shared = [name for name in tensors if "shared_experts" in name]
    for name in shared:
        weight = tensors[name]
        tensors[name] = weight[:, :0].clone() if "down_proj" in name else weight[:0].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    error, spread = logit_error(path, prompt_tensors(97))
    assert shared and spread > 0.5 and error < 1e-4


# -- routing and experts -------------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("options", ROUTES)
def test_route_equals_a_loop(options: dict[str, Any], has_bias: bool) -> None:
    """Of a bias for the choice, and of one of the logits."""
    options = dict(options)
    experts, top_k = options.pop("experts"), options.pop("top_k")
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(40, experts, generator=generator)
    bias = torch.randn(experts, generator=generator) * 0.3 if has_bias else None
    of_logits = torch.randn(experts, generator=generator) if has_bias else None
    ids, weights = route(logits, bias, top_k, **options, logit_bias=of_logits)
    logits = logits if of_logits is None else logits + of_logits
    expected = naive_route(logits, bias, top_k, **options)
    torch.testing.assert_close(
        dense_weights(ids, weights, experts).double(), expected, atol=1e-6, rtol=1e-5
    )


BLOCKS = {
    "glm4_moe": (Glm4MoeMoE, OF_FAMILY["glm4_moe"]),
    "deepseek_v3": (DeepseekV3MoE, OF_FAMILY["glm4_moe"]),
    "qwen3_moe": (Qwen3MoeSparseMoeBlock, OF_FAMILY["qwen3_moe"]),
}


@pytest.mark.parametrize("family", BLOCKS)
def test_the_module_equals_transformers(tmp_path: Path, family: str) -> None:
    """hidden + MoE(norm(hidden)), packed and not."""
    block_class, fields = BLOCKS[family]
    size = 64
    torch_config = AutoConfig.for_model(family, hidden_size=64, **fields)
    torch_config._experts_implementation = "eager"
    block = block_class(torch_config)
    generator = torch.Generator().manual_seed(0)
    for tensor in block.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5)
    ours = _as_ours(block, family, size)
    norm = RMSNorm(size, 1e-5)
    norm.weight.data = 1 + 0.2 * torch.randn(size, generator=generator)
    hidden = torch.randn(23, size, generator=generator)
    with torch.no_grad():
        expected = block(norm(hidden)[None])
        expected = hidden + (expected[0] if isinstance(expected, tuple) else expected)[0]
        torch.testing.assert_close(ours(hidden.clone(), norm), expected, atol=2e-5, rtol=1e-5)
        ours.experts.pack()
        for rows in (1, 2, 5, 23):
            torch.testing.assert_close(
                ours(hidden[:rows].clone(), norm), expected[:rows], atol=2e-5, rtol=1e-5
            )


def _as_ours(block: torch.nn.Module, family: str, size: int) -> MoE:
    if family == "qwen3_moe":
        moe = MoEConfig(6, 2, 24, scoring="softmax", has_correction_bias=False)
    else:
        moe = MoEConfig(8, 3, 24, 48, n_group=4, topk_group=2, routed_scaling_factor=1.5)
    ours, tensors = _moe_of(moe, size), block.state_dict()
    state = {name: t for name, t in tensors.items() if not name.startswith("shared_experts.")}
    if ours.shared_experts is not None:
        gate, up, down = (
            tensors[f"shared_experts.{p}_proj.weight"] for p in ("gate", "up", "down")
        )
        state["shared_experts.gate_up_proj.weight"] = torch.cat([gate, up])
        state["shared_experts.down_proj.weight"] = down
    ours.load_state_dict(state)
    return ours


def _moe_of(moe: MoEConfig, size: int) -> MoE:
    config = DecoderConfig(
        vocab_size=8, hidden_size=size, intermediate_size=8, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=8, max_position_embeddings=8, rms_norm_eps=1e-5,
        rope_parameters={}, moe=moe,
    )  # fmt: skip
    layer = feed_forward(config, 0)
    assert isinstance(layer, MoE)
    return layer


@pytest.mark.parametrize(("rows", "count", "top_k"), [(1, 8, 2), (7, 8, 3), (30, 5, 1), (3, 40, 8)])
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_equal_a_loop(
    rows: int, count: int, top_k: int, has_bias: bool, between: str
) -> None:
    """The CPU's way, packed and not, and what CUDA runs without kernels of its own."""
    sizes = rows, count, top_k, 32, 24
    experts, x, ids, weights = random_experts(*sizes, torch.float32, has_bias=has_bias)
    experts.gate_and_mul = BETWEEN[between][0]
    assert experts.gate_up_proj is not None and experts.down_proj is not None
    expected = naive_experts(experts, x, ids, weights, between).float()
    stacked = experts.gate_up_proj, experts.down_proj, experts.gate_and_mul, count
    biases = experts.biases
    for out in (grouped_experts(x, ids, weights, *stacked, biases), experts(x, ids, weights)):
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-5)
    experts.pack()
    assert experts.gate_up_proj is None
    torch.testing.assert_close(experts(x, ids, weights), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="weights are packed where oneDNN can"
)
def test_a_row_in_bf16_does_not_depend_on_the_rows_beside_it() -> None:
    size, generator = 64, torch.Generator().manual_seed(1)
    layer = _moe_of(MoEConfig(8, 3, 48, 96, n_group=4, topk_group=2), size)
    for parameter in layer.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        parameter.data = noise.to(parameter.dtype if parameter.ndim == 1 else torch.bfloat16)
    for module in layer.modules():
        if isinstance(module, Linear | Experts):
            module.pack()
    norm = RMSNorm(size, 1e-5)
    norm.weight.data = torch.ones(size, dtype=torch.bfloat16)
    hidden = torch.randn(9, size, generator=generator).bfloat16()
    with torch.no_grad():
        together = layer(hidden.clone(), norm)
        for rows in range(1, 9):
            assert torch.equal(layer(hidden[:rows].clone(), norm), together[:rows])


def test_a_rows_router_logits_do_not_depend_on_the_rows_beside_it() -> None:
    """Bit for bit: a tie that falls the other way is another expert."""
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(n, 512, generator=generator).bfloat16() for n in (9, 160))
    together = router_logits(x, weight)
    for rows in range(1, 9):
        assert torch.equal(router_logits(x[:rows], weight), together[:rows])


def test_an_overflow_stays_with_the_rows_that_chose_it() -> None:
    experts, x, ids, weights = random_experts(6, 4, 1, 16, 8, torch.float32)
    assert experts.gate_up_proj is not None and experts.down_proj is not None
    broken = int(ids[0, 0])
    experts.down_proj.data[broken] = torch.inf
    stacked = experts.gate_up_proj, experts.down_proj
    for out in (experts(x, ids, weights), grouped_experts(x, ids, weights, *stacked)):
        finite = torch.isfinite(out).all(-1)
        assert finite.tolist() == (ids[:, 0] != broken).tolist()


# -- decoding ------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=["glm", "glm4_moe_lite", "qwen3_next"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = mtp_model_dir(
        tmp_path_factory.mktemp("target"), layout=request.param, num_mtp_layers=3, seed=1
    )
    return path, Oracle(path)


@pytest.mark.slow
@covering(mode=["none", *MTP], chunk=[None, 24], overlap=[False, True], pool=[None, 112])
def test_greedy_equals_transformers(
    target: Any, mode: str, chunk: int | None, overlap: bool, pool: int | None
) -> None:
    path, oracle = target
    config = config_of(mode, 3, Drafters())
    check_greedy(path, oracle, config, chunk=chunk, overlap=overlap, pool=pool)


def test_mtp_layers_are_mixtures_by_their_number_behind_the_target(tmp_path: Path) -> None:
    """With first_k_dense_replace = n + 1 the first MTP layer is dense."""
    fields = {"first_k_dense_replace": 4, "num_nextn_predict_layers": 3}
    target = load_config(tiny_model_dir(tmp_path, "glm4_moe", **fields))
    inner = mtp_decoder_config(target, 3)
    assert [inner.moe_of_layer(i) is not None for i in range(3)] == [False, True, True]
    assert target.moe_of_layer(2) is None


def test_the_family_says_what_is_fed_on_and_the_user_may_differ(tmp_path: Path) -> None:
    path = mtp_model_dir(tmp_path, layout="glm", num_mtp_layers=1)
    for asked, expected in ((None, False), (True, True), (False, False)):
        spec = MTPDecodingConfig(num_nextn_predict_layers=1, mtp_feeds_post_norm=asked)
        llm = LLM(path, spec, device="cpu", dtype="float32", max_seq_len=32)
        assert llm.executor.draft_model.config.norm_output is expected


# -- refusals ------------------------------------------------------------------------------------
def _change(path: Path, **fields: Any) -> None:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"moe_layer_freq": 2}, ["moe_layer_freq=2", "allowed is 1"]),
        ({"scoring_func": "softmax"}, ["scoring_func='softmax'", "'sigmoid'"]),
        ({"n_group": 3}, ["n_group=3"]),
        ({"topk_group": 5}, ["topk_group=5"]),
        ({"num_experts_per_tok": 5}, ["num_experts_per_tok=5", "hold 4"]),
        ({"n_routed_experts": 0}, ["n_routed_experts=0"]),
        ({"routed_scaling_factor": 0.0}, ["routed_scaling_factor"]),
        ({"partial_rotary_factor": 0.2, "rope_parameters": None}, ["partial_rotary_factor=0.2"]),
        ({"layer_types": ["linear_attention"] * 2 + ["full_attention"]},
         ["2 of 3", "'linear_attention'", "allowed are 'full_attention'", "use one of them"]),
        ({"model_type": "other_vl", "text_config": {"layer_types": ["linear_attention"]}},
         ["1 of 1", "'linear_attention'"]),
        ({"model_type": "olmo_hybrid", "full_attention_interval": 4},
         ["full_attention_interval=4", "'linear_attention'"]),
    ],
)  # fmt: skip
def test_configs_that_are_refused(tmp_path: Path, fields: dict[str, Any], words: list[str]) -> None:
    path = tiny_model_dir(tmp_path, "glm4_moe")
    _change(path, **fields)
    with pytest.raises(CheckpointError) as refusal:
        load_config(path)
    assert all(word in str(refusal.value) for word in words), refusal.value


EXPERT = "model.layers.1.mlp.experts.7.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("missing", ["lacks 1 of", EXPERT]),
        ("surplus", ["experts.8.up_proj", "n_routed_experts"]),
        ("shape", [EXPERT, "[25, 48]", "[24, 48]", "moe_intermediate_size"]),
        ("bias", ["lacks 1 of", "e_score_correction_bias"]),
    ],
)
def test_weights_that_are_refused(tmp_path: Path, change: str, words: list[str]) -> None:
    path = tiny_model_dir(tmp_path, "glm4_moe")
    tensors = load_file(path / "model.safetensors")
    if change == "missing":
        del tensors[EXPERT]
    elif change == "surplus":
        tensors[EXPERT.replace("7", "8")] = tensors[EXPERT].clone()
    elif change == "shape":
        tensors[EXPERT] = torch.zeros(25, 48)
    else:
        del tensors["model.layers.2.mlp.gate.e_score_correction_bias"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as refusal:
        load_decoder(path, ON_CPU)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_heads_that_cannot_be_used_or_trained(tmp_path: Path) -> None:
    """A gated attention (twice the query rows) is Qwen3-Next's own; a mixture is not trained."""
    path = mtp_model_dir(tmp_path, layout="qwen3_next", num_mtp_layers=1)
    tensors = load_file(path / "model.safetensors")
    name = "mtp.layers.0.self_attn.q_proj.weight"
    save_file(tensors | {name: torch.cat([tensors[name]] * 2)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="q_proj"):
        LLM(path, MTPDecodingConfig(num_nextn_predict_layers=1), device="cpu", dtype="float32")
    glm = load_decoder(tiny_model_dir(tmp_path, "glm4_moe"), UNPACKED)  # fmt: skip
    with pytest.raises(ConfigError, match="mixture of experts"):
        create_head(NewHead("mtp"), glm, None, torch.float32, 0)
