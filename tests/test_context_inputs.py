"""A pass over prompts in a fixed shape, as a captured graph runs it, here run eagerly on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from test_executor import Oracle, _config, _prompts
from tiny import tiny_model_dir
from tiny_heads import mtp_model_dir

from trtspec import LLM, CudaGraphConfig, KvCacheConfig, SamplingParams
from trtspec.errors import ConfigError
from trtspec.executor import build
from trtspec.executor.context_inputs import ContextInputs
from trtspec.executor.forward_step import StepOutputs
from trtspec.executor.graphs import first_rows
from trtspec.executor.py_executor import PyExecutor
from trtspec.executor.request import ContextChunk, Request
from trtspec.metadata.attention import NUM_RESERVED_BLOCKS

triton_paged = pytest.importorskip("trtspec.attention.triton_paged", reason="needs triton")
MODES = {"none": False, "ngram": True, "eagle3": True, "mtp_eagle": False, "draft_target": False}
"""Each with its prompts whole or in chunks."""


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=1)


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("draft"), seed=2)


class Uncaptured:
    """Stands for `CudaGraphs`: the same inputs, the step run as it is."""

    def __init__(self, executor: PyExecutor, tokens: Sequence[int]):
        self.executor, self.passes = executor, 0
        config = executor.config
        self.shapes = [
            ContextInputs(
                n, config.max_batch_size, config.max_seq_len, executor.kv_cache, executor.device
            )
            for n in tokens
        ]

    def run(self, requests: list[Request], num_drafts: int, draft_len: int) -> None:
        return None  # generations by themselves, eagerly

    def shape_for(self, chunks: Sequence[ContextChunk]) -> ContextInputs | None:
        return next((shape for shape in self.shapes if shape.holds(chunks)), None)

    def run_contexts(
        self, shape: ContextInputs, chunks: Sequence[ContextChunk], num_drafts: int, draft_len: int
    ) -> StepOutputs:
        shape.fill(chunks)
        params = [chunk.request.sampling_params for chunk in chunks]
        inputs = shape.step_inputs(
            num_drafts, all(p.is_greedy for p in params), any(p.has_filters for p in params)
        )
        self.passes += 1
        return first_rows(self.executor._step(inputs, draft_len), len(chunks))


def _llm(
    target_dir: Path, draft_dir: Path, mode: str, monkeypatch: pytest.MonkeyPatch, **arguments: bool
) -> LLM:
    """With Triton's attention, in its interpreter."""
    backend = triton_paged.TritonAttention()
    monkeypatch.setattr(build, "_attention_backend", lambda name, device: backend)
    return LLM(
        target_dir, _config(mode, 2, draft_dir, None), device="cpu", dtype="float32",
        max_batch_size=3, max_seq_len=96,
        kv_cache_config=KvCacheConfig(max_tokens=512, tokens_per_block=8), **arguments,
    )  # fmt: skip


@pytest.mark.parametrize(("mode", "chunked"), MODES.items())
def test_padding_changes_no_token(
    target_dir: Path, draft_dir: Path, mode: str, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of a pass and less, alone and several, beside generations; some fit no shape."""
    arguments = {"enable_chunked_prefill": True, "max_num_tokens": 40} if chunked else {}
    llm = _llm(target_dir, draft_dir, mode, monkeypatch, **arguments)
    graphs = Uncaptured(llm.executor, (24, 40) if chunked else (24, 96))
    llm.executor.graphs = graphs  # type: ignore[assignment]
    prompts = [*_prompts(4), [1] * 70]
    params = [SamplingParams(max_tokens=4, ignore_eos=True) for _ in prompts]
    outputs = llm.generate(prompts, params)
    oracle = Oracle(target_dir)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, 4)
    assert graphs.passes >= 2
    cache = llm.executor.kv_cache
    assert cache.num_free_blocks == cache.num_blocks - NUM_RESERVED_BLOCKS


def test_sampled_text_is_the_same(
    target_dir: Path, draft_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding stands on the scratch slot: its parameters and noise are nobody's."""
    texts = []
    for fixed in (False, True):
        llm = _llm(target_dir, draft_dir, "eagle3", monkeypatch)
        if fixed:
            llm.executor.graphs = Uncaptured(llm.executor, (64,))  # type: ignore[assignment]
        params = [SamplingParams(5, 0.9, seed=i, ignore_eos=True) for i in range(3)]
        outputs = llm.generate(_prompts(3), params)
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]


def test_what_a_shape_holds(target_dir: Path, draft_dir: Path, monkeypatch) -> None:
    executor = _llm(target_dir, draft_dir, "none", monkeypatch).executor
    shape = Uncaptured(executor, (32,)).shapes[0]
    request = executor.enqueue([1] * 40, SamplingParams(max_tokens=2))

    def chunk(count: int) -> ContextChunk:
        return ContextChunk(request, request.token_ids[:count], 0, count)

    assert shape.num_contexts == 2
    assert shape.holds([chunk(31)]) and not shape.holds([chunk(32)])  # a row for the padding
    assert shape.holds([chunk(16), chunk(16)]) and not shape.holds([chunk(16), chunk(17)])
    assert not shape.holds([chunk(1)] * 3)


@pytest.mark.parametrize(
    ("lens", "rows", "size"),
    [([5, 0, 9], 20, 4), ([1, 1, 1], 3, 8), ([16], 16, 16), ([3, 0], 9, 2)],
)
def test_tiles_on_the_device_are_the_hosts(lens: list[int], rows: int, size: int) -> None:
    expected, start = set(), 0
    for i, count in enumerate(lens):
        for j in range(0, count, size):
            expected.add((i, start + j, min(size, count - j)))
        start += count
    last_rows = torch.tensor(lens).cumsum(0) - 1
    tiles = triton_paged._tiles_on_device(last_rows, rows, size).tolist()
    assert {tuple(tile) for tile in tiles if tile[2]} == expected
    assert all(0 <= i < len(lens) and 0 <= first < rows for i, first, _ in tiles)
    assert sum(tile[2] for tile in tiles) == sum(lens)


@pytest.mark.parametrize("sizes", [[0], ["8"], 64, [True]])
def test_sizes_are_checked(sizes: object) -> None:
    with pytest.raises(ConfigError, match="context_tokens"):
        CudaGraphConfig(context_tokens=sizes)  # type: ignore[arg-type]
