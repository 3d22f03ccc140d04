"""Routing and experts as loops in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trtspec.layers.experts import Experts
from trtspec.ops.experts.fp4 import Fp4Weight, from_checkpoint
from trtspec.ops.layer.activation import gate_and_mul
from trtspec.ops.layer.fp8 import FP8, Fp8Weight


def naive_route(
    logits: Tensor, bias: Tensor | None, top_k: int, n_group: int, topk_group: int, **how: Any
) -> Tensor:
    """[T, E] float64: the weight of each expert, 0 where it was not chosen."""
    scores = logits.double()
    scores = scores.sigmoid() if how["scoring"] == "sigmoid" else scores.softmax(-1)
    out = torch.zeros_like(scores)
    size = scores.shape[1] // n_group
    for row, own in zip(out, scores.tolist(), strict=True):
        wanted = [s + (0 if bias is None else float(bias[e])) for e, s in enumerate(own)]
        groups = [range(i, i + size) for i in range(0, len(own), size)]
        groups.sort(key=lambda g: -sum(sorted((wanted[e] for e in g), reverse=True)[:2]))
        chosen = sorted((e for g in groups[:topk_group] for e in g), key=lambda e: -wanted[e])
        total = sum(own[e] for e in chosen[:top_k]) if how["normalize"] else 1.0
        for e in chosen[:top_k]:
            row[e] = own[e] / total * how["scale"]
    return out


_ROUTES = [  # experts, chosen, groups, searched groups, scoring, normalize, scale
    (8, 2, 4, 2, "sigmoid", True, 2.5),
    (8, 1, 2, 1, "sigmoid", False, 1.0),
    (160, 8, 1, 1, "sigmoid", True, 1.0),
    (256, 8, 8, 4, "sigmoid", True, 2.0),
    (36, 5, 3, 2, "softmax", True, 1.0),
    (6, 6, 1, 1, "softmax", False, 1.0),
]
_FIELDS = ("experts", "top_k", "n_group", "topk_group", "scoring", "normalize", "scale")
ROUTES = [dict(zip(_FIELDS, values, strict=True)) for values in _ROUTES]


def dense_weights(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """[T, E]: what `route` returned, in one form whatever the order of its choices."""
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    out = torch.zeros(len(ids), experts, dtype=weights.dtype, device=ids.device)
    return out.scatter(1, ids, weights)


def random_experts(
    rows: int,
    count: int,
    top_k: int,
    size: int,
    inner: int,
    dtype: torch.dtype,
    seed: int = 0,
    has_bias: bool = False,
) -> tuple[Experts, Tensor, Tensor, Tensor]:
    """Experts, x [T, D], ids [T, k] and weights [T, k]; one expert is chosen by nobody."""
    generator = torch.Generator().manual_seed(seed)
    experts = Experts(count, size, inner, has_bias=has_bias)
    for parameter in experts.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        parameter.data = noise.to(dtype)
    x = torch.randn(rows, size, generator=generator).to(dtype)
    ids = torch.rand(rows, count, generator=generator)
    ids[:, count // 2] = -1.0
    return experts, x, ids.topk(top_k).indices, torch.rand(rows, top_k, generator=generator)


class Fp8Experts(NamedTuple):
    gate_up: Fp8Weight
    down: Fp8Weight

    def part(self, first: int, count: int, device: str) -> Fp8Experts:
        """`count` experts from `first` on, on a device."""
        codes = (stack.at(slice(first, first + count)) for stack in self)
        return Fp8Experts(*(Fp8Weight(c.to(device), s.to(device), group) for c, s, group in codes))


def to_fp8(experts: Experts, gate_up_group: int, down_group: int) -> Fp8Experts:
    """Codes near the experts' weights, with scales of all sizes; the experts get the codes' exact
    values in float64."""
    generator, found = torch.Generator().manual_seed(5), []
    assert experts.gate_up_proj is not None and experts.down_proj is not None
    stacks = (experts.gate_up_proj, gate_up_group), (experts.down_proj, down_group)
    for parameter, group in stacks:
        weight = parameter.data.double()
        count, rows, columns = weight.shape
        shape = (count, rows, -(-columns // group))
        scales = 2.0 ** (torch.rand(shape, generator=generator) * 8 - 12)
        spread = scales.double().repeat_interleave(group, -1)[..., :columns]
        codes = (weight / spread).clamp(-448, 448).float().to(FP8)
        parameter.data = codes.double() * spread
        found.append(Fp8Weight(codes, scales, group))
    return Fp8Experts(*found)


def to_fp4(experts: Experts) -> tuple[Fp4Weight, Fp4Weight]:
    """MXFP4 weights of all codes and of scales about those of random experts, which get their exact
    values in float64."""
    generator, found = torch.Generator().manual_seed(5), []
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    for name in ("gate_up_proj", "down_proj"):
        count, rows, columns = getattr(experts, name).shape
        blocks = torch.randint(256, (count, rows, columns // 32, 16), generator=generator).byte()
        middle = 125 - round(math.log2(columns) / 2)
        scales = torch.randint(middle - 2, middle + 2, blocks.shape[:-1], generator=generator)
        codes = torch.stack((blocks % 16, blocks // 16), dim=-1).flatten(-2).long()
        values = table[codes % 8] * torch.where(codes < 8, 1.0, -1.0)
        weight = values * 2.0 ** (scales[..., None].double() - 127)
        getattr(experts, name).data = weight.flatten(-2)
        found.append(from_checkpoint(blocks, scales.byte()))
    return found[0], found[1]


def _gelu_tanh(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


BETWEEN: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {  # ours, and of gate and up
    "silu": (gate_and_mul("silu"), lambda gate, up: gate * gate.sigmoid() * up),
    "gelu_tanh": (gate_and_mul("gelu_tanh"), lambda gate, up: _gelu_tanh(gate) * up),
    "clamped": (
        gate_and_mul("silu", 0.3),
        lambda gate, up: (
            (gate * gate.sigmoid()).minimum(torch.full_like(gate, 0.3))
            * up.maximum(torch.full_like(up, -0.3)).minimum(torch.full_like(up, 0.3))
        ),
    ),
    "swish": (gate_and_mul("silu", 0.7, 1.702), lambda gate, up: _swish(gate, up)),
}


def _swish(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's, clamped at 0.7."""
    gate, up = gate.minimum(torch.full_like(gate, 0.7)), up.clip(-0.7, 0.7)
    return gate / (1 + torch.exp(-1.702 * gate)) * (1 + up)


def naive_experts(
    experts: Experts, x: Tensor, ids: Tensor, weights: Tensor, between: str = "silu"
) -> Tensor:
    """One row and one choice at a time, float64."""
    assert experts.gate_up_proj is not None and experts.down_proj is not None
    first, second = experts.gate_up_proj_bias, experts.down_proj_bias
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, row in enumerate(x.double()):
        for e, weight in zip(ids[t].tolist(), weights[t].double(), strict=True):
            gate_up = experts.gate_up_proj[e].double() @ row
            gate, up = (gate_up if first is None else gate_up + first[e]).chunk(2)
            y = experts.down_proj[e].double() @ BETWEEN[between][1](gate, up)
            out[t] += weight * (y if second is None else y + second[e])
    return out
