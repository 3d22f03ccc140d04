"""The prefix cache of models with linear attention: a prompt goes on from a copy of what an earlier
one's slot held."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import Drafters, config_of, cpu_engine, spread
from prefixes import GREEDY, SAMPLED, Watched, assert_same, converse, random_tokens
from tiny import tiny_model_dir
from tiny_heads import eagle3_dir, mtp_model_dir

from trtspec import (
    LLM,
    KvCacheConfig,
    MTPDecodingConfig,
    SamplingParams,
    SaveHiddenStatesDecodingConfig,
)
from trtspec.errors import ConfigError
from trtspec.executor import prefixes
from trtspec.state.state_copies import StateCopies

PAGE, K = 4, 3


@pytest.fixture(autouse=True)
def _keeps_states_of_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "LEAST_APART", 6)


def engine(target: Path, config: Any = None, copies: int | None = 16, **options: Any) -> LLM:
    """copies: None is no prefix cache."""
    cache = KvCacheConfig(
        max_tokens=options.pop("pool", None),
        tokens_per_block=PAGE,
        enable_block_reuse=copies is not None,
        num_state_copies=copies,
    )
    return cpu_engine(target, config, kv_cache_config=cache, **options)


@spread(
    mode=["none", "ngram", "eagle3", "mtp_eagle", "mtp", "draft_target"],
    family=["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"],
    **{"sampled,chunk,overlap,pool,copies": [
        (False, None, False, None, 16), (True, 17, False, 120, 16), (False, 17, True, 120, 3),
        (True, None, False, None, 1), (False, None, True, None, 16),
    ]},
)  # fmt: skip
def test_texts_and_drafts_are_those_without_it(
    tmp_path: Path, mode: str, family: str, sampled: bool, chunk: int | None, overlap: bool,
    pool: int | None, copies: int,
) -> None:  # fmt: skip
    if mode.startswith("mtp"):
        target = mtp_model_dir(tmp_path, layout="qwen3_next", family=family, num_mtp_layers=K)
        config: Any = MTPDecodingConfig(max_draft_len=K, use_mtp_vanilla=mode == "mtp")
    else:
        target = tiny_model_dir(tmp_path, family, seed=3)
        draft = tiny_model_dir(tmp_path / "draft", "llama", seed=4)
        config = config_of(mode, K, Drafters(draft=draft, head=eagle3_dir(tmp_path)))
    params, options = SAMPLED if sampled else GREEDY, {"chunk": chunk, "overlap": overlap}
    plain = converse(engine(target, config, None, **options), params)
    cached = converse(engine(target, config, copies, pool=pool, **options), params)
    assert_same(cached, plain)
    assert sum(cached.cached) >= (60 if copies > 1 else 12)


def test_what_is_taken_over(tmp_path: Path) -> None:
    """The last whole block of a prompt; where a second one parts from it, of a third; an answer's
    end once another turn has computed it."""
    target, rng = tiny_model_dir(tmp_path, "qwen3_5_text"), random.Random(0)
    watched, params = Watched(engine(target)), SamplingParams(max_tokens=9, ignore_eos=True)
    base = random_tokens(rng, 30)
    (first,) = watched.run([base], params)
    for _ in range(3):
        watched.run([[*base[:18], *random_tokens(rng, 12)]], params)
    watched.run([[*base, *random_tokens(rng, 4)]], params)
    turn = [*first.token_ids, *random_tokens(rng, 9)]
    (second,) = watched.run([turn], params)
    watched.run([[*second.token_ids, 1, 2]], params)
    # 28 of 30: whole blocks. The second prompt leaves a state at 16, where it parts from the first.
    # The last but one has 48 tokens, of which at least one is computed.
    assert watched.seen.cached == [0, 0, 16, 16, 28, 28, 44]
    watched.llm.reset_prefix_cache()
    assert len(watched.executor.kv_cache.state_copies) == 0
    watched.run([base], params)
    assert watched.seen.cached[-1] == 0


@pytest.mark.slow
def test_every_rank_copies(tmp_path: Path) -> None:
    path = mtp_model_dir(tmp_path, layout="qwen3_next", family="qwen3_next", num_mtp_layers=1)
    config = MTPDecodingConfig(num_nextn_predict_layers=2)
    seen = []
    for copies in (None, 16):
        with engine(path, config, copies, tensor_parallel_size=2) as llm:
            seen.append(converse(llm, GREEDY))
    assert seen[1].outputs == seen[0].outputs and sum(seen[1].cached) > 60


@pytest.mark.parametrize(
    ("length", "cached"), [(7, [0, 0, 0, 0]), (30, [0, 28, 28, 28]), (32, [0, 28, 28, 28])]
)
@pytest.mark.parametrize("mode", ["none", "mtp"])
def test_prompts_at_once_wait_for_a_state_alone(
    tmp_path: Path, mode: str, length: int, cached: list[int]
) -> None:
    """Prompts too short to leave one start together; of longer ones the first is waited for."""
    target, config = tiny_model_dir(tmp_path, "qwen3_next"), None
    if mode == "mtp":  # which publishes a block some rows later
        target = mtp_model_dir(tmp_path, layout="qwen3_next", family="qwen3_next", num_mtp_layers=2)
        config = MTPDecodingConfig(max_draft_len=2, use_mtp_vanilla=True)
    watched = Watched(engine(target, config))
    prompt = random_tokens(random.Random(1), length)
    requests = [watched.executor.enqueue(prompt, GREEDY) for _ in range(4)]
    watched.step()
    assert len(watched.executor.scheduler.running) == (1 if any(cached) else 4)
    while watched.executor.has_work:
        watched.step()
    assert [request.cached_tokens for request in requests] == cached
    assert len({tuple(request.output_token_ids) for request in requests}) == 1


def test_no_more_states_are_waited_for_than_are_kept(tmp_path: Path) -> None:
    target, rng = tiny_model_dir(tmp_path, "qwen3_next"), random.Random(0)
    watched = Watched(engine(target, copies=1, max_batch_size=12, max_num_tokens=512))
    prompts = [random_tokens(rng, 30) for _ in range(3)]
    requests = [watched.executor.enqueue(prompts[i % 3], GREEDY) for i in range(12)]
    watched.step()
    assert len(watched.executor.scheduler.running) == 9  # of one prompt three wait
    while watched.executor.has_work:
        watched.step()
    assert len({tuple(request.output_token_ids) for request in requests}) == 3


def test_a_state_keeps_the_blocks_before_it(tmp_path: Path) -> None:
    """A prompt leaves one behind blocks of an earlier prompt, older than others."""
    rng, params = random.Random(0), SamplingParams(max_tokens=2, ignore_eos=True)
    target = tiny_model_dir(tmp_path, "qwen3_next")
    watched = Watched(engine(target, pool=300, max_seq_len=96, max_batch_size=1))
    base = random_tokens(rng, 40)
    for is_base in (1, 0, 0, 1, 0, 0, 0, 1):
        start = base if is_base else random_tokens(rng, 40)
        watched.run([start + random_tokens(rng, 17)], params)
    assert watched.seen.cached == [0, 0, 0, 0, 0, 0, 0, 40]


def test_saved_hidden_states_need_no_copies(tmp_path: Path) -> None:
    target = tiny_model_dir(tmp_path, "qwen3_next")
    config = SaveHiddenStatesDecodingConfig(
        output_directory=str(tmp_path / "states"), eagle3_layers_to_capture=[0, 1, 2]
    )
    executor = engine(target, config).executor
    states = executor.state.recurrent
    assert states is not None and len(states.taken_in) == executor.config.max_batch_size + 1


def test_copies_go_with_their_blocks(tmp_path: Path) -> None:
    """Blocks that another prompt needs are evicted, the copies at their ends too."""
    target, rng = tiny_model_dir(tmp_path, "qwen3_5_text"), random.Random(2)
    watched = Watched(engine(target, pool=100, max_seq_len=96, max_batch_size=1))
    prompts = [random_tokens(rng, 60) for _ in range(3)]
    for prompt in prompts:
        watched.run([prompt], GREEDY)
    copies = watched.executor.kv_cache.state_copies
    assert copies is not None and len(copies) == 1
    watched.run(prompts[:1], GREEDY)
    assert watched.seen.cached == [0, 0, 0, 0]


def test_what_a_failed_request_left_is_dropped(tmp_path: Path) -> None:
    """NaN in its slot would go on in others'."""
    target, rng = tiny_model_dir(tmp_path, "qwen3_5_text"), random.Random(3)
    llm = engine(target)
    executor, prompt = llm.executor, random_tokens(rng, 30)
    request = executor.enqueue(prompt, GREEDY)
    executor.step()
    states = executor.state.recurrent
    assert states is not None and len(executor.kv_cache.state_copies) == 1
    states.layers[0].matrices[request.slot] = torch.nan
    while executor.has_work:
        executor.step()
    assert request.error is not None
    assert len(executor.kv_cache.state_copies) == 0
    again = Watched(llm).run([prompt], GREEDY)[0]
    assert again.cached_tokens == 0 and len(again.output_token_ids) == 14


def test_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_model_dir(tmp_path, "qwen3_5_text")
    with caplog.at_level("INFO"):
        watched = Watched(engine(target, copies=0))
        watched.llm.executor.kv_cache.reset_prefixes()
    assert not watched.executor.kv_cache.reuse.is_on
    prompt = list(range(1, 40))
    watched.run([prompt, prompt], GREEDY)
    assert watched.seen.cached == [0, 0]
    with pytest.raises(ConfigError, match="num_state_copies=-1"):
        KvCacheConfig(num_state_copies=-1)


def test_the_ledger() -> None:
    copies, keys = StateCopies(range(5, 8)), [bytes([i]) for i in range(9)]
    assert [copies.add(keys[: i + 1], request_id=i // 2) for i in range(3)] == [5, 6, 7]
    assert copies.last(keys, 9) == 3 and copies.last(keys, 2) == 2
    assert copies.last(keys[5:], 4) == copies.last(keys, 0) == 0
    assert copies.use(keys[0]) == 5
    assert copies.add(keys[:4], 9) == 6 and keys[1] not in copies  # the one used longest ago
    copies.drop_of(1)
    assert keys[2] not in copies and len(copies) == 2
    copies.drop(keys[2])
    assert copies.add(keys[:5], 9) == 7
    copies.clear()
    assert len(copies) == 0 and {copies.add(keys[:n], 1) for n in (1, 2, 3)} == {5, 6, 7}
