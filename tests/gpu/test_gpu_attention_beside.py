"""Attention of generations beside that of the same pass's prompts, by the kernels of csrc."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trtspec import native
from trtspec.attention import csrc_kernels
from trtspec.attention.base import CachedLayer
from trtspec.attention.split_kv import Tables
from trtspec.attention.tiles import tiles_on_device
from trtspec.attention.triton_contexts import context_attention
from trtspec.attention.triton_generations import paged_attention
from trtspec.layers.fused import linear, qkv_rope_and_write
from trtspec.layers.linear import Linear
from trtspec.layers.norm import RMSNorm
from trtspec.ops.layer.rope import CacheWrite, Rope

HAS_KERNELS = torch.cuda.is_available() and native.kernels(torch.empty(1, device="cuda"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_KERNELS, reason="needs the kernels of csrc (Hopper, nvcc)"),
]
PAGE, LAYERS, HIDDEN = 32, 4, 512


@dataclass
class Pass:
    """Rows of prompts, then of generations, each request in pages of its own.

    Args:
        prompts: tokens read earlier and rows of each. texts: of each generation, before its `rows`.
    """

    prompts: list[tuple[int, int]]
    texts: list[int]
    rows: int
    heads: tuple[int, int]
    dim: int
    window: int | None = None
    has_sinks: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        torch.manual_seed(len(self.texts) + self.dim)
        spans = [*self.prompts, *((length, self.rows) for length in self.texts)]
        pages = -(-max(map(sum, spans)) // PAGE)
        order = torch.randperm(len(spans) * pages).view(len(spans), pages)
        self.blocks = order.int().cuda()
        positions = [torch.arange(start, start + rows) for start, rows in spans]
        self.owners = torch.repeat_interleave(
            torch.arange(len(spans)), torch.tensor([rows for _, rows in spans])
        ).cuda()
        self.positions = torch.cat(positions).cuda()
        self.slots = (
            self.blocks[self.owners, self.positions // PAGE].long() * PAGE + self.positions % PAGE
        )
        q_heads, kv_heads = self.heads
        self.cache = torch.randn(LAYERS, 2, len(spans) * pages * PAGE, kv_heads, self.dim)
        self.cache = self.cache.to("cuda", self.dtype)
        self.qkv = self._weight(HIDDEN, (q_heads + 2 * kv_heads) * self.dim)
        self.o = self._weight(q_heads * self.dim, HIDDEN)
        self.norm = RMSNorm(HIDDEN, 1e-5).to("cuda", self.dtype)
        self.norm.weight.fill_(1.0)
        self.sinks = torch.randn(q_heads).to("cuda", self.dtype) if self.has_sinks else None
        self.rope = Rope(torch.randn(pages * PAGE, self.dim).cuda(), self.positions)
        last = torch.tensor([rows for _, rows in self.prompts]).cumsum(0) - 1
        self.tiles = tiles_on_device(last.cuda(), int(last[-1]) + 1, 128 // (q_heads // kv_heads))

    def _weight(self, columns: int, outputs: int) -> Linear:
        layer = Linear(columns, outputs, bias=False)
        layer.weight = nn.Parameter(torch.randn(outputs, columns) / columns**0.5, False)
        return layer.to("cuda", self.dtype)

    def run(self, hidden: Tensor, beside: bool) -> Tensor:
        """Some layers' attention: each product reads what the one before wrote. They share the
        memory of its results, as the layers of a pass do."""
        out = hidden.new_zeros(len(hidden), self.heads[0], self.dim)
        count, num_prompts = len(hidden) - len(self.texts) * self.rows, len(self.prompts)
        of_prompts = Tables(self.blocks, self.positions)
        of_generations = Tables(self.blocks[num_prompts:], self.positions[count:])
        for k, v in self.cache:
            to = CacheWrite(k, v, self.slots, scratch_slot=0)
            cached = CachedLayer(
                k_slots=k, v_slots=v, page_size=PAGE, window=self.window, sinks=self.sinks
            )
            q = qkv_rope_and_write((hidden,), self.qkv, (self.norm,), self.rope, self.heads[0], to)
            context_attention(
                q, cached, of_prompts, self.tiles, 128 * self.heads[1] // self.heads[0], out
            )
            some = q[count:], cached, of_generations, self.rows
            if beside:
                paged_attention(*some, out[count:], is_beside=True)
            else:
                out[count:] = paged_attention(*some)
            hidden = linear((out.flatten(1),), self.o, residual=hidden)
        return hidden


@torch.inference_mode()
@pytest.mark.parametrize(("heads", "dim"), [((9, 3), 64), ((8, 2), 128)])
@pytest.mark.parametrize(
    ("prompts", "texts", "rows"),
    [
        ([(0, 50)], [40, 300, 7], 1),
        ([(0, 90), (33, 17)], [500] * 12, 4),
        ([(3000, 40)], [2000, 10, 1000], 3),  # keys of prompts are cut, and a kernel joins them
        ([(0, 400)], [60] * 70, 2),
    ],
)
@pytest.mark.parametrize("options", [{}, {"window": 48, "has_sinks": True}, {"dtype": torch.half}])
def test_says_what_it_says_by_itself(
    heads: tuple[int, int], dim: int, prompts: list[tuple[int, int]], texts: list[int], rows: int,
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In graphs, where each kernel may start before the one in front of it has ended."""
    case, calls = Pass(prompts, texts, rows, heads, dim, **options), list[bool]()
    clusters = csrc_kernels.attend_clusters

    def recording(*args: object) -> None:
        calls.append(bool(args[-1]))
        clusters(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(csrc_kernels, "attend_clusters", recording)
    hidden = torch.zeros(len(case.positions), HIDDEN, device="cuda", dtype=case.dtype)
    graphs, outs = [], []
    for beside in (False, True):
        case.run(hidden, beside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(case.run(hidden, beside))
        graphs.append(graph)
    assert calls == [False] * 2 * LAYERS + [True] * 2 * LAYERS
    kept = case.cache.clone()
    for seed in range(20):
        torch.manual_seed(seed)
        hidden.copy_(torch.randn(hidden.shape))
        for graph, out in zip(graphs, outs, strict=True):
            case.cache.copy_(kept)
            out.zero_()
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(*outs) and outs[0].abs().max() > 1
