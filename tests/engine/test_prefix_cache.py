"""The prefix cache: what prompts take over of earlier ones changes no token and no draft."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from dflash_cases import make_dflash_case, make_dspark_case
from drafting import LAYERS, Script, make_case, run_random_schedule
from masked import MaskedScript, make_masked_case
from matrix import MODES, Drafters, config_of, cpu_engine, full, make_drafters, spread
from oracle import Oracle
from perfect import add_perfect_mtp, one_layer_target, perfect_eagle3
from prefixes import GREEDY, SAMPLED, assert_same, converse, random_tokens, sharing_prompts
from tiny import tiny_model_dir
from tiny_heads import mtp_model_dir

from trtspec import LLM, EagleDecodingConfig, KvCacheConfig, MTPDecodingConfig, SamplingParams

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


@pytest.mark.slow
@spread(
    mode=MODES,
    **{"sampled,chunk,overlap,pool,partial": [
        (False, None, False, None, True), (True, 21, False, 144, True),
        (False, 21, True, 144, True), (True, None, False, None, False),
        (False, None, True, 144, False),
    ]},
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


# -- every draft logit -------------------------------------------------------------------------
MORE_CHAINS = ["eagle1", "eagle3_two_engine", "mtp_eagle", "deepseek_v3_vanilla"] if full() else []
MORE_MASKED = ["pard"] if full() else []
"""Without logits they are compared above, latent attention in test_prefix_families.py."""
CASES_OF_KIND: dict[str, Any] = {
    "chain": (make_case, Script, ["eagle3", "mtp_vanilla", *MORE_CHAINS]),
    "masked": (make_masked_case, MaskedScript, ["p_eagle", *MORE_MASKED]),
    "block": (make_dflash_case, MaskedScript, ["dflash", "dflash_next"]),
    "markov": (make_dspark_case, Script, ["dspark"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def deep_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("deep"), seed=1, num_hidden_layers=LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, n) for kind, (_, _, names) in CASES_OF_KIND.items() for n in names]
)
def test_every_draft_logit_equals_recomputation(
    deep_target_dir: Path, tmp_path: Path, kind: str, name: str
) -> None:
    """First and second turns arrive at random while others run; blocks run out all the time."""
    k = 4
    make, script, _ = CASES_OF_KIND[kind]
    case, rng = make(name, deep_target_dir, tmp_path, k), random.Random(3)
    prompts = sharing_prompts(rng, 21)
    second = [[*p, *case.oracle.extend(p, 10), *random_tokens(rng, 2)] for p in prompts]
    prompts += rng.sample(second, 4)
    compared, executor = run_random_schedule(case, k, 1, script, prompts, max_seq_len=72)
    assert compared > 100
    stats = executor.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache.hit_tokens > 60
    assert stats.prefix_cache.evicted_blocks > 0


# -- acceptance --------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["eagle3", "mtp_eagle", "mtp"])
def test_a_perfect_head_stays_perfect(tmp_path: Path, mode: str) -> None:
    """The same prompt again, and prompts that part at a block's end, accept every draft."""
    k, target = 3, one_layer_target(tmp_path)
    if mode == "eagle3":
        head = perfect_eagle3(tmp_path, target)
        config: Any = EagleDecodingConfig(
            max_draft_len=k, speculative_model=head, eagle3_layers_to_capture=[0]
        )
    else:
        add_perfect_mtp(target, k if mode == "mtp" else 1)
        config = MTPDecodingConfig(num_nextn_predict_layers=k, use_mtp_vanilla=mode == "mtp")
    llm = engine(target, config, reuse=True, overlap=False)
    params = SamplingParams(max_tokens=1 + 3 * (k + 1), ignore_eos=True)
    base = random_tokens(random.Random(0), 24)
    for last in range(12 if full() else 5):
        for turn in range(2):
            output = llm.generate([*base, last, last + 1], params)
            assert output.cached_tokens >= (24 - k if turn else 16 if last else 0)
            assert output.spec_stats.acceptance_per_position == [1.0] * k
