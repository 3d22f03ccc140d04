"""Grammars on CUDA: the tokens of brute force, by several graphs a step and eagerly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from guided import LANGUAGES, VOCAB, GuidedOracle, save_tokenizer
from matrix import NETWORKS, Drafters, config_of, covering, make_drafters
from tiny_heads import mtp_model_dir

from trtspec import LLM, CudaGraphConfig, GuidedDecodingParams, KvCacheConfig, SamplingParams

pytest.importorskip("xgrammar", reason="needs xgrammar")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
K, COUNT = 3, 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = mtp_model_dir(tmp_path_factory.mktemp("models"), seed=1, num_mtp_layers=K)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def drafters(target: Path) -> Drafters:
    return make_drafters(target.parent)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(2, 30))] for _ in range(7)]


@pytest.fixture(scope="module")
def expected(target: Path, prompts: list[list[int]]) -> list[list[int]]:
    oracle = GuidedOracle(target, "cuda")
    return [
        oracle.extend(prompt, COUNT, None if i == 3 else LANGUAGES[i % len(LANGUAGES)])
        for i, prompt in enumerate(prompts)
    ]


def engine(target: Path, config: Any, **options: Any) -> LLM:
    return LLM(
        target, config, device="cuda", dtype="float32", max_batch_size=4, max_seq_len=96,
        max_num_tokens=32, enable_chunked_prefill=True,
        kv_cache_config=KvCacheConfig(max_tokens=options.pop("pool", None) or 1024,
                                      tokens_per_block=8),
        **options,
    )  # fmt: skip


def params() -> list[SamplingParams]:
    guided = [None if i == 3 else LANGUAGES[i % len(LANGUAGES)].params for i in range(7)]
    return [SamplingParams(max_tokens=COUNT, guided_decoding=each) for each in guided]


@covering(
    mode=["none", "ngram", *NETWORKS],
    graphs=[CudaGraphConfig(), CudaGraphConfig(context_tokens=(16, 32)), None],
    overlap=[True, False],
    pool=[None, 112],
)
def test_tokens_are_those_of_brute_force(
    target: Path,
    drafters: Drafters,
    prompts: list[list[int]],
    expected: list[list[int]],
    mode: str,
    graphs: CudaGraphConfig | None,
    overlap: bool,
    pool: int | None,
) -> None:
    config = config_of(mode, K, drafters)
    with engine(
        target, config, cuda_graph_config=graphs, disable_overlap_scheduler=not overlap, pool=pool
    ) as llm:
        outputs = llm.generate(prompts, params())
        assert not [output.error for output in outputs if output.error]
        assert [output.outputs[0].token_ids for output in outputs] == expected
        llm.executor.kv_cache.check_integrity()


def test_sampled_outputs_are_the_cpus(target: Path, drafters: Drafters) -> None:
    """Seeded requests under rejection, with the distributions that masked drafts came from."""
    guided = GuidedDecodingParams(regex="([cdef]|ab|xy){40}")
    given = [
        SamplingParams(max_tokens=16, temperature=2.0, seed=i, guided_decoding=guided)
        for i in range(4)
    ]
    prompts = [[5 + i, 17, 33] for i in range(4)]
    tokens = []
    for device in ("cuda", "cpu"):
        config = config_of("eagle3", 1, drafters, acceptance="rejection")
        with LLM(
            target, config, device=device, dtype="float32", max_batch_size=4, max_seq_len=96
        ) as llm:
            outputs = llm.generate(prompts, given)
            assert not [output.error for output in outputs if output.error]
            tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]


def test_the_host_works_between_the_halves_of_a_launch(target: Path, drafters: Drafters) -> None:
    """The drafts' masks come in the next call, after the step before was read."""
    guided = GuidedDecodingParams(regex="([cdef]|ab|xy){60}")
    texts = []
    for overlap in (True, False):
        config = config_of("eagle3", K, drafters)
        with engine(target, config, disable_overlap_scheduler=not overlap) as llm:
            executor, waits = llm.executor, 0
            given = SamplingParams(max_tokens=40, guided_decoding=guided)
            requests = [executor.enqueue([5 + i, 17, 33], given) for i in range(3)]
            while executor.has_work:
                executor.step()
                waits += bool(executor._pending) and executor._pending[-1].launch_rest is not None
            texts.append([request.output_token_ids for request in requests])
        assert (waits > 5) == overlap
    assert texts[0] == texts[1]


def test_steps_without_grammars_stay_one_graph(target: Path, drafters: Drafters) -> None:
    with engine(target, config_of("eagle3", K, drafters)) as llm:
        free = SamplingParams(max_tokens=8, ignore_eos=True)
        guided = SamplingParams(max_tokens=8, guided_decoding=LANGUAGES[0].params)
        llm.generate([3, 4, 5], free)
        llm.generate([[3, 4, 5], [6, 7]], [free, guided])
        parts = {key.is_guided: len(c.parts) for key, c in llm.executor.graphs._graphs.items()}
        # Up to the masks, what is accepted, the first pass; then each draft and the pass after it.
        assert parts == {False: 1, True: 3 + 2 * (K - 1) + 1}
