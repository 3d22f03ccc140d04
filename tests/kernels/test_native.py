"""The kernels of csrc compile, and a machine that cannot compile them is told what it lacks."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trtspec import native
from trtspec.errors import ConfigError


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))


def _has_compiler() -> bool:
    pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
    return shutil.which("nvcc") is not None and shutil.which("ninja") is not None


def _optimises_little() -> dict[str, str]:
    """Returns the environment in which nvcc takes less than half the time, where it can."""
    words = subprocess.run(["nvcc", "--help"], capture_output=True, text=True, check=True).stdout
    quick = "-Ofc=max " if "--Ofast-compile" in words else ""
    return {"NVCC_APPEND_FLAGS": quick + "-Xcompiler -O0"}


def test_the_kernels_compile_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not _has_compiler():
        pytest.skip("needs nvcc and ninja")
    for name, value in _optimises_little().items():
        monkeypatch.setenv(name, value)
    library = native.build("9.0a")
    names = ("linear", "linear_gated", "linear_rope", "experts", "accept_greedy", "choose_drafts",
             "update_window", "attend_clusters", "attend_prompts")  # fmt: skip
    for name in names:
        assert f"__tvm_ffi_{name}".encode() in library.read_bytes(), name
    made = library.stat().st_mtime_ns
    assert native.build("9.0a") == library and library.stat().st_mtime_ns == made
    _update_empty_windows(importlib.import_module("tvm_ffi").load_module(str(library)))


def test_processes_that_start_together_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the ranks of an engine do. (Threads have a lock each, as processes do.)"""
    ffi = pytest.importorskip("tvm_ffi.cpp", reason="needs apache-tvm-ffi")
    builds = []

    def build(name: str, *, build_directory: str, **_: object) -> str:
        builds.append(name)
        time.sleep(0.3)
        made = Path(build_directory, f"{name}.so")
        made.write_bytes(b"made")
        return str(made)

    monkeypatch.setattr(ffi, "build", build)
    monkeypatch.setattr(native, "_cuda_home", lambda: "/")
    with ThreadPoolExecutor(3) as pool:
        libraries = {*pool.map(native.build, ["9.0a"] * 3)}
    assert [library.read_bytes() for library in libraries] == [b"made"] and len(builds) == 1


def _update_empty_windows(kernels: Any) -> None:
    """As vanilla MTP with one module does: nothing is kept, launched or refused."""
    hidden, ids, rows = torch.ones(4, 12), torch.arange(4), torch.tensor([1, 3])
    kernels.update_window(hidden, ids, rows, rows, torch.empty(5, 0, 12), ids.new_empty(5, 0))


@pytest.fixture(scope="module")
def is_dense(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tensor, int], bool]:
    """The bindings' own check, compiled for the CPU."""
    ffi = pytest.importorskip("tvm_ffi.cpp", reason="needs apache-tvm-ffi")
    if shutil.which("ninja") is None or shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler and ninja")
    library = ffi.build_inline(
        "dense", functions="dense", build_directory=str(tmp_path_factory.mktemp("dense")),
        extra_include_paths=[str(native.source_dir() / "include")], cpp_sources="""
            #include "trtspec/dense.h"
            bool dense(tvm::ffi::TensorView x, int64_t first) {
              return trtspec::is_dense(x, static_cast<int>(first));
            }""",
    )  # fmt: skip
    return importlib.import_module("tvm_ffi").load_module(library).dense


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((3, 4), (4, 1)), ((3, 4), (8, 1)), ((3, 4), (1, 3)), ((2, 3, 4), (12, 4, 1)),
        ((2, 3, 4), (24, 4, 1)), ((2, 3, 4), (24, 8, 1)), ((7,), (1,)), ((7,), (2,)), ((), ()),
        ((1, 5), (99, 1)), ((1, 5), (99, 2)), ((5, 1), (1, 99)), ((5, 1), (3, 1)),
        ((2, 1, 4), (4, 99, 1)), ((1, 1), (7, 9)), ((3, 4), (0, 1)), ((3, 4), (4, 0)),
        ((3, 0, 4), (4, 4, 1)), ((3, 0), (1, 1)), ((0, 4), (9, 2)), ((0,), (5,)),
    ],
)  # fmt: skip
def test_a_tensor_is_dense_where_torch_calls_it_contiguous(
    shape: tuple[int, ...], strides: tuple[int, ...], is_dense: Callable[[Tensor, int], bool]
) -> None:
    x = torch.empty(200).as_strided(shape, strides)
    assert is_dense(x, 0) == x.is_contiguous()


def test_rows_are_dense_however_far_apart(is_dense: Callable[[Tensor, int], bool]) -> None:
    x = torch.empty(5, 8)
    assert is_dense(x[:, :4], 1) and is_dense(x[:, :1], 1) and is_dense(x.t()[:1].t(), 1)
    assert not is_dense(x[:, ::2], 1) and not is_dense(x.t(), 1)


def test_a_broken_source_gives_the_compilers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not _has_compiler():
        pytest.skip("needs nvcc and ninja")
    (tmp_path / "broken.cu").write_text("int f() { return undeclared_name; }")
    monkeypatch.setattr(native, "source_dir", lambda: tmp_path)
    with pytest.raises(ConfigError, match="undeclared_name"):
        native.build("9.0a")


def test_no_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="set CUDA_HOME"):
        native.build("9.0a")


def test_no_tvm_ffi(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(native.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'trtspec\[cuda\]'"):
        native.build("9.0a")


def test_a_machine_without_compilers_is_warned_once_and_served_by_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(architecture: str) -> Path:
        raise ConfigError("no nvcc here")

    monkeypatch.setattr(native, "build", fail)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    native._load.cache_clear()
    try:
        assert native._load(0) is None and native._load(0) is None
    finally:
        native._load.cache_clear()
    assert [r.getMessage() for r in caplog.records].count(caplog.records[0].getMessage()) == 1
    assert "no nvcc here" in caplog.text


def test_the_cpu_has_no_kernels() -> None:
    assert native.kernels(torch.zeros(1)) is None
