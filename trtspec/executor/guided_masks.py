"""The memory of a step's masks: written on the host, read on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..guided.grammar import OPEN, Masks
from ..metadata.guided import GuidedStep, Point


class MaskRows:
    """Rows of masks [R, W] int32. On the CPU both sides are one tensor."""

    def __init__(self, num_rows: int, num_words: int, device: torch.device):
        self.device = torch.full((num_rows, num_words), OPEN, dtype=torch.int32, device=device)
        self.host = self.device
        self._sent: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.host = torch.full_like(self.device, OPEN, device="cpu").pin_memory()
            self._sent = torch.cuda.Event()
        self._rows: Masks = self.host.numpy()

    def to_write(self) -> Masks:
        """Returns the host's rows, once the device has read what was sent before."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._rows

    def send(self, num_rows: int) -> None:
        """Copies the first rows to the device, without waiting."""
        if self._sent is not None:
            self.device[:num_rows].copy_(self.host[:num_rows], non_blocking=True)
            self._sent.record()


@dataclass
class GuidedMasks:
    """The masks of any step of an engine: B requests, K drafts, W words."""

    verify: MaskRows  # [B * (K+1), W]
    draft: MaskRows  # [B, W]
    num_masked_drafts: int

    @staticmethod
    def allocate(
        max_batch_size: int, max_draft_len: int, vocab_size: int, device: torch.device
    ) -> GuidedMasks:
        words = (vocab_size + 31) // 32
        return GuidedMasks(
            verify=MaskRows(max_batch_size * (max_draft_len + 1), words, device),
            draft=MaskRows(max_batch_size, words, device),
            num_masked_drafts=max_draft_len,
        )

    def step(self, reach: Callable[[Point], None] | None, draft_len: int) -> GuidedStep:
        """Returns what a step reads. On other ranks than the first the host has no part."""
        return GuidedStep(
            verify_masks=self.verify.device,
            draft_masks=self.draft.device,
            num_masked_drafts=min(self.num_masked_drafts, draft_len),
            reach=reach or _pass_by,
        )


def _pass_by(point: Point) -> None:
    """Does nothing."""
