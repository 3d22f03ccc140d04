"""Prints, as JSON, how many warpgroup instructions Triton's kernels of linear attention have on a
Hopper GPU, by kernel, for heads of the sizes given: "16,32" is keys, values. It needs an
environment without TRITON_INTERPRET."""

from __future__ import annotations

import json
import sys

import torch
from compile_triton import compiled

from trtspec.ops.layer import triton_delta_rule as kernels
from trtspec.ops.layer.delta_rule import (
    Contexts,
    DeltaMemory,
    DeltaRows,
    DeltaWeights,
    Generations,
    places,
)

DRAFTS, TAPS, HEADS, ROWS = 20, 4, 4, 64


def count(key: int, value: int) -> dict[str, int]:
    """In bf16. The generations have so many drafts that 64 rows are a tile."""
    channels = 2 * HEADS * key + HEADS * value
    kept = 2, places(DRAFTS, TAPS)
    memory = DeltaMemory(
        torch.empty(2, HEADS, key, value), _bf16(*kept, channels), _bf16(*kept, 2 * HEADS)
    )
    weights = DeltaWeights(torch.empty(TAPS, channels), torch.empty(HEADS), torch.empty(HEADS))
    zero = torch.zeros(1, dtype=torch.int64)
    found = {}
    for function, rows, requests in (
        (kernels.delta_generations, DRAFTS + 1, Generations(zero, zero, zero)),
        (kernels.delta_contexts, ROWS, Contexts(zero, zero + ROWS - 1, torch.arange(ROWS))),
    ):
        given = DeltaRows(_bf16(rows, channels), _bf16(rows, 2 * HEADS))
        for name, kernel in compiled(function, given, weights, memory, requests).items():
            found[name] = kernel.asm["ptx"].count("wgmma.mma_async")
    return found


def _bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


if __name__ == "__main__":
    kernels.splits = lambda x: True  # as on a GPU
    json.dump({sizes: count(*map(int, sizes.split(","))) for sizes in sys.argv[1:]}, sys.stdout)
