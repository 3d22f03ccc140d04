"""Twins of checkpoints whose weights have 4 bits (or 8 in whole words), in each format.

What they are is said by the `compressed-tensors` package for its integers, by float64 for others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from quantized import FP8, Tensors, is_quantised
from torch import Tensor

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word is this output of its eight
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
GROUP_OF_FP4 = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32, "modelopt": 16}


@dataclass(frozen=True)
class Form:
    """How to quantise: `method` is a format of compressed-tensors or the config's quant_method."""

    method: str
    bits: int = 4
    group: int = 32  # -1: a whole row; of floats the format says it
    symmetric: bool = True
    dtype: torch.dtype = torch.float16  # of integers' scales
    shuffled: bool = False  # groups are of columns in any order
    version: str = "gptq"

    def __str__(self) -> str:
        kind = f"{self.bits} bits, groups of {self.group}" * (self.method not in GROUP_OF_FP4)
        said = "asymmetric" * (not self.symmetric), "shuffled" * self.shuffled, str(self.dtype)[6:]
        return ", ".join(filter(None, (self.method, self.version[5:], kind, *said)))


@dataclass(frozen=True)
class Integers:
    """A weight in numbers without sign: (number - zero) * scale of the column's group."""

    numbers: Tensor  # [out, in]
    zeros: Tensor  # [out, groups]
    scales: Tensor  # [out, groups]
    group_of: Tensor  # [in]

    def values(self) -> Tensor:
        steps = self.numbers - self.zeros[:, self.group_of]
        return (steps.double() * self.scales.double()[:, self.group_of]).float()


def four_bits(
    form: Form, twin: Tensors, chosen: Callable[[str], bool] = is_quantised, random: bool = False
) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the config; `twin` gets what they are.

    Args:
        chosen: whether a tensor is quantised, by its name.
        random: weights are replaced by random codes, scales and zeros, so all occur.
    """
    generator = torch.Generator().manual_seed(1)
    packer = PACKERS.get(form.method)
    tensors, left = {}, []
    for name, weight in list(twin.items()):
        if not chosen(name):
            tensors[name] = weight
            if name.endswith("proj.weight") or name == "lm_head.weight":
                left.append(name.removesuffix(".weight"))
            continue
        if packer is None:
            parts, twin[name] = _fp4(form, weight, generator, random)
        else:
            parts, twin[name] = packer(form, _integers(form, weight, generator, random))
        module = name.removesuffix("weight")
        tensors |= {f"{module}{part}": tensor for part, tensor in parts.items()}
    return tensors, config_of(form, left)


def _integers(form: Form, weight: Tensor, generator: torch.Generator, random: bool) -> Integers:
    rows, columns = weight.shape
    size = columns if form.group == -1 else form.group
    groups, most = -(-columns // size), 2**form.bits - 1
    least = int(
        form.method in ("gptq", "auto-round") and form.version == "gptq"
    )  # less one is stored
    group_of = torch.arange(columns) // size
    if form.shuffled:
        group_of = group_of[torch.randperm(columns, generator=generator)]
    if random:
        if form.shuffled and form.method == "gptq":
            group_of = torch.randint(groups, (columns,), generator=generator)
        numbers = torch.randint(most + 1, (rows, columns), generator=generator)
        zeros = torch.randint(least, most + 1, (rows, groups), generator=generator)
        scales = (0.01 * torch.randn(rows, groups, generator=generator).exp()).to(form.dtype)
        zeros = torch.full_like(zeros, (most + 1) // 2) if form.symmetric else zeros
        return Integers(numbers, zeros, scales, group_of)
    of_groups = weight[:, group_of.argsort(stable=True)].view(rows, groups, size)
    if form.symmetric:
        scales = (of_groups.abs().amax(2) / (most // 2)).to(form.dtype)
        zeros = torch.full(scales.shape, (most + 1) // 2)
    else:
        low, high = of_groups.amin(2).clamp(max=0), of_groups.amax(2).clamp(min=0)
        scales = ((high - low) / most).to(form.dtype)
        zeros = (-low / scales.float()).round().long().clamp(least, most)
    steps = (weight / scales.float()[:, group_of]).round().long()
    return Integers((steps + zeros[:, group_of]).clamp(0, most), zeros, scales, group_of)


def _packed(form: Form, whole: Integers) -> tuple[Tensors, Tensor]:
    """As the package packs; it says the values too, of columns in the order of their groups."""
    middle = 2 ** (form.bits - 1)
    order = whole.group_of.argsort(stable=True)
    numbers, zeros = ((n - middle).to(torch.int8) for n in (whole.numbers, whole.zeros))
    parts = {"weight_scale": whole.scales, "weight_shape": torch.tensor(numbers.shape)}
    in_order = {**parts, "weight_packed": pack_to_int32(numbers[:, order], form.bits)}
    in_order["weight_scale"] = whole.scales.float()
    if not form.symmetric:
        parts["weight_zero_point"] = words = pack_to_int32(zeros, form.bits, packed_dim=0)
        in_order["weight_zero_point"] = words.T.clone(memory_format=torch.contiguous_format).T
    scheme = QuantizationScheme(targets=["Linear"], weights=_args(form))
    values = PackedQuantizationCompressor.decompress(in_order, scheme)["weight"]
    if form.shuffled:
        parts["weight_g_idx"] = whole.group_of.int()
    parts["weight_packed"] = pack_to_int32(numbers, form.bits)
    return parts, values[:, order.argsort()]


def _words(numbers: Tensor, bits: int) -> Tensor:
    """Packs the last dimension into int32, the first of each word in its low bits."""
    split = numbers.unflatten(-1, (-1, 32 // bits))
    return (split << torch.arange(0, 32, bits)).sum(-1).to(torch.int32)


def _awq(form: Form, whole: Integers) -> tuple[Tensors, Tensor]:
    def words(numbers: Tensor) -> Tensor:
        return _words(numbers.T.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2), 4)

    parts = {"qweight": words(whole.numbers), "qzeros": words(whole.zeros)}
    return {**parts, "scales": whole.scales.T}, whole.values()


def _gptq(form: Form, whole: Integers) -> tuple[Tensors, Tensor]:
    return {
        "qweight": _words(whole.numbers, form.bits).T,
        "qzeros": _words(whole.zeros.T - int(form.version == "gptq"), form.bits),
        "scales": whole.scales.T,
        "g_idx": whole.group_of.int(),
    }, whole.values()


def _auto_round(form: Form, whole: Integers) -> tuple[Tensors, Tensor]:
    """GPTQ's first format, without a tensor of groups."""
    parts, values = _gptq(form, whole)
    return {name: part for name, part in parts.items() if name != "g_idx"}, values


PACKERS = {"awq": _awq, "gptq": _gptq, "auto-round": _auto_round, "pack-quantized": _packed}


def _fp4(form: Form, weight: Tensor, generator: Any, random: bool) -> tuple[Tensors, Tensor]:
    group, is_mx = GROUP_OF_FP4[form.method], form.method == "mxfp4-pack-quantized"
    peaks = weight.abs().unflatten(1, (-1, group)).amax(2) / 6
    step = peaks.max() / 448  # of the tensor
    low, high = (0, 253) if is_mx else (1, 127)  # of bytes that are positive scales
    bytes_ = torch.randint(low, high, peaks.shape, generator=generator).to(torch.uint8)
    if is_mx:
        stored = bytes_ if random else (peaks.log2().round() + 127).to(torch.uint8)
        wide, beside = 2.0 ** (stored.double() - 127), {}
    else:
        stored = bytes_.view(FP8) if random else (peaks / step).to(FP8)
        divisor = (1 / step).view(1)
        wide = stored.double() / divisor.double()
        beside = {"weight_global_scale": divisor, "input_global_scale": torch.ones(1)}
    if form.method == "modelopt":
        wide = stored.double() * step.double()
        beside = {"weight_scale_2": step, "input_scale": torch.tensor(0.5)}
    wide = wide.repeat_interleave(group, 1)
    codes = (weight.double() / wide)[..., None].sub(E2M1).abs().argmin(2)
    if random:
        codes = torch.randint(16, weight.shape, generator=generator)
    values = (E2M1[codes].double() * wide).float()
    if form.method == "modelopt":
        beside["weight"] = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    else:
        beside["weight_packed"] = pack_fp4_to_uint8(E2M1[codes])
    return {**beside, "weight_scale": stored}, values


def _args(form: Form) -> QuantizationArgs:
    kind = "float" if form.method in GROUP_OF_FP4 else "int"
    how: dict[str, Any] = {"strategy": "group", "group_size": form.group}
    if form.method == "nvfp4-pack-quantized":
        how = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": FP8}
    elif form.method == "mxfp4-pack-quantized":
        how = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    elif form.group == -1:
        how = {"strategy": "channel"}
    return QuantizationArgs(num_bits=form.bits, type=kind, symmetric=form.symmetric, **how)


def config_of(form: Form, left: list[str]) -> dict[str, Any]:
    """quantization_config; `left` are the modules that stay as they are."""
    size = {"quant_method": form.method, "bits": form.bits, "group_size": form.group}
    if form.method == "awq":
        return {**size, "zero_point": True, "version": "gemm", "modules_to_not_convert": left}
    if form.method == "gptq":
        version = {} if form.version == "gptq" else {"checkpoint_format": form.version}
        return {**size, "desc_act": form.shuffled, "sym": form.symmetric, **version}
    if form.method == "auto-round":
        floats = {name: {"bits": 16, "data_type": "float"} for name in left}
        said = {"sym": form.symmetric, "data_type": "int", "extra_config": floats}
        packing = "auto_gptq" if form.version == "gptq" else "gptqmodel"
        said |= {"packing_format": f"auto_round:{packing}", "autoround_version": "0.9"}
        return {**size, **said}
    if form.method == "modelopt":
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        groups = {"group_0": {"input_activations": weights, "weights": weights}}
        said = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        return {**said, "config_groups": groups, "ignore": left}
    group = {"targets": ["Linear"], "weights": json.loads(_args(form).model_dump_json())}
    if form.shuffled:  # packages have written it; the one of today does not
        group["weights"]["actorder"] = "group"
    if form.method == "nvfp4-pack-quantized":
        group["input_activations"] = {**group["weights"], "dynamic": "local"}
    return {
        "quant_method": "compressed-tensors",
        "format": form.method,
        "config_groups": {"group_0": {**group, "format": form.method}},
        "ignore": left,
        "quantization_status": "compressed",
    }
