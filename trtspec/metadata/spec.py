"""`SpecMetadata`: what a worker is told about one step.

The names are TensorRT-LLM's, so that its users and its tests find them. The executor fills one
per pass; a foreign loop sets the fields it has and leaves the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .embeds import RereadEmbeds, RowEmbeds
from .logits import LogitsState
from .mode import SpeculativeDecodingMode
from .sampling import SamplingMetadata, request_sampling_params, rows_to_tensor


@dataclass(frozen=True)
class CapturedHiddenStates:
    """The one static buffer into which the target's forward copies the layers a drafter reads."""

    layers: tuple[int, ...]  # 0-based: the residual stream after these layers, in this order
    buffer: Tensor  # [max_num_tokens, len(layers) * D], written by the target's forward


@dataclass
class SpecMetadata:
    """Sizes: B requests, C contexts, G = B - C generations, K draft tokens, R = C + G*(K+1).

    Raises:
        ConfigError: a size is negative, or max_total_draft_tokens < max_draft_len.
    """

    max_num_requests: int
    max_draft_len: int
    max_total_draft_tokens: int
    # -- what this step is (host) --------------------------------------------------------------
    spec_dec_mode: SpeculativeDecodingMode = SpeculativeDecodingMode.NONE
    is_cuda_graph: bool = False
    num_generations: int = 0
    num_tokens: int = 0
    request_ids: list[int] | None = None
    seq_lens: list[int] | None = None  # rows per request in this pass
    draft_lens: list[int] | None = None
    runtime_draft_len: int | None = None  # drafts to propose in this step, None is K
    num_extra_kv_tokens: int = 0
    num_layers: int = 0
    all_rank_num_tokens: list[int] | None = None
    all_rank_num_seqs: list[int] | None = None
    is_spec_dec_tree: bool = False
    is_spec_dec_dynamic_tree: bool = False
    allow_advanced_sampling: bool = False
    device: torch.device | str = "cpu"
    # -- device tensors of this step -----------------------------------------------------------
    draft_tokens: Tensor | None = None  # [G, K] int32, -1 is "no draft here"
    gather_ids: Tensor | None = None  # [R] int64 rows of the pass that get logits
    num_accepted_draft_tokens: Tensor | None = None  # [B] int32, written by the worker
    slot_ids: Tensor | None = None  # [B] int64, a request's row in per-slot state
    next_prompt_tokens: Tensor | None = None  # [C] int32, -1 at the prompt's end
    inputs_embeds: RowEmbeds | None = None  # rows of contexts that no token's embedding is for
    next_inputs_embeds: RowEmbeds | None = None  # rows whose *next* token is such a one
    reread_embeds: RereadEmbeds | None = None  # the same where rows before are computed again
    bad_requests: Tensor | None = None  # [B] bool, logits held NaN; written by the worker
    sampling: SamplingMetadata | None = None
    logits_state: LogitsState | None = None  # set where a request shapes its logits
    captured: CapturedHiddenStates | None = None  # of this pass; rows 0 … T-1 are valid
    # -- rows written by populate_sampling_params_for_one_model --------------------------------
    temperatures: Tensor | None = None  # [R] float32
    top_ks: Tensor | None = None  # [R] int32
    top_ps: Tensor | None = None  # [R] float32
    seeds: Tensor | None = None  # [R] int64
    positions: Tensor | None = None  # [R] int64, keys the noise; set by the loop that samples
    state: dict[str, Any] = field(default_factory=dict, repr=False)
    """Per-slot state a worker keeps between steps, by name; owned by the executor."""

    def __post_init__(self) -> None:
        for name in ("max_num_requests", "max_draft_len", "max_total_draft_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"SpecMetadata.{name}={value!r}: it must be an int >= 0.")
        if self.max_total_draft_tokens < self.max_draft_len:
            raise ConfigError(
                f"SpecMetadata.max_total_draft_tokens={self.max_total_draft_tokens} is below "
                f"max_draft_len={self.max_draft_len}; for a chain both are K."
            )

    def prepare(self) -> None:
        """Called before a forward. The base has nothing to do."""

    def create_cuda_graph_metadata(self, max_batch_size: int) -> SpecMetadata:
        """A copy for graph capture, sized for `max_batch_size`; itself if it is already one."""
        if self.is_cuda_graph:
            return self
        captured = copy.copy(self)
        captured.is_cuda_graph = True
        captured.max_num_requests = max_batch_size
        captured.state = dict(self.state)
        captured.__post_init__()
        return captured

    def is_layer_capture(self, layer_id: int) -> bool:
        """Whether the drafter wants the output of this target layer (0-based)."""
        return self.captured is not None and layer_id in self.captured.layers

    def maybe_capture_hidden_states(
        self, layer_id: int, hidden_states: Tensor, residual: Tensor | None = None
    ) -> None:
        """Copies a layer's output into the buffer when `is_layer_capture(layer_id)`.

        Args:
            hidden_states: [T, D]; with `residual` [T, D] the layer's output is their sum.
        """
        if self.captured is None:
            return
        for column, layer in enumerate(self.captured.layers):
            if layer == layer_id:
                if residual is not None:
                    hidden_states, residual = hidden_states + residual, None
                rows, size = hidden_states.shape
                start = column * size
                self.captured.buffer[:rows, start : start + size] = hidden_states

    def draft_hidden_states(self, final: Tensor | None, num_tokens: int) -> Tensor | None:
        """What the drafter reads: the captured layers [T, n * D], or `final` [T, D]."""
        return final if self.captured is None else self.captured.buffer[:num_tokens]

    def sampling_rows(self) -> SamplingMetadata | None:
        """The sampling parameters of this pass, or None for argmax everywhere.

        `sampling` if the executor set it; otherwise the populated rows. Rows without `positions`
        are sampled with noise from torch's default generator: correct, but not reproducible.
        """
        if self.sampling is not None or not self.allow_advanced_sampling:
            return self.sampling
        rows = (self.temperatures, self.top_ks, self.top_ps, self.seeds)
        if self.temperatures is None or any(row is None for row in rows):
            return None
        positions = self.positions
        if positions is None:
            shape, device = self.temperatures.shape, self.temperatures.device
            positions = torch.randint(2**62, shape, dtype=torch.int64, device=device)
        return SamplingMetadata(*rows, positions=positions)  # type: ignore[arg-type]

    def populate_sampling_params_for_one_model(self, requests: Iterable[Any]) -> None:
        """Writes one row of sampling parameters per logits row, in batch order.

        A generation request has K+1 rows, a context 1. Greedy rows are neutralised (temperature
        0, top-k off, top-p 1). Without `allow_advanced_sampling` nothing is written and the
        worker takes the argmax.

        Args:
            requests: objects with `sampling_params` (or TensorRT-LLM's `sampling_config`) and
                `is_generation` (or TensorRT-LLM's `state`); contexts first.
        """
        if not self.allow_advanced_sampling:
            return
        rows: list[tuple[float, int, float, int]] = []
        for request in requests:
            repeat = 1 + self.max_draft_len if _is_generation(request) else 1
            rows += [request_sampling_params(request)] * repeat
        if not rows:
            return
        temperatures, top_ks, top_ps, seeds = zip(*rows, strict=True)
        self.temperatures = rows_to_tensor(list(temperatures), torch.float32, self.device)
        self.top_ks = rows_to_tensor(list(top_ks), torch.int32, self.device)
        self.top_ps = rows_to_tensor(list(top_ps), torch.float32, self.device)
        self.seeds = rows_to_tensor(list(seeds), torch.int64, self.device)


def _is_generation(request: Any) -> bool:
    flag = getattr(request, "is_generation", None)
    if flag is not None:
        return bool(flag)
    state = getattr(request, "state", None)
    name = getattr(state, "name", str(state))
    if state is None:
        raise ConfigError(
            f"{type(request).__name__} has neither `is_generation` nor `state`: trtspec cannot "
            "tell how many logits rows it has. Give it `is_generation: bool`."
        )
    return "GENERATION" in name.upper()
