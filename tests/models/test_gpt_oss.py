"""gpt-oss: sinks, windows, biases, its activation and MXFP4 experts, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loading import ON_CPU
from matrix import MODES, MTP, check_greedy, config_of, covering, make_drafters
from oracle import Oracle, logit_error, prompt_tensors
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRanks
from tiny import prefill_metadata
from tiny_gemma import edit_config
from tiny_gpt_oss import BY_GROUPS, gpt_oss_dir, mxfp4_dir
from torch import Tensor

from trtspec.checkpoints.families.moe import gpt_oss_moe
from trtspec.checkpoints.hf_config import load_config
from trtspec.checkpoints.place import LoadOptions, WeightForm
from trtspec.checkpoints.weights import load_decoder
from trtspec.distributed.comm import Communicator
from trtspec.distributed.logits import gather_logits
from trtspec.distributed.parallel import Parallel
from trtspec.errors import CheckpointError
from trtspec.layers.experts import Experts
from trtspec.models.decoder import Decoder
from trtspec.ops.experts.fp4 import Fp4Weight
from trtspec.ops.layer.fp8 import Fp8Weight

pytest.importorskip("transformers.models.gpt_oss", reason="transformers is too old for an oracle")
FULL, SLIDING = "full_attention", "sliding_attention"
STACK = "model.layers.1.mlp.experts.down_proj"
VARIANTS: list[dict[str, Any]] = [
    {},
    {"attention_bias": False, "num_experts_per_tok": 1},
    {"layer_types": [FULL, FULL, SLIDING], "swiglu_limit": 7.0, "num_experts_per_tok": 6},
    {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "swiglu_limit": 0.2},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    error, spread = logit_error(gpt_oss_dir(tmp_path, **changes), prompt_tensors(97))
    assert spread > 0.5
    assert error < 1e-4


@pytest.mark.parametrize("sizes", [BY_GROUPS, {"hidden_size": 64, "intermediate_size": 64}])
def test_mxfp4_logits_equal_transformers(tmp_path: Path, sizes: dict[str, int]) -> None:
    """It makes floats of them by its own table. With equal sizes a turned matrix has its shape."""
    error, spread = logit_error(mxfp4_dir(tmp_path, **sizes), prompt_tensors(97))
    assert spread > 0.5
    assert error < 1e-4


# -- kept as they are ----------------------------------------------------------------------------
KEPT = replace(ON_CPU, form=WeightForm(keeps_fp8=True))
KINDS = {Fp4Weight: "MXFP4", Fp8Weight: "FP8", None: "floats"}


def _kind(model: Decoder) -> str:
    """What all experts of the model are."""
    (kind,) = {KINDS[experts.kind] for experts in model.modules() if isinstance(experts, Experts)}
    return kind


def _logits(path: Path, options: LoadOptions, ranks: tuple[int, int]) -> list[tuple[str, Tensor]]:
    """Of each rank, and what its experts are."""
    prompts, (size, expert_ranks) = prompt_tensors(97), ranks

    def of_rank(comm: Communicator) -> tuple[str, Tensor]:
        model = load_decoder(path, options, Parallel(comm, expert_ranks))
        meta, positions = prefill_metadata(model.config, [len(prompt) for prompt in prompts])
        hidden = model(torch.cat(prompts), positions, meta)
        return _kind(model), gather_logits(model.compute_logits(hidden))

    return ThreadRanks(size).run(of_rank)


@pytest.mark.parametrize(
    ("sizes", "ranks", "kind"),
    [
        ((64, 128), (1, 1), "MXFP4"),
        ((64, 128), (2, 1), "MXFP4"),  # the width is cut between blocks of 64 columns
        ((192, 192), (2, 2), "MXFP4"),
        ((64, 192), (2, 1), "FP8"),  # within a block
        ((64, 64), (4, 1), "FP8"),  # within a group
        ((96, 96), (1, 1), "FP8"),  # an odd number of groups
        ((96, 64), (1, 1), "FP8"),  # of gate and up alone
    ],
)
def test_a_gpu_keeps_mxfp4_where_blocks_are_whole(
    tmp_path: Path, sizes: tuple[int, int], ranks: tuple[int, int], kind: str
) -> None:
    """Else its numbers are FP8, with the same values."""
    fields = {"hidden_size": sizes[0], "intermediate_size": sizes[1], "num_attention_heads": 4}
    path = mxfp4_dir(tmp_path, num_local_experts=4, **fields)
    ((on_cpu, expected),) = _logits(path, ON_CPU, (1, 1))
    assert on_cpu == "floats"
    for found, logits in _logits(path, KEPT, ranks):
        assert found == kind
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_mxfp4_that_is_lost_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = mxfp4_dir(tmp_path, num_attention_heads=4, num_local_experts=4)
    floats = gpt_oss_dir(tmp_path, num_attention_heads=4, num_local_experts=4)
    for model, ranks in ((path, (2, 2)), (floats, (2, 1)), (path, (2, 1))):
        assert not any("MXFP4" in text for text in caplog.messages)
        _logits(model, KEPT, ranks)
    told = next(text for text in caplog.messages if "MXFP4" in text)
    assert "3 of 3 mixtures" in told and "moe_expert_parallel_size" in told


def test_large_scales_make_them_fp8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A kernel's factor must be a bf16."""
    path = mxfp4_dir(tmp_path, hidden_size=64, intermediate_size=64)
    tensors = load_file(path / "model.safetensors")
    scales = tensors[f"{STACK}_scales"]
    for largest, kinds in ((128, {"MXFP4"}), (129, {"MXFP4", "FP8"})):
        scales[1, 2, 0] = largest
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        model, plain = load_decoder(path, KEPT), load_decoder(path, ON_CPU)
        layers = zip(model.layers, plain.layers, strict=True)
        assert {KINDS[layer.mlp.experts.kind] for layer in model.layers} == kinds
        x, ids = torch.randn(3, 64), torch.tensor([[1, 0]] * 3)
        for ours, expected in layers:
            pair = (layer.mlp.experts(x, ids, torch.ones(3, 2)) for layer in (ours, expected))
            torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)
    assert any("1 of 3 mixtures" in text for text in caplog.messages)


def test_float_experts_are_quantised_as_they_lie(tmp_path: Path) -> None:
    """Gates before ups, and each rank's own."""
    options = replace(ON_CPU, form=WeightForm(quantizes=True))
    path = gpt_oss_dir(tmp_path, num_attention_heads=4, num_local_experts=4)
    ours, plain = (load_decoder(path, replace(o, pack=False)) for o in (options, ON_CPU))
    for a, b in zip(ours.layers, plain.layers, strict=True):
        for leaf in ("gate_up_proj", "down_proj"):
            found, exact = (getattr(layer.mlp.experts, leaf) for layer in (a, b))
            bound = float(exact.abs().max()) / 512
            torch.testing.assert_close(found, exact, rtol=1 / 16, atol=bound)
    expected = _logits(path, options, (1, 1))[0][1]
    for ranks in ((2, 1), (2, 2), (4, 2)):
        for _, logits in _logits(path, options, ranks):
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_biases_of_experts_have_the_models_dtype(tmp_path: Path) -> None:
    """The kernels for few rows ask for it."""
    model = load_decoder(gpt_oss_dir(tmp_path), replace(ON_CPU, dtype=torch.bfloat16))
    for layer in model.layers:
        assert {bias.dtype for bias in layer.mlp.experts.biases} == {torch.bfloat16}
        assert layer.mlp.gate.bias.dtype == torch.float32


# -- decoding ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("gpt_oss")
    path = gpt_oss_dir(folder, seed=1)
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


# -- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_local_experts": 0}, ["num_local_experts=0"]),
        ({"num_experts_per_tok": 7}, ["num_experts_per_tok=7", "1 … 6"]),
        ({"swiglu_limit": -1.0}, ["swiglu_limit"]),
        ({"layer_types": [FULL, "chunked_attention", FULL]}, ["chunked_attention"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, fields: dict[str, Any], words: list[str]) -> None:
    path = gpt_oss_dir(tmp_path)
    edit_config(path, **fields)
    with pytest.raises(CheckpointError) as refusal:
        load_config(path)
    assert all(word in str(refusal.value) for word in words), refusal.value


def _drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def _nan_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{STACK}_scales"][2, 3, 1] = 255
    tensors[f"{STACK}_scales"][2, 3, 0] = 253  # times 6 is infinite


def _twice(tensors: dict[str, torch.Tensor]) -> None:
    tensors[STACK] = torch.zeros(6, 192, 64)


def _matrix(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("blocks", "scales"):
        tensors[f"{STACK}_{part}"] = tensors[f"{STACK}_{part}"][0].contiguous()


def _short(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{STACK}_blocks"] = tensors[f"{STACK}_blocks"][..., :8].contiguous()


def _turned_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{STACK}_scales"] = tensors[f"{STACK}_scales"].transpose(1, 2).contiguous()


def _signed(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{STACK}_blocks"] = tensors[f"{STACK}_blocks"].view(torch.int8)


def _fewer_experts(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("blocks", "scales"):
        tensors[f"{STACK}_{part}"] = tensors[f"{STACK}_{part}"][:5].contiguous()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_drop(f"{STACK}_scales"), [f"{STACK}_blocks, but not {STACK}_scales"]),
        (_drop(f"{STACK}_blocks"), [f"{STACK}_scales, but not {STACK}_blocks"]),
        (_drop(f"{STACK}_bias"), ["lacks 1 of", f"{STACK}_bias"]),
        (_drop("model.layers.1.self_attn.sinks"), ["lacks 1 of", "layers.1.self_attn.sinks."]),
        (_nan_scale, [f"{STACK}_scales", "2 scales that are NaN"]),
        (_twice, [f"{STACK} and {STACK}_blocks", "one weight"]),
        (_matrix, [f"{STACK}_blocks", "[64, 6, 16]", "only experts' stacks"]),
        (_short, [f"{STACK}_blocks", "[6, 64, 6, 8]", "groups, 16]"]),
        (_turned_scales, [f"{STACK}_scales [6, 6, 64]", "only experts' stacks"]),
        (_signed, [f"{STACK}_blocks", "dtype I8", "of U8"]),
        (_fewer_experts, [STACK, "[5, 64, 192]", "[6, 64, 192]", "num", "intermediate_size"]),
    ],
)
def test_weights_that_are_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], words: list[str]
) -> None:
    path = mxfp4_dir(tmp_path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as refusal:
        load_decoder(path, ON_CPU)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_mxfp4_that_the_config_does_not_say(tmp_path: Path) -> None:
    path = mxfp4_dir(tmp_path)
    edit_config(path, quantization_config=None)
    with pytest.raises(CheckpointError, match="in MXFP4, which config"):
        load_decoder(path, ON_CPU)


def test_the_largest_scale_is_read(tmp_path: Path) -> None:
    """252, with which 6 is still a float32."""
    path = mxfp4_dir(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors[f"{STACK}_scales"][2, 3, 1] = 252
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    load_decoder(path, ON_CPU)


def test_one_experts_matrix_is_no_stack(tmp_path: Path) -> None:
    path = gpt_oss_dir(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors[STACK] = tensors[STACK][0].contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=STACK.replace(".", r"\.")):
        load_decoder(path, ON_CPU)


def test_what_an_older_transformers_does_not_fill_in() -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 8}
    moe = gpt_oss_moe(SimpleNamespace(**sizes), Path("config.json"))
    assert (moe.swiglu_limit, moe.swiglu_alpha) == (7.0, 1.702)


def test_a_config_without_newer_fields_is_read(tmp_path: Path) -> None:
    """As published: `swiglu_alpha` is missing, and rope_scaling stands beside rope_theta."""
    path = gpt_oss_dir(tmp_path)
    raw = json.loads((path / "config.json").read_text())
    del raw["swiglu_alpha"]
    rope = raw.pop("rope_parameters")
    raw |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "experts_per_token": 2}
    (path / "config.json").write_text(json.dumps(raw))
    error, _ = logit_error(path, prompt_tensors(97))
    assert error < 1e-4
