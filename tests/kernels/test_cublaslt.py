"""The choice among cuBLASLt's algorithms: when it is asked for, what is kept. The products
themselves are in tests/gpu/test_gpu_products.py."""

from __future__ import annotations

import ctypes
import json
import logging
import math
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trtspec import ConfigError, CudaGraphConfig
from trtspec.ops.layer import cublaslt
from trtspec.ops.layer.cublaslt import Size, size_of, tuning

SIZE = Size(torch.bfloat16, 128, 4096, 1024, False)
WEIGHT = torch.empty(4096, 1024)
REJECTED = 99


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "new" / "gpu.json"
    monkeypatch.setattr(cublaslt, "_path", lambda device: path)
    monkeypatch.setattr(cublaslt, "_library", object)
    monkeypatch.setattr(cublaslt._Product, "__init__", lambda self, device, size: None)
    monkeypatch.setattr(cublaslt._Product, "accepts", lambda self, a: a.data[0] != REJECTED)
    return path


def _measures(monkeypatch: pytest.MonkeyPatch, found: Any) -> list[Size]:
    """Stands in for a GPU: what it was asked for is returned."""
    asked: list[Size] = []

    def measure(size: Size, weight: torch.Tensor) -> Any:
        asked.append(size)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(cublaslt, "_measure", measure)
    return asked


def _algorithm(first: int) -> cublaslt._Algorithm:
    algorithm = cublaslt._Algorithm(workspace=64)
    algorithm.data[0] = first
    return algorithm


def test_a_choice_outlives_the_process(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _measures(monkeypatch, _algorithm(7))
    first = cublaslt._choose(SIZE, WEIGHT)
    other = Size(torch.bfloat16, 128, 4096, 1024, True)
    cublaslt._choose(other, WEIGHT)
    again = cublaslt._choose(SIZE, WEIGHT)
    assert asked == [SIZE, other] and len(json.loads(path.read_text())) == 2
    assert first is not None and again is not None
    assert bytes(again) == bytes(first) == bytes(_algorithm(7)) and again.workspace == 64


def test_what_another_process_chose_meanwhile_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Size(torch.bfloat16, 64, 4096, 1024, False)

    def measure(size: Size, weight: Tensor) -> cublaslt._Algorithm:
        cublaslt._write(path, {str(SIZE): _algorithm(1), str(other): _algorithm(2)})
        return _algorithm(3)

    monkeypatch.setattr(cublaslt, "_measure", measure)
    best = cublaslt._choose(SIZE, WEIGHT)
    assert best is not None and best.data[0] == 1
    assert {size: a and a.data[0] for size, a in cublaslt._read(path).items()} == {
        str(SIZE): 1, str(other): 2,
    }  # fmt: skip
    assert [p.name for p in path.parent.iterdir()] == ["gpu.json"]


def test_a_choice_that_the_library_does_not_know_is_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir()
    cublaslt._write(path, {str(SIZE): _algorithm(REJECTED)})
    asked = _measures(monkeypatch, _algorithm(5))
    for _ in range(2):
        best = cublaslt._choose(SIZE, WEIGHT)
        assert best is not None and best.data[0] == 5
    assert asked == [SIZE]


def test_that_cublas_is_best_is_kept_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _measures(monkeypatch, None)
    assert cublaslt._choose(SIZE, WEIGHT) is None and cublaslt._choose(SIZE, WEIGHT) is None
    assert asked == [SIZE]


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"a": 1}', '{"a": "00"}', '{"bfloat16 128x1024 4096": "zz"}']
)
def test_a_broken_file_is_said_and_survived(
    path: Path, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_text(text)
    _measures(monkeypatch, _algorithm(3))
    with caplog.at_level(logging.WARNING):
        cublaslt._choose(SIZE, WEIGHT)
    assert all("of no use" in r.message for r in caplog.records) and caplog.records
    assert set(cublaslt._read(path)) == {str(SIZE)}


def test_what_cannot_be_measured_is_left_to_cublas(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = _measures(monkeypatch, torch.OutOfMemoryError("no room"))
    assert cublaslt._choose(SIZE, WEIGHT) is None and "no room" in caplog.text
    assert not path.exists(), "the next start may have the room"
    cublaslt._choose(SIZE, WEIGHT)
    assert len(asked) == 2


def test_a_directory_that_cannot_be_written_costs_only_the_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.write_text("a file where the directory would be")
    _measures(monkeypatch, _algorithm(5))
    assert cublaslt._choose(SIZE, WEIGHT) is not None and "was not kept" in caplog.text


def test_tuning_is_of_one_thread_and_ends() -> None:
    seen: list[bool] = []

    def look() -> None:
        seen.append(cublaslt._tuning.is_on)

    with tuning():
        with tuning(False):
            look()
        look()
        other = threading.Thread(target=look)
        other.start()
        other.join()
    look()
    assert seen == [False, True, False, False]


def test_which_products_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_ALIGNMENT", 16)  # the CPU's memory is aligned to 64

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    x, weight, residual = zeros(128, 1024), zeros(4096, 1024), zeros(128, 4096)
    assert size_of(x, weight, None) == SIZE
    summed = size_of(x, weight, residual)
    assert summed is not None and summed.adds and str(summed) != str(SIZE)
    for wrong in (
        (zeros(129, 1024), weight, None),
        (zeros(0, 1024), weight, None),
        (x, zeros(1024, 1024), None),
        (x.float(), weight.float(), None),
        (x.half(), weight, None),
        (zeros(128, 512), weight, None),
        (zeros(128, 2048)[:, ::2], weight, None),
        (zeros(128 * 1024 + 4)[4:].view(128, 1024), weight, None),
        (x[None], weight, None),
        (x, weight, zeros(64, 4096)),
        (x, weight, zeros(1, 4096)),
        (x, weight, residual.float()),
        (x, weight.clone().requires_grad_(), None),
        (x.to("meta"), weight, None),
    ):
        assert size_of(*wrong) is None
    with torch.no_grad():
        assert size_of(x, weight.clone().requires_grad_(), None) == SIZE


def test_the_cpu_has_no_choice() -> None:
    with tuning():
        assert cublaslt.multiply(torch.ones(128, 1024).bfloat16(), WEIGHT.bfloat16()) is None


class Library:
    """Answers as cuBLASLt does: two algorithms with a workspace, one of them known without."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.preferences: dict[int, int] = {}
        self.refuses_without_workspace = False

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return 0

        return call

    def cublasLtMatmulPreferenceSetAttribute(
        self, preference: Any, attribute: int, value: Any, size: Any
    ) -> int:
        self.preferences[attribute] = value._obj.value
        assert ctypes.sizeof(value._obj) == size.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        results, count = arguments[-2:]
        assert self.preferences[3] == 2, "sums in parts are of fp32"
        with_workspace = self.preferences[1] > 0
        if not with_workspace and self.refuses_without_workspace:
            count._obj.value = 1  # of nothing
            return 15
        for i, first in enumerate((8, 7, 9) if with_workspace else (7,)):
            results[i].data[0], results[i].state = first, 15 if first == 9 else 0
        count._obj.value = 3 if with_workspace else 1
        return 0


@pytest.mark.parametrize("refuses", [False, True])
def test_proposals_are_those_with_and_without_a_workspace(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    library.refuses_without_workspace = refuses
    monkeypatch.setattr(cublaslt, "_library", lambda: library)
    monkeypatch.setattr(cublaslt, "_handle", lambda device: None)
    product = cublaslt._Product(0, SIZE)
    assert [a.data[0] for a in product.algorithms()] == [8, 7]
    assert library.calls.count("cublasLtMatmulPreferenceDestroy") == 2


def test_times_go_to_what_took_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of a round: by a clock that each run moves."""
    clock = [0.0]
    orders: list[list[int]] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def run(number: int) -> Any:
        def of(weight: Tensor) -> None:
            clock[0] += 10.0**number
            orders[-1].append(number)

        return of

    class Graph:
        def __init__(self, run: Any, weights: list[Tensor]) -> None:
            self.replay = lambda: [run(weight) for weight in weights]

    monkeypatch.setattr(
        cublaslt, "_graphs", lambda runs, weights: [Graph(run, weights) for run in runs]
    )
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: orders.append([]))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: orders.append([]))
    orders.append([])
    times = cublaslt._times([run(0), run(1), run(2)], [WEIGHT, WEIGHT])
    assert times == [1.0, 10.0, 100.0]
    of_graph = [[number] * 8 for number in range(3)]  # as many products at least
    turns = [(0, 1, 2), (1, 2, 0), (2, 0, 1)]
    assert [order for order in orders if len(order) > 2][:3] == [
        [*of_graph[a], *of_graph[b], *of_graph[c]] for a, b, c in turns
    ]


def test_what_is_refused_in_a_graph_takes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty graph would be the fastest."""

    class Graph:
        def __init__(self) -> None:
            self.is_open = False

        def capture_begin(self, pool: Any) -> None:
            self.is_open = True

        def capture_end(self) -> None:
            self.is_open = False

    class Stream:
        def wait_stream(self, other: Any) -> None: ...

    monkeypatch.setattr(cublaslt, "capture_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    runs = [lambda weight: None, lambda weight: True, lambda weight: False]
    graphs = cublaslt._graphs(runs, [WEIGHT])
    assert [graph is None for graph in graphs] == [False, False, True]
    assert all(graph is None or not graph.is_open for graph in graphs)

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return 2.0

    monkeypatch.setattr(Graph, "replay", lambda self: None, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    assert cublaslt._times(runs, [WEIGHT]) == [0.25, 0.25, math.inf]


@pytest.mark.parametrize(("status", "needed", "is_known"), [
    (0, 64, True), (0, 65, False), (7, 64, False),
])  # fmt: skip
def test_an_algorithm_from_a_file_is_checked(
    status: int, needed: int, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Checking(Library):
        def cublasLtMatmulAlgoCheck(self, *arguments: Any) -> int:
            arguments[-1]._obj.workspace = needed
            return status

    monkeypatch.setattr(cublaslt, "_library", Checking)
    monkeypatch.setattr(cublaslt, "_handle", lambda device: None)
    assert cublaslt._Product(0, SIZE).accepts(_algorithm(1)) is is_known


def test_without_the_library_nothing_is_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cublaslt._library.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "1.0")
    assert cublaslt._choose(SIZE, WEIGHT) is None and cublaslt._choose(SIZE, WEIGHT) is None
    assert len(caplog.records) == 1 and "cuBLAS serves" in caplog.text
    cublaslt._library.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cublaslt._choose(SIZE, WEIGHT) is None and len(caplog.records) == 1
    cublaslt._library.cache_clear()


def test_the_switch_is_a_bool_and_on() -> None:
    assert CudaGraphConfig().enable_autotuner
    with pytest.raises(ConfigError, match="enable_autotuner='no'"):
        CudaGraphConfig(enable_autotuner="no")  # type: ignore[arg-type]
