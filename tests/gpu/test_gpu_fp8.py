"""The kernels of csrc with FP8 weights against float64, with what stands around a product."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import steady
import tiny
import tiny_dflash
import tiny_heads
import torch
import torch.nn.functional as F
from quantized import to_blocks
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
from tiny_dflash import dflash_dir
from tiny_heads import SIZE, eagle1_dir, eagle3_dir, mtp_model_dir
from torch import Tensor

from trtspec import (
    LLM,
    CudaGraphConfig,
    DFlashDecodingConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    SamplingParams,
)
from trtspec.checkpoints import place
from trtspec.config import DecodingBaseConfig
from trtspec.layers import fused, linear
from trtspec.layers.linear import Linear
from trtspec.layers.norm import RMSNorm
from trtspec.ops.layer.activation import SWIGLU
from trtspec.ops.layer.fp8 import FP8, Fp8Weight, dequantize, quantize, quantize_rows
from trtspec.ops.layer.rope import CacheWrite, Rope, apply_rope

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_KERNELS, reason="needs Hopper, nvcc and apache-tvm-ffi"),
]
# (in, out): small and large weights; sizes that do not divide by tiles of 16, or by groups.
SIZES = [(64, 24), (576, 960), (1536, 576), (192, 40), (4096, 1040), (2048, 4098), (14336, 512)]
ROWS = [1, 3, 8, 9, 17, 32, 33, 64, 100, 130, 260]


def _linear(size: int, out: int, group: int | None, bias: bool = False) -> Linear:
    layer = Linear(size, out, bias).cuda().to(torch.bfloat16)
    weight = quantize(_random(out, size, seed=1) * size**-0.5)
    if group is not None:
        scales = weight.scales * (1 + _random(out, -(-size // group), seed=2).float().abs())
        weight = Fp8Weight(weight.codes, scales, group)
    layer.hold_fp8(weight)
    if layer.bias is not None:
        layer.bias.data = _random(out, seed=2)
    return layer


def _taken(x: Tensor, layer: Linear, norm: RMSNorm | None = None) -> Tensor:
    """Returns the activations that a layer multiplies, float64: rounded ones, but for groups."""
    if layer.group < layer.in_features:
        return _exact(x, norm)
    rows = quantize_rows.__wrapped__(x, norm)  # type: ignore[attr-defined]
    return rows.codes.double() * rows.scales.double()[:, None]


def _product(x: Tensor, layer: Linear) -> Tensor:
    assert layer.weight is not None and layer.scales is not None
    scales = layer.scales.double().repeat_interleave(layer.group, 1)[:, : layer.in_features]
    bias = None if layer.bias is None else layer.bias.double()
    return F.linear(x, layer.weight.double() * scales, bias)


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("size", SIZES)
def test_linear(group: int | None, size: tuple[int, int], served: list[str]) -> None:  # noqa: F811
    plain, biased = (_linear(*size, group, bias) for bias in (False, True))
    norm = _norm(size[0], torch.bfloat16)
    for rows in ROWS:
        x = _random(rows, size[0] + 32)[:, : size[0]]  # rows apart in memory
        residual = _random(rows, size[1], seed=4)
        _close(fused.linear((x,), plain), _product(_taken(x, plain), plain))
        _close(fused.linear((x,), biased, (norm,)), _product(_taken(x, biased, norm), biased))
        expected = _product(_taken(x, plain), plain) + residual
        _close(fused.linear((x,), plain, residual=residual), expected)
        out = fused.linear((x,), plain, residual=residual, in_place=True)
        assert out.data_ptr() == residual.data_ptr()
        _close(out, expected)
    in_tiles = group is not None and size[0] % 128 == 0 and size[1] % 4 == 0
    few = 2 if group and size[0] == 14336 else 3  # of up to 8 rows
    assert served.count("linear") == 4 * few
    assert served.count("fp8_tiles") == 4 * in_tiles * (len(ROWS) - 1 - few)  # of up to 256


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("size", [(576, 960), (4096, 1040)])
def test_norms_with_an_offset(group: int | None, size: tuple[int, int], served: list[str]) -> None:  # noqa: F811
    """Gemma's and Qwen3.5's: their weights are differences from one."""
    layer, norm = _linear(*size, group), _norm(size[0], torch.bfloat16)
    norm.weight.data -= 1
    norm.offset = 1.0
    for rows in (1, 5, 8, 9):
        x = _random(rows, size[0])
        _close(fused.linear((x,), layer, (norm,)), _product(_taken(x, layer, norm), layer))
    in_tiles = group is not None and size[0] % 128 == 0
    assert served == ["linear"] * 3 + ["fp8_tiles"] * in_tiles


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("size", [(64, 32), (576, 3072), (2048, 4096)])
def test_swiglu(group: int | None, size: tuple[int, int], served: list[str]) -> None:  # noqa: F811
    layer, norm = _linear(*size, group, bias=True), _norm(size[0], torch.bfloat16)
    for rows in (1, 5, 8):
        x = _random(rows, size[0])
        gate, up = _product(_taken(x, layer, norm), layer).chunk(2, dim=-1)
        _close(fused.gated(x, layer, norm, SWIGLU), F.silu(gate) * up)
    assert served == ["linear_gated"] * 3


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("heads", [(9, 3, 64, 576), (32, 8, 128, 4096), (4, 4, 16, 64)])
def test_rope_and_cache(
    group: int | None,
    heads: tuple[int, int, int, int],
    served: list[str],  # noqa: F811
) -> None:
    q_heads, kv_heads, dim, size = heads
    layer, norm = _linear(size, (q_heads + 2 * kv_heads) * dim, group), _norm(size, torch.bfloat16)
    rows = 5
    x = _random(rows, size)
    angles = 10 * _random(40, dim // 2, dtype=torch.float32, seed=6)
    positions = torch.tensor([3, 39, 0, 7, 7], device="cuda")
    rope = Rope(torch.cat([angles.cos(), angles.sin()], -1), positions)
    slots = torch.tensor([7, 3, 0, 9, 4], device="cuda")
    k, v = (torch.zeros(12, kv_heads, dim, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    to = CacheWrite(k, v, slots, scratch_slot=11)
    q = fused.qkv_rope_and_write((x,), layer, (norm,), rope, q_heads, to)
    assert served == ["linear_rope"]
    qkv = _product(_taken(x, layer, norm), layer).view(rows, -1, dim)
    cos, sin = (t.double() for t in rope.rotation(torch.bfloat16))
    turned = apply_rope(qkv[:, : q_heads + kv_heads], cos, sin)
    _close(q, turned[:, :q_heads])
    _close(k[slots], turned[:, q_heads:])
    _close(v[slots], qkv[:, q_heads + kv_heads :])


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("size", [(576, 960), (4096, 2048), (8192, 512)])
def test_a_row_does_not_depend_on_the_others(group: int | None, size: tuple[int, int]) -> None:
    layer, norm = _linear(*size, group), _norm(size[0], torch.bfloat16)
    x, residual = _random(8, size[0]), _random(8, size[1], seed=4)
    normed = fused.linear((x,), layer, (norm,))
    added = fused.linear((x,), layer, residual=residual)
    for rows in range(1, 8):
        part = (x[:rows],)
        assert torch.equal(fused.linear(part, layer, (norm,)), normed[:rows])
        assert torch.equal(fused.linear(part, layer, residual=residual[:rows]), added[:rows])


@pytest.mark.parametrize("size", [(14336, 4096), (20480, 144)])
def test_long_rows(size: tuple[int, int], served: list[str]) -> None:  # noqa: F811
    """More columns than a thread holds at once. One row is nearly zero, one has a late largest."""
    layer = _linear(*size, None)
    for rows in (1, 4, 5, 6):  # 6 of 20,480 leave less room for weights on their way
        x, residual = _random(rows, size[0]), _random(rows, size[1], seed=4)
        x[-1] = 0
        x[-1, -1] = 2.0**-20
        x[0, size[0] - 8 :] *= 64  # the largest are the last
        expected = _product(_taken(x, layer), layer) + residual
        _close(fused.linear((x,), layer, residual=residual), expected)
    assert served == ["linear"] * 4


@pytest.mark.parametrize("group", [256, 64])
def test_every_code_is_read_exactly(group: int) -> None:
    """Also subnormal ones. Each row of x picks one code."""
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(FP8).clone()
    codes[torch.tensor([0x7F, 0xFF], device="cuda")] = 0.0  # NaN
    ones = torch.ones(64, 256 // group, device="cuda")
    weight = Fp8Weight(codes.repeat(64, 1), ones, group)
    layer = Linear(256, 64, bias=False).cuda().to(torch.bfloat16)
    layer.hold_fp8(weight)
    eye = torch.eye(256, dtype=torch.bfloat16, device="cuda")
    expected = dequantize(weight, torch.float32)
    assert torch.equal(expected, codes.float().repeat(64, 1))
    for rows in (8, 32, 64, 256):  # every kernel
        parts = [fused.linear((x,), layer).float() for x in eye.split(rows)]
        assert torch.equal(torch.cat(parts).T, expected)


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_an_mlp_is_its_layers(rows: int) -> None:
    up, down, norm = _linear(576, 3072, None), _linear(1536, 576, None), _norm(576, torch.bfloat16)
    hidden = _random(rows, 576)
    gate, value = _product(_taken(hidden, up, norm), up).chunk(2, dim=-1)
    inner = (F.silu(gate) * value).to(torch.bfloat16)
    expected = _product(_taken(inner, down), down) + hidden.double()
    out = fused.gated_mlp(hidden, up, down, norm, SWIGLU, adds=True)
    assert out.data_ptr() == hidden.data_ptr()
    error = (out.double() - expected).abs()
    assert error.max() < 0.05 * expected.abs().max()  # codes near a tie may go the other way
    assert error.mean() < 0.01 * expected.abs().mean()


@pytest.mark.parametrize("size", [(576, 960), (4096, 1040)])
def test_few_and_many_rows_have_the_same_codes(size: tuple[int, int]) -> None:
    """So that what a row gives differs by the rounding of sums alone."""
    layer, norm = _linear(*size, None), _norm(size[0], torch.bfloat16)
    x = _random(40, size[0])
    many = fused.linear((x,), layer, (norm,))
    few = torch.cat([fused.linear((part,), layer, (norm,)) for part in x.split(8)])
    assert (many.float() - few.float()).abs().max() < 2**-7 * few.float().abs().max()


# -- drafters --------------------------------------------------------------------------------------
def _drafter(kind: str, folder: Path) -> DecodingBaseConfig:
    if kind == "eagle3":  # rows of a multiple of 64, which csrc reads
        head = eagle3_dir(folder, size=192, target_size=SIZE, own_embedding=True)
        return EagleDecodingConfig(
            max_draft_len=3, speculative_model=head, eagle3_layers_to_capture=[0, 1, 2], quant="fp8"
        )
    if kind == "dflash":
        head = dflash_dir(folder, draft_vocab=40)
        return DFlashDecodingConfig(max_draft_len=4, speculative_model=head, quant="fp8")
    if kind == "eagle1":  # its lm_head is the target's
        head = eagle1_dir(folder)
        return EagleDecodingConfig(max_draft_len=3, speculative_model=head, quant="fp8")
    model = tiny_model_dir(folder, seed=5, hidden_size=128, num_attention_heads=4)
    return DraftTargetDecodingConfig(max_draft_len=3, speculative_model=model, quant="fp8")


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "eagle1", "draft_target"])
def test_quantised_drafters(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their logits are those of the CPU with the same codes, and greedy text is the target's."""
    monkeypatch.setitem(tiny.DEFAULTS, "vocab_size", 96)  # of which an lm_head in FP8 can be made
    for module in (tiny_heads, tiny_dflash):
        monkeypatch.setattr(module, "VOCAB", 96)
    target, config = tiny_model_dir(tmp_path, num_hidden_layers=6), _drafter(kind, tmp_path)
    prompts = [[5, 9, 33, 7, 60, 2, 41], [17, 3, 8], [50, 51, 52, 53, 54]]
    asked = SamplingParams(max_tokens=24, ignore_eos=True)
    make = partial(LLM, target, dtype="float32", max_seq_len=64, max_batch_size=3)
    plain = make(device="cpu").generate(prompts, asked)
    expected = [output.outputs[0].token_ids for output in plain]
    monkeypatch.setattr(place, "has_fp8", lambda device: True)
    monkeypatch.setattr(linear, "_can_pack", lambda dtype: False)  # packed weights are not copied
    logits: dict[str, list[Tensor]] = {"cpu": [], "cuda": []}
    for device, made in logits.items():
        llm = make(config, device=device, cuda_graph_config=None)
        model = llm.executor.draft_model
        compute = model.compute_logits
        model.compute_logits = lambda *a, made=made, compute=compute: (
            made.append(compute(*a)) or made[-1]
        )
        outputs = llm.generate(prompts, asked)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert sum(isinstance(m, Linear) and m.fp8 is not None for m in model.modules()) >= 3
    # Later passes read drafts. A sum that differs by 1e-4 makes an activation another code here and
    # there, so that logits of these small models differ by up to 0.15 of their deviation.
    ours, theirs = logits["cuda"][0].cpu(), logits["cpu"][0]
    assert (ours - theirs).square().mean().sqrt() < 0.25 * theirs.std()
    outputs = make(config, device="cuda", cuda_graph_config=CudaGraphConfig()).generate(
        prompts, asked
    )
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_an_mtp_layer_in_an_fp8_checkpoint(tmp_path: Path) -> None:
    """It stays FP8 without an option, and greedy text is the target's."""
    sizes: dict[str, Any] = {"moe_intermediate_size": 32, "v_head_dim": 16}
    path = mtp_model_dir(tmp_path, layout="deepseek_v3", num_mtp_layers=1, **sizes)
    to_blocks(path, (16, 32))
    prompts = [[5, 9, 33, 7, 60, 2, 41], [17, 3, 8], [50, 51, 52, 53, 54]]
    asked = SamplingParams(max_tokens=24, ignore_eos=True)
    make = partial(LLM, path, device="cuda", dtype="float32", max_seq_len=64, max_batch_size=3)
    expected = [output.outputs[0].token_ids for output in make().generate(prompts, asked)]
    llm = make(MTPDecodingConfig(max_draft_len=3))
    modules = dict(llm.executor.draft_model.named_modules())
    parts = {
        name.rpartition(".")[2]
        for name, module in modules.items()
        if getattr(module, "fp8", None) is not None or getattr(module, "kind", None) is Fp8Weight
    }
    assert parts == {"o_proj", "gate_up_proj", "down_proj", "experts"}
    outputs = llm.generate(prompts, asked)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert sum(output.spec_stats.num_draft_tokens for output in outputs) > 0


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "eagle1", "draft_target"])
def test_a_step_with_a_quantised_drafter_is_one_graph_that_waits_for_nothing(
    kind: str, tmp_path: Path
) -> None:
    target = tiny_model_dir(tmp_path, num_hidden_layers=6)
    llm = steady.engine(target, _drafter(kind, tmp_path))
    steady.launch(llm.executor)
    steady.finish(llm.executor)
