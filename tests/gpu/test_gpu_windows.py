"""Sliding windows on CUDA: blocks are given back between replays, and MTP layers of two kinds have
block tables of their own in one graph."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import flashinfer_pass
import pytest
import steady
import torch
from tiny import tiny_model_dir
from tiny_dflash import dflash_dir
from tiny_heads import eagle3_dir
from tiny_step import step_dir

from trtspec import (
    LLM,
    CudaGraphConfig,
    DFlashDecodingConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    SamplingParams,
)
from trtspec.config import DecodingBaseConfig
from trtspec.metadata.attention import NULL_BLOCK, NUM_RESERVED_BLOCKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB, WINDOW = 97, 8
MODES = ["mtp_two_groups", "draft_target", "eagle3", "dflash_sinks"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("windows")


@pytest.fixture(scope="module")
def step_target(root: Path) -> Path:
    """Full and sliding layers, and MTP layers of both kinds."""
    return step_dir(root, WINDOW)


@pytest.fixture(scope="module")
def mixed_target(root: Path) -> Path:
    return tiny_model_dir(
        root, "qwen2", use_sliding_window=True, sliding_window=WINDOW, seed=4,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def head(root: Path) -> Path:
    return eagle3_dir(root)


def _case(
    mode: str, step_target: Path, mixed_target: Path, head: Path
) -> tuple[Path, DecodingBaseConfig]:
    if mode == "mtp_two_groups":
        config = MTPDecodingConfig(num_nextn_predict_layers=3, use_mtp_vanilla=True)
        return step_target, config
    if mode == "dflash_sinks":
        return mixed_target, _with_sinks(head.parent)
    if mode == "draft_target":
        config = DraftTargetDecodingConfig(max_draft_len=3, speculative_model=mixed_target)
        return mixed_target, config
    return mixed_target, EagleDecodingConfig(
        max_draft_len=3, speculative_model=head, eagle3_layers_to_capture=[0, 1, 2]
    )


def _with_sinks(folder: Path) -> DFlashDecodingConfig:
    """A head with sinks, scaled values, and windows that are counted from each row of a block."""
    path = dflash_dir(
        folder, block=4, sinks=True, attention_value_scale=0.612, use_swa=True,
        swa_window_size=WINDOW,
    )  # fmt: skip
    return DFlashDecodingConfig(max_draft_len=3, speculative_model=path, target_layer_ids=[0, 1, 2])


def _prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in (45, 9, 14, 7)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pool", [None, 96])
def test_tokens_equal_the_cpus(
    step_target: Path, mixed_target: Path, head: Path, mode: str, pool: int | None
) -> None:
    """fp32, chunked prompts, overlap: as graphs, eagerly, and on the CPU without overlap."""
    target, config = _case(mode, step_target, mixed_target, head)
    texts = []
    for device, graphs in (("cpu", None), ("cuda", None), ("cuda", CudaGraphConfig())):
        llm = LLM(
            target, config, device=device, dtype="float32", max_batch_size=3, max_seq_len=96,
            max_num_tokens=16, enable_chunked_prefill=True, cuda_graph_config=graphs,
            kv_cache_config=KvCacheConfig(max_tokens=pool or 1024, tokens_per_block=4),
        )  # fmt: skip
        outputs = llm.generate(_prompts(), SamplingParams(max_tokens=40, ignore_eos=True))
        texts.append([output.outputs[0].token_ids for output in outputs])
        assert (llm.stats().num_preemptions > 0) == (pool is not None)
        llm.executor.run_until_done()
        cache = llm.executor.kv_cache
        cache.check_integrity()
        assert all(p.num_free == p.num_blocks - NUM_RESERVED_BLOCKS for p in cache._pools)
    assert texts[1] == texts[0] and texts[2] == texts[0]


@pytest.mark.parametrize("mode", MODES)
def test_steps_that_give_blocks_back_are_one_launch_and_wait_for_nothing(
    step_target: Path, mixed_target: Path, head: Path, mode: str
) -> None:
    target, config = _case(mode, step_target, mixed_target, head)
    llm = LLM(
        target, config, device="cuda", dtype="bfloat16", max_batch_size=2, max_seq_len=200,
        kv_cache_config=KvCacheConfig(max_tokens=1024, tokens_per_block=4),
    )  # fmt: skip
    executor, cache = llm.executor, llm.executor.kv_cache
    steady.start(executor)
    windowed = [g for g, window in enumerate(cache.windows) if window is not None]

    def num_given_back() -> list[int]:
        ids = [request.request_id for request in executor.scheduler.running]
        tables = cache.block_tables(ids)
        return [int((row == NULL_BLOCK).cumprod(0).sum()) for g in windowed for row in tables[g]]

    while not all(num_given_back()):  # blocks of the prompt are zeroed as they leave
        executor.step()
    before = num_given_back()
    for _ in range(12):
        steady.launch(executor)
        while len(executor._pending) > 1:
            executor._read(executor._pending.popleft())
    assert all(now > then for now, then in zip(num_given_back(), before, strict=True))
    steady.finish(executor)


def test_drafts_of_a_head_with_sinks_equal_the_cpus(mixed_target: Path, head: Path) -> None:
    config, found = _with_sinks(head.parent), []
    for device in ("cpu", "cuda"):
        drafts = _drafts(mixed_target, config, device)
        assert len(drafts) > 30 and len(set(drafts)) > 20
        found.append(drafts)
    common = min(map(len, found))  # under overlap there is a step more
    assert found[0][:common] == found[1][:common]


def _drafts(target: Path, config: DecodingBaseConfig, device: str) -> list[tuple[int, ...]]:
    """The drafts of every step along one text, in fp32 and without graphs."""
    llm = LLM(
        target, config, device=device, dtype="float32", max_batch_size=1, max_seq_len=128,
        cuda_graph_config=None,
    )  # fmt: skip
    worker, drafts = llm.executor.worker, list[tuple[int, ...]]()
    draft = worker.draft

    def kept(inputs: Any) -> torch.Tensor:
        proposals = draft(inputs)
        drafts.append(tuple(proposals[0].tolist()))
        return proposals

    worker.draft = kept  # type: ignore[method-assign]
    llm.generate(_prompts()[0], SamplingParams(max_tokens=48, ignore_eos=True))
    return drafts


@pytest.mark.parametrize(("contexts", "generations", "rows"), [
    ([(600, 60), (300, 90)], [500, 800], 1), ([], [500, 800], 1), ([], [500, 800], 4),
])  # fmt: skip
def test_flashinfer_reads_nothing_behind_the_window(
    contexts: list[tuple[int, int]], generations: list[int], rows: int
) -> None:
    if (reason := flashinfer_pass.why_unavailable()) is not None:
        pytest.skip(reason)
    from trtspec.attention.flashinfer import FlashInferAttention

    window, page = 100, 32
    backend: Any = FlashInferAttention(torch.device("cuda"))
    given = flashinfer_pass.make_flashinfer_pass(
        contexts, generations, rows, (8, 2), 64, torch.bfloat16, page=page
    )
    table, group = given.meta.block_tables[0], given.meta.kv_groups[0]
    for i, (start, _) in enumerate(given.spans):
        behind = (start - window + 1) // page
        blocks = table[i, :behind].to(torch.int64)
        group.k_cache[:, blocks] = torch.nan
        group.v_cache[:, blocks] = torch.nan
        table[i, :behind] = NULL_BLOCK
    group.k_cache[:, NULL_BLOCK] = 0
    group.v_cache[:, NULL_BLOCK] = 0
    given.check(flashinfer_pass.attend(backend, given, window=window), window)
