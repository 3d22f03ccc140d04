"""Products by cuBLASLt's algorithms, against float64, and the choice among them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matrix import covering
from tiny import tiny_model_dir

from trtspec import LLM, CudaGraphConfig, SamplingParams
from trtspec.layers.fused import linear
from trtspec.layers.linear import Linear
from trtspec.ops.layer import cublaslt
from trtspec.ops.layer.cublaslt import Size, tuning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OUT, SIZE = 2560, 2048


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(cublaslt, "_chosen", {})


def _operands(
    rows: int, dtype: torch.dtype = torch.bfloat16, out: int = OUT, size: int = SIZE
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    return normal(rows, size), normal(out, size), normal(rows, out)


def _largest_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((out.double() - exact).abs() / (1 + exact.abs())).max())


@covering(**{
    "dtype": [torch.bfloat16, torch.float16], "adds": [False, True],
    "rows,out,size": [
        (1, OUT, SIZE), (33, OUT, SIZE), (128, OUT, SIZE), (32, 4096, 14336), (128, 4096, 4096),
    ],
})  # fmt: skip
def test_every_algorithm_is_the_product(
    rows: int, out: int, size: int, adds: bool, dtype: torch.dtype
) -> None:
    x, weight, residual = _operands(rows, dtype, out, size)
    exact = x.double() @ weight.double().t() + (residual.double() if adds else 0)
    product = cublaslt._product(x.device.index, Size(dtype, rows, out, size, adds))
    algorithms = product.algorithms()
    assert algorithms
    for algorithm in algorithms:
        y = residual.clone() if adds else torch.full_like(residual, torch.nan)
        assert product.run(algorithm, x, weight, y)
        # Rounded once, or before the sum and after it, as cuBLAS does.
        assert _largest_error(y, exact) < (2**-6 if adds else 2**-7)


def _take_the_second(monkeypatch: pytest.MonkeyPatch) -> list[Size]:
    """Choosing is by the clock; here it is the heuristic's second proposal."""
    asked: list[Size] = []

    def measure(size: Size, weight: torch.Tensor) -> Any:
        asked.append(size)
        return cublaslt._product(weight.device.index, size).algorithms()[1]

    monkeypatch.setattr(cublaslt, "_measure", measure)
    return asked


def _layer(weight: torch.Tensor) -> Linear:
    layer = Linear(SIZE, OUT, bias=False).cuda().to(torch.bfloat16)
    assert layer.weight is not None
    layer.weight.data.copy_(weight)
    return layer


def test_a_layer_uses_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen once, before the graph; used in it, also after a new start, and nowhere else."""
    asked = _take_the_second(monkeypatch)
    x, weight, residual = _operands(96)
    layer = _layer(weight)
    by_cublas = layer(x)
    with tuning():
        chosen = layer(x)
        assert torch.equal(layer(x), chosen)
        summed = linear((x,), layer, residual=residual.clone(), in_place=True)
    assert [size.adds for size in asked] == [False, True]
    assert torch.equal(layer(x), by_cublas) and len(asked) == 2
    exact = x.double() @ weight.double().t()
    assert _largest_error(chosen, exact) < 2**-7
    assert _largest_error(summed, exact + residual.double()) < 2**-6
    monkeypatch.setattr(cublaslt, "_chosen", {})  # as in a new process
    with tuning():
        assert torch.equal(layer(x), chosen)
        linear((x,), layer, residual=residual.clone(), in_place=True)
        assert len(asked) == 2
        graph, out, total = torch.cuda.CUDAGraph(), torch.empty_like(chosen), residual.clone()
        with torch.cuda.graph(graph):
            out.copy_(layer(x))
            total.copy_(residual)
            linear((x,), layer, residual=total, in_place=True)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, chosen) and torch.equal(total, summed)


def test_a_size_first_met_in_a_capture_is_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _take_the_second(monkeypatch)
    x, weight, _ = _operands(96)
    layer = _layer(weight)
    expected = layer(x)
    graph = torch.cuda.CUDAGraph()
    with tuning(), torch.cuda.graph(graph):
        out = layer(x)
    graph.replay()
    assert torch.equal(out, expected) and not asked


def test_what_is_refused_is_left_to_cublas(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x, weight, residual = _operands(96)
    layer, nonsense = _layer(weight), cublaslt._Algorithm()
    monkeypatch.setattr(cublaslt, "_choose", lambda size, weight: nonsense)
    product = cublaslt._product(0, Size(x.dtype, 96, OUT, SIZE, False))
    assert not product.accepts(nonsense) and product.accepts(product.algorithms()[0])
    with tuning():
        assert torch.equal(layer(x), F.linear(x, weight))
        out = linear((x,), layer, residual=residual.clone(), in_place=True)
    assert torch.equal(out, residual.clone().addmm_(x, weight.t()))
    assert caplog.text.count("refused") == 2


def test_steps_of_an_engine_are_measured_unless_it_says_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Size] = []
    monkeypatch.setattr(cublaslt, "MIN_VALUES", 1)
    monkeypatch.setattr(cublaslt, "_choose", lambda size, weight: asked.append(size))
    target = tiny_model_dir(tmp_path)
    counts = []
    for enabled in (True, False):
        config = CudaGraphConfig(enable_autotuner=enabled)
        llm = LLM(
            target, device="cuda", dtype="bfloat16", max_seq_len=64, max_batch_size=40,
            cuda_graph_config=config,
        )  # fmt: skip
        prompts = [[3 + i, 4, 5] for i in range(40)]
        llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
        counts.append(len(asked))
    assert counts[0] > 0 and counts[1] == counts[0]


def test_products_are_timed_in_graphs() -> None:
    x, weight, _ = _operands(96)
    size = Size(x.dtype, 96, OUT, SIZE, False)
    product, out = cublaslt._product(x.device.index, size), torch.empty_like(x @ weight.t())
    runs = [partial(product.run, a, x, out=out) for a in product.algorithms()]
    times = cublaslt._times(runs, [weight, weight.clone()])
    assert len(times) == len(runs) and all(1e-4 < ms < 1 for ms in times)
    exact = x.double() @ weight.double().t()
    assert _largest_error(out, exact) < 2**-7, "a replay computes"


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
