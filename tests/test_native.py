"""The kernels of csrc compile, and a machine that cannot compile them is told what it lacks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from trtspec.errors import ConfigError
from trtspec.ops import native


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))


def _has_compiler() -> bool:
    pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
    return shutil.which("nvcc") is not None and shutil.which("ninja") is not None


def test_the_kernels_compile_without_a_gpu() -> None:
    if not _has_compiler():
        pytest.skip("needs nvcc and ninja")
    library = native.build("9.0a")
    for name in ("linear", "linear_swiglu", "linear_rope", "accept_greedy", "choose_drafts",
                 "update_window"):  # fmt: skip
        assert f"__tvm_ffi_{name}".encode() in library.read_bytes(), name
    made = library.stat().st_mtime_ns
    assert native.build("9.0a") == library and library.stat().st_mtime_ns == made


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
