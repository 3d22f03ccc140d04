"""Random weights of 4 bits in the form that products read, and their values."""

from __future__ import annotations

import torch
from torch import Tensor

from trtspec.layers.experts import Experts
from trtspec.ops.experts import fp4
from trtspec.ops.layer import four_bits
from trtspec.ops.layer.four_bits import FourBitWeight

GROUPS: list[int | str] = [32, 64, 128, 384, "nvfp4"]
FP8 = torch.float8_e4m3fn


def random_weight(
    out: int, size: int, group: int | str, device: str = "cpu", *, seed: int = 0, scale: float = 1.0
) -> tuple[FourBitWeight, Tensor]:
    """Returns a weight with every number, zero and power of a scale, and its values in float64.

    Args:
        scale: that all scales are multiplied by.
    """
    generator = torch.Generator().manual_seed(out + size + seed)
    numbers = torch.randint(0, 16, (out, size), dtype=torch.uint8, generator=generator)
    if group == "nvfp4":
        codes = torch.arange(out * size // 16).view(out, -1) % 127  # of e4m3, subnormal ones too
        scales = codes.to(torch.uint8).view(FP8)
        of_rows = (1 + torch.rand(out, generator=generator)) * 1e-3 * scale
        table = torch.tensor([*fp4.MAGNITUDES, *(-x for x in fp4.MAGNITUDES)]).double()
        values = table[numbers.long()] * scales.double().repeat_interleave(16, 1)
        values = values * of_rows.double()[:, None]
        parts = [part.to(device) for part in (numbers, scales, of_rows)]
        return four_bits.from_nvfp4(*parts), values.to(device)
    assert isinstance(group, int)
    zeros = torch.randint(0, 17, (out, size // group), dtype=torch.uint8, generator=generator)
    kind = torch.float16 if group == 64 else torch.bfloat16
    scales = (0.1 * scale * torch.rand(out, size // group, generator=generator)).to(kind)
    spread = [t.double().repeat_interleave(group, 1) for t in (zeros, scales)]
    values = (numbers.double() - spread[0]) * spread[1]
    parts = [part.to(device) for part in (numbers, zeros, scales)]
    return four_bits.from_integers(*parts, group), values.to(device)


def to_four_bits(experts: Experts, group: int | str) -> tuple[FourBitWeight, FourBitWeight]:
    """Returns stacks of random weights, which the experts get in float64; they keep a vector's
    size."""
    found = []
    for name in ("gate_up_proj", "down_proj"):
        count, out, size = getattr(experts, name).shape
        scale = 2.5 * size**-0.5
        each = [random_weight(out, size, group, seed=i, scale=scale) for i in range(count)]
        getattr(experts, name).data = torch.stack([values for _, values in each])
        records = torch.stack([weight.records for weight, _ in each])
        of_rows = [weight.row_scales for weight, _ in each if weight.row_scales is not None]
        found.append(FourBitWeight(records, torch.stack(of_rows) if of_rows else None))
    return found[0], found[1]
