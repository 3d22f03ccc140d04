"""Passes over random texts for FlashInfer's kernels, with their result in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import paged_pass
import pytest
import torch
from torch import Tensor

from trtspec.attention.triton_backend import TritonAttention
from trtspec.errors import ConfigError
from trtspec.metadata.attention import NUM_RESERVED_BLOCKS, AttentionMetadata, KVGroup

flashinfer = pytest.importorskip("trtspec.attention.flashinfer", reason="needs triton")


def why_unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    try:
        flashinfer._load()
    except ConfigError as error:
        return str(error)
    return None


TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}  # of the norm of a row's head
MAX_SEQ_LEN = 40_000
SALIENT = 8


@dataclass
class Pass:
    meta: AttentionMetadata
    q: Tensor  # [T, Hq, D]
    history: list[tuple[Tensor, Tensor]]  # keys and values of each text, [S, Hkv, D]
    spans: list[tuple[int, int]]  # each request's first position and rows

    def expected(self, window: int | None = None) -> Tensor:
        """[T, Hq, D] float64, request by request and row by row, guarded rows left at zero."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device="cuda")
        row = 0
        for (start, count), (keys, values) in zip(self.spans, self.history, strict=True):
            keys, values = keys.double(), values.double()
            kv_heads, dim = keys.shape[1:]
            for position in range(start, start + count):
                if position < self.meta.max_seq_len:
                    low = 0 if window is None else max(0, position - window + 1)
                    query = self.q[row].double().view(kv_heads, -1, dim)
                    scores = torch.einsum("hgd,shd->hgs", query, keys[low : position + 1])
                    weights = (scores / dim**0.5).softmax(-1)
                    out[row] = torch.einsum(
                        "hgs,shd->hgd", weights, values[low : position + 1]
                    ).flatten(0, 1)
                row += 1
        return out

    def check(self, out: Tensor, window: int | None = None) -> None:
        inside = [p < self.meta.max_seq_len for s, n in self.spans for p in range(s, s + n)]
        expected = self.expected(window)
        error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        worst = error[torch.tensor(inside, device="cuda")].max()
        assert worst <= TOLERANCE[self.q.dtype], float(worst)
        assert torch.isfinite(out).all()


def make_flashinfer_pass(
    contexts: list[tuple[int, int]], generations: list[int], rows: int, heads: tuple[int, int],
    dim: int, dtype: torch.dtype, page: int = 32, max_seq_len: int = MAX_SEQ_LEN,
    max_pages: int | None = None,
) -> Pass:  # fmt: skip
    """Contexts (start, rows) and generations (start) of random texts in scattered blocks.

    What no text fills is NaN, the ends of its last block as well. The last keys of a text are
    large, so that one too many or too few is seen however long the text.
    """
    torch.manual_seed(len(generations) + 7 * rows + dim)
    q_heads, kv_heads = heads
    spans = contexts + [(start, rows) for start in generations]
    lengths = [min(start + count, max_seq_len) for start, count in spans]
    pages = [-(-length // page) for length in lengths]
    width = max_pages or max(pages)
    total = NUM_RESERVED_BLOCKS + sum(pages)
    blocks = list(range(NUM_RESERVED_BLOCKS, total))
    random.Random(0).shuffle(blocks)
    shape = (2, total, page, kv_heads, dim)  # the second of two layers is read
    k_cache, v_cache = (torch.full(shape, torch.nan, dtype=dtype, device="cuda") for _ in "kv")
    k_cache[:, 0], v_cache[:, 0] = 0, 0
    # As in a captured graph, the table is columns of a wider tensor.
    table = torch.zeros(len(spans), 1 + width, dtype=torch.int32)
    history = []
    for i, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        own = [blocks.pop() for _ in range(count)]
        table[i, 1 : 1 + count] = torch.tensor(own)
        keys, values = (
            torch.randn(length, kv_heads, dim, device="cuda").to(dtype) for _ in range(2)
        )
        keys[-SALIENT:] *= 6
        history.append((keys, values))
        for cache, text in ((k_cache, keys), (v_cache, values)):
            flat = torch.full((count * page, kv_heads, dim), torch.nan, dtype=dtype, device="cuda")
            flat[:length] = text
            cache[1, torch.tensor(own, device="cuda")] = flat.view(count, page, kv_heads, dim)
    positions = torch.tensor([p for s, n in spans for p in range(s, s + n)])
    inside = positions < max_seq_len
    position_ids = torch.where(inside, positions, 0).cuda()
    meta = AttentionMetadata(
        context_lens=tuple(n for _, n in contexts),
        context_starts=tuple(s for s, _ in contexts),
        num_generations=len(generations),
        rows_per_generation=rows,
        position_ids=position_ids,
        kv_lens=torch.tensor(lengths, dtype=torch.int32).cuda(),
        max_kv_len=max(lengths),
        kv_groups=(KVGroup(k_cache, v_cache),),
        block_tables=(table.cuda()[:, 1:],),
        slot_mappings=(torch.empty(0, dtype=torch.int64),),
        max_seq_len=max_seq_len,
    )
    q = torch.randn(len(positions), q_heads, dim, device="cuda").to(dtype)
    return Pass(meta, q, history, spans)


def attend(backend: TritonAttention, given: Pass, window: int | None = None) -> Tensor:
    return paged_pass.attend(backend, given.q, given.meta, layer=1, window=window)
