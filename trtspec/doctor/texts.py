"""Sequences of the target, packed for an examination."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ConfigError
from ..train.records import Sequences


def texts_of(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], device: torch.device
) -> Sequences:
    """Packs each prompt with what the target wrote after it; short ones share a row.

    Raises:
        ConfigError: nothing was written.
    """
    rows = [[*p, *o] for p, o in zip(prompts, outputs, strict=True)]
    if not any(len(o) for o in outputs):
        raise ConfigError("The target wrote nothing after these prompts: give other ones.")
    length = max(map(len, rows))
    places, used = list[tuple[int, int]](), list[int]()  # (line, first column); columns, by line
    for row in rows:
        line = next((i for i, n in enumerate(used) if n + len(row) <= length), len(used))
        used += [0] * (line == len(used))
        places.append((line, used[line]))
        used[line] += len(row)
    shape = len(used), length
    ids, documents = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1)
    mask = torch.zeros(shape, dtype=torch.bool)
    positions = torch.zeros(shape, dtype=torch.int64)
    for row, prompt, (line, first) in zip(rows, prompts, places, strict=True):
        end = first + len(row)
        ids[line, first:end] = torch.tensor(row)
        documents[line, first:end] = documents[line].max() + 1
        mask[line, first + len(prompt) : end] = True
        positions[line, first:end] = torch.arange(len(row))
    return Sequences(ids, mask, documents, positions).to(device)
