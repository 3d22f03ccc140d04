"""FP8 weights that stay so: codes bit for bit, logits those of float64, also over ranks.

Engines keep them on CUDA. Here `WeightForm(keeps_fp8=True)` says so on the CPU.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import oracle
import pytest
import tiny
import tiny_dflash
import tiny_heads
import torch
from loading import ON_CPU, UNPACKED_HEAD
from oracle import prompt_tensors, random_prompts
from quantized import FP8, LEFT_OUT, Tensors, compressed, other, to_blocks, write
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRanks
from tiny import prefill_metadata, tiny_model_dir
from tiny_dflash import dflash_dir
from tiny_gemma import gemma_dir
from tiny_gemma_moe import moe_dir
from tiny_heads import eagle1_dir, eagle3_dir, mtp_model_dir
from tiny_step import MOE as STEP_MOE
from tiny_step import step_dir
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from trtspec import (
    LLM,
    CheckpointError,
    ConfigError,
    DFlashDecodingConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    SamplingParams,
)
from trtspec.checkpoints import place
from trtspec.checkpoints.heads import load as head_loading
from trtspec.checkpoints.heads.load import load_head
from trtspec.checkpoints.heads.records import HeadRequest
from trtspec.checkpoints.place import WeightForm, weight_form
from trtspec.checkpoints.tensors import TensorSource
from trtspec.checkpoints.weights import load_decoder
from trtspec.distributed.comm import Communicator
from trtspec.distributed.logits import gather_logits
from trtspec.distributed.parallel import ONE_RANK, Cut, Parallel
from trtspec.executor import build, drafters
from trtspec.layers import linear
from trtspec.layers.experts import Experts
from trtspec.layers.linear import Linear
from trtspec.models.decoder import Decoder
from trtspec.ops.experts.torch import grouped_experts
from trtspec.ops.layer.fp8 import Fp8Weight, dequantize, quantize

CPU, F32 = torch.device("cpu"), torch.float32
KEPT = WeightForm(keeps_fp8=True)
QUANTIZED = WeightForm(keeps_fp8=True, quantizes=True)
ROUNDED = WeightForm(quantizes=True)

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def _exact_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading is compared to float64 without the rounding of activations."""
    monkeypatch.setattr(Fp8Weight, "by_rows", property(lambda weight: False))


def load(
    path: Path, form: WeightForm = KEPT, pack: bool = True, parallel: Parallel = ONE_RANK
) -> Decoder:
    return load_decoder(path, replace(ON_CPU, form=form, pack=pack), parallel)


def logits_of(model: Decoder) -> Tensor:
    prompts = prompt_tensors(90)
    meta, positions = prefill_metadata(model.config, [len(prompt) for prompt in prompts])
    return gather_logits(model.compute_logits(model(torch.cat(prompts), positions, meta)))


@torch.no_grad()
def check_logits(path: Path, twin: Path) -> None:
    """Those of the model with FP8 weights are those of their exact values in float64."""
    exact = AutoModelForCausalLM.from_pretrained(
        twin, dtype=torch.float64, attn_implementation="eager", local_files_only=True
    ).eval()
    expected = torch.cat([exact(prompt[None]).logits[0] for prompt in prompt_tensors(90)])
    assert expected.std() > 0.4
    torch.testing.assert_close(logits_of(load(path)).double(), expected, atol=1e-4, rtol=1e-4)


def products(model: Decoder) -> dict[str, Linear]:
    return {n: m for n, m in model.layers.named_modules() if isinstance(m, Linear)}


def stacks(experts: Experts) -> list[Fp8Weight]:
    """Of FP8 experts, flattened: all rows of gate and up, and of down."""
    assert experts.held is not None
    return [
        Fp8Weight(codes.flatten(0, 1), scales.flatten(0, 1), group)
        for codes, scales, group in experts.held
    ]


FORMATS: dict[str, Callable[[Tensors], tuple[Tensors, dict[str, Any]]]] = {
    **{f"compressed {s}": lambda t, s=s: compressed(s, "float", t)  # type: ignore[misc]
       for s in ("tensor", "channel", "block")},
    **{form: lambda t, form=form: other(form, t)  # type: ignore[misc]
       for form in ("fp8", "fp8 inverse", "fp8 blocks", "fbgemm_fp8", "modelopt", "modelopt rows",
                    "modelopt blocks")},
}  # fmt: skip


def checkpoint_of(form: str, tmp_path: Path, **sizes: Any) -> tuple[Path, Path, Tensors, Tensors]:
    """A quantised checkpoint and its float twin: directories and tensors."""
    sizes = {"hidden_size": 144, "num_attention_heads": 6, "num_key_value_heads": 2, **sizes}
    path, twin_path = tiny_model_dir(tmp_path, **sizes), tiny_model_dir(tmp_path, **sizes)
    twin = load_file(path / "model.safetensors")
    tensors, config = FORMATS[form](twin)
    write(path, tensors, config)
    write(twin_path, twin, None)
    return path, twin_path, tensors, twin


@pytest.mark.parametrize("form", FORMATS)
def test_codes_stay_and_logits_are_float64s(tmp_path: Path, form: str) -> None:
    path, twin_path, tensors, twin = checkpoint_of(form, tmp_path)
    model = load(path)
    assert model.lm_head.scales is None and model.embed_tokens.weight.dtype == torch.float32
    for i, layer in enumerate(model.layers):
        for module, parts in {
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "self_attn.o_proj": ("self_attn.o_proj",),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.down_proj": ("mlp.down_proj",),
        }.items():
            names = [f"model.layers.{i}.{part}.weight" for part in parts]
            weight = layer.get_submodule(module).fp8
            if names == [LEFT_OUT]:
                assert weight is None
                continue
            assert weight is not None
            codes = torch.cat([tensors[name] for name in names])
            assert torch.equal(weight.codes.view(torch.uint8), codes.view(torch.uint8))
            assert weight.scales.dtype == torch.float32
            exact = torch.cat([twin[name] for name in names])
            assert torch.equal(dequantize(weight, torch.float32), exact)
    check_logits(path, twin_path)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_an_engine_says_the_floats_text(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, twin_path, _, _ = checkpoint_of(form, tmp_path)
    caplog.set_level(logging.INFO, "trtspec")
    expected = texts(twin_path)
    assert texts(path) == expected
    assert f"{path}: quantised weights are read as floats" in caplog.text
    assert "have FP8 weights" not in caplog.text
    monkeypatch.setattr(build, "weight_form", lambda quant, device: KEPT)
    assert texts(path) == expected
    assert "11 matrices have FP8 weights" in caplog.text


@torch.no_grad()
@pytest.mark.parametrize("form", ["compressed channel", "fp8"])
def test_activations_are_rounded_by_rows(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by hooks on transformers' layers, in float64.

    A value near a tie may be rounded the other way, and shows in the rows that follow it.
    """
    monkeypatch.undo()
    path, twin_path, _, _ = checkpoint_of(form, tmp_path)
    exact = AutoModelForCausalLM.from_pretrained(
        twin_path, dtype=torch.float64, attn_implementation="eager", local_files_only=True
    ).eval()
    prompts = prompt_tensors(90)
    floats = torch.cat([exact(prompt[None]).logits[0] for prompt in prompts])

    def rounded(module: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        scales = inputs[0].abs().amax(-1, keepdim=True) / 448
        return ((inputs[0] / scales).to(FP8).double() * scales,)

    for name, module in exact.model.layers.named_modules():
        if name.endswith("_proj") and f"model.layers.{name}.weight" != LEFT_OUT:
            module.register_forward_pre_hook(rounded)
    expected = torch.cat([exact(prompt[None]).logits[0] for prompt in prompts])
    ours = logits_of(load(path)).double()
    assert ((ours - expected).abs().mean(1) < 1e-4).double().mean() > 0.3
    assert ((ours - floats).abs().mean(1) > 1e-2).double().mean() > 0.9


def texts(path: Path, config: Any = None, **options: Any) -> list[list[int]]:
    llm = LLM(path, config, device="cpu", dtype="float32", max_seq_len=64, **options)
    outputs = llm.generate(random_prompts(3), SamplingParams(max_tokens=12, ignore_eos=True))
    if config is not None:
        assert sum(output.spec_stats.num_draft_tokens for output in outputs) > 0
    llm.shutdown()
    return [output.outputs[0].token_ids for output in outputs]


def fp8_modules(model: nn.Module) -> set[str]:
    """Returns the last names of modules whose weights are FP8."""
    named = model.named_modules()
    return {n.rpartition(".")[2] for n, m in named if _is_fp8(m)}


def _is_fp8(module: nn.Module) -> bool:
    if isinstance(module, Linear):
        return module.fp8 is not None
    return isinstance(module, Experts) and module.kind is Fp8Weight


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_what_keeps_fp8(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that does not multiply FP8 gets floats with the same values, as the CPU does."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda, multiplies = torch.device("cuda", 0), capability >= (8, 9)
    assert weight_form(None, CPU) == WeightForm()
    assert weight_form("fp8", CPU) == ROUNDED
    assert weight_form(None, cuda) == (KEPT if multiplies else WeightForm())
    assert weight_form("fp8", cuda) == (QUANTIZED if multiplies else ROUNDED)


def test_a_stack_of_fp8_and_floats_is_floats(tmp_path: Path) -> None:
    path, _, tensors, twin = checkpoint_of("fp8", tmp_path)
    raw = json.loads((path / "config.json").read_text())
    tensors[Q] = twin[Q]
    del tensors[f"{Q}_scale"]
    write(path, tensors, raw["quantization_config"])
    qkv, o = (products(load(path))[f"1.self_attn.{n}_proj"] for n in ("qkv", "o"))
    assert qkv.fp8 is None and qkv.weight is None and o.fp8 is not None  # packed
    # Asked to quantise, it quantises that part alone.
    weight = products(load(path, QUANTIZED))["1.self_attn.qkv_proj"].fp8
    k = tensors[Q.replace("q_proj", "k_proj")]
    assert weight is not None and torch.equal(weight.codes[144:192].float(), k.float())
    assert torch.equal(weight.codes[:144].float(), quantize(twin[Q]).codes.float())


@pytest.mark.parametrize(("block", "size"), [((16, 24), 144), ((16, 128), 152)])
def test_sizes_that_products_do_not_read_are_floats(
    tmp_path: Path, block: tuple[int, int], size: int
) -> None:
    path = tiny_model_dir(
        tmp_path, hidden_size=size, num_attention_heads=4, num_key_value_heads=2, head_dim=24
    )
    twin = to_blocks(path, block)
    model = load(path)
    assert products(model)["0.self_attn.qkv_proj"].fp8 is None
    assert (products(model)["0.mlp.down_proj"].fp8 is None) == (block[1] == 24)
    check_logits(path, twin)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("form", [WeightForm(), KEPT, QUANTIZED])
def test_codes_that_are_nan_are_refused(tmp_path: Path, code: int, form: WeightForm) -> None:
    path, _, tensors, _ = checkpoint_of("modelopt rows", tmp_path)
    raw = json.loads((path / "config.json").read_text())
    tensors[Q].view(torch.uint8)[3, 5] = code
    write(path, tensors, raw["quantization_config"])
    with pytest.raises(CheckpointError, match=rf"{Q} in .* holds 1 weights that are NaN"):
        load(path, form)


def test_scales_that_are_infinite_are_refused(tmp_path: Path) -> None:
    path, _, tensors, _ = checkpoint_of("fp8", tmp_path)
    raw = json.loads((path / "config.json").read_text())
    tensors[f"{Q}_scale"] = torch.tensor(float("inf"))
    write(path, tensors, raw["quantization_config"])
    with pytest.raises(CheckpointError, match=rf"{Q}_scale in .* holds 1 scales that are NaN"):
        load(path)


# -- experts, latent attention, ranks --------------------------------------------------------------
MODELS: dict[str, tuple[Callable[[Path], Path], list[tuple[int, int]]]] = {
    # name: how it is made, (ranks, of which share out experts). Widths are cut within blocks.
    "llama": (
        lambda p: tiny_model_dir(p, num_attention_heads=8, head_dim=16, intermediate_size=192),
        [(2, 1), (4, 1)],
    ),
    "gemma4": (lambda p: gemma_dir(p, "gemma4_text", num_global_key_value_heads=2), [(2, 1)]),
    "gemma4_small": (lambda p: gemma_dir(p, "gemma4_small", num_global_key_value_heads=2), []),
    "deepseek": (
        lambda p: tiny_model_dir(p, "deepseek_v3", moe_intermediate_size=64, q_lora_rank=32,
                                 v_head_dim=16),
        [(2, 1), (2, 2)],
    ),
    "qwen3_moe": (
        lambda p: tiny_model_dir(p, "qwen3_moe", moe_intermediate_size=96), [(2, 1), (2, 2)]
    ),
    "minimax_m2": (lambda p: tiny_model_dir(p, "minimax_m2", intermediate_size=64), []),
    "phi3": (lambda p: tiny_model_dir(p, "phi3", intermediate_size=96), [(2, 1)]),
    "step": (
        lambda p: step_dir(p, **{**STEP_MOE, "moe_intermediate_size": 32}), [(2, 1), (2, 2)]
    ),
}  # fmt: skip
CASES = [(name, *ranks) for name, (_, splits) in MODELS.items() for ranks in splits]
HAVE_EXPERTS = {"deepseek", "qwen3_moe", "step", "minimax_m2"}


@pytest.mark.parametrize("name", MODELS)
def test_every_family(tmp_path: Path, name: str) -> None:
    path = MODELS[name][0](tmp_path)
    twin = to_blocks(path, (16, 64))
    model, floats = load(path), load(twin, pack=False)
    kept = {n for n, m in products(model).items() if m.fp8 is not None}
    per_layer = {n for n in products(model) if "per_layer" in n}
    assert kept >= {n for n, m in products(model).items() if m.in_features % 16 == 0} - per_layer
    assert not kept & per_layer and bool(per_layer) == (name == "gemma4_small")
    mixtures = {n: m for n, m in model.layers.named_modules() if isinstance(m, Experts)}
    assert bool(mixtures) == (name in HAVE_EXPERTS)
    for module, experts in mixtures.items():
        same = floats.layers.get_submodule(module)
        for stack, exact in zip(stacks(experts), (same.gate_up_proj, same.down_proj), strict=True):
            assert torch.equal(dequantize(stack, torch.float32), exact.data.flatten(0, 1))
        # What CUDA runs without kernels of its own.
        x = torch.randn(5, experts.size, generator=torch.Generator().manual_seed(0))
        ids, weights = torch.tensor([[0, 3], [1, 2], [4, 5], [0, 1], [3, 4]]), torch.rand(5, 2)
        assert experts.held is not None
        out = grouped_experts(x, ids, weights, *experts.held, experts.gate_and_mul)
        torch.testing.assert_close(out, same(x, ids, weights), atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(model), logits_of(floats), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scales", ["tensor", "rows", "blocks"])
def test_experts_in_one_tensor_stay_fp8(tmp_path: Path, scales: str) -> None:
    """Each expert's part of it is."""
    path = tiny_model_dir(tmp_path, "qwen3_moe", hidden_size=64, moe_intermediate_size=96)
    twin = load_file(path / "model.safetensors")
    tensors, (height, width) = (
        dict(twin),
        {"tensor": (0, 0), "rows": (1, 0), "blocks": (16, 32)}[scales],
    )
    for stem in {name.partition(".experts.")[0] for name in twin if ".experts." in name}:
        of_expert = [
            {p: tensors.pop(f"{stem}.experts.{e}.{p}_proj.weight") for p in ("gate", "up", "down")}
            for e in range(6)
        ]
        whole = {
            "gate_up_proj": torch.stack([torch.cat([w["gate"], w["up"]]) for w in of_expert]),
            "down_proj": torch.stack([w["down"] for w in of_expert]),
        }
        for name, stack in whole.items():
            rows, columns = height or stack.shape[1], width or stack.shape[2]
            blocks = stack.unflatten(1, (-1, rows)).unflatten(3, (-1, columns))
            scale = blocks.abs().amax((2, 4)) / 448 * 1.3
            spread = scale.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
            codes = (stack / spread).to(FP8)
            full = f"{stem}.experts.{name}"
            tensors |= {
                full: codes,
                f"{full}_scale_inv": scale if scales == "blocks" else scale[..., 0],
            }
            if scales == "tensor":
                tensors[f"{full}_scale_inv"] = scale[:, 0, 0]
            parts = (codes.float() * spread).unbind()
            for e, part in enumerate(parts):
                if name == "down_proj":
                    twin[f"{stem}.experts.{e}.down_proj.weight"] = part
                else:
                    for half, value in zip(("gate", "up"), part.chunk(2), strict=True):
                        twin[f"{stem}.experts.{e}.{half}_proj.weight"] = value.contiguous()
    write(path, twin, None)
    floats = load(path, WeightForm(), pack=False)
    block = {"weight_block_size": [16, 32]} if scales == "blocks" else {}
    write(path, tensors, {"quant_method": "fp8", **block})
    model = load(path)
    for layer, same in zip(model.layers, floats.layers, strict=True):
        experts = layer.mlp.experts
        for stack, exact in zip(
            stacks(experts),
            (same.mlp.experts.gate_up_proj, same.mlp.experts.down_proj),
            strict=True,
        ):
            torch.testing.assert_close(dequantize(stack, torch.float32), exact.data.flatten(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "expert_ranks"), CASES)
@pytest.mark.parametrize("how", ["kept", "quantised", "rounded"])
def test_ranks_equal_one(tmp_path: Path, name: str, size: int, expert_ranks: int, how: str) -> None:
    path = MODELS[name][0](tmp_path)
    if how == "kept":
        to_blocks(path, (16, 64))
    form = {"kept": KEPT, "quantised": QUANTIZED, "rounded": ROUNDED}[how]
    with torch.no_grad():
        expected = logits_of(load(path, form))

    def of_rank(comm: Communicator) -> Tensor:
        return logits_of(load(path, form, parallel=Parallel(comm, expert_ranks)))

    results = ThreadRanks(size).run(of_rank)
    torch.testing.assert_close(results[0], expected, atol=1e-4, rtol=1e-4)


def test_each_rank_reads_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model_dir(tmp_path, num_attention_heads=8, head_dim=16)
    to_blocks(path, (16, 64))
    read: dict[str, int] = {}
    original = TensorSource.read

    def counted(source: TensorSource, cut: Cut | None = None) -> Tensor:
        tensor = original(source, cut)
        if tensor.dtype == FP8:
            read[source.name] = read.get(source.name, 0) + tensor.numel()
        return tensor

    monkeypatch.setattr(TensorSource, "read", counted)
    ThreadRanks(2).run(lambda comm: load(path, KEPT, parallel=Parallel(comm)))
    tensors = load_file(path / "model.safetensors")
    assert read == {n: t.numel() for n, t in tensors.items() if t.dtype == FP8}


# -- quantising at load ----------------------------------------------------------------------------
@pytest.mark.parametrize("rows_at_once", [1 << 24, 500])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma4_moe"])
def test_floats_become_fp8_by_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, rows_at_once: int
) -> None:
    """In pieces: what that takes beside the model is small, even where experts are one stack."""
    sizes = {"moe_intermediate_size": 32}
    if family == "gemma4_moe":
        path = moe_dir(tmp_path, **sizes)
    else:
        path = tiny_model_dir(tmp_path, family, **(sizes if family == "qwen3_moe" else {}))
    monkeypatch.setattr(place, "WEIGHTS_AT_ONCE", rows_at_once)
    pieces = []

    def counted(weight: Tensor) -> Fp8Weight:
        pieces.append(weight.numel())
        return quantize(weight)

    monkeypatch.setattr(place, "quantize", counted)
    model, rounded = load(path, QUANTIZED), load(path, ROUNDED, pack=False)
    assert max(pieces) <= rows_at_once
    floats = load(path, WeightForm(), pack=False)
    for name, module in floats.layers.named_modules():
        if isinstance(module, Linear):
            held = model.layers.get_submodule(name).fp8
            pairs = [(held, module.weight, rounded.layers.get_submodule(name).weight)]
        elif isinstance(module, Experts):
            same = rounded.layers.get_submodule(name)
            up, down = stacks(model.layers.get_submodule(name))
            pairs = [
                (up, module.gate_up_proj.flatten(0, 1), same.gate_up_proj.flatten(0, 1)),
                (down, module.down_proj.flatten(0, 1), same.down_proj.flatten(0, 1)),
            ]
        else:
            continue
        for weight, original, in_floats in pairs:
            expected = quantize(original.data)
            assert torch.equal(weight.codes.float(), expected.codes.float())
            assert torch.equal(weight.scales, expected.scales)
            assert torch.equal(dequantize(weight, torch.float32), in_floats.data)
            step = original.abs().amax(1, keepdim=True) / 448 * 16.01  # half of 32, at the largest
            assert ((in_floats - original).abs() <= step).all()
            assert not torch.equal(in_floats, original)
    assert torch.equal(rounded.lm_head.weight, floats.lm_head.weight)
    with torch.no_grad():
        torch.testing.assert_close(logits_of(model), logits_of(rounded), atol=1e-4, rtol=1e-4)


def test_quantising_an_fp8_checkpoint_changes_nothing(tmp_path: Path) -> None:
    path, _, _, _ = checkpoint_of("fp8 blocks", tmp_path)
    kept, quantized = products(load(path)), products(load(path, QUANTIZED))
    for name, module in kept.items():
        ours, other_way = module.fp8, quantized[name].fp8
        assert other_way is not None
        if ours is not None:  # but for what the checkpoint left out
            assert torch.equal(ours.codes.float(), other_way.codes.float())
            assert torch.equal(ours.scales, other_way.scales) and ours.group == other_way.group


def test_an_engine_of_quantised_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what a checkpoint of the rounded weights says: alone, on two ranks, and in FP8."""
    path, twin_path = tiny_model_dir(tmp_path), tiny_model_dir(tmp_path)
    twin = load_file(path / "model.safetensors")
    for name, weight in twin.items():
        if "proj.weight" in name:
            twin[name] = dequantize(quantize(weight), torch.float32)
    write(twin_path, twin, None)
    expected = texts(twin_path)
    assert texts(path) != expected
    assert texts(path, quant="fp8") == expected
    assert texts(path, quant="fp8", tensor_parallel_size=2) == expected
    monkeypatch.setattr(build, "weight_form", lambda quant, device: QUANTIZED)
    assert texts(path, quant="fp8") == expected


def test_rows_of_zeros_and_of_tiny_numbers_stay_so() -> None:
    weight = torch.tensor([[0.0, 0.0], [1e-44, 0.0], [-3.0, 1.5]])
    exact = dequantize(quantize(weight), torch.float32)
    assert torch.equal(exact, torch.tensor([[0.0, 0.0], [0.0, 0.0], [-3.0, 1.5]]))


def test_weights_that_are_nan_are_not_quantised(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors[Q][1, 2] = float("nan")
    write(path, tensors, None)
    with pytest.raises(CheckpointError, match=rf"{Q} in .* NaN or infinite, which FP8 has not"):
        load(path, ROUNDED)


@pytest.mark.parametrize("quant", ["int4", "FP8", 8])
def test_other_kinds_are_refused(quant: Any) -> None:
    with pytest.raises(ConfigError, match=r"quant=.*: use 'fp8' or None"):
        LLM("smollm2-135m", quant=quant)


# -- drafters --------------------------------------------------------------------------------------
LATENT: dict[str, Any] = {
    "layout": "deepseek_v3", "num_mtp_layers": 1, "moe_intermediate_size": 32, "v_head_dim": 16,
}  # fmt: skip
OF_HEADS = {"o_proj", "gate_up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("mode", "fp8_parts"),
    [
        ("mtp", {*OF_HEADS, "experts"}),
        ("eagle3", set()),
        ("draft_target", {*OF_HEADS, "qkv_proj"}),
    ],
)
def test_drafters_over_fp8_targets(
    tmp_path: Path, mode: str, fp8_parts: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter is what its own checkpoint has: an MTP layer in an FP8 one FP8, a head of floats
    that shares its ends floats."""
    path = mtp_model_dir(tmp_path, **LATENT) if mode == "mtp" else tiny_model_dir(tmp_path)
    twin = to_blocks(path, (16, 32))
    config: Any = {
        "mtp": lambda: MTPDecodingConfig(num_nextn_predict_layers=1),
        "eagle3": lambda: EagleDecodingConfig(
            max_draft_len=3,
            speculative_model=eagle3_dir(tmp_path),
            eagle3_layers_to_capture=[0, 1, 2],
        ),
        "draft_target": lambda: DraftTargetDecodingConfig(max_draft_len=3, speculative_model=path),
    }[mode]()
    expected, exact = texts(twin), drafted(path, config)[1]
    monkeypatch.setattr(place, "has_fp8", lambda device: True)
    assert texts(path, config) == expected
    assert are_close(drafted(path, config)[1], exact)
    executor = LLM(path, config, device="cpu", dtype="float32", max_seq_len=64).executor
    assert fp8_modules(executor.draft_model) == fp8_parts
    executor.shutdown()


HEADS: dict[str, tuple[Callable[[Path], Path], Callable[..., Any], set[str]]] = {
    "eagle3": (
        eagle3_dir,
        partial(EagleDecodingConfig, max_draft_len=3, eagle3_layers_to_capture=[0, 1, 2]),
        {*OF_HEADS, "lm_head"},
    ),
    "eagle1": (eagle1_dir, partial(EagleDecodingConfig, max_draft_len=3), OF_HEADS),
    "dflash": (
        partial(dflash_dir, draft_vocab=40),
        partial(DFlashDecodingConfig, max_draft_len=4),
        {*OF_HEADS, "lm_head"},
    ),
    "dflash2": (
        partial(dflash_dir, path={}),
        partial(DFlashDecodingConfig, max_draft_len=4),
        OF_HEADS,
    ),
    "mtp": (
        partial(mtp_model_dir, **LATENT),
        partial(MTPDecodingConfig, num_nextn_predict_layers=1),
        {*OF_HEADS, "experts"},
    ),
    "draft_target": (
        partial(tiny_model_dir, seed=5),
        partial(DraftTargetDecodingConfig, max_draft_len=3),
        {*OF_HEADS, "qkv_proj"},
    ),
}
"""Its directory, its config, and the modules whose weights `quant="fp8"` makes FP8."""


def drafted(path: Path, config: Any, **options: Any) -> tuple[list[list[int]], list[Tensor]]:
    """Returns the tokens of some requests, and the logits that their drafts were chosen by."""
    llm = LLM(path, config, device="cpu", dtype="float32", max_seq_len=64, **options)
    logits: list[Tensor] = []
    if config is not None:
        model = llm.executor.draft_model
        compute_logits = model.compute_logits

        def keep(*arguments: Any) -> Any:
            logits.append(compute_logits(*arguments))
            return logits[-1]

        model.compute_logits = keep
    outputs = llm.generate(random_prompts(4), SamplingParams(max_tokens=12, ignore_eos=True))
    llm.shutdown()
    return [output.outputs[0].token_ids for output in outputs], logits


def are_close(ours: list[Tensor], others: list[Tensor]) -> bool:
    return len(ours) == len(others) and all(
        torch.allclose(a, b, atol=1e-4, rtol=1e-4) for a, b in zip(ours, others, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_a_quantised_drafter_is_one_of_the_rounded_weights(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, and in FP8. What is generated stays the target's, on two ranks too."""
    make, config_of, modules = HEADS[kind]
    head, twin = make(tmp_path), make(tmp_path)
    target = head if kind == "mtp" else tiny_model_dir(tmp_path, num_hidden_layers=6)
    tensors = load_file(twin / "model.safetensors")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}
    rounded = {f"{part}.weight" for module in modules for part in parts.get(module, (module,))}
    for name, weight in tensors.items():
        if ".".join(name.split(".")[-2:]) in rounded:
            tensors[name] = dequantize(quantize(weight), torch.float32)
    save_file(tensors, twin / "model.safetensors", metadata={"format": "pt"})
    quantised = config_of(speculative_model=head, quant="fp8")
    plain, _ = drafted(target, None)
    tokens, exact = drafted(target, config_of(speculative_model=twin))
    assert tokens == plain and exact
    assert not are_close(drafted(target, config_of(speculative_model=head))[1], exact), (
        "nothing is rounded"
    )
    for module in (head_loading, drafters):
        monkeypatch.setattr(module, "lm_head_for_drafts", lambda lm_head, form: lm_head)
    for _ in ("floats with FP8's values", "FP8"):
        tokens, logits = drafted(target, quantised)
        assert tokens == plain and are_close(logits, exact)
        monkeypatch.setattr(place, "has_fp8", lambda device: True)
    assert drafted(target, quantised, tensor_parallel_size=2)[0] == plain
    llm = LLM(target, quantised, device="cpu", dtype="float32", max_seq_len=64)
    assert fp8_modules(llm.executor.draft_model) == modules
    llm.shutdown()


@pytest.fixture
def set_vocabulary(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Gives the models and prompts made from now on so many tokens."""

    def set_size(size: int) -> None:
        monkeypatch.setitem(tiny.DEFAULTS, "vocab_size", size)
        for module in (tiny_heads, tiny_dflash, oracle):
            monkeypatch.setattr(module, "VOCAB", size)

    return set_size


@pytest.mark.parametrize("kind", ["eagle1", "dflash2", "mtp", "draft_target"])
def test_drafts_are_chosen_by_a_copy_of_the_lm_head(
    tmp_path: Path,
    kind: str,
    set_vocabulary: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In FP8. A head's is of the target's, which verifies by its own as before."""
    make, config_of, modules = HEADS[kind]
    set_vocabulary(96)
    head = make(tmp_path)
    target = head if kind == "mtp" else tiny_model_dir(tmp_path, num_hidden_layers=6)
    config = config_of(speculative_model=head, quant="fp8")
    make_llm = partial(LLM, target, device="cpu", dtype="float32", max_seq_len=64)
    plain, _ = drafted(target, None)
    monkeypatch.setattr(place, "has_fp8", lambda device: True)
    monkeypatch.setattr(linear, "_can_pack", lambda dtype: False)  # as on a GPU
    llm = make_llm(config)
    model, theirs = llm.executor.draft_model, llm.executor.target.lm_head
    if kind == "draft_target":
        ours, exact = model.lm_head, load(head, pack=False).lm_head.weight
    else:
        ours, exact = model.lm_head_of_step(0), theirs.weight
        assert model.shares_lm_head and model.lm_head_of_step(1) is ours
    assert theirs.fp8 is None and ours.fp8 is not None
    assert torch.equal(dequantize(ours.fp8, F32), dequantize(quantize(exact), F32))
    assert fp8_modules(model) == {*modules, "lm_head"}
    outputs = llm.generate(random_prompts(4), SamplingParams(max_tokens=12, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == plain
    llm.shutdown()
    executor = make_llm(replace(config, quant=None)).executor
    assert fp8_modules(executor.draft_model) == set()
    executor.shutdown()


def test_each_rank_copies_its_part_of_a_shared_lm_head(
    tmp_path: Path, set_vocabulary: Callable[[int], None]
) -> None:
    """Of 63 tokens two ranks have 32 rows, the last of which is no token's."""
    set_vocabulary(63)
    target, path = tiny_model_dir(tmp_path), eagle1_dir(tmp_path)
    how = replace(UNPACKED_HEAD, form=WeightForm(keeps_fp8=True, quantizes=True))

    def of_rank(comm: Communicator) -> Tensor:
        decoder = load(target, parallel=Parallel(comm), pack=False)
        lm_head = load_head(path, decoder, HeadRequest(), how).lm_head
        assert isinstance(lm_head, Linear) and lm_head.shard == decoder.lm_head.shard
        return dequantize(lm_head.fp8, F32)

    parts = torch.cat(ThreadRanks(2).run(of_rank))
    exact = load(target, pack=False).lm_head.weight
    assert torch.equal(parts[:63], dequantize(quantize(exact), F32))
    assert torch.equal(parts[63], torch.zeros_like(parts[63]))


def test_an_lm_head_of_97_tokens_is_not_copied(tmp_path: Path) -> None:
    """Products of FP8 would make it floats again at every pass."""
    lm_head = load(tiny_model_dir(tmp_path), pack=False).lm_head
    assert place.lm_head_for_drafts(lm_head, WeightForm(keeps_fp8=True, quantizes=True)) is lm_head


def test_an_lm_head_that_is_not_finite_is_not_copied(
    tmp_path: Path, set_vocabulary: Callable[[int], None]
) -> None:
    set_vocabulary(96)
    target, path = tiny_model_dir(tmp_path), eagle1_dir(tmp_path)
    decoder = load(target, pack=False)
    decoder.lm_head.weight[3, 4] = float("inf")
    how = replace(UNPACKED_HEAD, form=WeightForm(keeps_fp8=True, quantizes=True))
    with pytest.raises(CheckpointError, match=r"lm_head holds weights that are .*leave quant out"):
        load_head(path, decoder, HeadRequest(), how)


@pytest.mark.parametrize("keeps_fp8", [False, True])
def test_rows_of_no_token_are_zeros(
    tmp_path: Path, keeps_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An lm_head of 41 tokens on two ranks: the second has 20 and one more row."""
    target, path = tiny_model_dir(tmp_path), eagle3_dir(tmp_path, draft_vocab=41)
    monkeypatch.setattr(place, "has_fp8", lambda device: keeps_fp8)
    how = replace(UNPACKED_HEAD, form=place.weight_form("fp8", CPU))

    def of_rank(comm: Communicator) -> Tensor:
        decoder = load(target, parallel=Parallel(comm), pack=False)
        request = HeadRequest(layers_to_capture=[0, 1, 2])
        lm_head = load_head(path, decoder, request, how).lm_head
        assert isinstance(lm_head, Linear) and (lm_head.fp8 is not None) is keeps_fp8
        return lm_head.weight.float() if lm_head.fp8 is None else dequantize(lm_head.fp8, F32)

    torch.use_deterministic_algorithms(True)  # then new memory holds NaN
    try:
        parts = torch.cat(ThreadRanks(2).run(of_rank))
    finally:
        torch.use_deterministic_algorithms(False)
    exact = load_file(path / "model.safetensors")["lm_head.weight"]
    assert torch.equal(parts[:41], dequantize(quantize(exact), F32))
    assert torch.equal(parts[41], torch.zeros_like(parts[41]))
