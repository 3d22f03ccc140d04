"""Passes over prompts that compute their last layer for the rows with logits alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trtspec.executor import forward_step
from trtspec.models.decoder import Decoder


def watch_last_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets passes of any number of rows do so. Returns their rows, a list that grows."""
    rows: list[int] = []
    last_layer = Decoder._last_layer

    def counted(self: Decoder, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        rows.append(len(hidden))
        return last_layer(self, hidden, *args)

    monkeypatch.setattr(forward_step, "FEWEST_ROWS", 1)
    monkeypatch.setattr(Decoder, "_last_layer", counted)
    return rows
