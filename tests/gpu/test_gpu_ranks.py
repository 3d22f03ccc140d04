"""Two GPUs: the same tokens as one, one graph launch a step on each, and all ways to reduce.

`TRTSPEC_RANK_SOAK_REQUESTS` says how many requests the soak has; 2000 is the long run.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import steady
import torch
from matrix import MODES, NETWORKS, Drafters, config_of, make_drafters, spread
from oracle import VOCAB, Oracle, random_prompts
from sampled import requests, texts
from tiny import tiny_model_dir
from tiny_heads import mtp_model_dir

from trtspec import LLM, KvCacheConfig, SamplingParams
from trtspec.distributed.peer import ALL_REDUCE_ENV_VAR, WAYS
from trtspec.executor.ranks import CHECK_ENV_VAR

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
REQUESTS = int(os.environ.get("TRTSPEC_RANK_SOAK_REQUESTS", "200"))


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=3)


@pytest.fixture(scope="module")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"), oracle)


def engine(target: Path, config: Any, ranks: int = 2, **options: Any) -> LLM:
    given: dict[str, Any] = {
        "max_batch_size": 4, "max_seq_len": 96, "dtype": "float32", "tensor_parallel_size": ranks,
    }  # fmt: skip
    return LLM(target, config, device="cuda", **(given | options))


@spread(mode=MODES, overlap=[False, True], pool=[None, 112], chunk=[None, 24])
def test_greedy_equals_transformers(
    target_dir: Path, drafters: Drafters, oracle: Oracle,
    mode: str, overlap: bool, pool: int | None, chunk: int | None,
) -> None:  # fmt: skip
    prompts, count = (random_prompts(6), 24) if pool is None else (random_prompts(6, 12), 32)
    with engine(
        target_dir, config_of(mode, 3, drafters), disable_overlap_scheduler=not overlap,
        kv_cache_config=KvCacheConfig(max_tokens=pool, tokens_per_block=8),
        enable_chunked_prefill=chunk is not None, max_num_tokens=chunk or 96,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, count)


@spread(mode=[*NETWORKS, "ngram"], rule=["strict", "exact_match", "rejection", "block"])
def test_sampled_texts_equal_one_gpu(
    target_dir: Path, drafters: Drafters, mode: str, rule: str
) -> None:
    config = config_of(mode, 3, drafters, acceptance=rule)
    prompts, params = requests(12)
    with engine(target_dir, config, ranks=1) as llm:
        expected = texts(llm, prompts, params)
    with engine(target_dir, config) as llm:
        assert texts(llm, prompts, params) == expected


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("expert_ranks", [1, 2])
def test_experts_equal_transformers(tmp_path: Path, family: str, expert_ranks: int) -> None:
    path = tiny_model_dir(tmp_path, family)
    oracle, prompts = Oracle(path), random_prompts(4)
    with engine(path, None, moe_expert_parallel_size=expert_ranks) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, 16)


@pytest.mark.parametrize("mode", ["none", "eagle3", "mtp_eagle"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_is_one_launch_and_waits_for_nothing(
    target_dir: Path, drafters: Drafters, mode: str, temperature: float
) -> None:
    config = config_of(mode, 3, drafters)
    cache = KvCacheConfig(max_tokens=1024, tokens_per_block=128)
    with engine(
        target_dir, config, dtype="bfloat16", max_batch_size=2, max_seq_len=200,
        kv_cache_config=cache,
    ) as llm:  # fmt: skip
        steady.start(llm.executor, temperature)
        steady.launch(llm.executor)
        steady.finish(llm.executor)


WAY_SCRIPT = """
import json, sys
from trtspec import LLM, EagleDecodingConfig, SamplingParams
from trtspec.distributed.peer import PeerCommunicator
target, head, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
config = EagleDecodingConfig(
    max_draft_len=3, speculative_model=head, eagle3_layers_to_capture=[0, 1, 2]
)
with LLM(target, config, device="cuda", dtype="float32", max_seq_len=96,
         tensor_parallel_size=2) as llm:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    is_peer = isinstance(llm.executor.runner.world.comm, PeerCommunicator)
print(json.dumps([is_peer, [output.outputs[0].token_ids for output in outputs]]))
"""


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_reduce(
    target_dir: Path, drafters: Drafters, oracle: Oracle, tmp_path: Path, way: str
) -> None:
    """In processes of their own: one has peer memory once."""
    script, prompts = tmp_path / "script.py", random_prompts(6)
    script.write_text(WAY_SCRIPT)
    command = [sys.executable, script, target_dir, str(drafters.head), json.dumps(prompts)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False,
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
            ALL_REDUCE_ENV_VAR: way, CHECK_ENV_VAR: "1",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    is_peer, texts_of_way = json.loads(done.stdout.splitlines()[-1])
    assert is_peer == (way != "nccl")
    assert texts_of_way == [oracle.extend(prompt, 24) for prompt in prompts]


def test_soak_with_every_step_compared(
    target_dir: Path, drafters: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed requests in a small pool; the ranks compare their tokens at every step."""
    monkeypatch.setenv(CHECK_ENV_VAR, "1")
    rng = random.Random(3)
    for mode in ("none", "eagle3", "mtp_eagle", "ngram"):
        with engine(
            target_dir, config_of(mode, 3, drafters), max_batch_size=8,
            kv_cache_config=KvCacheConfig(max_tokens=256, tokens_per_block=8),
        ) as llm:  # fmt: skip
            for _ in range(-(-REQUESTS // 4 // 32)):
                prompts = [
                    [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(32)
                ]
                params = [
                    SamplingParams(
                        max_tokens=rng.randint(1, 40), temperature=rng.choice([0.0, 1.0]), seed=i
                    )
                    for i in range(32)
                ]
                for output in llm.generate(prompts, params):
                    assert output.outputs[0].finish_reason in ("stop", "length")
            llm.executor.kv_cache.check_integrity()
