"""Products with FP8 weights against float64; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from trtspec.layers import fused
from trtspec.layers.linear import Linear
from trtspec.layers.norm import RMSNorm
from trtspec.ops.layer import fp8
from trtspec.ops.layer.activation import SWIGLU
from trtspec.ops.layer.fp8 import (
    FP8,
    LARGEST,
    Fp8Rows,
    Fp8Weight,
    Rescaling,
    dequantize,
    multiply,
    multiply_floats,
    quantize,
    quantize_rows,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]
WAYS = ["torch", "triton"]
# On a GPU the twin of rows runs the kernel.
ROW_WAYS = ["torch", "triton"] if DEVICE == "cpu" else ["triton"]
ERROR = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def _random_weight(out: int, size: int, group: int) -> Fp8Weight:
    generator = torch.Generator().manual_seed(out)
    codes = (torch.randn(out, size, generator=generator) * 100).clamp(-LARGEST, LARGEST).to(FP8)
    scales = torch.rand(out, -(-size // group), generator=generator) + 0.5
    return Fp8Weight(codes.to(DEVICE), (scales * size**-0.5 / 100).to(DEVICE), group)


def _exact(weight: Fp8Weight) -> Tensor:
    scales = weight.scales.double().repeat_interleave(weight.group, 1)
    return weight.codes.double() * scales[:, : weight.codes.shape[1]]


def _way(name: str) -> Any:
    return fp8 if name == "torch" else pytest.importorskip("trtspec.ops.layer.triton_fp8")


def _rows_way(name: str) -> Any:
    return fp8 if name == "torch" else pytest.importorskip("trtspec.ops.layer.triton_fp8_rows")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("rows", "out", "size", "group"),
    [(1, 48, 96, 32), (9, 70, 512, 128), (20, 64, 300, 96), (40, 32, 320, 128), (130, 24, 64, 32)],
)
def test_floats_times_codes_are_float64s(
    way: str, dtype: torch.dtype, adds: bool, rows: int, out: int, size: int, group: int
) -> None:
    weight = _random_weight(out, size, group)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 2 * size, generator=generator).to(DEVICE, dtype)[:, :size]
    residual = torch.randn(rows, out, generator=generator).to(DEVICE, dtype) if adds else None
    expected = x.double() @ _exact(weight).T
    if residual is not None:
        expected += residual.double()
    y = _way(way).multiply_floats(x, weight, residual)
    assert y.dtype == dtype and (residual is None or y is residual)
    torch.testing.assert_close(y.double(), expected, atol=ERROR[dtype], rtol=ERROR[dtype])


def _exact_rows(rows: Fp8Rows) -> Tensor:
    return rows.codes.double() * rows.scales.double()[:, None]


def _check_rows(rows: Fp8Rows, exact: Tensor) -> None:
    """Each value is one of the two codes next to it: within a step of e4m3."""
    error = (_exact_rows(rows) - exact).abs()
    largest = exact.abs().amax(1, keepdim=True)
    # Half a step, and what float32 adds to a tie.
    allowed = torch.maximum(exact.abs() * 2.0**-4, largest / LARGEST * 2.0**-10) * 1.001
    assert bool((error <= allowed).all())
    at_most = torch.where(exact.abs().amax(1) > 0, LARGEST, 0.0)
    assert torch.equal(rows.codes.float().abs().amax(1).double(), at_most.double())


@pytest.mark.parametrize("way", ROW_WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [None, 0.0, 1.0])
def test_rows_are_rounded(way: str, dtype: torch.dtype, normed: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 400, generator=generator) * torch.logspace(-3, 1, 5)[:, None]
    x[2, 7], x[3] = 40.0, 0.0
    x = x.to(DEVICE, dtype)[:, :300]  # rows apart in memory
    norm, exact = None, x.double()
    if normed is not None:
        norm = RMSNorm(300, 1e-5, normed).to(DEVICE)
        norm.weight.data = torch.randn(300, generator=generator).to(DEVICE, dtype)
        scale = torch.rsqrt(exact.square().mean(1, keepdim=True) + 1e-5)
        exact = exact * scale * (norm.weight.double() + normed)
    _check_rows(_rows_way(way).quantize_rows(x, norm), exact)


@pytest.mark.parametrize("way", ROW_WAYS)
def test_what_is_no_number_stays_so(way: str) -> None:
    x = torch.randn(3, 64).to(DEVICE)
    x[1, 5], x[2, 6] = torch.nan, torch.inf
    rows = _rows_way(way).quantize_rows(x, None)
    assert rows.codes[1].float().isnan().any() and not _exact_rows(rows)[2].isfinite().all()
    _check_rows(Fp8Rows(rows.codes[:1], rows.scales[:1]), x[:1].double())


@pytest.mark.parametrize("way", ROW_WAYS)
@pytest.mark.parametrize("scale", [1e-30, 1e-36, 1e-38, 1e-44])
def test_rows_of_tiny_numbers_are_finite(way: str, scale: float) -> None:
    x = torch.randn(2, 64).to(DEVICE)
    x[0] *= scale
    x[0, 3] = 0.0
    rows = _rows_way(way).quantize_rows(x, None)
    torch.testing.assert_close(_exact_rows(rows)[0], x[0].double(), atol=1e-32, rtol=0.07)
    _check_rows(Fp8Rows(rows.codes[1:], rows.scales[1:]), x[1:].double())


@pytest.mark.parametrize("way", ROW_WAYS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_rescaling(way: str, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    product, bias = normal(4, 96) * 1e5, normal(96) if has_bias else None
    by = Rescaling(normal(4).abs() * 1e-3, normal(96).abs() * 1e-2, bias)
    exact = product.double() * by.rows.double()[:, None] * by.columns.double()
    exact = exact if bias is None else exact + bias.double()
    ops, residual = _rows_way(way), normal(4, 96)
    torch.testing.assert_close(
        ops.rescale(product, by, torch.float32, None).double(), exact, atol=1e-5, rtol=1e-5
    )
    total = residual.double() + exact
    assert ops.rescale(product, by, torch.float32, residual) is residual
    torch.testing.assert_close(residual.double(), total, atol=1e-5, rtol=1e-5)
    gate, up = exact.chunk(2, dim=-1)
    _check_rows(ops.rescaled_swiglu(product, by), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_times_codes_are_float64s(dtype: torch.dtype) -> None:
    """With sizes that libraries take, and others. A row's result does not depend on the others.

    Tensor cores add up codes with some 13 bits.
    """
    allowed = max(ERROR[dtype], 2e-3 if DEVICE == "cuda" else 0.0)
    for rows, out, size in [(5, 48, 96), (9, 70, 500), (40, 32, 320)]:
        weight = _random_weight(out, size, size)
        bias = torch.randn(out).to(DEVICE, dtype)
        x = torch.randn(rows, size).to(DEVICE, dtype)
        y = multiply(x, weight, bias)
        expected = _exact_rows(quantize_rows(x)) @ _exact(weight).T + bias.double()
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), expected, atol=allowed, rtol=allowed)
        alone = multiply(x[:1], weight, bias)
        torch.testing.assert_close(alone, y[:1], atol=allowed, rtol=allowed)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])  # OLMo-2's has none
def test_an_mlp_of_codes(adds: bool, has_bias: bool, has_norm: bool) -> None:
    """Fused or not it is the same layers, one after the other."""
    torch.manual_seed(0)
    up, down = (Linear(*sizes, has_bias).to(DEVICE) for sizes in ((64, 96), (48, 64)))
    norm = RMSNorm(64, 1e-5).to(DEVICE) if has_norm else None
    if norm is not None:
        norm.weight.data.uniform_(0.5, 1.5)
    for layer in (up, down):
        layer.hold_fp8(quantize(torch.randn(layer.out_features, layer.in_features) * 0.1))
        layer.to(DEVICE)
        if layer.bias is not None:
            layer.bias.data.normal_()
    hidden = torch.randn(20, 64, device=DEVICE)
    normed = hidden if norm is None else norm(hidden)
    gate, value = up(normed).chunk(2, dim=-1)
    expected = down(torch.nn.functional.silu(gate) * value) + (hidden if adds else 0.0)
    out = fused.gated_mlp(hidden.clone(), up, down, norm, SWIGLU, adds)
    # Codes near a tie may go the other way.
    assert float((out - expected).abs().max() / expected.abs().max()) < 0.05
    assert float((out - expected).abs().mean() / expected.abs().mean()) < 0.01


@pytest.mark.parametrize("rows", [5, 20])
def test_a_normed_row_is_rounded_once(rows: int) -> None:
    """Before gate and up alone too, where the checkpoint left the product behind them float.

    The kernels of few rows round x times the norm's weight, not what the model's dtype makes of it.
    """
    torch.manual_seed(0)
    layer, norm = Linear(64, 96, False).to(DEVICE), RMSNorm(64, 1e-5).to(DEVICE, torch.bfloat16)
    layer.hold_fp8(quantize(torch.randn(96, 64) * 0.1))
    layer.to(DEVICE)
    norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(rows, 64, device=DEVICE, dtype=torch.bfloat16)
    weight = layer.fp8
    assert weight is not None
    exact = _exact_rows(quantize_rows(x, norm)) @ _exact(weight).T
    gate, up = exact.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    error = (fused.gated(x, layer, norm, SWIGLU).double() - expected).abs()
    assert bool((error <= 2.0**-6 * (expected.abs() + 0.1)).all())  # of bf16


def test_a_part_of_an_fp8_layer_has_its_scales() -> None:
    for group in (32, 64):
        layer = Linear(64, 48, True).to(DEVICE)
        layer.hold_fp8(_random_weight(48, 64, group))
        assert layer.bias is not None and layer.weight is not None
        layer.bias.data.normal_()
        part, x = layer.outputs_from(16), torch.randn(5, 64, device=DEVICE)
        assert part is not None and part.weight is not None
        assert part.weight.data_ptr() == layer.weight[16:].data_ptr()
        torch.testing.assert_close(part(x), layer(x)[:, 16:], atol=2e-3, rtol=2e-3)


def test_no_kernel_reads_codes_on_earlier_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles none for them. Weights become float there, at load."""

    def none_may_be(module: str, x: Tensor) -> None:
        raise AssertionError(f"{module} was asked for")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(fp8, "kernels", none_may_be)
    weight = _random_weight(40, 96, 32)
    assert torch.equal(dequantize(weight, torch.float32), _exact(weight).float())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [128, 300])
def test_every_code_is_read_exactly(way: str, dtype: torch.dtype, group: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).clone()
    codes[torch.tensor([0x7F, 0xFF])] = 0.0  # NaN
    codes = codes.expand(3, 256)[:, torch.arange(300) % 256].contiguous()
    scales = torch.tensor([1.0, 0.25, 2.0**-20])[:, None].expand(3, -(-300 // group)).contiguous()
    weight = Fp8Weight(codes.to(DEVICE), scales.to(DEVICE), group)
    y = _way(way).dequantize(weight, dtype)
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


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_gpus_quantise_as_the_cpu_does() -> None:
    w = torch.randn(4000, 96)
    ours, cpus = quantize(w.to(DEVICE)), quantize(w)
    assert torch.equal(ours.scales.cpu(), cpus.scales)
    assert torch.equal(ours.codes.cpu().view(torch.uint8), cpus.codes.view(torch.uint8))


def test_many_rows_are_the_librarys() -> None:
    weight = _random_weight(32, 64, 32)
    x = torch.randn(fp8.MAX_ROWS + 1, 64, device=DEVICE)
    torch.testing.assert_close(
        multiply_floats(x, weight).double(), x.double() @ _exact(weight).T, atol=1e-3, rtol=1e-3
    )


def test_rows_that_a_kernel_takes_have_room_in_a_block() -> None:
    """A block of Hopper has 227 KiB, of which the kernel's own variables take 18,560 (ptxas)."""
    free, ring = (227 << 10) - 18_560, 4 * 2 * 16 * 32 * 16
    weight = torch.empty(16, 64)
    layer = cast(Linear, SimpleNamespace(weight=weight, scales=torch.empty(16, 1)))
    rooms = []
    for size in range(64, 120_000, 64):
        for rows in range(1, 9):
            x = torch.empty(rows, size, dtype=torch.bfloat16, device="meta")
            if fused._reads_fp8(layer, (x,)):
                rooms.append(rows * (size + (64 if size % 128 == 0 else 0)))
    assert max(rooms) <= fused.MAX_RESTING_BYTES <= free - ring
