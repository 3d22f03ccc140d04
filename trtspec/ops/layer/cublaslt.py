"""Products of a few dozen rows with large weights, by the fastest of cuBLASLt's algorithms.

cuBLAS takes the first of the algorithms that its heuristic proposes. For the rows of a step of many
requests that is often not the fastest (docs/performance.md). So each size is measured once, before
its graph is captured. The choice is kept in the cache directory: a second start chooses the same.
The library is torch's, by its C interface
(https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api). Whatever goes wrong here, cuBLAS
serves.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ...utils import cache_dir, replace_text
from ..launch.captures import capture_stream, no_garbage_collection

logger = logging.getLogger(__name__)

MAX_ROWS = 128
"""With more, the faster algorithms draw more power, and a step at the GPU's limit gains nothing."""
MIN_VALUES = 4 << 20
"""Smaller weights are left to cuBLAS: there an algorithm matters less than the launch."""
MIN_GAIN = 0.02
"""Of cuBLAS's time; by less, its own choice stays."""
WORKSPACE = 32 << 20
_ROUNDS = 12
_PRODUCTS_OF_GRAPH = 8  # at least, so that its launch counts little
_VERSION = 2  # of the measurement: choices by another one are not read
_KINDS = {torch.bfloat16: 14, torch.float16: 2}  # cudaDataType: CUDA_R_16BF, CUDA_R_16F
_ALIGNMENT = 256  # of addresses, which the heuristic takes for granted


@dataclass(frozen=True)
class Size:
    """x [rows, size] times a weight [out, size], perhaps added to what is there."""

    dtype: torch.dtype
    rows: int
    out: int
    size: int
    adds: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {self.rows}x{self.size} {self.out}{' adds' if self.adds else ''}"


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: a cublasLtMatmulAlgo_t, the workspace it needs in bytes."""

    _fields_ = (
        ("data", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int32),
        ("waves", c_float),
        ("reserved", c_int32 * 4),
    )


class _Tuning(threading.local):
    is_on = False


_tuning = _Tuning()
_chosen: dict[tuple[int, Size], _Algorithm | None] = {}


@contextmanager
def tuning(enabled: bool = True) -> Iterator[None]:
    """Lets `multiply` serve inside, in this thread.

    It measures sizes that it meets for the first time, unless a graph is being captured.
    """
    before, _tuning.is_on = _tuning.is_on, enabled
    try:
        yield
    finally:
        _tuning.is_on = before


def multiply(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor | None:
    """Multiplies x [T, K] with weight [N, K] transposed, by an algorithm faster than cuBLAS's.

    Args:
        residual: [T, N], takes the sum; None: a new tensor.

    Returns:
        [T, N], or None where cuBLAS's choice is to serve: outside of `tuning`, for sizes this is
        not for, and where no faster algorithm is known.
    """
    if not x.is_cuda or not _tuning.is_on:
        return None
    size = size_of(x, weight, residual)
    if size is None:
        return None
    key = x.device.index, size
    if key not in _chosen and not torch.cuda.is_current_stream_capturing():
        _chosen[key] = _choose(size, weight)
    algorithm = _chosen.get(key)
    if algorithm is None:
        return None
    out = residual
    if out is None:
        out = torch.empty(size.rows, size.out, dtype=x.dtype, device=x.device)
    if _product(x.device.index, size).run(algorithm, x, weight, out):
        return out
    logger.warning("cuBLASLt refused the algorithm chosen for %s: cuBLAS serves.", size)
    _chosen[key] = None
    return None


def size_of(x: Tensor, weight: Tensor, residual: Tensor | None) -> Size | None:
    """Returns the product's size if an algorithm may be chosen for it and these tensors."""
    if x.dim() != 2 or weight.dim() != 2 or x.dtype not in _KINDS:
        return None
    (rows, inner), (out, expected) = x.shape, weight.shape
    if not 0 < rows <= MAX_ROWS or weight.numel() < MIN_VALUES or inner != expected:
        return None
    if residual is not None and residual.shape != (rows, out):
        return None
    tensors = (x, weight) if residual is None else (x, weight, residual)
    for t in tensors:
        if t.dtype != x.dtype or t.device != x.device or not t.is_contiguous():
            return None
        if t.data_ptr() % _ALIGNMENT or (t.requires_grad and torch.is_grad_enabled()):
            return None
    return Size(x.dtype, rows, out, inner, residual is not None)


# -- choosing -----------------------------------------------------------------------------------
def _choose(size: Size, weight: Tensor) -> _Algorithm | None:
    """Returns the fastest algorithm for a size, from the cache directory or by measurement.

    None is the one that cuBLAS chooses.
    """
    if _library() is None:
        return None
    try:
        path, name = _path(weight.device.index), str(size)
        known = _read(path)
        if name in known and _is_usable(known[name], size, weight):
            return known[name]
        best = _measure(size, weight)
        now = _read(path)  # what another process wrote meanwhile stays
        if name not in known:
            best = now.get(name, best)
        _write(path, now | {name: best})
        return best
    except (OSError, RuntimeError, AttributeError) as error:
        logger.warning("Products of %s are cuBLAS's choice, none was measured: %s", size, error)
        return None


def _is_usable(algorithm: _Algorithm | None, size: Size, weight: Tensor) -> bool:
    return algorithm is None or _product(weight.device.index, size).accepts(algorithm)


def _measure(size: Size, weight: Tensor) -> _Algorithm | None:
    device = weight.device
    product = _product(device.index, size)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(size.rows, size.size, device=device, generator=generator).to(size.dtype)
    out = torch.zeros(size.rows, size.out, dtype=size.dtype, device=device)
    algorithms = [a for a in product.algorithms() if product.run(a, x, weight, out)]
    # More bytes than stay in L2, as when a step comes to its next layer.
    enough = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    copies = -(-enough // (weight.numel() * weight.element_size()))
    weights = [weight, *(weight.clone() for _ in range(copies - 1))]

    def by_cublas(w: Tensor) -> None:
        if size.adds:
            out.addmm_(x, w.t())
        else:
            torch.mm(x, w.t(), out=out)

    runs: list[Callable[[Tensor], object]] = [by_cublas]
    runs += [partial(product.run, a, x, out=out) for a in algorithms]
    times = _times(runs, weights)
    best = min(range(len(runs)), key=times.__getitem__)
    us, best_us = times[0] * 1e3, times[best] * 1e3
    message = "%s: %.1f us by cuBLAS, %.1f by the best of %d algorithms."
    logger.info(message, size, us, best_us, len(algorithms))
    gain = 1 - times[best] / times[0]
    return algorithms[best - 1] if best and gain >= MIN_GAIN else None


def _times(runs: list[Callable[[Tensor], object]], weights: list[Tensor]) -> list[float]:
    """Returns ms of a product each, in a graph, as a step has them: an algorithm that clears its
    workspace first waits there for some µs.

    They take turns: a GPU's clock drifts at its power limit.
    """
    runs[0](weights[0])  # loads what is loaded on first use
    weights = weights * -(-_PRODUCTS_OF_GRAPH // len(weights))
    graphs = _graphs(runs, weights)
    left = [number for number, graph in enumerate(graphs) if graph is not None]
    torch.cuda.synchronize()
    rounds: list[tuple[list[int], list[torch.cuda.Event]]] = []
    for first in range(_ROUNDS):
        order = [left[(first + i) % len(left)] for i in range(len(left))]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(left) + 1)]
        torch.cuda._sleep(50_000 * len(left))  # cycles: the host gets ahead
        marks[0].record()
        for number, mark in zip(order, marks[1:], strict=True):
            graph = graphs[number]
            assert graph is not None
            graph.replay()
            mark.record()
        rounds.append((order, marks))
    torch.cuda.synchronize()
    times: list[list[float]] = [[] for _ in runs]
    for order, marks in rounds:
        for number, begin, end in zip(order, marks, marks[1:], strict=False):
            times[number].append(begin.elapsed_time(end) / len(weights))
    return [median(of_run) if of_run else math.inf for of_run in times]


def _graphs(
    runs: list[Callable[[Tensor], object]], weights: list[Tensor]
) -> list[torch.cuda.CUDAGraph | None]:
    """Captures each run's products with all weights. The graphs share memory.

    None: the library refused, so that nothing was captured.
    """
    device, pool = weights[0].device, torch.cuda.graph_pool_handle()
    stream = capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graphs: list[torch.cuda.CUDAGraph | None] = []
    with torch.cuda.stream(stream), no_garbage_collection():
        for run in runs:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool)
            try:
                answers = [run(weight) for weight in weights]
            finally:
                graph.capture_end()
            was_refused = any(answer is False for answer in answers)
            graphs.append(None if was_refused else graph)
    return graphs


def _path(device: int) -> Path:
    name = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
    library = _library().cublasLtGetVersion()
    return cache_dir() / "algorithms" / f"{name}-cublaslt-{library}-{_VERSION}.json"


def _read(path: Path) -> dict[str, _Algorithm | None]:
    try:
        return {
            size: None if code is None else _Algorithm.from_buffer_copy(bytes.fromhex(code))
            for size, code in json.loads(path.read_text()).items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("%s is of no use, products are measured again: %s", path, error)
        return {}


def _write(path: Path, known: dict[str, _Algorithm | None]) -> None:
    codes = {size: None if a is None else bytes(a).hex() for size, a in known.items()}
    try:
        replace_text(path, json.dumps(codes, indent=1))
    except OSError as error:  # this run has its choice; the next will measure again
        logger.warning("The choice of algorithms was not kept: %s", error)


# -- the library --------------------------------------------------------------------------------
@cache
def _library() -> Any:
    """None where torch has no cuBLASLt."""
    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError as error:
        logger.warning("cuBLASLt cannot be asked for its algorithms, cuBLAS serves: %s", error)
        return None
    library.cublasLtGetVersion.restype = c_size_t
    return library


@cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(byref(handle)))
    return handle


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt answered with status {status}.")


@cache
def _product(device: int, size: Size) -> _Product:
    return _Product(device, size)


class _Product:
    """The library's descriptors of one size.

    It counts columns first: weight [K, N] transposed times x [K, T] is out [N, T].
    """

    def __init__(self, device: int, size: Size):
        self.device, self.library = device, _library()
        self.beta = c_float(1.0 if size.adds else 0.0)
        kind = _KINDS[size.dtype]
        self.description = c_void_p()
        compute_fp32, scale_fp32 = 68, 0  # CUBLAS_COMPUTE_32F, CUDA_R_32F
        create = self.library.cublasLtMatmulDescCreate
        _check(create(byref(self.description), compute_fp32, scale_fp32))
        transposes_weight, yes = 3, c_int32(1)  # CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T
        set_attribute = self.library.cublasLtMatmulDescSetAttribute
        _check(set_attribute(self.description, transposes_weight, byref(yes), c_size_t(4)))

        def layout(rows: int, columns: int) -> c_void_p:
            made = c_void_p()
            create = self.library.cublasLtMatrixLayoutCreate
            _check(create(byref(made), kind, c_uint64(rows), c_uint64(columns), c_int64(rows)))
            return made

        self.weight = layout(size.size, size.out)
        self.x, self.out = layout(size.size, size.rows), layout(size.out, size.rows)

    def algorithms(self) -> list[_Algorithm]:
        """Returns what the heuristic proposes, its favourite first, with and without a workspace.

        Parts of sums are added in fp32.
        """
        library, most = self.library, 64
        found: dict[bytes, _Algorithm] = {}
        for workspace in (WORKSPACE, 0):
            preference, results, count = c_void_p(), (_Algorithm * most)(), c_int()
            _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
            try:
                limit, size = 1, c_uint64(workspace)  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
                mask, in_fp32 = 3, c_uint32(2)  # …_REDUCTION_SCHEME_MASK: none or COMPUTE_TYPE
                set_attribute = library.cublasLtMatmulPreferenceSetAttribute
                _check(set_attribute(preference, limit, byref(size), c_size_t(8)))
                _check(set_attribute(preference, mask, byref(in_fp32), c_size_t(4)))
                ask = library.cublasLtMatmulAlgoGetHeuristic
                status = ask(*self._problem(), preference, most, results, byref(count))
            finally:
                library.cublasLtMatmulPreferenceDestroy(preference)
            for result in results[: count.value] if status == 0 else ():
                if result.state == 0:
                    found.setdefault(bytes(result.data), result)
        return list(found.values())

    def accepts(self, algorithm: _Algorithm) -> bool:
        """Whether the library knows this algorithm for this size."""
        result = _Algorithm()
        check = self.library.cublasLtMatmulAlgoCheck
        status = check(*self._problem(), byref(algorithm), byref(result))
        return status == 0 and result.workspace <= algorithm.workspace <= WORKSPACE

    def _problem(self) -> tuple[c_void_p, ...]:
        """Returns the library's handle, and descriptors of the product, its inputs and outputs."""
        handle = _handle(self.device)
        return handle, self.description, self.weight, self.x, self.out, self.out

    def run(self, algorithm: _Algorithm, x: Tensor, weight: Tensor, out: Tensor) -> bool:
        """Multiplies; returns False, with nothing written, where the library refuses."""
        with torch.cuda.device(x.device):
            # Of the stream's memory (in a capture, of the graph's); what runs later may reuse it.
            workspace = torch.empty(algorithm.workspace, dtype=torch.uint8, device=x.device)
            result = c_void_p(out.data_ptr()), self.out
            status = self.library.cublasLtMatmul(
                _handle(self.device),
                self.description,
                byref(c_float(1.0)),
                c_void_p(weight.data_ptr()),
                self.weight,
                c_void_p(x.data_ptr()),
                self.x,
                byref(self.beta),
                *result,  # is added to
                *result,  # is written
                byref(algorithm),
                c_void_p(workspace.data_ptr()),
                c_size_t(algorithm.workspace),
                c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
            )
        return bool(status == 0)
