"""`StepContext`: one step as a worker reads it, with every field there.

`SpecMetadata` is the public face: TensorRT-LLM's names, of which a loop sets what it has. It is
converted once, where a worker is entered. `require` refuses a step for which the loop left out
something.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError, shown
from ..utils import to_device
from .attention import AttentionMetadata
from .embeds import RereadEmbeds, RowEmbeds
from .logits import LogitsState
from .missed import MissedRows
from .sampling import SamplingMetadata, SlotSampling

if TYPE_CHECKING:
    from .spec import SpecMetadata


class StepSizes(NamedTuple):
    """Requests and drafts of a step. Logits have one row per context, K'+1 per generation."""

    num_contexts: int  # C
    num_generations: int  # G
    num_drafts: int  # K', verified

    @property
    def num_requests(self) -> int:
        """B."""
        return self.num_contexts + self.num_generations

    @property
    def num_rows(self) -> int:
        """R = C + G*(K'+1)."""
        return self.num_contexts + self.num_generations * (self.num_drafts + 1)


@dataclass(frozen=True)
class StepContext:
    """Sizes: B requests, C contexts, G generations, K' drafts verified, R rows of logits."""

    sizes: StepSizes
    draft_len: int  # drafts to propose
    slot_ids: Tensor  # [B] int64, a row in per-slot state; [0] in a loop without slots
    slot_capacity: int
    next_prompt_tokens: Tensor  # [C] int32, -1 at the prompt's end
    sampling: SamplingMetadata  # [R] rows; [0], all greedy, if the loop has no parameters
    state: dict[str, Any]  # per-slot state by name
    logits_state: LogitsState | None = None  # where a request shapes its logits
    next_inputs_embeds: RowEmbeds | None = None  # where a prompt holds embeddings
    reread_embeds: RereadEmbeds | None = None
    missed: MissedRows | None = None  # where the head's work is left for later: one row each

    @staticmethod
    def of(
        spec: SpecMetadata, sizes: StepSizes, max_draft_len: int, device: torch.device
    ) -> StepContext:
        """Converts what a loop has set.

        Args:
            max_draft_len: K, proposed unless `runtime_draft_len` is less.

        Raises:
            ConfigError: fewer rows of sampling parameters than of logits; slots or next tokens of
                another number of requests; a wrong `runtime_draft_len`; a tree of drafts.
        """
        wanted, slots, following = spec.runtime_draft_len, spec.slot_ids, spec.next_prompt_tokens
        if wanted is not None and not (isinstance(wanted, Integral) and wanted >= 0):
            raise ConfigError(
                f"SpecMetadata.runtime_draft_len={shown(wanted)}: give an int >= 0, or None for K."
            )
        for name in ("is_spec_dec_tree", "is_spec_dec_dynamic_tree"):
            if getattr(spec, name):
                raise ConfigError(
                    f"SpecMetadata.{name}={shown(getattr(spec, name))}: there are no draft trees "
                    "here. Give chains, [G, K] draft_tokens, and leave it False."
                )
        _require_length("slot_ids", slots, sizes.num_requests, "requests")
        if not sizes.num_contexts:
            following = None  # a loop may have left an earlier step's, which nothing reads
        _require_length("next_prompt_tokens", following, sizes.num_contexts, "contexts")
        if slots is None:
            slots = torch.empty(0, dtype=torch.int64, device=device)
        if following is None:
            following = torch.full((sizes.num_contexts,), -1, dtype=torch.int32, device=device)
        sampling = spec.sampling_of_step(sizes)
        return StepContext(
            sizes=sizes,
            draft_len=max_draft_len if wanted is None else min(wanted, max_draft_len),
            slot_ids=slots,
            slot_capacity=spec.slot_capacity,
            next_prompt_tokens=following,
            sampling=no_sampling(device) if sampling is None else sampling,
            state=spec.state,
            logits_state=spec.logits_state,
            next_inputs_embeds=spec.next_inputs_embeds,
            reread_embeds=spec.reread_embeds,
            missed=spec.missed,
        )

    def require(self, state_names: Sequence[str] = (), has_draft_memory: bool = False) -> None:
        """Raises ConfigError where the loop has left out what this step reads by slot.

        Args:
            state_names: of `SpecMetadata.state`.
        """
        read = [name for name in state_names if name not in self.state]
        if not self.has_slots:
            read = list(state_names)
            if self.logits_state is not None:
                read.append("logits_state")
            if has_draft_memory and not self.sampling.all_greedy:
                read.append("what drafts were drawn from")
        if read:
            raise ConfigError(
                f"This step reads what is kept by slot ({', '.join(read)}): set spec_metadata."
                "slot_ids [B], and spec_metadata.state to what worker.allocate_state(…) returned; "
                "call worker.admit for each request."
            )
        if self.logits_state is not None and not self.has_sampling:
            raise ConfigError("spec_metadata.logits_state needs spec_metadata.sampling: set both.")

    @property
    def has_slots(self) -> bool:
        return self.slot_ids.shape[0] > 0

    @property
    def has_sampling(self) -> bool:
        """Whether there are rows of sampling parameters, greedy ones included."""
        return self.sampling.temperatures.shape[0] > 0

    def output_lens(self, lens: Tensor) -> Tensor:
        """Returns how many accepted tokens are output: lens [B] -> [B].

        It is 0 for a context that ends inside its prompt: its next token is the prompt's.
        """
        contexts = self.sizes.num_contexts
        if not contexts:
            return lens
        of_contexts = lens[:contexts].masked_fill(self.next_prompt_tokens >= 0, 0)
        return torch.cat([of_contexts, lens[contexts:]])


def _require_length(name: str, given: Tensor | None, count: int, of_what: str) -> None:
    if given is None or (isinstance(given, Tensor) and given.shape == (count,)):
        return
    form = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
    raise ConfigError(
        f"SpecMetadata.{name} is {form}, but the step has {count} {of_what}: give a tensor "
        f"[{count}]."
    )


def no_sampling(device: torch.device) -> SamplingMetadata:
    """Returns parameters of no rows: every request is greedy."""
    return SamplingMetadata(
        **SlotSampling.neutral(0, device)._asdict(),
        positions=torch.empty(0, dtype=torch.int64, device=device),
        all_greedy=True,
        has_filters=False,
    )


def batch_shape(meta: AttentionMetadata | None, spec: SpecMetadata) -> tuple[int, int]:
    """Returns (C, B) of a pass.

    Raises:
        ConfigError: neither the attention metadata nor the request ids are set, or there are more
            generations than requests.
    """
    if meta is not None:
        return meta.num_contexts, meta.num_seqs
    if spec.request_ids is None:
        raise ConfigError(
            "Without attn_metadata a worker needs spec_metadata.request_ids and num_generations."
        )
    if spec.num_generations > len(spec.request_ids):
        raise ConfigError(
            f"SpecMetadata.num_generations={spec.num_generations} is above the number of "
            f"request_ids, {len(spec.request_ids)}: set both for each step."
        )
    return len(spec.request_ids) - spec.num_generations, len(spec.request_ids)


def first_axis(position_ids: Tensor) -> Tensor:
    """Returns positions as one row: [T], [1, T] (TensorRT-LLM's), [3, T] or [3, 1, T] (M-RoPE's)
    -> [T].

    Raises:
        ConfigError: another shape, or no tensor.
    """
    shape = getattr(position_ids, "shape", None)
    if not shape or math.prod(shape[:-1]) not in (1, 3):
        given = "None" if position_ids is None else f"a {type(position_ids).__name__}"
        given = given if shape is None else f"of shape {tuple(shape)}"
        raise ConfigError(
            f"position_ids are {given}: give a tensor [T], [1, T], [3, T] or [3, 1, T]."
        )
    return position_ids if position_ids.dim() == 1 else position_ids.flatten(0, -2)[0]


def next_positions(
    position_ids: Tensor, meta: AttentionMetadata | None, spec: SpecMetadata
) -> Tensor | None:
    """Returns the position of the token that each logits row chooses, [R] int64.

    It is None if neither `gather_ids` nor the metadata say which rows of the pass have logits.

    Args:
        position_ids: [T], or [1, T], or [3, T] whose first axis counts.
    """
    if spec.sampling is not None or not spec.allow_advanced_sampling:
        return None  # the executor sets them itself, or nothing is sampled
    # Another engine's metadata has neither positions nor rows.
    known = meta if isinstance(meta, AttentionMetadata) else None
    positions = first_axis(position_ids if known is None else known.position_ids).to(torch.int64)
    if spec.gather_ids is not None:
        return positions[spec.gather_ids] + 1
    if known is not None:
        if not known.num_contexts:
            return positions + 1
        generations = positions[known.num_context_tokens :]
        return torch.cat([positions[known.ends_of_contexts()], generations]) + 1
    has_shape = meta is not None or spec.request_ids is not None
    contexts, requests = batch_shape(meta, spec) if has_shape else (0, 0)
    if not contexts:
        return positions + 1
    if spec.seq_lens is None and requests > 1:
        return None
    lens = spec.seq_lens or [positions.shape[0]]
    ends = torch.tensor(lens[:contexts]).cumsum(0) - 1
    last = positions[to_device(ends, positions.device)]
    return torch.cat([last, positions[sum(lens[:contexts]) :]]) + 1
