"""An engine's end, interrupts and captured loops on CUDA."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from pathlib import Path
from types import SimpleNamespace

import interrupts
import pytest
import torch
from interrupts import RaiseAtLine
from tiny import tiny_model_dir
from tiny_heads import eagle3_dir

from trtspec import LLM, AsyncLLM, EagleDecodingConfig, KvCacheConfig, SamplingParams, SpecMetadata
from trtspec.workers import PlainWorker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 2**20


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target"))


def _engine(target_dir: Path, head_dir: Path, max_tokens: int) -> LLM:
    config = EagleDecodingConfig(
        max_draft_len=2, speculative_model=str(head_dir), eagle3_layers_to_capture=[0, 1, 2]
    )
    return LLM(
        target_dir, config, device="cuda", dtype="float32", max_batch_size=4, max_seq_len=64,
        max_num_tokens=16, enable_chunked_prefill=True,
        kv_cache_config=KvCacheConfig(max_tokens=max_tokens, tokens_per_block=4),
    )  # fmt: skip


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_an_engine_thread_answers(target_dir: Path, device: str) -> None:
    """Its thread captures and replays the graphs."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [[3, 4 + i] for i in range(6)]
    llm = LLM(target_dir, device=device, dtype="float32", max_batch_size=4, max_seq_len=64)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    other = LLM(target_dir, device=device, dtype="float32", max_batch_size=4, max_seq_len=64)

    async def answer(engine: AsyncLLM, prompt: list[int]) -> list[int]:
        outputs = [output async for output in engine.generate(prompt, params)]
        return outputs[-1].outputs[0].token_ids

    async def answer_all() -> list[list[int]]:
        async with AsyncLLM(other) as engine:
            return await asyncio.gather(*(answer(engine, prompt) for prompt in prompts))

    assert asyncio.run(answer_all()) == expected


def test_shutdown_gives_the_gpus_memory_back_without_the_collector(
    target_dir: Path, tmp_path: Path
) -> None:
    """Models, head, cache, slots, memory of drafts and graphs."""
    head_dir = eagle3_dir(tmp_path)
    left, held = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):  # the first leaves what a process keeps: handles, workspaces
            with _engine(target_dir, head_dir, 200_000) as llm:
                llm.generate([[1, 2], [3, 4]], SamplingParams(max_tokens=4, temperature=1.0))
                held.append(torch.cuda.memory_allocated())
            left.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    assert held[-1] - left[-1] > 16 * MIB
    assert left[2] - left[1] <= MIB // 4, left


def test_graphs_of_an_engine_that_nobody_holds_are_gone_without_the_collector(
    target_dir: Path, tmp_path: Path
) -> None:
    """Nobody called shutdown; the collector never ran."""
    head_dir = eagle3_dir(tmp_path)
    left, held = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):  # the first leaves what a process keeps: handles, workspaces
            llm = _engine(target_dir, head_dir, 200_000)
            llm.generate([[1, 2], [3, 4]], SamplingParams(max_tokens=4, temperature=1.0))
            graphs = llm.executor.graphs
            assert graphs is not None and graphs.num_graphs > 0
            refs = [weakref.ref(p.graph) for each in graphs._graphs.values() for p in each.parts]
            refs += [weakref.ref(graphs), weakref.ref(llm.executor)]
            held.append(torch.cuda.memory_allocated())
            del llm, graphs
            assert all(ref() is None for ref in refs)
            left.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    assert held[-1] - left[-1] > 16 * MIB
    assert left[2] - left[1] <= MIB // 4, left


def test_an_interrupt_between_launch_and_read_loses_nothing_on_cuda(
    target_dir: Path, tmp_path: Path
) -> None:
    """Also of steps that are graphs, whose tables were sent or not. One line in eight."""
    llm = _engine(target_dir, eagle3_dir(tmp_path), 192)
    interrupts.begin(llm)
    interrupts.finish(llm)
    expected = interrupts.begin(llm)  # prompts are found in the prefix cache, or copied in part
    interrupts.finish(llm)
    interrupts.begin(llm)  # everything is captured by now
    with RaiseAtLine(None, KeyboardInterrupt) as trace:
        interrupts.finish(llm)
    raised, places = 0, list(trace.seen)[::8]
    for place in places:
        requests = interrupts.begin(llm)
        try:
            with RaiseAtLine(place, KeyboardInterrupt):
                interrupts.finish(llm)
        except KeyboardInterrupt:
            raised += 1
        interrupts.finish(llm)
        interrupts.check(llm, requests, expected, place)
        if not llm.stats().prefix_cache.cached_blocks or not requests[3].cached_tokens:
            interrupts.begin(
                llm
            )  # an exception forgets all prefixes: later ones meet the same lines
            interrupts.finish(llm)
    assert raised > 0.9 * len(places)
    llm.shutdown()


def test_a_captured_loop_sees_the_rows_that_are_populated_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A loop written for TensorRT-LLM captures the worker once and populates before each replay."""
    caplog.set_level(logging.ERROR)
    vocab, worker = 64, PlainWorker(None)
    spec = SpecMetadata(4, 0, 0, allow_advanced_sampling=True)
    spec = spec.create_cuda_graph_metadata(2)
    logits = torch.randn(2, vocab, device="cuda")
    best = logits.argmax(1).tolist()
    none = torch.empty(0, dtype=torch.int32, device="cuda")

    def populate(temperature: float) -> None:
        config = SimpleNamespace(temperature=[temperature], top_k=None, top_p=None)
        spec.populate_sampling_params_for_one_model(
            [
                SimpleNamespace(sampling_config=config, is_generation=False, request_id=i)
                for i in "ab"
            ]
        )

    populate(1.0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        worker.sample_and_accept_draft_tokens(logits, none, 2, 2, spec)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        tokens, _ = worker.sample_and_accept_draft_tokens(logits, none, 2, 2, spec)

    def replays(count: int) -> list[list[int]]:
        seen = []
        for _ in range(count):
            graph.replay()
            seen.append(tokens[:, 0].tolist())
        return seen

    populate(0.0)
    assert replays(5) == [best] * 5
    populate(50.0)
    drawn = replays(40)
    assert len({first for first, _ in drawn}) > 10 and len({second for _, second in drawn}) > 10
    populate(0.0)
    assert replays(2) == [best] * 2
