"""Checkpoints with weights of 4 bits, or of 8 in words, are their dequantised twins."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from four_bits import Form, config_of, four_bits
from quantized import Tensors, compressed, other, texts_of, write
from safetensors.torch import load_file
from tiny import tiny_model_dir
from torch import Tensor

from trtspec import CheckpointError
from trtspec.checkpoints.dequantized import dequantized
from trtspec.checkpoints.hf_config import load_config
from trtspec.checkpoints.tensors import open_checkpoint

PACKED, NVFP4, MXFP4 = (f"{kind}pack-quantized" for kind in ("", "nvfp4-", "mxfp4-"))
SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "moe_intermediate_size": 64, "num_hidden_layers": 2,
}  # fmt: skip
BF16 = torch.bfloat16
Config = dict[str, Any]
FORMS = [
    Form(PACKED), Form(PACKED, group=64, dtype=BF16), Form(PACKED, group=128, symmetric=False),
    Form(PACKED, symmetric=False, dtype=BF16), Form(PACKED, 8, group=64), Form(PACKED, group=-1),
    Form(PACKED, 8, group=-1, symmetric=False, dtype=BF16), Form(PACKED, shuffled=True),
    Form(PACKED, group=64, symmetric=False, shuffled=True), Form(NVFP4), Form(MXFP4),
    Form("modelopt"), *(Form("awq", group=group, symmetric=False) for group in (32, 64, 128, -1)),
    *(
        Form("gptq", bits, group, symmetric, shuffled=shuffled, version=version)
        for version in ("gptq", "gptq_v2")
        for bits, group, symmetric, shuffled in [
            (4, 32, True, False), (4, 128, False, True), (8, 64, False, False),
            (8, 32, True, True), (4, -1, False, False),
        ]
    ),
    Form("auto-round"), Form("auto-round", group=128, symmetric=False), Form("auto-round", 8, 64),
    Form("auto-round", symmetric=False, version="gptq_v2"),
]  # fmt: skip
OF_EXPERTS = [
    Form(PACKED, dtype=BF16), Form(NVFP4), Form(MXFP4), Form("modelopt"),
    Form("awq", symmetric=False), Form("gptq", shuffled=True), Form("auto-round"),
]  # fmt: skip
BY_METHOD = {form.method: form for form in OF_EXPERTS}
BY_METHOD["asymmetric"] = Form(PACKED, symmetric=False)
MODULE = "model.layers.0.mlp.up_proj"


def _check_weights(path: Path, twin: Tensors) -> None:
    with ExitStack() as stack:
        sources = open_checkpoint(path, stack)
        raw = json.loads((path / "config.json").read_text())
        read = {n: s.read() for n, s in dequantized(sources, raw, path / "config.json").items()}
    assert read.keys() == twin.keys()
    for name, weight in twin.items():
        torch.testing.assert_close(read[name], weight, atol=0, rtol=1e-6)


def _check(path: Path, twin: Tensors, tensors: Tensors, config: Config) -> None:
    write(path, twin, None)
    plain = texts_of(path)
    write(path, tensors, config)
    _check_weights(path, twin)
    assert texts_of(path) == plain


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_weights_and_text(tmp_path: Path, form: Form) -> None:
    path = tiny_model_dir(tmp_path, **SIZES)
    twin = load_file(path / "model.safetensors")
    _check(path, twin, *four_bits(form, twin))
    is_scattered = form.method == "gptq" and form.shuffled
    stays = form.bits == 4 and form.method != MXFP4 and not is_scattered
    assert load_config(path).has_four_bits is stays


@pytest.mark.parametrize("method", ["gptq", "auto-round"])
def test_modules_with_bits_and_groups_of_their_own(tmp_path: Path, method: str) -> None:
    path = tiny_model_dir(tmp_path, **SIZES)
    twin = load_file(path / "model.safetensors")
    attention = {name: twin.pop(name) for name in list(twin) if "self_attn" in name}
    wide, _ = four_bits(Form(method, 8, 64, symmetric=False), attention)
    tensors, config = four_bits(Form(method), twin)
    own = {"bits": 8, "group_size": 64, "sym": False}
    if method == "gptq":
        config["dynamic"] = {r"+:.*self_attn.*": {**own, "desc_act": True}, r"-:lm_head": {}}
    else:
        config["extra_config"] |= {"model.layers.0.self_attn.q_proj": {**own, "act_bits": None}}
    _check(path, twin | attention, tensors | wide, config)


def test_a_last_group_that_is_narrower(tmp_path: Path) -> None:
    """Where modules may differ shapes say what groups there are: 192 columns are 128 and 64."""
    path = tiny_model_dir(tmp_path, **{**SIZES, "hidden_size": 192, "intermediate_size": 192})
    twin = load_file(path / "model.safetensors")
    tensors, config = four_bits(Form("auto-round", group=128), twin, random=True)
    config["extra_config"]["model.layers.9.mlp.up_proj"] = {"bits": 8}
    write(path, tensors, config)
    _check_weights(path, twin)


@pytest.mark.parametrize("form", [Form(PACKED), Form(NVFP4), Form("modelopt")], ids=str)
def test_beside_fp8(tmp_path: Path, form: Form) -> None:
    """Attention in FP8, MLPs in 4 bits: tensors say which."""
    path = tiny_model_dir(tmp_path, **SIZES)
    twin = load_file(path / "model.safetensors")
    attention = {name: twin.pop(name) for name in list(twin) if "self_attn" in name}
    is_modelopt = form.method == "modelopt"
    codes, of_codes = (
        other("modelopt", attention) if is_modelopt else compressed("channel", "float", attention)
    )
    tensors, config = four_bits(form, twin)
    tensors, twin = tensors | codes, twin | attention
    if is_modelopt:
        layers = {"x.q_proj": {"quant_algo": "FP8"}}
        layers["x.up_proj"] = {"quant_algo": "NVFP4", "group_size": 16}
        config = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    else:
        (group,) = of_codes["config_groups"].values()
        config["config_groups"]["group_1"] = {"format": of_codes["format"], **group}
    _check(path, twin, tensors, config)
    assert load_config(path).has_four_bits
    if is_modelopt:
        layers["x.down_proj"] = {"quant_algo": "W4A8_AWQ"}
        with pytest.raises(CheckpointError, match=r"quantized_layers: 'x.down_proj'.*W4A8_AWQ"):
            write(path, tensors, config)
            load_config(path)


def test_auto_round_in_the_order_of_awq(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, **SIZES)
    twin = load_file(path / "model.safetensors")
    tensors, config = four_bits(Form("awq", symmetric=False), twin)
    said = {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}
    said |= {"bits": 4, "group_size": config["group_size"]}
    same = {"x.q_proj": {"bits": 4, "group_size": config["group_size"]}}
    _check(path, twin, tensors, {**said, "extra_config": same})
    write(path, tensors, {**config, "zero_point": False, "autoround_version": "0.9"})
    _check_weights(path, twin)


@pytest.mark.parametrize("form", OF_EXPERTS, ids=str)
def test_experts_alone(tmp_path: Path, form: Form) -> None:
    """As Kimi-K2-Thinking has them."""
    path = tiny_model_dir(tmp_path, "qwen3_moe", **SIZES)
    twin = load_file(path / "model.safetensors")
    tensors, config = four_bits(form, twin, lambda name: ".mlp.experts." in name)
    assert len(tensors) > len(twin)
    _check(path, twin, tensors, config)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_code_in_random_shapes(tmp_path: Path, form: Form) -> None:
    twin, generator = {}, torch.Generator().manual_seed(3)
    for number in range(12):
        rows, columns = torch.randint(1, 9, (2,), generator=generator).tolist()
        weight = torch.randn(8 * rows, columns * max(form.group, 32), generator=generator)
        twin[f"model.layers.{number}.mlp.up_proj.weight"] = weight
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path, *four_bits(form, twin, random=True))
    _check_weights(tmp_path, twin)


def test_rows_that_fill_no_whole_words(tmp_path: Path) -> None:
    """The package packs them so: weight_shape says where they end."""
    (tmp_path / "config.json").write_text("{}")
    for symmetric in (True, False):
        twin = {f"{MODULE}.weight": torch.randn(13, 21)}
        write(tmp_path, *four_bits(Form(PACKED, group=-1, symmetric=symmetric), twin))
        _check_weights(tmp_path, twin)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_of_zeros_are_left_out(tmp_path: Path, value: float) -> None:
    """AutoGPTQ writes them for every product of a model without biases."""
    path = tiny_model_dir(tmp_path, **SIZES)
    twin = load_file(path / "model.safetensors")
    tensors, config = four_bits(BY_METHOD["gptq"], twin)
    write(path, twin, None)
    plain = texts_of(path)
    tensors[f"{MODULE}.bias"] = torch.full((256,), value)
    write(path, tensors, config)
    if value:
        with pytest.raises(CheckpointError, match=r"up_proj.bias. Check .*mlp_bias"):
            texts_of(path)
    else:
        assert texts_of(path) == plain


def test_a_zero_of_256(tmp_path: Path) -> None:
    """GPTQ's first format stores 255 for it."""
    (tmp_path / "config.json").write_text("{}")
    twin = {f"{MODULE}.weight": torch.randn(8, 32)}
    tensors, config = four_bits(Form("gptq", 8, 32), twin)
    tensors[f"{MODULE}.qzeros"] = torch.full((1, 2), -1, dtype=torch.int32)
    write(tmp_path, tensors, config)
    with ExitStack() as stack:
        sources = dequantized(
            open_checkpoint(tmp_path, stack), {"quantization_config": config}, tmp_path / "c.json"
        )
        assert bool((sources[f"{MODULE}.weight"].read() < 0).all())


def test_a_config_beside_config_json(tmp_path: Path) -> None:
    """ModelOpt's hf_quant_config.json."""
    path = tiny_model_dir(tmp_path, **SIZES)
    twin = load_file(path / "model.safetensors")
    tensors, _ = four_bits(Form("modelopt"), twin)
    write(path, twin, None)
    plain = texts_of(path)
    write(path, tensors, None)
    said = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    _check_weights(path, twin)
    assert texts_of(path) == plain


@pytest.mark.parametrize("form", [f for f in FORMS if f.method in ("awq", "gptq")], ids=str)
def test_words_bit_by_bit(form: Form) -> None:
    """What the twin's values are, by another reading of the words than `four_bits` writes."""

    def number(part: str, row: int, column: int, place: int) -> int:
        word = int(tensors[f"proj.{part}"][row, column])
        bits = range(form.bits)
        return sum(((word >> (form.bits * place + bit)) & 1) << bit for bit in bits)

    twin, per, is_awq = {"proj.weight": torch.randn(24, 128)}, 32 // form.bits, form.method == "awq"
    tensors, _ = four_bits(form, twin, random=True)
    for row, column in itertools.product(range(24), range(0, 128, 5)):
        word, place = row // per, row % per
        if is_awq:
            group = column // (128 if form.group == -1 else form.group)
            place = (0, 4, 1, 5, 2, 6, 3, 7)[place]
            code = number("qweight", column, word, place)
        else:
            group = int(tensors["proj.g_idx"][column])
            code = number("qweight", column // per, row, column % per)
        zero = number("qzeros", group, word, place) + (form.version == "gptq" and not is_awq)
        value = (code - zero) * float(tensors["proj.scales"][group, row])
        assert twin["proj.weight"][row, column].item() == pytest.approx(value, rel=1e-6)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("refused"), **SIZES)


@pytest.fixture(scope="module")
def floats(path: Path) -> Tensors:
    return load_file(path / "model.safetensors")


def _refused(path: Path, tensors: Tensors, config: Config, said: str, why: str = "") -> None:
    """The message matches `said`, and names a cure; `why` is for a test that fails."""
    write(path, tensors, config)
    try:
        texts_of(path)
    except CheckpointError as error:
        assert re.search(said, str(error)), (why, error)
        assert re.search(r"[Cc]opy |[Uu]se |[Rr]emove |[Cc]heck |must be", str(error)), (why, error)
    else:
        pytest.fail(f"{why}: it is read")


def _longer(t: Tensor) -> Tensor:
    return torch.cat([t.view(-1)] * 3) if t.ndim < 2 else torch.cat([t, t[:1]])


def _with_nan(t: Tensor) -> Tensor:
    return torch.cat([t.float().flatten()[1:], torch.tensor([torch.nan])]).view(t.shape).to(t.dtype)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "longer": _longer,
    "narrower": lambda t: t[:, :-1],
    "empty": lambda t: t[:0],
    "another dtype": lambda t: t.float().long() if t.is_floating_point() else t.float(),
    "NaN": _with_nan,
    "all 0": torch.zeros_like,
    "all 255": lambda t: torch.full_like(t, 255),  # NaN among powers of two
    "1 more": lambda t: t + 1,
    "1 less": lambda t: t - 1,
}
OF_ALL = "missing", "longer", "another dtype"
OF_MATRICES = *OF_ALL, "narrower", "empty"


@pytest.mark.parametrize(
    ("method", "part", "changes"),
    [
        *((m, "weight_packed", OF_MATRICES) for m in (PACKED, NVFP4, MXFP4)),
        *((m, "weight_scale", (*OF_MATRICES, "NaN")) for m in (PACKED, NVFP4, "modelopt")),
        *((m, part, OF_MATRICES) for m in ("awq", "gptq") for part in ("qweight", "qzeros")),
        *((m, "scales", (*OF_MATRICES, "NaN")) for m in ("awq", "gptq")),
        (PACKED, "weight_shape", ("1 more",)),
        ("asymmetric", "weight_zero_point", OF_MATRICES),
        (NVFP4, "weight_global_scale", (*OF_ALL, "NaN", "all 0")),
        (MXFP4, "weight_scale", (*OF_MATRICES, "all 255")),
        ("modelopt", "weight", OF_MATRICES),
        ("modelopt", "weight_scale_2", (*OF_ALL, "NaN")),
        ("gptq", "g_idx", (*OF_ALL, "1 more", "1 less")),
    ],
)
def test_tensors_that_do_not_fit(
    path: Path, floats: Tensors, method: str, part: str, changes: tuple[str, ...]
) -> None:
    tensors, config = four_bits(BY_METHOD[method], dict(floats))
    tensor = tensors.pop(f"{MODULE}.{part}")
    for change in changes:
        if change == "empty" and method in ("gptq", "auto-round"):  # where shapes may say bits
            config = {**config, "dynamic": {"+:.*q_proj": {"bits": 8}}}
        changed = {} if change == "missing" else {f"{MODULE}.{part}": CHANGES[change](tensor)}
        _refused(path, {**tensors, **changed}, config, re.escape(MODULE), change)


@pytest.mark.parametrize("method", [PACKED, NVFP4, MXFP4, "awq", "gptq"])
def test_a_weight_twice_is_refused(path: Path, floats: Tensors, method: str) -> None:
    tensors, config = four_bits(BY_METHOD[method], dict(floats))
    name = f"{MODULE}.weight"
    _refused(path, {**tensors, name: floats[name]}, config, r"up_proj\.(qweight|weight_packed)")


@pytest.mark.parametrize(
    ("method", "change", "said"),
    [
        ("awq", {"version": "gemv"}, "version.*gemv"),
        ("awq", {"bits": 3}, r"bits\W+3\b|\b3 bits"),
        ("gptq", {"bits": 3}, r"bits\W+3\b|\b3 bits"),
        (PACKED, config_of(Form(PACKED, bits=3), []), r"bits\W+3\b|\b3 bits"),
        ("gptq", {"group_size": 0}, r"group_size\W+0\b"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format.*marlin"),
        ("awq", {"checkpoint_format": "gemv"}, "checkpoint_format.*gemv"),
        ("gptq", {"dynamic": {"-:.*a": {}, "+:.*b": {"bits": 3}}}, r"dynamic.*\+:\.\*b"),
        ("auto-round", {"packing_format": "auto_round:mlx"}, "packing_format.*auto_round:mlx"),
        ("auto-round", {"packing_format": None}, "packing_format.*None"),
        ("auto-round", {"data_type": "mx_fp"}, "data_type.*mx_fp"),
        ("auto-round", {"act_bits": 8}, "act_bits': 8"),
        ("auto-round", {"extra_config": {"x.q_proj": {"bits": 2}}}, "x.q_proj.*bits.*2"),
        (
            "auto-round",
            {"packing_format": "auto_round:auto_awq", "extra_config": {"x.q_proj": {"bits": 8}}},
            "extra_config.*x.q_proj",
        ),
        ("auto-round", {"bits": 2}, r"bits\W+2\b"),
        ("modelopt", {"group_size": 32}, "group_size': 32"),
        ("modelopt", {"quant_algo": "W4A8_AWQ"}, "quant_algo.*W4A8_AWQ"),
        ("modelopt", {"quant_algo": "NVFP4_AWQ"}, "quant_algo.*NVFP4_AWQ"),
    ],
)
def test_other_configs(path: Path, floats: Tensors, method: str, change: Config, said: str) -> None:
    tensors, config = four_bits(BY_METHOD[method], dict(floats))
    _refused(path, tensors, {**config, **change}, said)
