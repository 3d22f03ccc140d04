"""Request state that lives on the device, by slot.

The host writes a slot once, when a request is admitted, and never reads it. Each step gathers its
inputs from the slots and writes the next step's inputs to them. The last slot is scratch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..metadata.logits import LogitsState
from ..metadata.missed import MissedRows
from ..metadata.sampling import RequestSampling, SlotSampling
from ..metadata.spec import CapturedHiddenStates
from ..utils import rows_to_tensor
from .recurrent import RecurrentStates


@dataclass
class SlotState:
    """S slots and one scratch slot; K draft tokens.

    A request's first step is of its prompt, and writes what steps write.
    """

    next_tokens: Tensor  # [S+1, K+1] int32: last token, then drafts (-1 none); written by a step
    past_lens: Tensor  # [S+1] int64: tokens with KV in the target; written by a step
    sampling: SlotSampling  # S+1 slots; this and the rest are written at admission
    written: dict[int, RequestSampling] = field(default_factory=dict)  # what `sampling` holds
    rope_deltas: Tensor | None = None  # [S+1] int64, of models with M-RoPE (AttentionMetadata)
    worker: dict[str, Tensor] = field(default_factory=dict)  # what worker and rule keep by slot
    captured: CapturedHiddenStates | None = None  # of the current pass, not by slot
    missed: MissedRows | None = None  # where a step may leave the head's work for later
    chances: Tensor | None = None
    """[S+1, K] float32: how likely it is that a draft and all before it are accepted, by the
    drafter. Ones where it does not say. Written by a step; None without `max_verified_drafts`."""
    recurrent: RecurrentStates | None = None  # of layers with linear attention
    logits: LogitsState | None = None  # None until a request has penalties, biases or bans

    @staticmethod
    def allocate(
        num_slots: int, max_draft_len: int, device: torch.device, has_rope_deltas: bool = False
    ) -> SlotState:
        rows = num_slots + 1

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return SlotState(
            next_tokens=zeros(rows, max_draft_len + 1, dtype=torch.int32),
            past_lens=zeros(rows, dtype=torch.int64),
            sampling=SlotSampling.neutral(rows, device),
            rope_deltas=zeros(rows, dtype=torch.int64) if has_rope_deltas else None,
        )

    def admit(self, slot: int, sampling: RequestSampling, rope_delta: int = 0) -> None:
        """Writes a new request's parameters. Raises nothing, and does not wait."""
        self.sampling.write(slot, sampling, self.written.pop(slot, None))
        self.written[slot] = sampling
        if self.rope_deltas is not None:
            self.rope_deltas[slot : slot + 1].fill_(rope_delta)
        if self.missed is not None:
            self.missed.positions[slot].fill_(-1)

    def set_drafts(self, slots: list[int], drafts: list[list[int]]) -> None:
        """Overwrites the drafts of some slots from the host (mode USER_PROVIDED)."""
        device = self.next_tokens.device
        index = rows_to_tensor(slots, torch.int64, device)
        self.next_tokens[index, 1:] = rows_to_tensor(drafts, torch.int32, device)
