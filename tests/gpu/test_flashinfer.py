"""FlashInfer's kernels against a softmax in float64, and the executor with them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import paged_pass
import pytest
import tiny_heads
import torch
from flashinfer_pass import (
    MAX_SEQ_LEN,
    Pass,
    attend,
    flashinfer,
    make_flashinfer_pass,
    why_unavailable,
)
from tiny import tiny_model_dir
from tiny_heads import eagle3_dir
from torch import Tensor

from trtspec import LLM, EagleDecodingConfig, KvCacheConfig, SamplingParams
from trtspec.attention.triton_backend import TritonAttention
from trtspec.ops.step.slots import draft_step_metadata

UNAVAILABLE = why_unavailable()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or ""),
]
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(scope="module")
def backend() -> TritonAttention:
    return flashinfer.FlashInferAttention(torch.device("cuda"))


def refuses_to_fall_back(*args: object) -> Tensor:
    raise AssertionError("Triton's kernel was asked")


LENGTHS = [1, 2, 63, 64, 65, 257, 1000, 32_760]


@pytest.mark.parametrize(
    ("rows", "heads", "dim", "dtype", "page", "starts"),
    [
        (1, (32, 8), 128, BF16, 32, LENGTHS),
        (4, (32, 8), 128, BF16, 32, LENGTHS),
        (4, (32, 8), 128, BF16, 32, [32_764]),  # alone: many parts
        (4, (32, 8), 128, BF16, 32, [*range(1, 33)]),  # many: one part each
        (6, (32, 8), 128, BF16, 32, LENGTHS),
        (1, (9, 3), 64, BF16, 32, LENGTHS),
        (4, (9, 3), 64, BF16, 32, LENGTHS),
        (4, (16, 16), 128, FP16, 16, [5, 300]),
        (6, (8, 1), 256, BF16, 32, [5, 4000]),  # 48 rows of a KV head: two tiles
    ],
)
def test_xqa(
    backend: TritonAttention, monkeypatch: pytest.MonkeyPatch, rows: int, heads: tuple[int, int],
    dim: int, dtype: torch.dtype, page: int, starts: list[int],
) -> None:  # fmt: skip
    monkeypatch.setattr(TritonAttention, "_generation", refuses_to_fall_back)
    given = make_flashinfer_pass([], starts, rows, heads, dim, dtype, page)
    given.check(attend(backend, given))
    given.check(attend(backend, given))  # what it counts in is as it was


@pytest.mark.parametrize("rows", [1, 4])
def test_a_window(backend: TritonAttention, rows: int) -> None:
    """One row: XQA. Several: Triton. One that is wider than any text: none at all."""
    for window in (17, 300, MAX_SEQ_LEN):
        given = make_flashinfer_pass([], [5, 17, 299, 3000], rows, (32, 8), 128, BF16)
        given.check(attend(backend, given, window), window)


@pytest.mark.parametrize("max_pages", [None, 200])
def test_rows_past_the_maximum_length(backend: TritonAttention, max_pages: int | None) -> None:
    """From 4092 on all four rows are inside, from 4094 on two, from 4096 on none."""
    given = make_flashinfer_pass(
        [], [4092, 4093, 4094, 4095, 4096, 77], 4, (32, 8), 128, BF16,
        max_seq_len=4096, max_pages=max_pages,
    )  # fmt: skip
    given.check(attend(backend, given))


def test_rows_before_the_text_begins(backend: TritonAttention) -> None:
    """MTP's windows: rows that write nowhere come first, at position 0."""
    given = make_flashinfer_pass([], [0], 4, (32, 8), 128, BF16)
    given.meta.position_ids.copy_(torch.tensor([0, 0, 0, 1]))
    out = attend(backend, given)
    text = Pass(given.meta, given.q[2:], given.history, [(0, 2)])
    text.check(out[2:])
    assert torch.isfinite(out).all()


def test_draft_passes_and_inert_rows(backend: TritonAttention) -> None:
    given = make_flashinfer_pass([], [40, 4095, 4096], 1, (32, 8), 128, BF16, max_seq_len=4096)
    positions = torch.tensor([[40], [4095], [4096]], device="cuda")
    step = Pass(draft_step_metadata(given.meta, positions, 1), given.q, given.history, given.spans)
    step.check(attend(backend, step))
    # A request that fills a graph's batch: no blocks, positions from 0.
    given.meta.block_tables[0][2] = 0
    for rows in (1, 4):
        positions = torch.arange(rows, device="cuda").repeat(3, 1)
        meta = draft_step_metadata(given.meta, positions, 1)
        q = given.q.repeat_interleave(rows, 0)
        out = paged_pass.attend(backend, q, meta, layer=1)
        assert torch.isfinite(out).all() and not out[2 * rows :].any()


@pytest.mark.parametrize("rows", [1, 4])
def test_a_captured_graph_follows_the_lengths(backend: TritonAttention, rows: int) -> None:
    def texts(starts: list[int]) -> Pass:
        return make_flashinfer_pass([], starts, rows, (32, 8), 128, BF16, max_pages=200)

    held = texts([900, 3000, 77])
    meta = replace(held.meta, max_seq_len=200 * 32)
    attend(backend, replace(held, meta=replace(meta, derived={})))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(backend, replace(held, meta=meta))
    for given in (texts([800, 2900, 7]), texts([1, 33, 2000]), texts([900, 3000, 77])):
        (group,), (other,) = meta.kv_groups, given.meta.kv_groups
        for ours, theirs in ((group.k_cache, other.k_cache), (group.v_cache, other.v_cache)):
            ours.fill_(torch.nan)
            ours[:, : theirs.shape[1]] = theirs
        meta.block_tables[0].copy_(given.meta.block_tables[0])
        meta.position_ids.copy_(given.meta.position_ids)
        meta.kv_lens.copy_(given.meta.kv_lens)
        held.q.copy_(given.q)
        graph.replay()
        given.check(out)


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "page", "rows", "window"),
    [  # the rows beside the contexts are of kernels that other tests use as well
        ((32, 8), 128, BF16, 32, 4, None),
        ((32, 8), 128, BF16, 32, 4, 100),
        ((9, 3), 64, BF16, 32, 1, None),
        ((8, 1), 256, BF16, 32, 6, None),
        ((16, 16), 128, FP16, 16, 4, None),
    ],
)
def test_contexts(
    backend: TritonAttention, heads: tuple[int, int], dim: int, dtype: torch.dtype, page: int,
    rows: int, window: int | None,
) -> None:  # fmt: skip
    """Whole prompts and later chunks, alone and beside generations."""
    chunks = [(0, 1), (0, 65), (64, 32), (31, 2), (2000, 100), (0, 500)]
    for contexts, generations in ((chunks[:1], []), (chunks, []), (chunks, [3, 700])):
        given = make_flashinfer_pass(contexts, generations, rows, heads, dim, dtype, page)
        given.check(attend(backend, given, window), window)


def test_plans_follow_one_another_without_a_wait(backend: TritonAttention) -> None:
    """The host may plan again while the device has yet to read the last plan."""
    passes = [
        make_flashinfer_pass([(0, 40 * i), (7, 3)], [], 1, (9, 3), 64, BF16) for i in range(1, 5)
    ]
    outs = [attend(backend, given) for given in passes for _ in range(2)]
    outs += [attend(backend, given) for given in passes]  # planned before, and not the last
    for given, out in zip([p for p in passes for _ in range(2)] + passes, outs, strict=True):
        given.check(out)


def test_what_flashinfer_does_not_take(
    backend: TritonAttention, caplog: pytest.LogCaptureFixture
) -> None:
    given = make_flashinfer_pass([(0, 20)], [30, 5], 4, (6, 2), 16, BF16)
    for layer in (given.meta.kv_groups[0].k_cache, given.meta.kv_groups[0].v_cache):
        layer.nan_to_num_(0.0)  # torch's masked reads do not stand it
    with caplog.at_level(logging.WARNING):
        given.check(attend(backend, given))
        given.check(attend(backend, given))
    assert len([r for r in caplog.records if "head size 16" in r.message]) == 2


def test_the_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiny_heads, "HEAD_DIM", 64)
    target = tiny_model_dir(tmp_path, seed=1, head_dim=64)
    head = eagle3_dir(tmp_path)
    prompts = [[(7 * i + 3 * j) % 97 for j in range(3 + 11 * i)] for i in range(6)]
    config = EagleDecodingConfig(
        max_draft_len=3, speculative_model=head, eagle3_layers_to_capture=[0, 1, 2]
    )
    texts = []
    for name in ("flashinfer", "triton"):
        with caplog.at_level(logging.WARNING):
            llm = LLM(
                target, config, device="cuda", dtype="bfloat16", attn_backend=name,
                max_batch_size=4, max_seq_len=96, max_num_tokens=32, enable_chunked_prefill=True,
                kv_cache_config=KvCacheConfig(max_tokens=1024),
            )  # fmt: skip
            outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
        texts.append([o.outputs[0].token_ids for o in outputs])
        assert all(len(text) == 24 for text in texts[-1])
        assert llm.executor.graphs is not None and llm.executor.graphs.num_graphs > 0
        llm.executor.kv_cache.check_integrity()
    assert "does not serve" not in caplog.text
    # In bf16 near-ties fall either way, but not most of the time.
    assert sum(a[0] == b[0] for a, b in zip(*texts, strict=True)) >= 4
