"""Sampling parameters: of a request, by slot, and of a pass, one row per logits row."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError
from ..utils import renamed

GREEDY_TEMPERATURE = 0.0
"""A row at this temperature takes the argmax, exactly."""
NO_TOP_K = 0
MAX_TOP_K = 2**31 - 1  # of int32; TensorRT-LLM's for "off"
NO_TOP_P = 1.0


class RequestSampling(NamedTuple):
    """Sampling parameters of one request on the host. The defaults: greedy, no filter."""

    temperature: float = GREEDY_TEMPERATURE
    top_k: int = NO_TOP_K
    top_p: float = NO_TOP_P
    seed: int = 0

    @classmethod
    def of(cls, params: Any, seed: int) -> RequestSampling:
        """Reads checked `SamplingParams`; a greedy request has the default of everything else."""
        if params.is_greedy:
            return cls(seed=seed)
        return cls(params.temperature, params.top_k, params.top_p, seed)


class SlotSampling(NamedTuple):
    """The fields of `RequestSampling` as tensors: entry i belongs to slot i, or to row i."""

    temperatures: Tensor  # [S] float32, 0 is greedy
    top_ks: Tensor  # [S] int32, 0 is off
    top_ps: Tensor  # [S] float32, 1 is off
    seeds: Tensor  # [S] int64

    @classmethod
    def neutral(cls, num_slots: int, device: torch.device) -> SlotSampling:
        """Allocates S slots with the defaults of `RequestSampling`."""
        values = zip(RequestSampling(), _DTYPES, strict=True)
        return cls(*(torch.full((num_slots,), v, dtype=t, device=device) for v, t in values))

    def write(self, slot: int, request: RequestSampling, before: RequestSampling | None) -> None:
        """Writes one request's parameters to its slot; on CUDA the host does not wait.

        Args:
            before: what the slot holds, which is not written again; None: unknown.
        """
        held = (None,) * len(self) if before is None else before
        for column, value, old in zip(self, request, held, strict=True):
            if value != old:
                column[slot : slot + 1].fill_(value)  # the value goes with the kernel: no copy

    def rows(self, slots: Tensor) -> SlotSampling:
        """Gathers the parameters of these slots [R]."""
        return SlotSampling(*(column[slots] for column in self))

    def followed_by(self, others: SlotSampling) -> SlotSampling:
        """Appends the rows of `others`."""
        return SlotSampling(*(torch.cat(pair) for pair in zip(self, others, strict=True)))


_DTYPES = torch.float32, torch.int32, torch.float32, torch.int64


@dataclass(frozen=True)
class SamplingMetadata:
    """Rows of C + G*(K+1) logits: 1 per context, K+1 per generation request.

    The two flags are what the host knows of the whole batch. They only let work be skipped that
    would change nothing.
    """

    temperatures: Tensor  # [R] float32, 0 is greedy
    top_ks: Tensor  # [R] int32, 0 is off
    top_ps: Tensor  # [R] float32, 1 is off
    seeds: Tensor  # [R] int64
    positions: Tensor  # [R] int64, the position the sampled token will have
    all_greedy: bool = False
    has_filters: bool = True

    def contiguous(self) -> SamplingMetadata:
        """Returns the same with rows contiguous in memory."""
        return self._map(Tensor.contiguous)

    def select(self, rows: slice) -> SamplingMetadata:
        """Returns the parameters of some of the rows."""
        return self._map(lambda column: column[rows])

    def _map(self, change: Callable[[Tensor], Tensor]) -> SamplingMetadata:
        columns = ((k, v) for k, v in vars(self).items() if isinstance(v, Tensor))
        changed: dict[str, Any] = {name: change(column) for name, column in columns}
        return replace(self, **changed)


def request_sampling_params(request: Any) -> RequestSampling:
    """Reads the sampling parameters of a request of any loop; greedy ones get neutral values.

    Reads `request.sampling_params` (trtspec's) or `request.sampling_config` (TensorRT-LLM's, whose
    values are lists of one). Greedy means temperature 0 or unset with no filter, or top_k 1.
    Without a seed one is derived from the request's id (`request_id`, `py_request_id`), so that
    requests do not share their noise; without either it is 0.

    Raises:
        ConfigError: it has neither of the first two.
    """
    params = getattr(request, "sampling_params", None)
    if params is None:
        params = getattr(request, "sampling_config", None)
    if params is None:
        raise ConfigError(
            f"{type(request).__name__} has neither `sampling_params` nor `sampling_config`: give "
            "it one, or leave SpecMetadata.allow_advanced_sampling out."
        )

    def value(name: str) -> Any:
        attribute = getattr(params, name, None)
        if isinstance(attribute, (list, tuple)):
            attribute = attribute[0] if attribute else None
        return attribute

    temperature, top_k, top_p = value("temperature"), value("top_k"), value("top_p")
    top_k = NO_TOP_K if top_k is None or top_k >= MAX_TOP_K else int(top_k)
    asked = value("random_seed") if value("seed") is None else value("seed")
    # TensorRT-LLM's seeds are unsigned.
    seed = _seed_of_id(request) if asked is None else int(asked) % 2**63
    filters = top_k > 1 or (top_p is not None and 0.0 < top_p < 1.0)
    if temperature is None:
        temperature = 1.0 if filters else GREEDY_TEMPERATURE
    if temperature <= 0 or top_k == 1 or top_p == 0:
        return RequestSampling(seed=seed)
    top_p = NO_TOP_P if top_p is None else float(top_p)
    return RequestSampling(float(temperature), top_k, top_p, seed)


def _seed_of_id(request: Any) -> int:
    ids = getattr(request, "request_id", None), getattr(request, "py_request_id", None)
    known = next((number for number in ids if number is not None), None)
    if known is None:
        return 0
    number = known if isinstance(known, int) else zlib.crc32(str(known).encode())
    return (number + 1) * 0x9E3779B97F4A7C15 % 2**63  # the golden ratio scatters them


__getattr__ = renamed(__name__, {"to_device": "trtspec.utils.to_device"})
