"""Sampling parameters of one pass: one row per logits row."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

GREEDY_TEMPERATURE = 0.0
"""A row at this temperature takes the argmax, exactly."""
NO_TOP_K = 0
MAX_TOP_K = 2**31 - 1  # of int32; TensorRT-LLM's for "off"
NO_TOP_P = 1.0


@dataclass(frozen=True)
class SamplingMetadata:
    """Rows of C + G*(K+1) logits: 1 per context, K+1 per generation request.

    The two flags are what the host knows of the whole batch; they only skip work that would
    change nothing.
    """

    temperatures: Tensor  # [R] float32, 0 is greedy
    top_ks: Tensor  # [R] int32, 0 is off
    top_ps: Tensor  # [R] float32, 1 is off
    seeds: Tensor  # [R] int64
    positions: Tensor  # [R] int64, the position the sampled token will have
    all_greedy: bool = False
    has_filters: bool = True

    def contiguous(self) -> SamplingMetadata:
        """The same, rows side by side in memory."""
        return replace(
            self, temperatures=self.temperatures.contiguous(), top_ks=self.top_ks.contiguous(),
            top_ps=self.top_ps.contiguous(), seeds=self.seeds.contiguous(),
            positions=self.positions.contiguous(),
        )  # fmt: skip

    def select(self, rows: slice) -> SamplingMetadata:
        """The parameters of some of the rows."""
        return replace(
            self, temperatures=self.temperatures[rows], top_ks=self.top_ks[rows],
            top_ps=self.top_ps[rows], seeds=self.seeds[rows], positions=self.positions[rows],
        )  # fmt: skip


def request_sampling_params(request: Any) -> tuple[float, int, float, int]:
    """(temperature, top_k, top_p, seed) of a request, greedy rows neutralised.

    Reads `request.sampling_params` (ours) or `request.sampling_config` (TensorRT-LLM's, whose
    values are lists of one). Greedy means temperature 0 or unset with no filter, or top_k 1.
    Without a seed the request's id (`request_id`, `py_request_id`) makes one, so that requests do
    not share their noise; without either it is 0.
    """
    params = getattr(request, "sampling_params", None)
    if params is None:
        params = request.sampling_config

    def value(name: str) -> Any:
        given = getattr(params, name, None)
        if isinstance(given, (list, tuple)):
            given = given[0] if given else None
        return given

    temperature, top_k, top_p = value("temperature"), value("top_k"), value("top_p")
    top_k = NO_TOP_K if top_k is None or top_k >= MAX_TOP_K else int(top_k)
    given = value("random_seed") if value("seed") is None else value("seed")
    seed = _seed_of_id(request) if given is None else int(given) % 2**63  # theirs are unsigned
    filters = top_k > 1 or (top_p is not None and 0.0 < top_p < 1.0)
    if temperature is None:
        temperature = 1.0 if filters else GREEDY_TEMPERATURE
    if temperature <= 0 or top_k == 1 or top_p == 0:
        return GREEDY_TEMPERATURE, NO_TOP_K, NO_TOP_P, seed
    top_p = NO_TOP_P if top_p is None else float(top_p)
    return float(temperature), top_k, top_p, seed


def _seed_of_id(request: Any) -> int:
    ids = getattr(request, "request_id", None), getattr(request, "py_request_id", None)
    given = next((name for name in ids if name is not None), None)
    if given is None:
        return 0
    number = given if isinstance(given, int) else zlib.crc32(str(given).encode())
    return (number + 1) * 0x9E3779B97F4A7C15 % 2**63  # the golden ratio scatters them


def to_device(host: Tensor, device: torch.device | str) -> Tensor:
    """Copies a CPU tensor; on CUDA through pinned memory, so that the host does not wait."""
    if torch.device(device).type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def rows_to_tensor(values: list[Any], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Host values -> device tensor, without waiting for the device."""
    return to_device(torch.tensor(values, dtype=dtype), device)
