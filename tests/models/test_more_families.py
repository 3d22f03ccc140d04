"""Texts of families whose layers are unlike Llama's, against transformers; and MiniMax-M2's
config."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loading import ON_CPU, UNPACKED
from matrix import MODES, MTP, check_greedy, config_of, covering, make_drafters
from oracle import Oracle, logit_error, prompt_tensors
from quantized import to_blocks
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRanks
from tiny import LONG_PHI, tiny_model_dir
from tiny_gemma import edit_config

from trtspec import LLM
from trtspec.checkpoints.families.llama import FULL, SLIDING
from trtspec.checkpoints.hf_config import load_config
from trtspec.checkpoints.place import WeightForm
from trtspec.checkpoints.weights import load_decoder
from trtspec.cli.inspect_head import _rope
from trtspec.distributed.parallel import Parallel
from trtspec.doctor.trials import rope_trials
from trtspec.errors import CheckpointError, ConfigError
from trtspec.models.rope import NOT_ROTATED, build_cos_sin
from trtspec.ops.layer.fp8 import dequantize
from trtspec.train.new_head import NewHead, head_config

SCALED = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 16.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "minimax_m2": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 7, "layer_types": [SLIDING, FULL, SLIDING]},
    "exaone4": {"sliding_window": 7, "layer_types": [SLIDING, FULL, SLIDING]},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
}


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    path = tiny_model_dir(folder, request.param, seed=1, **FAMILIES[request.param])
    oracle = Oracle(path)
    return path, oracle, make_drafters(folder, oracle)


@pytest.mark.slow
@covering(
    mode=[mode for mode in MODES if mode not in MTP], chunk=[None, 24],
    overlap=[False, True], pool=[None, 88],
)  # fmt: skip
def test_greedy_equals_transformers(
    target: Any, mode: str, chunk: int | None, overlap: bool, pool: int | None
) -> None:
    path, oracle, drafters = target
    config = config_of(mode, 3, drafters)
    check_greedy(path, oracle, config, chunk=chunk, overlap=overlap, pool=pool)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_that_can_be_trained(tmp_path: Path, family: str) -> None:
    """Layers of their own are Llama's; MTP layers would be the target's."""
    config = load_config(tiny_model_dir(tmp_path, family, **FAMILIES[family]))
    made = head_config(NewHead("eagle3", layers_to_capture=(0, 1, 2)), config, 9).decoder
    assert not (made.post_norms or made.norms_all_heads or made.layer_types or made.moe)
    assert not (made.norm_offset or made.output_gate or made.linear_layers)
    with pytest.raises(ConfigError, match=r"post_norms|norms_all_heads|layer_types|mixture"):
        head_config(NewHead("mtp"), config, None)


def test_long_rope_within_its_original_length(tmp_path: Path) -> None:
    """Phi-4-mini's; `test_models.py` compares logits."""
    path = tiny_model_dir(tmp_path, "phi3", **LONG_PHI)
    llm = LLM(path, device="cpu", dtype="float32", max_batch_size=2)
    assert llm.executor.config.max_seq_len == 128
    config = load_config(path)
    factor = math.sqrt(1 + math.log(1024 / 128) / math.log(128))
    assert float(build_cos_sin(config, 2)[0, 0]) == pytest.approx(factor)
    with pytest.raises(ConfigError, match=r"in 2 … 128, the model's original length: longer texts"):
        LLM(path, device="cpu", max_seq_len=256)
    with pytest.raises(ConfigError, match=r"in 2 … 256, .*Its YaRN reaches to 1024: raise max_pos"):
        LLM(tiny_model_dir(tmp_path / "yarn", rope_parameters=SCALED),
            device="cpu", max_seq_len=512)  # fmt: skip
    for kind in ("eagle3", "dflash"):  # a head rotates all of its 16 dimensions
        mask = 90 if kind == "dflash" else None
        new = NewHead(kind, layers_to_capture=(0, 1, 2), mask_token_id=mask)
        made = head_config(new, config, 9).decoder
        assert made.rope_parameters == {"rope_type": "default", "rope_theta": 1000.0}
    head = SimpleNamespace(config=SimpleNamespace(decoder=made))
    assert not any("longrope" in trial.cure for trial in rope_trials(head, config))
    head.config.decoder = replace(config, layer_types=(), type_fields={})
    head.config.decoder = replace(head.config.decoder, rope_parameters=made.rope_parameters)
    assert any("longrope" in trial.cure for trial in rope_trials(head, config))


def test_stacks_of_another_size_are_refused(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "phi3")
    edit_config(path, num_key_value_heads=4)
    with pytest.raises(CheckpointError, match=r"qkv_proj.weight .* 128 rows.* 64 \+ 64 \+ 64"):
        load_decoder(path, ON_CPU)


def test_quantised_stacks_stay_so(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "phi3")
    floats = load_decoder(to_blocks(path, (16, 64)), UNPACKED)
    model = load_decoder(path, replace(UNPACKED, form=WeightForm(keeps_fp8=True)))
    exact, found = floats.layers[1].self_attn, model.layers[1].self_attn
    assert found.qkv_proj.fp8 is not None and found.o_proj.fp8 is not None
    assert torch.equal(dequantize(found.qkv_proj.fp8, torch.float32), exact.qkv_proj.weight)


@pytest.mark.parametrize("family", ["smollm3", "exaone4"])
def test_layers_without_positions_are_told_and_not_tried(tmp_path: Path, family: str) -> None:
    config = load_config(tiny_model_dir(tmp_path, family, **FAMILIES[family]))
    assert "none: no positions" in {_rope(config.of_layer(i)) for i in range(3)}
    plain = load_config(tiny_model_dir(tmp_path / "plain"))
    trials = rope_trials(SimpleNamespace(config=SimpleNamespace(decoder=plain)), config)
    assert trials and not any("none" in trial.name for trial in trials)
    assert not rope_trials(
        SimpleNamespace(config=SimpleNamespace(decoder=replace(
            plain, rope_parameters=NOT_ROTATED))), config,
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 7])
def test_layer_types_of_mixtral_that_say_otherwise(tmp_path: Path, window: int | None) -> None:
    path = tiny_model_dir(tmp_path, "mixtral", sliding_window=window)
    kind = FULL if window is None else SLIDING
    edit_config(path, layer_types=[kind] * 3)
    assert load_config(path).layer_windows == (window,) * 3
    edit_config(path, layer_types=[FULL, SLIDING, FULL])
    with pytest.raises(CheckpointError, match=f"layer_types=.*all layers .* {kind!r}"):
        load_config(path)


@pytest.mark.parametrize("fields", [
    {"sliding_window": None, "sliding_window_pattern": None},
    {"sliding_window": None, "sliding_window_pattern": "LLLG"},
])  # fmt: skip
def test_exaone_without_windows(tmp_path: Path, fields: dict[str, Any]) -> None:
    path = tiny_model_dir(tmp_path, "exaone4", **FAMILIES["exaone4"])
    edit_config(path, layer_types=None, **fields)
    config = load_config(path)
    assert config.layer_windows == (None,) * 3 and not config.layer_types


@pytest.mark.parametrize("pattern", [0, -1, "LLLG", 1.5])
def test_exaones_pattern(tmp_path: Path, pattern: Any) -> None:
    path = tiny_model_dir(tmp_path, "exaone4", **FAMILIES["exaone4"])
    edit_config(path, layer_types=None, sliding_window_pattern=pattern)
    with pytest.raises(CheckpointError, match=r"sliding_window_pattern=.*Give layer_types"):
        load_config(path)


def test_more_flags_than_layers(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "smollm3", no_rope_layers=[1, 0, 1, 0, 1])
    error, spread = logit_error(path, prompt_tensors(97))
    assert spread > 0.5 and error < 1e-4


def test_mtp_layers_of_minimax_are_left_out(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "minimax_m2")
    tensors = load_file(path / "model.safetensors")
    of_last = {name: t for name, t in tensors.items() if name.startswith("model.layers.2.")}
    more = {name.replace("layers.2.", "layers.3."): t.clone() for name, t in of_last.items()}
    save_file(tensors | more, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="no place for"):
        load_decoder(path, ON_CPU)
    edit_config(path, num_mtp_modules=1)
    load_decoder(path, ON_CPU)
    edit_config(path, num_mtp_modules="one")
    with pytest.raises(CheckpointError, match="num_mtp_modules='one'"):
        load_config(path)


# What MiniMax-M2's public config.json says beside what every config does.
PUBLIC: dict[str, Any] = {
    "attn_type_list": [1, 1, 1], "use_qk_norm": True, "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0,
    "num_mtp_modules": 3, "mtp_transformer_layers": 1, "use_mtp": True, "mlp_intermediate_size": 96,
}  # fmt: skip


def test_a_public_config(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "minimax_m2")
    edit_config(path, **PUBLIC)
    config = load_config(path)
    assert (config.rotary_dim, config.norms_all_heads, config.qk_norm) == (8, True, True)
    assert config.moe is not None and config.moe.scoring == "sigmoid"
    load_config(tiny_model_dir(tmp_path / "other", "mixtral"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attn_type_list": [1, 0, 1]}, ["attn_type_list=[1, 0, 1]", "allowed are 1 alone"]),
        ({"qk_norm_type": "per_head"}, ["qk_norm_type='per_head'", "allowed is 'per_layer'"]),
        ({"use_routing_bias": False}, ["use_routing_bias=False"]),
        ({"scoring_func": "softmax"}, ["scoring_func='softmax'"]),
        ({"shared_intermediate_size": 64}, ["shared_intermediate_size=64"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok=9", "1 … 8"]),
        ({"rotary_dim": 7}, ["partial_rotary_factor"]),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, fields: dict[str, Any], words: list[str]) -> None:
    path = tiny_model_dir(tmp_path, "minimax_m2")
    edit_config(path, **{"rope_parameters": None, **fields})
    with pytest.raises(CheckpointError) as refusal:
        load_config(path)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_norms_over_all_heads_are_not_cut(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "minimax_m2")
    with pytest.raises(ConfigError, match=r"norms over all heads at once .*Use one of 1"):
        ThreadRanks(2).run(lambda comm: load_decoder(path, ON_CPU, Parallel(comm)))
    ThreadRanks(2).run(lambda comm: load_decoder(path, ON_CPU, Parallel(comm, 2, True)))
