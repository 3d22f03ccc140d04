"""The middle of texts, where a step must be one graph launch and wait for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trtspec import LLM, KvCacheConfig, PyExecutor, SamplingParams
from trtspec.config import DecodingBaseConfig

LENGTH = 150


def engine(target: Path, config: DecodingBaseConfig | None, temperature: float = 0.0) -> LLM:
    """Two requests in the middle of their texts, between two page boundaries."""
    llm = LLM(
        target, config, device="cuda", dtype="bfloat16", max_batch_size=2, max_seq_len=200,
        kv_cache_config=KvCacheConfig(max_tokens=1024, tokens_per_block=128),
    )  # fmt: skip
    start(llm.executor, temperature)
    return llm


def start(executor: PyExecutor, temperature: float = 0.0) -> None:
    """Brings two requests to the middle of their texts."""
    params = SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=1, ignore_eos=True)
    for i in range(2):
        executor.enqueue([3, 4, 5 + i], params)
    for _ in range(6):
        executor.step()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of a function that waits for nothing, and what it returned while it was captured."""
    step()  # compiles
    with no_waiting():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def launch(executor: PyExecutor, num_graphs: int = 1) -> None:
    """Launches the next step of the two requests: so many graphs, no kernel besides."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with no_waiting():
            batch = executor._schedule()
            assert len(batch.generations) == 2 and not batch.contexts
            executor._pending.append(executor._launch(executor._plan(batch, batch)))
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts.get("cudaGraphLaunch", 0) == num_graphs
    launches = {name: n for name, n in counts.items() if "LaunchKernel" in name}
    assert not launches, launches


def finish(executor: PyExecutor) -> None:
    """Whatever was launched by hand, the texts end where they should."""
    requests = executor.run_until_done()
    assert len(requests) == 2
    assert all(len(request.output_token_ids) == LENGTH for request in requests)
