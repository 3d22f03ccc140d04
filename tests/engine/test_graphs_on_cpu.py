"""What `CudaGraphs` decides, sends and reads, on the CPU: passes over prompts and generations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eager_graphs import EagerGraphs
from matrix import Drafters, config_of, make_drafters
from oracle import VOCAB, Oracle
from tiny_heads import mtp_model_dir
from uncaptured import PaddedTorch

from trtspec import LLM, CudaGraphConfig, KvCacheConfig, SamplingParams
from trtspec.executor import build
from trtspec.executor.cuda_graphs.graph_key import GraphKey

MODES = ["none", "sa", "eagle3", "mtp_eagle", "draft_target", "dflash"]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=1)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    backend = PaddedTorch()
    monkeypatch.setattr(build, "attention_backend", lambda name, device: backend)
    monkeypatch.setattr("trtspec.executor.cuda_graphs.context_inputs.TOKENS_PER_CONTEXT", 4)
    yield


def engine(target_dir: Path, mode: str, drafters: Drafters, **options: Any) -> LLM:
    given: dict[str, Any] = {"max_batch_size": 3, "max_seq_len": 32, "max_num_tokens": 40}
    return LLM(
        target_dir, config_of(mode, 2, drafters), device="cpu", dtype="float32",
        kv_cache_config=KvCacheConfig(max_tokens=512, tokens_per_block=8), **given | options,
    )  # fmt: skip


def joined(graphs: EagerGraphs) -> list[GraphKey]:
    return [key for key in graphs._graphs if key.num_beside]


PROMPTS = [[(7 * i + j * j) % VOCAB for j in range(n)] for i, n in enumerate((9, 4, 2, 5, 19, 3))]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_texts_are_those_without_graphs(
    target_dir: Path, drafters: Drafters, mode: str, temperature: float
) -> None:
    """Prompts join generations at once. Penalties are among the requests."""
    params = [
        SamplingParams(
            max_tokens=3 + 2 * i, temperature=temperature, seed=i, ignore_eos=True,
            frequency_penalty=0.5 * (i == 3),
        )
        for i in range(len(PROMPTS))
    ]  # fmt: skip
    expected = engine(target_dir, mode, drafters).generate(PROMPTS, params)
    llm = engine(target_dir, mode, drafters)
    graphs = EagerGraphs(llm.executor, CudaGraphConfig(context_tokens=[7, 16, 24]))
    graphs.joined.seconds_of_pass = 1.0  # as of a huge model
    for output, wanted in zip(llm.generate(PROMPTS, params), expected, strict=True):
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert joined(graphs)
    llm.executor.kv_cache.check_integrity()


def test_passes_are_joined_once_apart_has_cost_a_capture(
    target_dir: Path, drafters: Drafters
) -> None:
    llm = engine(target_dir, "none", drafters)
    graphs, oracle = EagerGraphs(llm.executor), Oracle(target_dir)
    graphs.joined.seconds_of_pass = graphs.capture_cost / 3
    counts, requests = [], []
    for _ in range(6):
        requests.append(llm.executor.enqueue([5, 7, 2], SamplingParams(12, ignore_eos=True)))
        llm.executor.step()
        counts.append(len(joined(graphs)))
        while len(llm.executor.scheduler.running) > 1:
            llm.executor.step()
    llm.executor.run_until_done()
    assert counts[0] == 0 and 0 in counts[1:] and counts[-1] == 1
    for request in requests:
        assert request.output_token_ids == oracle.extend([5, 7, 2], 12)


def test_passes_stay_apart_where_memory_is_short(target_dir: Path, drafters: Drafters) -> None:
    llm = engine(target_dir, "none", drafters)
    graphs = EagerGraphs(llm.executor)
    graphs.joined.seconds_of_pass, graphs.has_spare_memory = 1.0, False
    llm.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True))
    assert not joined(graphs)


def test_log_probabilities_are_read_from_passes_apart(target_dir: Path, drafters: Drafters) -> None:
    llm = engine(target_dir, "none", drafters)
    graphs = EagerGraphs(llm.executor)
    graphs.joined.seconds_of_pass = 1.0
    llm.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1))
    assert not joined(graphs)
