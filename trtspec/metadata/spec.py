"""`SpecMetadata`: what a worker needs to know about one step.

The names are TensorRT-LLM's, so that its users and its tests find them. The executor fills one
per pass. A foreign loop sets the fields that it has and leaves out the others.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..checks import is_int
from ..errors import ConfigError
from ..other_names import NamesFields
from ..utils import rows_to_tensor, to_device
from .embeds import RereadEmbeds, RowEmbeds
from .guided import GuidedStep
from .logits import LogitsState
from .missed import MissedRows
from .mode import SpeculativeDecodingMode
from .sampling import RequestSampling, SamplingMetadata, SlotSampling, request_sampling_params
from .step import StepContext, StepSizes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CapturedHiddenStates:
    """Copies of the target layers that a drafter reads.

    The buffer is static. Where not all rows are verified it is a copy with all rows.
    """

    layers: tuple[int, ...]  # 0-based: the residual stream after these layers, in this order
    buffer: Tensor  # [max_num_tokens, len(layers) * D], written by the target's forward


@dataclass
class SpecMetadata(NamesFields):
    """What a worker reads of a step beside logits and attention: TensorRT-LLM's record, and more.

    Sizes: B requests, C contexts, G = B - C generations, K draft tokens, R = C + G*(K+1).

    Raises:
        ConfigError: a size is negative, or max_total_draft_tokens < max_draft_len.
    """

    # -- in TensorRT-LLM's order; the first three are required ----------------------------------
    max_num_requests: int
    max_draft_len: int
    max_total_draft_tokens: int
    num_generations: int = 0
    is_cuda_graph: bool = field(default=False, repr=False)
    spec_dec_mode: SpeculativeDecodingMode = SpeculativeDecodingMode.NONE
    draft_tokens: Tensor | None = None  # [G, K] int32, -1 is "no draft here"
    draft_lens: Any = None  # for loops that keep it; nothing here reads it
    request_ids: list[int] | None = None
    seq_lens: list[int] | None = None  # rows per request in this pass
    gather_ids: Tensor | None = None  # [R] int64 rows of the pass that get logits
    num_accepted_draft_tokens: Tensor | None = None  # [B] int32, written by the worker
    num_tokens: int = 0
    all_rank_num_tokens: list[int] | None = None
    all_rank_num_seqs: list[int] | None = None
    _: KW_ONLY
    num_extra_kv_tokens: int = 0  # KV rows per request that drafting writes past the verified ones
    num_layers: int = 0  # of the target
    is_spec_dec_tree: bool = False
    is_spec_dec_dynamic_tree: bool = False
    allow_advanced_sampling: bool = False
    # -- rows of sampling parameters, K+1 per generation: buffers of (K+1) * max_num_requests, which
    # populate_sampling_params_for_one_model writes; a loop may set other tensors instead ----------
    temperatures: Tensor | None = None  # [>= R] float32
    top_ks: Tensor | None = None  # [>= R] int32
    top_ps: Tensor | None = None  # [>= R] float32
    seeds: Tensor | None = None  # [>= R] int64; None draws new ones in every step
    positions: Tensor | None = None  # [>= R] int64, of the tokens sampled; None: the worker's
    # -- not TensorRT-LLM's: host --------------------------------------------------------------
    runtime_draft_len: int | None = None  # drafts to propose in this step, None is K
    num_seq_slots: int = 0  # number of slots, TensorRT-LLM's name; 0 is max_num_requests
    device: torch.device | str | None = None  # of the buffers; None is CUDA where there is one
    # -- not TensorRT-LLM's: device tensors of this step ---------------------------------------
    slot_ids: Tensor | None = None  # [B] int64 below slot_capacity, a row in per-slot state
    next_prompt_tokens: Tensor | None = None  # [C] int32, -1 at the prompt's end
    inputs_embeds: RowEmbeds | None = None  # rows with an embedding of the prompt, not a token's
    next_inputs_embeds: RowEmbeds | None = None  # rows whose *next* token has such an embedding
    reread_embeds: RereadEmbeds | None = None  # the same for drafters that compute rows again
    bad_requests: Tensor | None = None  # [B] bool, logits held NaN; written by the worker
    sampling: SamplingMetadata | None = None
    logits_state: LogitsState | None = None  # set where a request shapes its logits
    guided: GuidedStep | None = None  # set where a request has a grammar
    missed: MissedRows | None = None  # set where a step may leave the head's work for later
    captured: CapturedHiddenStates | None = None  # of this pass; rows 0 … T-1 are valid
    state: dict[str, Any] = field(default_factory=dict, repr=False)
    """Per-slot state a worker keeps between steps, by name; owned by the executor."""
    _step: StepContext | None = field(default=None, init=False, repr=False)
    _rows: SamplingMetadata | None = field(default=None, init=False, repr=False)
    _next_positions: Tensor | None = field(default=None, init=False, repr=False)
    _slot_buffer: Tensor | None = field(default=None, init=False, repr=False)
    _populated_slots: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = ("max_num_requests", "max_draft_len", "max_total_draft_tokens", "num_generations")
        for name in sizes:
            value = getattr(self, name)
            if not is_int(value, 0):
                raise ConfigError(f"SpecMetadata.{name}={value!r}: it must be an int >= 0.")
        if self.max_total_draft_tokens < self.max_draft_len:
            raise ConfigError(
                f"SpecMetadata.max_total_draft_tokens={self.max_total_draft_tokens} is below "
                f"max_draft_len={self.max_draft_len}; for a chain both are K."
            )
        if not isinstance(self.spec_dec_mode, SpeculativeDecodingMode):
            raise ConfigError(
                f"SpecMetadata.spec_dec_mode={self.spec_dec_mode!r}: give a "
                "SpeculativeDecodingMode. By position num_generations and is_cuda_graph come first."
            )

    def prepare(self) -> None:
        """Does nothing. TensorRT-LLM's loops call it before a forward."""

    def create_cuda_graph_metadata(self, max_batch_size: int) -> SpecMetadata:
        """Returns a copy for graph capture, of `max_batch_size`, or itself if it is one."""
        if self.is_cuda_graph:
            return self
        if self.allow_advanced_sampling:  # before copying, so that both have the same
            self._make_buffers(max(max_batch_size, self.max_num_requests))
        captured = copy.copy(self)
        captured.is_cuda_graph = True
        captured.num_seq_slots = self.slot_capacity
        captured.max_num_requests = max_batch_size
        captured.state = dict(self.state)
        captured.__post_init__()
        return captured

    def is_layer_capture(self, layer_id: int) -> bool:
        """Whether the drafter reads the output of this target layer (0-based)."""
        return self.captured is not None and layer_id in self.captured.layers

    def maybe_capture_hidden_states(
        self, layer_id: int, hidden_states: Tensor, residual: Tensor | None = None
    ) -> None:
        """Copies a layer's output into the buffer when `is_layer_capture(layer_id)`.

        Args:
            hidden_states: [T, D]; with `residual` [T, D] the layer's output is their sum.
        """
        if residual is not None and self.is_layer_capture(layer_id):
            hidden_states = hidden_states + residual
        for buffer in self.places_of_layer(layer_id, *hidden_states.shape):
            buffer.copy_(hidden_states)

    def places_of_layer(self, layer_id: int, rows: int, size: int) -> list[Tensor]:
        """Returns the parts of the buffer for a layer's output [rows, size]; often none."""
        if self.captured is None:
            return []
        columns = [i for i, layer in enumerate(self.captured.layers) if layer == layer_id]
        return [self.captured.buffer[:rows, i * size : (i + 1) * size] for i in columns]

    def draft_hidden_states(self, final: Tensor | None, num_tokens: int) -> Tensor | None:
        """Returns what the drafter reads: the captured layers [T, n * D], or `final` [T, D]."""
        return final if self.captured is None else self.captured.buffer[:num_tokens]

    def captured_rows(self, num_tokens: int, layers: tuple[int, ...] = ()) -> Tensor:
        """Returns the captured layers of this pass, [T, n * D].

        Args:
            layers: those that the head reads; () is whatever was captured.

        Raises:
            ConfigError: nothing was captured, or other layers.
        """
        if self.captured is None:
            raise ConfigError(
                f"The head reads target layers {list(layers)}: set spec_metadata.captured to a "
                "CapturedHiddenStates with these layers before the target's forward, and call "
                "maybe_capture_hidden_states after each layer."
            )
        if layers and tuple(self.captured.layers) != tuple(layers):
            raise ConfigError(
                f"The head reads target layers {list(layers)}, and spec_metadata.captured holds "
                f"{list(self.captured.layers)}: give it the head's layers, in the head's order."
            )
        return self.captured.buffer[:num_tokens]

    def marked_requests(self) -> Tensor:
        """Returns `bad_requests` [B] bool.

        Raises:
            ConfigError: the worker has not written it.
        """
        if self.bad_requests is None:
            raise ConfigError(
                "The worker has not set spec_metadata.bad_requests [B] bool: accept by "
                "_sample_and_accept_draft_tokens_base, or set it in forward."
            )
        return self.bad_requests

    def sampling_rows(self, num_rows: int) -> SamplingMetadata | None:
        """Returns the sampling parameters of `num_rows` logits rows; None is argmax everywhere.

        These are `sampling` if the executor set it. Otherwise they are the populated rows, or those
        that a loop set. Seeds or positions that are missing are drawn from torch's default
        generator: the output is distributed correctly, but not reproducible.

        Raises:
            ConfigError: fewer rows of parameters than of logits.
        """
        if self.sampling is not None or not self.allow_advanced_sampling:
            return self.sampling
        if self._rows is not None:
            return self._rows
        return self.sampling_of_step(StepSizes(num_rows, 0, 0))

    @contextmanager
    def step(
        self,
        sizes: StepSizes,
        max_draft_len: int,
        device: torch.device,
        next_positions: Tensor | None = None,
    ) -> Iterator[StepContext]:
        """Converts this metadata to what a worker reads, and yields it.

        Until it exits, `sampling_rows` returns the rows of this step. Nested in a step of the same
        sizes it yields that step.

        Args:
            max_draft_len, device: the worker's K, and where its logits are.
            next_positions: [R] int64, which key the noise of rows without `positions`. None: as in
                the step around this one.
        """
        before = self._step, self._rows, self._next_positions
        try:
            if next_positions is not None:
                self._next_positions = next_positions
            if self._step is None or self._step.sizes != sizes:
                self._step = step = StepContext.of(self, sizes, max_draft_len, device)
                self._rows = step.sampling if step.has_sampling else None
            yield self._step
        finally:
            self._step, self._rows, self._next_positions = before

    @contextmanager
    def rows_of_step(
        self, num_contexts: int, num_generations: int, num_drafts: int
    ) -> Iterator[None]:
        """Makes `sampling_rows` return rows for C + G*(K'+1) logits rows until it exits.

        Missing seeds and positions are drawn once.
        """
        outer = self._rows
        self._rows = self.sampling_of_step(StepSizes(num_contexts, num_generations, num_drafts))
        try:
            yield
        finally:
            self._rows = outer

    def sampling_of_step(self, sizes: StepSizes) -> SamplingMetadata | None:
        """Returns the sampling parameters of a step's rows. What is missing is drawn anew."""
        if self.sampling is not None or not self.allow_advanced_sampling:
            return self.sampling
        columns = self._columns()
        if columns is None:
            return None
        num_contexts, num_generations, num_drafts = sizes
        count = sizes.num_rows
        stride = self.max_draft_len + 1  # between the first rows of two generations, as populated

        def of_step(rows: Tensor) -> Tensor:
            needed = num_contexts + num_generations * stride
            if num_drafts == self.max_draft_len or rows.shape[0] == count:
                needed = count
            if rows.shape[0] < needed:
                raise ConfigError(
                    f"{rows.shape[0]} rows of sampling parameters for {needed} rows of logits: "
                    "populate them for this batch (1 per context, K+1 per generation)."
                )
            if needed == count:
                return rows[:count]
            generations = rows[num_contexts:needed].view(num_generations, stride)
            return torch.cat([rows[:num_contexts], generations[:, : num_drafts + 1].flatten()])

        def drawn() -> Tensor:
            device = columns["temperatures"].device
            return torch.randint(2**62, (count,), dtype=torch.int64, device=device)

        positions = self._next_positions
        if self.positions is not None:
            positions = of_step(self.positions)
        elif positions is not None and len(positions) < count:
            if self.seeds is not None:
                raise ConfigError(
                    f"{len(positions)} positions for {count} rows of logits: seeds need one for "
                    "each. Give position_ids of all rows of the pass, or SpecMetadata.positions."
                )
            positions = None
        elif positions is not None:  # a padded pass has more of them
            positions = positions[:count]
        step_rows: dict[str, Any] = {
            name: drawn() if rows is None else of_step(rows) for name, rows in columns.items()
        }
        return SamplingMetadata(**step_rows, positions=drawn() if positions is None else positions)

    def _columns(self) -> dict[str, Any] | None:
        """Returns the rows that a loop set, filters that it left out as off; None: all is greedy.

        Raises:
            ConfigError: there are filters or seeds, and no temperatures.
        """
        columns = {name: getattr(self, name) for name in SlotSampling._fields}
        temperatures = self.temperatures
        if temperatures is None:
            given = [name for name, rows in columns.items() if rows is not None]
            if given:
                raise ConfigError(
                    f"SpecMetadata has {' and '.join(given)}, but no temperatures. Set "
                    "`temperatures`, too: one for each row, 0 for greedy ones."
                )
            return None
        missing = [name for name in ("top_ks", "top_ps") if columns[name] is None]
        if missing:
            neutral = SlotSampling.neutral(len(temperatures), temperatures.device)._asdict()
            columns |= {name: neutral[name] for name in missing}
        return columns

    def populate_sampling_params_for_one_model(self, requests: Iterable[Any]) -> None:
        """Writes one row of sampling parameters per logits row, in batch order.

        A generation request has K+1 rows, a context 1. Rows of greedy requests, and rows past the
        batch, get neutral values (temperature 0, top-k off, top-p 1). The buffers are allocated
        once, so that captured graphs and the copy of `create_cuda_graph_metadata` read them too.

        If every request has a `py_seq_slot` (TensorRT-LLM's), `slot_ids` is set to these, unless
        the loop set it. Without `allow_advanced_sampling` nothing is written, and the worker takes
        the argmax.

        Temperature, top-k, top-p and seed are read. What else `SamplingParams` asks of the logits
        is the loop's to do before the worker gets them: a warning says so once.

        Args:
            requests: objects with `sampling_params` (or TensorRT-LLM's `sampling_config`) and
                `is_generation` (or TensorRT-LLM's `state`); contexts first.

        Raises:
            ConfigError: more requests than `max_num_requests`, a context behind a generation, or a
                request with neither `is_generation` nor `state`, or without sampling parameters.
        """
        if not self.allow_advanced_sampling:
            return
        requests = list(requests)
        if len(requests) > self.max_num_requests:
            raise ConfigError(
                f"{len(requests)} requests in a batch of max_num_requests={self.max_num_requests}."
            )
        rows: list[RequestSampling] = []
        are_generations = [_is_generation(request) for request in requests]
        if sorted(are_generations) != are_generations:
            raise ConfigError("A context is behind a generation: give the contexts first.")
        for request, is_generation in zip(requests, are_generations, strict=True):
            repeat = 1 + self.max_draft_len if is_generation else 1
            rows += [request_sampling_params(request)] * repeat
            params = getattr(request, "sampling_params", None)
            if self.logits_state is None and getattr(params, "shapes_logits", False):
                _warn_of_shaping()
        buffers, slot_buffer = self._make_buffers(self.max_num_requests)
        rows += [RequestSampling()] * (buffers.seeds.shape[0] - len(rows))
        for buffer, values in zip(buffers, zip(*rows, strict=True), strict=True):
            buffer.copy_(rows_to_tensor(list(values), buffer.dtype, buffer.device))
        if self.slot_ids is self._populated_slots:  # else it is the loop's own
            slots = [getattr(request, "py_seq_slot", None) for request in requests]
            self.slot_ids = self._populated_slots = self._written(slots, slot_buffer)

    def _make_buffers(self, num_requests: int) -> tuple[SlotSampling, Tensor]:
        """Returns buffers of parameter rows and slots, which grow if they are too small."""
        count = (self.max_draft_len + 1) * num_requests
        allocated = [getattr(self, name) for name in SlotSampling._fields]
        slots = self._slot_buffer
        is_enough = all(buffer is not None and buffer.shape[0] >= count for buffer in allocated)
        if is_enough and slots is not None and slots.shape[0] >= num_requests:
            return SlotSampling(*allocated), slots
        buffers = SlotSampling.neutral(count, self.buffer_device)
        for name, buffer in buffers._asdict().items():
            setattr(self, name, buffer)
        self._slot_buffer = torch.zeros(num_requests, dtype=torch.int64, device=self.buffer_device)
        return buffers, self._slot_buffer

    def _written(self, slots: list[int | None], buffer: Tensor) -> Tensor | None:
        """Writes slots to the buffer's start and returns that part. None: no request has a slot."""
        unused = self.slot_capacity  # of a request that only fills the batch
        filled = [unused if slot is None else slot for slot in slots]
        if all(slot is None for slot in slots):
            return None
        outside = [slot for slot in filled if not 0 <= slot <= unused]
        if outside:
            raise ConfigError(
                f"py_seq_slot={outside[0]}: SpecMetadata has slots 0 … {unused - 1}. Set "
                "num_seq_slots, or slot_ids [B]."
            )
        written = buffer[: len(filled)]
        written.copy_(to_device(torch.tensor(filled), buffer.device))
        return written

    @property
    def slot_capacity(self) -> int:
        """Returns the slots of per-slot state. The row after them is for padding requests."""
        return self.num_seq_slots or self.max_num_requests

    @property
    def buffer_device(self) -> torch.device:
        """Returns the device of the rows of parameters."""
        if self.device is not None:
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@cache
def _warn_of_shaping() -> None:
    logger.warning(
        "A request's SamplingParams have penalties, logit_bias, bans, min_tokens or min_p. "
        "populate_sampling_params_for_one_model reads temperature, top_k, top_p and seed alone: "
        "change the logits before the worker gets them, or use LLM."
    )


def _is_generation(request: Any) -> bool:
    flag = getattr(request, "is_generation", None)
    if flag is not None:
        if flag not in (True, False):
            name = type(request).__name__
            raise ConfigError(f"{name}.is_generation={flag!r}: it must be True or False.")
        return bool(flag)
    state = getattr(request, "state", None)
    name = getattr(state, "name", str(state))
    if state is None:
        raise ConfigError(
            f"{type(request).__name__} has neither `is_generation` nor `state`: trtspec cannot "
            "tell how many logits rows it has. Give it `is_generation: bool`."
        )
    return "GENERATION" in name.upper()
