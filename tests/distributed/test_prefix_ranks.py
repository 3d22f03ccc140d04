"""The prefix cache over two ranks: what one looks up and copies, all have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matrix import MODES, Drafters, config_of, cpu_engine, full, make_drafters, spread, thinned
from oracle import Oracle
from prefixes import GREEDY, SAMPLED, assert_same, converse
from tiny_heads import mtp_model_dir

from trtspec import KvCacheConfig, MTPDecodingConfig

K = 3


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=K)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"), Oracle(target_dir))


@pytest.fixture(autouse=True)
def every_step_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_CHECK_RANKS", "1")


def _cache(reuse: bool, pool: int | None = None) -> KvCacheConfig:
    return KvCacheConfig(max_tokens=pool, tokens_per_block=4, enable_block_reuse=reuse)


@pytest.mark.slow
@spread(
    mode=MODES if full() else ["eagle3", "mtp"], sampled=[False, True], chunk=[None, 21],
    pool=[None, 140],
)  # fmt: skip
def test_texts_and_drafts_are_those_of_one_rank_without_it(
    target_dir: Path, drafters: Drafters, mode: str, sampled: bool, chunk: int | None,
    pool: int | None,
) -> None:  # fmt: skip
    config, params = config_of(mode, K, drafters), SAMPLED if sampled else GREEDY
    options: Any = {"chunk": chunk, "overlap": False}
    plain = converse(
        cpu_engine(target_dir, config, kv_cache_config=_cache(False), **options), params
    )
    with cpu_engine(
        target_dir, config, tensor_parallel_size=2, kv_cache_config=_cache(True, pool), **options
    ) as llm:
        cached = converse(llm, params)
        llm.reset_prefix_cache()
        assert llm.generate([1, *range(30)], GREEDY).cached_tokens == 0
    assert_same(cached, plain)
    assert cached.cached[1] > 20 and cached.cached[3] > 8


@pytest.mark.slow
@pytest.mark.parametrize("pool", thinned([80, None], 2))
def test_ranks_with_requests_of_their_own(tmp_path: Path, pool: int | None) -> None:
    """A prompt goes to the rank that has its beginning."""
    path = mtp_model_dir(tmp_path, layout="deepseek_v3", num_mtp_layers=K)
    config = MTPDecodingConfig(num_nextn_predict_layers=K, use_mtp_vanilla=True)
    plain = converse(cpu_engine(path, config, kv_cache_config=_cache(False), overlap=False), GREEDY)
    with cpu_engine(
        path, config, tensor_parallel_size=2, enable_attention_dp=True, overlap=False,
        kv_cache_config=_cache(True, pool),
    ) as llm:  # fmt: skip
        cached = converse(llm, GREEDY)
        cache: Any = llm.executor.kv_cache
        used = [pools[0].num_keys > 0 for pools in cache._pools_of]
        assert used.count(True) == (1 if pool is None else 2), "the other is for want of room"
        stats = llm.stats().prefix_cache
        assert stats.cached_blocks == sum(pools[0].num_keys for pools in cache._pools_of)
    assert_same(cached, plain)
    assert cached.cached[1] > 20 and cached.cached[3] > 8
