"""The choice among cuBLASLt's algorithms: when it is asked for, what is kept. The products
themselves are in tests/gpu/test_gpu_products.py."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from trtspec import ConfigError, CudaGraphConfig
from trtspec.ops import cublaslt
from trtspec.ops.cublaslt import Size, tuning

SIZE = Size(torch.bfloat16, 128, 4096, 1024, False)
WEIGHT = torch.empty(4096, 1024)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "new" / "gpu.json"
    monkeypatch.setattr(cublaslt, "_path", lambda device: path)
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
    assert len(caplog.records) == 1


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
        seen.append(getattr(cublaslt._is_tuning, "value", False))

    with tuning():
        with tuning(False):
            look()
        look()
        other = threading.Thread(target=look)
        other.start()
        other.join()
    look()
    assert seen == [False, True, False, False]


def test_the_cpu_has_no_choice() -> None:
    with tuning():
        assert cublaslt.multiply(torch.ones(128, 1024), WEIGHT) is None


def test_the_switch_is_a_bool() -> None:
    with pytest.raises(ConfigError, match="enable_autotuner='no'"):
        CudaGraphConfig(enable_autotuner="no")  # type: ignore[arg-type]
