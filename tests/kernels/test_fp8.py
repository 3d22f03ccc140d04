"""Products with FP8 weights against float64; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trtspec.ops.layer import fp8
from trtspec.ops.layer.fp8 import FP8, LARGEST, Fp8Weight, dequantize, multiply, quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]
WAYS = ["torch", "triton"]


def _random_weight(out: int, size: int, group: int) -> Fp8Weight:
    generator = torch.Generator().manual_seed(out)
    codes = (torch.randn(out, size, generator=generator) * 100).clamp(-LARGEST, LARGEST).to(FP8)
    scales = torch.rand(out, -(-size // group), generator=generator) + 0.5
    return Fp8Weight(codes.to(DEVICE), (scales * size**-0.5 / 100).to(DEVICE), group)


def _exact(weight: Fp8Weight) -> Tensor:
    scales = weight.scales.double().repeat_interleave(weight.group, 1)
    return weight.codes.double() * scales[:, : weight.codes.shape[1]]


def _way(name: str) -> object:
    return fp8 if name == "torch" else pytest.importorskip("trtspec.ops.layer.triton_fp8")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("rows", "out", "size", "group"),
    [(1, 48, 96, 96), (9, 70, 512, 128), (20, 64, 300, 300), (40, 32, 320, 128), (130, 24, 64, 64)],
)
def test_a_product_is_float64s(
    way: str, dtype: torch.dtype, adds: bool, rows: int, out: int, size: int, group: int
) -> None:
    weight = _random_weight(out, size, group)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 2 * size, generator=generator).to(DEVICE, dtype)[:, :size]
    residual = torch.randn(rows, out, generator=generator).to(DEVICE, dtype) if adds else None
    expected = x.double() @ _exact(weight).T
    if residual is not None:
        expected += residual.double()
    y = _way(way).multiply(x, weight, residual)  # type: ignore[attr-defined]
    assert y.dtype == dtype and (residual is None or y is residual)
    error = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(y.double(), expected, atol=error, rtol=error)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [128, 300])
def test_every_code_is_read_exactly(way: str, dtype: torch.dtype, group: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).clone()
    codes[torch.tensor([0x7F, 0xFF])] = 0.0  # NaN
    codes = codes.expand(3, 256)[:, torch.arange(300) % 256].contiguous()
    scales = torch.tensor([1.0, 0.25, 2.0**-20])[:, None].expand(3, -(-300 // group)).contiguous()
    weight = Fp8Weight(codes.to(DEVICE), scales.to(DEVICE), group)
    y = _way(way).dequantize(weight, dtype)  # type: ignore[attr-defined]
    assert y.dtype == dtype and torch.equal(y.double(), _exact(weight))


def test_quantised_rows_are_within_half_a_step() -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(40, 96, generator=generator) * torch.logspace(-6, 6, 40)[:, None]
    w[3] = 0.0
    weight = quantize(w)
    back = dequantize(weight, torch.float64 if DEVICE == "cpu" else torch.float32).double()
    # Three bits of mantissa; below 2^-6 of a code the steps are 2^-9.
    allowed = torch.maximum(w.abs() * 2.0**-4, weight.scales * 2.0**-10) * 1.0001
    assert bool(((back.cpu() - w.double()).abs() <= allowed).all())
    assert bool((back[3] == 0).all()) and weight.scales[3] == 1.0
    assert bool((weight.codes.float().abs().amax(1)[weight.scales[:, 0] != 1.0] == LARGEST).all())


def test_many_rows_are_the_librarys() -> None:
    weight = _random_weight(32, 64, 64)
    x = torch.randn(fp8.MAX_ROWS + 1, 64, device=DEVICE)
    torch.testing.assert_close(
        multiply(x, weight).double(), x.double() @ _exact(weight).T, atol=1e-3, rtol=1e-3
    )
