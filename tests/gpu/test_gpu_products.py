"""Products by cuBLASLt's algorithms, against float64, and the choice among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trtspec.ops import cublaslt
from trtspec.ops.cublaslt import Size, multiply, tuning
from trtspec.ops.linear import Linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OUT, SIZE = 2560, 2048


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(cublaslt, "_chosen", {})


def _operands(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    return normal(rows, SIZE), normal(OUT, SIZE), normal(rows, OUT)


def _largest_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((out.double() - exact).abs() / (1 + exact.abs())).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("rows", [1, 33, 128])
def test_every_algorithm_is_the_product(rows: int, adds: bool, dtype: torch.dtype) -> None:
    x, weight, residual = _operands(rows, dtype)
    exact = x.double() @ weight.double().t() + (residual.double() if adds else 0)
    product = cublaslt._product(x.device.index, Size(dtype, rows, OUT, SIZE, adds))
    algorithms = product.algorithms()
    assert algorithms
    for algorithm in algorithms:
        out = residual.clone() if adds else torch.full_like(residual, torch.nan)
        product.run(algorithm, x, weight, out)
        # Rounded once, or before the sum and after it, as cuBLAS does.
        assert _largest_error(out, exact) < (2**-6 if adds else 2**-7)


def _take_the_second(monkeypatch: pytest.MonkeyPatch) -> list[Size]:
    """Choosing is by the clock; here it is the heuristic's second proposal."""
    asked: list[Size] = []

    def measure(size: Size, weight: torch.Tensor) -> Any:
        asked.append(size)
        return cublaslt._product(weight.device.index, size).algorithms()[1]

    monkeypatch.setattr(cublaslt, "_measure", measure)
    return asked


def test_a_layer_uses_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen once, then used in and outside of graphs, and after a new start."""
    asked = _take_the_second(monkeypatch)
    x, weight, residual = _operands(96)
    layer = Linear(SIZE, OUT, bias=False).cuda().to(torch.bfloat16)
    assert layer.weight is not None
    layer.weight.data.copy_(weight)
    assert multiply(x, weight) is None and not asked, "nobody asked to measure"
    with tuning():
        eager = layer(x)
        assert torch.equal(layer(x), eager)
        summed = multiply(x, weight, residual.clone())
    assert len(asked) == 2 and summed is not None
    exact = x.double() @ weight.double().t()
    assert _largest_error(eager, exact) < 2**-7
    assert _largest_error(summed, exact + residual.double()) < 2**-6
    monkeypatch.setattr(cublaslt, "_chosen", {})  # as in a new process
    with tuning():
        assert torch.equal(layer(x), eager)
    assert len(asked) == 2
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(eager)
    with torch.cuda.graph(graph):
        out.copy_(layer(x))
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, eager)


def test_what_it_does_not_serve_is_left_to_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _take_the_second(monkeypatch)
    x, weight, residual = _operands(96)
    with tuning():
        assert multiply(x.float(), weight.float()) is None
        assert multiply(x[:, :1024], weight) is None
        assert multiply(x, weight[:512]) is None, "small"
        assert multiply(x, weight, residual[:, ::2].repeat(1, 2)[:, 1:]) is None
        assert multiply(x.repeat(2, 1), weight) is None, "many rows"
        assert multiply(x, weight.clone().requires_grad_()) is None
        with torch.no_grad():
            assert multiply(x, weight.clone().requires_grad_()) is not None
    assert len(asked) == 1


def test_measuring_finds_the_faster_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What wins is what the events said; it is cuBLAS's own unless the gain is worth a change."""
    x, weight, _ = _operands(128)
    size = Size(x.dtype, 128, OUT, SIZE, False)
    count = len(cublaslt._product(0, size).algorithms())
    for times, winner in (
        ([1.0] + [0.99] * count, None),
        ([1.0, *[1.1] * (count - 1), 0.9], count - 1),
    ):
        monkeypatch.setattr(cublaslt, "_times", lambda runs, weights, t=times: t)
        best = cublaslt._measure(size, weight)
        expected = winner if winner is None else cublaslt._product(0, size).algorithms()[winner]
        assert (best is None) == (expected is None)
        assert best is None or expected is None or bytes(best.data) == bytes(expected.data)


def test_times_are_of_the_products() -> None:
    """Twice the work takes longer, by far less than that it could be noise."""
    x, weight, _ = _operands(1024)
    out = torch.empty(1024, OUT, device="cuda", dtype=x.dtype)
    weights = [weight.clone() for _ in range(8)]

    def times(n: int) -> Any:
        return lambda w: [torch.mm(x, w.t(), out=out) for _ in range(n)]

    one, eight = cublaslt._times([times(1), times(8)], weights)
    assert 4 < eight / one < 12
