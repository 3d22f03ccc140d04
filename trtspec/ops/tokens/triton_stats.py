"""The first pass over rows of logits: each chunk's largest logit, and its sum of exponentials.

Sums are taken chunk by chunk in a fixed order, so that a request's tokens do not depend on the
other requests of the batch.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...metadata.sampling import SamplingMetadata
from ..launch.triton import after_previous

CHUNK, PART = 2048, 128
"""Logits of a program; of a part of it, whose largest logit the filters look at."""
LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits of a float32 that are zero in the logits' own type, by that type."""


class Rows(NamedTuple):
    """Rows of logits with their sampling parameters and statistics."""

    logits: Tensor  # [R, V]
    stride: int  # from row to row
    vocab: int
    chunks: int  # of a row
    temperatures: Tensor  # [R] float32
    seeds: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    best: Tensor  # [R, chunks] float32, largest logit
    totals: Tensor  # [R, chunks] float32, sum of exp((logit - best) / temperature)
    indices: Tensor  # [R, chunks] int32, where the best is; -1 - that if there is a NaN
    threshold: Tensor | None  # [R] int32, smallest key that passes; None without filters
    last: Tensor | None  # [R] int32, last index at which the threshold passes
    kept: Tensor | None  # [R] float32, sum of exponentials of the logits that pass


def take_statistics(
    logits: Tensor, sampling: SamplingMetadata, launch: dict[str, bool]
) -> tuple[Rows, Tensor | None]:
    """Takes the statistics of every row.

    Args:
        logits: [R, V], each row contiguous. sampling: R rows, contiguous.
        launch: of `dependent_launch`.

    Returns:
        (the rows; with filters the largest logit of every part [R, P] float32). With filters the
        rows have empty tensors that `triton_filter.py` fills.
    """
    (num_rows, vocab), device = logits.shape, logits.device
    chunks = triton.cdiv(vocab, CHUNK)
    best, totals = torch.empty((2, num_rows, chunks), dtype=torch.float32, device=device)
    threshold = last = kept = parts = None
    if sampling.has_filters:
        threshold, last = torch.empty((2, num_rows), dtype=torch.int32, device=device)
        kept = torch.empty(num_rows, dtype=torch.float32, device=device)
        shape = num_rows, chunks * (CHUNK // PART)
        parts = torch.empty(shape, dtype=torch.float32, device=device)
    rows = Rows(
        logits=logits,
        stride=logits.stride(0),
        vocab=vocab,
        chunks=chunks,
        temperatures=sampling.temperatures,
        seeds=sampling.seeds,
        positions=sampling.positions,
        best=best,
        totals=totals,
        indices=torch.empty((num_rows, chunks), dtype=torch.int32, device=device),
        threshold=threshold,
        last=last,
        kept=kept,
    )
    _stats_kernel[(num_rows, chunks)](rows, parts, PART=PART, CHUNK=CHUNK, num_warps=4, **launch)
    return rows, parts


@triton.jit
def _stats_kernel(rows, parts_ptr, PART: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Computes of one chunk its best, its sum, and the largest logit of every part."""
    after_previous(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(rows.logits + row * rows.stride + v, mask=v < rows.vocab, other=float("-inf"))
    has_nan = tl.max((x != x).to(tl.int32), 0) > 0
    x = clean(x)
    best = tl.max(x, 0)
    base = tl.where(best > float("-inf"), best, 0.0)
    total = tl.sum(tl.exp((x - base) / divisor_of(tl.load(rows.temperatures + row))), 0)
    index = chunk * CHUNK + tl.argmax(x, 0).to(tl.int32)
    entry = row * rows.chunks + chunk
    tl.store(rows.best + entry, best)
    tl.store(rows.totals + entry, total)
    tl.store(rows.indices + entry, tl.where(has_nan, -1 - index, index))
    if parts_ptr is not None:
        parts = tl.max(tl.reshape(x, [CHUNK // PART, PART]), 1)
        tl.store(parts_ptr + entry * (CHUNK // PART) + tl.arange(0, CHUNK // PART), parts)


@triton.jit
def clean(x):
    """Replaces NaN by -inf, so that it is never chosen, and +inf by the largest number."""
    x = tl.where(x != x, float("-inf"), x.to(tl.float32))
    return tl.minimum(x, 3.4028234663852886e38) + 0.0  # no -0


@triton.jit
def key_of(x, LOW_BITS: tl.constexpr):
    """Returns integers in the floats' order, without bits that are zero in the logits' type."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW_BITS


@triton.jit
def divisor_of(temperature):
    """Returns the temperature; 1 for a greedy row."""
    return tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def row_total(rows, row, divisor, CHUNKS: tl.constexpr):
    """Returns (largest logit, or 0 if there is none; sum of exp((logit - largest) / divisor))."""
    c = tl.arange(0, CHUNKS)
    inside = c < rows.chunks
    best = tl.load(rows.best + row * rows.chunks + c, mask=inside, other=float("-inf"))
    total = tl.load(rows.totals + row * rows.chunks + c, mask=inside, other=0.0)
    largest = tl.max(best, 0)
    largest = tl.where(largest > float("-inf"), largest, 0.0)
    return largest, tl.sum(total * tl.exp((best - largest) / divisor), 0)


@triton.jit
def row_choice(rows, row, CHUNKS: tl.constexpr):
    """Returns (the largest logit's token, the first of equals; whether the row is bad)."""
    c = tl.arange(0, CHUNKS)
    inside = c < rows.chunks
    best = tl.load(rows.best + row * rows.chunks + c, mask=inside, other=float("-inf"))
    index = tl.load(rows.indices + row * rows.chunks + c, mask=inside, other=0)
    is_bad = (tl.min(index, 0) < 0) | (tl.max(best, 0) == float("-inf"))
    index = tl.where(index < 0, -1 - index, index)
    return tl.sum(tl.where(c == tl.argmax(best, 0), index, 0), 0), is_bad


@triton.jit
def filtered(rows, row, x, v, LOW_BITS: tl.constexpr):
    """Returns the logits x of tokens v of a row, -inf where the filters drop them."""
    threshold, last = tl.load(rows.threshold + row), tl.load(rows.last + row)
    key = key_of(x, LOW_BITS)
    return tl.where((key > threshold) | ((key == threshold) & (v <= last)), x, float("-inf"))


@triton.jit
def probabilities(rows, row, v, temperature, SIZES: tl.constexpr):
    """Returns p of the tokens v of a sampled row, filters included."""
    base, total = row_total(rows, row, temperature, SIZES.CHUNKS)
    entry = rows.logits + row * rows.stride + v
    x = clean(tl.load(entry, mask=v < rows.vocab, other=float("-inf")))
    if rows.kept is not None:
        total = tl.load(rows.kept + row)
        x = filtered(rows, row, x, v, SIZES.LOW_BITS)
    return tl.exp((x - base) / temperature) / total
