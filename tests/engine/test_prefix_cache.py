"""The prefix cache: what prompts take over of earlier ones changes no token and no draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matrix import MODES, Drafters, config_of, covering, cpu_engine, make_drafters
from oracle import Oracle
from prefixes import GREEDY, SAMPLED, assert_same, converse
from tiny_heads import mtp_model_dir

from trtspec import LLM, KvCacheConfig

PAGE = 8


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=4)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"), Oracle(target_dir))


def engine(
    target: Path, config: Any, *, reuse: bool, pool: int | None = None, partial: bool = True,
    **options: Any,
) -> LLM:  # fmt: skip
    cache = KvCacheConfig(
        max_tokens=pool, tokens_per_block=PAGE, enable_block_reuse=reuse,
        enable_partial_reuse=partial,
    )  # fmt: skip
    return cpu_engine(target, config, kv_cache_config=cache, **options)


@covering(
    mode=MODES, sampled=[False, True], chunk=[None, 21], overlap=[False, True],
    pool=[None, 144], partial=[True, False],
)  # fmt: skip
def test_texts_and_drafts_are_those_without_it(
    target_dir: Path, drafters: Drafters, mode: str, sampled: bool, chunk: int | None,
    overlap: bool, pool: int | None, partial: bool,
) -> None:  # fmt: skip
    config = config_of(mode, 4, drafters)
    params = SAMPLED if sampled else GREEDY
    options = {"chunk": chunk, "overlap": overlap}
    plain = converse(engine(target_dir, config, reuse=False, **options), params)
    llm = engine(target_dir, config, reuse=True, pool=pool, partial=partial, **options)
    cached = converse(llm, params)
    assert_same(cached, plain)
    assert cached.cached[1] >= (24 if partial else 16)
