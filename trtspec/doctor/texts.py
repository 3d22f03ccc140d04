"""Sequences of the target, packed for an examination."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ConfigError
from ..train.packing import in_rows
from ..train.records import Sequences


def texts_of(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], device: torch.device
) -> Sequences:
    """Packs each prompt with what the target wrote after it; short ones share a row.

    Raises:
        ConfigError: nothing was written.
    """
    if not any(len(output) for output in outputs):
        raise ConfigError("The target wrote nothing after these prompts: give other ones.")
    documents = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([*prompt, *output])
        documents.append((ids, torch.arange(len(ids)) >= len(prompt)))
    return in_rows(documents, max(len(ids) for ids, _ in documents)).to(device)
