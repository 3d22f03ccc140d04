"""The memory of a step's masks, and of the tokens that the host reads to write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..guided.grammar import OPEN, Masks
from ..metadata.guided import GuidedStep, HandedOver, Point


class VerifyMasks:
    """Rows of masks [R, W] int32, copied while the target runs. On the CPU both are one tensor."""

    def __init__(self, num_rows: int, num_words: int, device: torch.device):
        self.device = torch.full((num_rows, num_words), OPEN, dtype=torch.int32, device=device)
        host = self.device
        self._copies: _Copies | None = None
        if device.type == "cuda":
            host = on_host(self.device)
            self._copies = _Copies(device)
        self._host, self._rows = host, host.numpy()

    def begin(self) -> None:
        """Notes that what is launched from now on belongs to a step whose masks come."""
        if self._copies is not None:
            self._copies.read_before.record(current_stream(self.device))

    def to_write(self) -> Masks:
        """Returns the host's rows, once the device has what was sent before."""
        if self._copies is not None:
            self._copies.sent.synchronize()
        return self._rows

    def send(self, num_rows: int) -> None:
        """Copies the first rows to the device, without waiting. What is launched next finds them.

        The copy runs beside the target, once the steps before have read what was sent to them.
        """
        copies = self._copies
        if copies is None:
            return
        with torch.cuda.stream(copies.stream):
            copies.stream.wait_event(copies.read_before)
            self.device[:num_rows].copy_(self._host[:num_rows], non_blocking=True)
            copies.sent.record(copies.stream)
        current_stream(self.device).wait_event(copies.sent)


class _Copies:
    """The stream of the copies, and its places among others."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.read_before, self.sent = torch.cuda.Event(), torch.cuda.Event()


class DraftMasks:
    """Rows of masks [B, W] int32, and what the host reads before it writes them.

    The device addresses the host's memory. So a step's own kernels copy, in its graphs too. The
    host writes after it has waited for tokens that came after the last reading.
    """

    def __init__(self, num_rows: int, max_draft_len: int, num_words: int, device: torch.device):
        self.device = torch.full((num_rows, num_words), OPEN, dtype=torch.int32, device=device)
        counts = torch.zeros((num_rows, max_draft_len + 1), dtype=torch.int32)
        self._chosen: torch.cuda.Event | None = None
        masks = self.device
        if device.type == "cuda":
            masks = on_host(self.device)
            self._chosen = torch.cuda.Event()
        tokens, lens, drafts = (
            on_host(like) if device.type == "cuda" else like.contiguous().clone()
            for like in (counts, counts[:, 0], counts[:, 0])
        )
        self.handed_over = HandedOver(tokens, lens, drafts, masks)
        self.rows: Masks = masks.numpy()
        self._tokens, self._lens, self._drafts = (t.numpy() for t in (tokens, lens, drafts))
        self._is_noted = False

    def note(self) -> None:
        """Notes that what is launched so far brings the tokens to read next."""
        if self._chosen is not None:
            self._chosen.record(current_stream(self.device))
            self._is_noted = True

    def wait(self) -> None:
        """Waits for the tokens to read next."""
        if self._chosen is not None:
            if not self._is_noted:
                self._chosen.record(current_stream(self.device))
            self._is_noted = False
            self._chosen.synchronize()

    def accepted(self, count: int) -> tuple[list[list[int]], list[int]]:
        """Returns the tokens that the step accepted, and how many, of the first requests."""
        return self._tokens[:count].tolist(), self._lens[:count].tolist()

    def drafts(self, count: int) -> list[int]:
        """Returns the last drafts of the first requests."""
        drafts: list[int] = self._drafts[:count].tolist()
        return drafts

    def forget(self) -> None:
        """Forgets a step that an exception left half done."""
        self._is_noted = False


def current_stream(tensor: torch.Tensor) -> torch.cuda.Stream:
    """Returns the stream on which a step of the tensor's device is launched."""
    return torch.cuda.current_stream(tensor.device)


def on_host(like: torch.Tensor) -> Any:
    """Returns a copy in page-locked memory, contiguous."""
    return like.cpu().contiguous().pin_memory()


@dataclass
class GuidedMasks:
    """The masks of any step of an engine: B requests, K drafts, W words."""

    verify: VerifyMasks  # [B * (K+1), W]
    draft: DraftMasks  # [B, W]
    num_masked_drafts: int

    @staticmethod
    def allocate(
        max_batch_size: int, max_draft_len: int, vocab_size: int, device: torch.device
    ) -> GuidedMasks:
        words = (vocab_size + 31) // 32
        return GuidedMasks(
            verify=VerifyMasks(max_batch_size * (max_draft_len + 1), words, device),
            draft=DraftMasks(max_batch_size, max_draft_len, words, device),
            num_masked_drafts=max_draft_len,
        )

    def step(self, host_part: Callable[[Point], None] | None, draft_len: int) -> GuidedStep:
        """Returns what a step reads. On other ranks than the first the host has no part."""
        return GuidedStep(
            verify_masks=self.verify.device,
            draft_masks=self.draft.device,
            handed_over=self.draft.handed_over,
            num_masked_drafts=min(self.num_masked_drafts, draft_len),
            host_part=host_part or _no_host_part,
        )


def _no_host_part(point: Point) -> None:
    """Does nothing."""
