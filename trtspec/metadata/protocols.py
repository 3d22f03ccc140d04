"""Protocols of objects that a caller hands to a step."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class GuidedDecoder(Protocol):
    """Masks the target's logits in place before a token is chosen."""

    def execute(self, logits: Tensor) -> None: ...
