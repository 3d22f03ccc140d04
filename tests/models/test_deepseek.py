"""DeepSeek-V3: latent attention, FP8 checkpoints and MTP layers, against transformers and plain
decoding. (MTP blocks against a float64 transcription: `test_drafting.py`, deepseek_v3.)"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import HEAD_ON_CPU, ON_CPU, UNPACKED, UNPACKED_HEAD
from matrix import MTP, Drafters, config_of, covering, cpu_engine
from oracle import Oracle, logit_error, random_prompts
from oracle import prompt_tensors as _texts
from safetensors.torch import load_file, save_file
from tiny import prefill_metadata, tiny_model_dir
from tiny_heads import eagle3_dir, mtp_model_dir
from torch import Tensor

from trtspec import LLM, MTPDecodingConfig, SamplingParams
from trtspec.attention.dense import DensePass
from trtspec.checkpoints.heads.load import load_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.checkpoints.hf_config import load_config
from trtspec.checkpoints.weights import load_decoder
from trtspec.errors import CheckpointError, ConfigError
from trtspec.models.decoder import Decoder
from trtspec.models.mla import MLAttention
from trtspec.ops.layer.latent import multiply_heads
from trtspec.ops.step.slots import draft_step_metadata
from trtspec.train.create_head import create_head
from trtspec.train.new_head import NewHead
from trtspec.train.save_head import save_head

CPU = torch.device("cpu")
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "mscale": 0.7,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def _load(path: Path, pack: bool = True) -> Decoder:
    return load_decoder(path, replace(ON_CPU, pack=pack))


def _set_config(path: Path, **fields: Any) -> None:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, **fields}))


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"q_lora_rank": None, "v_head_dim": 24},
        {"rope_parameters": YARN},
        {"rope_interleave": False, "rms_norm_eps": 1e-2, "tie_word_embeddings": True},
    ],
)
def test_logits_equal_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    path = tiny_model_dir(tmp_path, "deepseek_v3", **overrides)
    error, spread = logit_error(path, _texts(97))
    assert spread > 0.5 and error < 1e-4


DENSE, SPARSE = "dense", "sparse"


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"mlp_layer_types": [DENSE, DENSE, SPARSE], "q_lora_rank": None, "n_group": 2},
        {"mlp_layer_types": [SPARSE] * 3, "rope_parameters": YARN, "rope_interleave": False},
        {"mlp_layer_types": [DENSE] * 3},
    ],
)
def test_the_smaller_glm_equals_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    path = tiny_model_dir(tmp_path, "glm4_moe_lite", **overrides)
    error, spread = logit_error(path, _texts(97))
    assert spread > 0.5 and error < 1e-4


def test_the_smaller_glms_mtp_layers_feed_on_the_state_before_the_norm(tmp_path: Path) -> None:
    assert load_config(tiny_model_dir(tmp_path, "glm4_moe_lite")).mtp_feeds_post_norm is False


def test_experts_between_dense_layers_are_refused(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "glm4_moe_lite")
    for types in ([SPARSE, DENSE, SPARSE], [DENSE, SPARSE], [DENSE, SPARSE, "other"]):
        _set_config(path, mlp_layer_types=types)
        with pytest.raises(CheckpointError, match=r"mlp_layer_types|cannot read"):
            load_config(path)


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    """Its config.json has a name of its own, which transformers does not know."""
    path = tiny_model_dir(tmp_path, "deepseek_v3", n_group=1, topk_group=1)
    prompts = _texts(97)
    meta, positions = prefill_metadata(load_config(path), [len(text) for text in prompts])
    model = _load(path)
    expected = model.compute_logits(model(torch.cat(prompts), positions, meta))
    _set_config(path, model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    model = _load(path)
    assert torch.equal(model.compute_logits(model(torch.cat(prompts), positions, meta)), expected)


@pytest.mark.parametrize("interleave", [None, False, True])
def test_the_order_of_a_rotation_as_a_file_says_it(tmp_path: Path, interleave: bool | None) -> None:
    path = tiny_model_dir(tmp_path, "deepseek_v3")
    _set_config(path, rope_interleave=interleave)
    error, _ = logit_error(path, _texts(97))
    assert error < 1e-4


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("q_lora_rank", [None, 24])
def test_decoding_step_by_step_equals_prefill(
    tmp_path: Path, rows: int, q_lora_rank: int | None
) -> None:
    model = _load(tiny_model_dir(tmp_path, "deepseek_v3", q_lora_rank=q_lora_rank))
    length = 36
    whole, positions = prefill_metadata(model.config, [length])
    text = torch.randint(97, (length,), generator=torch.Generator().manual_seed(1))
    expected = model(text, positions, whole)
    fresh, _ = prefill_metadata(model.config, [length])
    for start in range(0, length, rows):
        step = draft_step_metadata(fresh, positions[None, start : start + rows], 0)
        ours = model(text[start : start + rows], step.position_ids, step)
        torch.testing.assert_close(ours, expected[start : start + rows], atol=1e-5, rtol=1e-5)


def test_the_cache_keeps_one_latent_head(tmp_path: Path) -> None:
    model = _load(tiny_model_dir(tmp_path, "deepseek_v3"))
    (spec,) = model.kv_group_specs(torch.bfloat16)
    assert spec.bytes_per_token() == 3 * (32 + 16) * 2
    group = spec.allocate(4, 8, CPU)
    assert group.k_cache.shape == (3, 4, 8, 1, 48) and group.v_cache.shape[-1] == 32
    for k_slots, v_slots in group.layer_slots:
        assert k_slots.data_ptr() == v_slots.data_ptr()


def test_whole_texts_without_a_cache_are_the_same(tmp_path: Path) -> None:
    """What training and the doctor run."""
    model = _load(tiny_model_dir(tmp_path, "deepseek_v3", rope_parameters=YARN), pack=False)
    meta, positions = prefill_metadata(model.config, [20, 20])
    text = torch.randint(97, (40,), generator=torch.Generator().manual_seed(1))
    dense = DensePass(torch.zeros(2, 20, dtype=torch.int64))
    torch.testing.assert_close(
        model(text, positions, dense), model(text, positions, meta), atol=1e-5, rtol=1e-5
    )


def test_mtp_layers_can_be_trained(tmp_path: Path) -> None:
    """Every parameter has a derivative, and that of one number is what differences say."""
    path = tiny_model_dir(tmp_path, "deepseek_v3", first_k_dense_replace=99)
    target = _load(path, pack=False)
    head = create_head(NewHead(kind="mtp"), target, None, torch.float32, seed=0).double()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(97, (12,), generator=generator)
    hidden = torch.randn(12, 48, generator=generator).double()

    def loss() -> Tensor:
        texts, positions = DensePass(torch.zeros(1, 12, dtype=torch.int64)), torch.arange(12)
        normed, fed_on = head(ids, positions, hidden, texts, 0)
        return head(ids, positions + 1, fed_on, texts, 1)[0].square().mean() + normed.mean()

    loss().backward()
    parameters = {n: p for n, p in head.layers[0].named_parameters() if p.requires_grad}
    assert all(p.grad is not None and p.grad.any() for p in parameters.values())
    weight = parameters["self_attn.kv_b_proj"]
    for place in [(3, 5), (-1, 7)]:  # of W_UK and of W_UV
        losses = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                weight[place] += step
                losses.append(float(loss()))
                weight[place] -= step
        slope = (losses[0] - losses[1]) / 2e-5
        assert slope == pytest.approx(float(weight.grad[place]), rel=1e-4)  # type: ignore[index]


def test_a_bf16_row_does_not_depend_on_how_many_share_the_call() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in [(9, 4, 40), (4, 40, 72)]
    )
    together = torch.empty(9, 4, 72, dtype=torch.bfloat16)
    multiply_heads(x, w, together)
    for n in range(1, 9):
        fewer = torch.empty(n, 4, 72, dtype=torch.bfloat16)
        multiply_heads(x[:n], w, fewer)
        assert torch.equal(fewer, together[:n])
    expected = torch.einsum("tha,hab->thb", x.double(), w.double())
    torch.testing.assert_close(together.double(), expected, atol=0.1, rtol=0.02)


# -- MTP ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mtp_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(
        tmp_path_factory.mktemp("mtp"), layout="deepseek_v3", own_ends=True,
        rope_parameters=YARN,
    )  # fmt: skip


@pytest.fixture(scope="module")
def oracle(mtp_dir: Path) -> Oracle:
    return Oracle(mtp_dir)


@pytest.mark.slow
@covering(mode=["none", *MTP], chunk=[None, 24], overlap=[False, True], pool=[None, 112])
def test_greedy_equals_transformers(
    mtp_dir: Path, oracle: Oracle, mode: str, chunk: int | None, overlap: bool, pool: int | None
) -> None:
    config = config_of(mode, 3, Drafters())
    llm = cpu_engine(mtp_dir, config, chunk=chunk, overlap=overlap, pool=pool)
    prompts, count = (random_prompts(6), 20) if pool is None else (random_prompts(6, 12), 32)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
    expected = oracle.extend_all(prompts, count)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert (llm.stats().num_preemptions > 0) == (pool is not None)
    llm.executor.kv_cache.check_integrity()


@pytest.mark.parametrize("guarded", [True, False])
def test_a_drafter_that_overflows_leaves_no_nan_behind(tmp_path: Path, guarded: bool) -> None:
    path = mtp_model_dir(tmp_path, layout="deepseek_v3", num_mtp_layers=1)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] *= 1e38
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(
        path, MTPDecodingConfig(num_nextn_predict_layers=2), device="cpu", dtype="float32",
        max_seq_len=64,
    )  # fmt: skip
    for module in llm.executor.draft_model.modules():
        if isinstance(module, MLAttention):
            assert module.sanitize_kv
            module.sanitize_kv = guarded
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=9, ignore_eos=True))
    assert llm.executor.kv_cache.groups[-1].k_cache.isfinite().all() == guarded


def test_trained_layers_are_read_back(tmp_path: Path) -> None:
    """`save_head` writes rows in the checkpoint's order, not in that of the loaded matrices."""
    target = _load(tiny_model_dir(tmp_path, "deepseek_v3", first_k_dense_replace=99), pack=False)
    head = create_head(NewHead(kind="mtp", num_layers=1), target, None, torch.float32, seed=0)
    for parameter in head.parameters():
        parameter.data = parameter.data.bfloat16().float()  # as it is written
    save_head(head, target.config, tmp_path / "out")
    again = load_head(
        tmp_path / "out",
        target,
        HeadRequest(kind="mtp", num_mtp_layers=1),
        UNPACKED_HEAD,
    )
    ours, theirs = (dict(h.layers[0].self_attn.named_parameters()) for h in (head, again))
    assert ours.keys() == theirs.keys() and len(ours) == 6
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name


# -- FP8 ---------------------------------------------------------------------------------------
BLOCKS = (16, 32)


def _to_fp8(path: Path, twin: Path) -> None:
    """Makes the layers' matrices of a checkpoint FP8; `twin` gets what they then are."""
    tensors, same = load_file(path / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name, weight in list(tensors.items()):
        same[name] = weight
        if not re.search(r"layers\.\d+\..*proj.*\.weight$", name):
            continue
        rows, columns = weight.shape
        grid = -(-rows // BLOCKS[0]), -(-columns // BLOCKS[1])
        scale = 0.5 + torch.rand(grid, generator=generator)
        quantized = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        same[name] = torch.empty(rows, columns)
        for i in range(rows):
            of_row = scale[i // BLOCKS[0]].repeat_interleave(BLOCKS[1])[:columns]
            quantized[i] = (weight[i] / of_row).to(torch.float8_e4m3fn)
            same[name][i] = quantized[i].float() * of_row
        tensors[name], tensors[f"{name}_scale_inv"] = quantized, scale
    twin.mkdir()
    (twin / "config.json").write_text((path / "config.json").read_text())
    save_file(same, twin / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    quantization = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": list(BLOCKS),
    }  # fmt: skip
    _set_config(path, quantization_config=quantization)


@pytest.fixture
def fp8_dirs(tmp_path: Path) -> tuple[Path, Path]:
    path = mtp_model_dir(tmp_path, layout="deepseek_v3", num_mtp_layers=2)
    _to_fp8(path, tmp_path / "twin")
    return path, tmp_path / "twin"


def test_an_fp8_checkpoint_is_its_dequantised_twin(fp8_dirs: tuple[Path, Path]) -> None:
    texts, parameters = [], []
    for path in fp8_dirs:
        model = _load(path, pack=False)
        head = load_head(
            path,
            model,
            HeadRequest(kind="mtp", num_mtp_layers=2),
            UNPACKED_HEAD,
        )
        parameters.append([*model.parameters(), *head.parameters()])
        llm = LLM(
            path, MTPDecodingConfig(num_nextn_predict_layers=2, use_mtp_vanilla=True),
            device="cpu", dtype="float32", max_seq_len=64,
        )  # fmt: skip
        outputs = llm.generate(random_prompts(2), SamplingParams(max_tokens=12, ignore_eos=True))
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert len(parameters[0]) == len(parameters[1]) > 50
    assert all(torch.equal(ours, twin) for ours, twin in zip(*parameters, strict=True))
    assert texts[0] == texts[1]
    bf16 = load_decoder(fp8_dirs[0], replace(UNPACKED, dtype=torch.bfloat16))
    exact = _load(fp8_dirs[1], pack=False).parameters()  # a router stays float32
    assert all(torch.equal(p, q.to(p.dtype)) for p, q in zip(bf16.parameters(), exact, strict=True))


GATE = "model.layers.0.mlp.gate_proj.weight"
MTP_GATE = "model.layers.3.mlp.experts.2.gate_proj.weight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{GATE}_scale_inv"), rf"is F8_E4M3, but there is no {GATE}_scale_inv"),
        (lambda t: t.update({f"{GATE}_scale_inv": torch.ones(5, 1)}),
         r"has shape \[5, 1\] and dtype F32; for .* of \[80, 48\] .* must be \[5, 2\] of F64, F32"),
        (lambda t: t.update({f"{GATE}_scale_inv": torch.ones(5, 2).int()}), "dtype I32; for a"),
        (lambda t: t.update({GATE: t[GATE].float()}), f"but {GATE} has dtype F32; it must be F8"),
        (lambda t: t.pop(GATE), f"holds {GATE}_scale_inv, but {GATE} is not there"),
        (lambda t: t.pop(f"{MTP_GATE}_scale_inv"), rf"there is no {MTP_GATE}_scale_inv"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_refused(
    fp8_dirs: tuple[Path, Path], change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    path = fp8_dirs[0]
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        _load(path)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_algo": "W4A8_AWQ"}, r"\('modelopt', quant_algo 'W4A8_AWQ'\) is set, but only"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"'weight_block_size': \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [8, 8], "fmt": "e5m2"}, "'fmt': 'e5m2'"),
        ({"quant_method": "awq", "weight_block_size": [8, 8]}, "'awq'.* is set, .* INT8 weights"),
        ("fp8", r"\('fp8'\) is set"),
    ],
)
def test_other_quantisation_is_refused(tmp_path: Path, quantization: Any, message: str) -> None:
    path = tiny_model_dir(tmp_path, "deepseek_v3")
    _set_config(path, quantization_config=quantization)
    with pytest.raises(CheckpointError, match=f"quantization_config.*{message}"):
        load_config(path)


# -- refusals ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported with latent"),
        ({"kv_lora_rank": 0}, "kv_lora_rank=0; it must be an int in 1 … 16384. Copy"),
        ({"q_lora_rank": -1}, "q_lora_rank=-1; it must be an int in 1 … 16384 or null"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim=15; it must be an int in 1 … 16384, even"),
        ({"rope_parameters": {**YARN, "mscale_all_dim": -1.0}}, "mscale_all_dim=-1.0"),
        ({"kv_lora_rank": 16}, "Check kv_lora_rank, qk_rope_head_dim and hidden_size there"),
        ({"v_head_dim": 12}, "qk_nope_head_dim, v_head_dim and kv_lora_rank there"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = tiny_model_dir(tmp_path, "deepseek_v3")
    _set_config(path, **fields)
    with pytest.raises(CheckpointError, match=message):
        _load(path)


def test_eagle_heads_have_no_latent_attention(tmp_path: Path) -> None:
    head = eagle3_dir(tmp_path)
    raw = json.loads((tiny_model_dir(tmp_path, "deepseek_v3") / "config.json").read_text())
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**raw, **config, "model_type": "deepseek_v3"}))
    target = _load(tiny_model_dir(tmp_path, "deepseek_v3", num_hidden_layers=8))
    with pytest.raises(CheckpointError, match="latent attention"):
        load_head(
            head,
            target,
            HeadRequest(kind="eagle"),
            HEAD_ON_CPU,
        )
    with pytest.raises(ConfigError, match="latent attention"):
        ids = torch.arange(40)
        create_head(NewHead(kind="eagle3"), target, ids, torch.float32, seed=0)


def test_another_models_mtp_layers_are_refused(mtp_dir: Path, tmp_path: Path) -> None:
    target = _load(tiny_model_dir(tmp_path, "deepseek_v3"))
    target.config = replace(target.config, hidden_size=64)
    with pytest.raises(CheckpointError, match="hidden_size=48, the target has 64"):
        load_head(
            mtp_dir,
            target,
            HeadRequest(kind="mtp", num_mtp_layers=1),
            HEAD_ON_CPU,
        )
