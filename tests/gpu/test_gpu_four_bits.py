"""The kernels of csrc with weights of 4 bits against float64, with what stands around a product."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import steady
import torch
import torch.nn.functional as F
from four_bits import Form, four_bits
from quantized import write
from random_four_bits import random_weight
from safetensors.torch import load_file
from test_gpu_kernels import (
    HAS_KERNELS,
    _close,
    _exact,
    _no_gradients,  # noqa: F401
    _norm,
    _random,
    served,  # noqa: F401
)
from tiny import tiny_model_dir
from tiny_heads import eagle3_dir
from torch import Tensor

from trtspec import LLM, CudaGraphConfig, EagleDecodingConfig, SamplingParams
from trtspec.layers import fused
from trtspec.layers.linear import Linear
from trtspec.ops.layer import four_bits as ops
from trtspec.ops.layer.activation import SWIGLU
from trtspec.ops.layer.rope import CacheWrite, Rope, apply_rope

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_KERNELS, reason="needs Hopper, nvcc and apache-tvm-ffi"),
]
GROUPS = [32, 128, "nvfp4"]
# (in, out): a tile for a block, some, and many; steps that 16 warps do not divide.
SIZES = [(128, 16), (640, 960), (1536, 576), (4096, 1040), (2048, 12_304), (14336, 512)]
ROWS = [1, 3, 8, 9, 16, 17, 32, 40, 70, 128, 129, 300, 530]


def _linear(size: int, out: int, group: int | str, bias: bool = False) -> tuple[Linear, Tensor]:
    """Returns a layer and its values in float64."""
    layer = Linear(size, out, bias).cuda().to(torch.bfloat16)
    weight, values = random_weight(out, size, group, "cuda")
    layer.hold_four_bits(weight)
    if layer.bias is not None:
        layer.bias.data = _random(out, seed=2)
    return layer, values


def _product(x: Tensor, layer: Linear, values: Tensor) -> Tensor:
    return F.linear(x, values, None if layer.bias is None else layer.bias.double())


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("size", SIZES)
def test_linear(group: int | str, size: tuple[int, int], served: list[str]) -> None:  # noqa: F811
    (plain, values), (biased, _) = (_linear(*size, group, bias) for bias in (False, True))
    norm = _norm(size[0], torch.bfloat16)
    for rows in ROWS:
        x = _random(rows, size[0] + 32)[:, : size[0]]  # rows apart in memory
        residual = _random(rows, size[1], seed=4)
        _close(fused.linear((x,), plain), _product(_exact(x), plain, values))
        _close(fused.linear((x,), biased, (norm,)), _product(_exact(x, norm), biased, values))
        expected = _product(_exact(x), plain, values) + residual
        _close(fused.linear((x,), plain, residual=residual), expected)
        out = fused.linear((x,), plain, residual=residual, in_place=True)
        assert out.data_ptr() == residual.data_ptr()
        _close(out, expected)
    # Rows that do not fit with their norm are normed before.
    assert served.count("linear") == 4 * sum(rows <= 16 for rows in ROWS)
    assert served.count("four_bit_tiles") == 4 * sum(16 < rows <= 512 for rows in ROWS)
    assert served.count("widen_four_bits") == 4 * sum(rows > 512 for rows in ROWS)


@pytest.mark.parametrize("group", GROUPS)
def test_widening_is_exact(group: int | str) -> None:
    weight, values = random_weight(80, 1152, group, "cuda")
    # Values are rounded to float32 first: products of scales, for integers and for NVFP4.
    assert torch.equal(ops.widen(weight, torch.bfloat16), ops.dequantize(weight, torch.bfloat16))
    torch.testing.assert_close(
        ops.dequantize(weight, torch.float32).double(), values, atol=0, rtol=2**-23
    )


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [(128, 32), (640, 3072), (4096, 8448)])
def test_swiglu(
    group: int | str,
    offset: float,
    size: tuple[int, int],
    served: list[str],  # noqa: F811
) -> None:
    (layer, values), norm = _linear(*size, group, bias=True), _norm(size[0], torch.bfloat16)
    norm.weight.data -= offset
    norm.offset = offset
    values *= 0.05
    weight = layer.four_bits
    assert weight is not None
    if weight.row_scales is not None:
        layer.hold_four_bits(weight._replace(row_scales=weight.row_scales * 0.05))
    else:
        values /= 0.05
    for rows in (1, 5, 8, 9, 16, 20):
        x = _random(rows, size[0])
        gate, up = _product(_exact(x, norm), layer, values).chunk(2, dim=-1)
        _close(fused.gated(x, layer, norm, SWIGLU), F.silu(gate) * up)
    assert served.count("linear_gated") == 5


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("heads", [(9, 3, 64, 640), (32, 8, 128, 4096), (4, 4, 16, 128)])
@pytest.mark.parametrize("rows", [5, 13])
def test_rope_and_cache(
    group: int | str,
    heads: tuple[int, int, int, int],
    rows: int,
    served: list[str],  # noqa: F811
) -> None:
    q_heads, kv_heads, dim, size = heads
    layer, values = _linear(size, (q_heads + 2 * kv_heads) * dim, group)
    norm, x = _norm(size, torch.bfloat16), _random(rows, size)
    angles = 10 * _random(40, dim // 2, dtype=torch.float32, seed=6)
    positions = torch.arange(rows, device="cuda") * 3 % 40
    rope = Rope(torch.cat([angles.cos(), angles.sin()], -1), positions)
    slots = torch.randperm(20, device="cuda")[:rows]
    k, v = (torch.zeros(21, kv_heads, dim, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    to = CacheWrite(k, v, slots, scratch_slot=20)
    q = fused.qkv_rope_and_write((x,), layer, (norm,), rope, q_heads, to)
    assert served == ["linear_rope"]
    qkv = _product(_exact(x, norm), layer, values).view(rows, -1, dim)
    cos, sin = (t.double() for t in rope.rotation(torch.bfloat16))
    turned = apply_rope(qkv[:, : q_heads + kv_heads], cos, sin)
    _close(q, turned[:, :q_heads])
    _close(k[slots], turned[:, q_heads:])
    _close(v[slots], qkv[:, q_heads + kv_heads :])


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("size", [(640, 960), (4096, 6144)])
def test_a_row_does_not_depend_on_the_others(group: int | str, size: tuple[int, int]) -> None:
    (layer, _), norm = _linear(*size, group), _norm(size[0], torch.bfloat16)
    x, residual = _random(16, size[0]), _random(16, size[1], seed=4)
    normed = fused.linear((x,), layer, (norm,))
    added = fused.linear((x,), layer, residual=residual)
    for rows in range(1, 16):
        part = (x[:rows],)
        assert torch.equal(fused.linear(part, layer, (norm,)), normed[:rows])
        assert torch.equal(fused.linear(part, layer, residual=residual[:rows]), added[:rows])


def test_a_row_that_is_no_number_stays_alone() -> None:
    (layer, values), norm = _linear(640, 960, 128), _norm(640, torch.bfloat16)
    x = _random(7, 640)
    x[2, 5], x[4, 7] = torch.nan, torch.inf
    for norms in ((), (norm,)):
        out = fused.linear((x,), layer, norms)
        rest = torch.tensor([0, 1, 3, 5, 6], device="cuda")
        _close(out[rest], _product(_exact(x[rest], *norms), layer, values))
        assert not out[2].isfinite().any() and not out[4].isfinite().all()


FORMS = [Form("pack-quantized"), Form("awq", group=128, symmetric=False), Form("modelopt")]
SIZE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}
HEAD = {"size": 192, "own_embedding": True}


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_engines_keep_them(tmp_path: Path, form: Form, family: str) -> None:
    """Parameters have the checkpoint's values; drafting changes no text; all is one graph."""
    path = tiny_model_dir(tmp_path, family, num_hidden_layers=6, **SIZE)
    twin = load_file(path / "model.safetensors")
    tensors, config = four_bits(form, twin)
    write(path, tensors, config)
    plain = _drafts_change_no_text(path, eagle3_dir(tmp_path, **HEAD, target_size=256))
    layer = plain.executor.target.layers[3]
    prefix = "model.layers.3."
    stacks = {
        "self_attn.qkv_proj": [f"self_attn.{part}_proj" for part in "qkv"],
        "self_attn.o_proj": ["self_attn.o_proj"],
        "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down_proj": ["mlp.down_proj"],
    }
    for name, parts in stacks.items():
        weight = layer.get_submodule(name).four_bits
        expected = torch.cat([twin[f"{prefix}{part}.weight"] for part in parts])
        kept = ops.dequantize(weight, torch.float32).cpu()
        torch.testing.assert_close(kept, expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("inner", [512, 128])
def test_engines_keep_experts(tmp_path: Path, form: Form, inner: int) -> None:
    """By csrc's kernels; of few columns more than 4 rows are Triton's."""
    sizes = {**SIZE, "hidden_size": 512, "moe_intermediate_size": inner, "head_dim": 64}
    path = tiny_model_dir(tmp_path, "qwen3_moe", num_hidden_layers=6, **sizes)
    twin = load_file(path / "model.safetensors")
    write(path, *four_bits(form, twin, lambda name: ".mlp.experts." in name))
    plain = _drafts_change_no_text(path, eagle3_dir(tmp_path, **HEAD, target_size=512))
    gate_up, down = plain.executor.target.layers[3].mlp.experts.held
    for expert in range(gate_up.shape[0]):
        gate, up, last = (
            twin[f"model.layers.3.mlp.experts.{expert}.{part}_proj.weight"]
            for part in ("gate", "up", "down")
        )
        for weight, expected in ((gate_up, torch.cat([gate, up])), (down, last)):
            kept = ops.dequantize(weight.at(expert), torch.float32).cpu()
            torch.testing.assert_close(kept, expected, atol=0, rtol=1e-6)


def _drafts_change_no_text(path: Path, head: Path) -> LLM:
    """Returns a plain engine."""
    drafting = EagleDecodingConfig(
        max_draft_len=3, speculative_model=head, eagle3_layers_to_capture=[0, 1, 2]
    )
    make = partial(LLM, path, device="cuda", dtype="bfloat16", max_seq_len=128, max_batch_size=3)
    plain = make(cuda_graph_config=CudaGraphConfig())
    prompts = [[5, 9, 33, 7, 60, 2, 41], [17, 3, 8], list(range(3, 60))]
    asked = SamplingParams(max_tokens=24, ignore_eos=True)
    texts = [
        [output.outputs[0].token_ids for output in llm.generate(prompts, asked)]
        for llm in (plain, make(drafting, cuda_graph_config=CudaGraphConfig()))
    ]
    # In bf16 a text may part at a near-tie, where another number of rows is rounded otherwise.
    same = sum(
        a == b
        for ours, theirs in zip(*texts, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    assert same > 0.4 * 3 * 24  # by chance it would be one of 97
    llm = steady.engine(path, drafting)
    steady.launch(llm.executor)
    steady.finish(llm.executor)
    return plain


@pytest.mark.parametrize("method", ["pack-quantized", "nvfp4-pack-quantized"])
def test_experts_are_fp8_with_groups(tmp_path: Path, method: str) -> None:
    """Of 32 and of 16 columns: their text is the CPU's."""
    sizes = {"moe_intermediate_size": 64, "num_hidden_layers": 2}
    path = tiny_model_dir(tmp_path, "qwen3_moe", **SIZE, **sizes)
    twin = load_file(path / "model.safetensors")
    tensors, config = four_bits(Form(method), twin, lambda name: ".mlp.experts." in name)
    write(path, tensors, config)
    prompts = [[5, 9, 33, 7, 60, 2, 41], [17, 3, 8], [50, 51, 52, 53, 54]]
    asked = SamplingParams(max_tokens=24, ignore_eos=True)
    texts = []
    for device in ("cpu", "cuda"):
        llm = LLM(path, device=device, dtype="float32", max_seq_len=64, max_batch_size=3)
        if device == "cuda":
            experts = llm.executor.target.layers[0].mlp.experts
            assert [weight.group for weight in experts.held] == [32 if method[0] == "p" else 16] * 2
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, asked)])
    assert texts[0] == texts[1]
