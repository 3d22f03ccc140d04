"""The prefix cache over a request's life: who shares with whom, and what an end leaves behind."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import (
    MODES,
    NETWORKS,
    Drafters,
    config_of,
    cpu_engine,
    full,
    make_drafters,
    spread,
)
from oracle import Oracle
from prefixes import GREEDY, VOCAB, random_tokens, sharing_prompts
from tiny_gemma import assistant_dir, gemma_dir
from tiny_gemma_assistant import assistant_config
from tiny_heads import mtp_model_dir

from trtspec import LLM, KvCacheConfig, SamplingParams, SaveHiddenStatesDecodingConfig
from trtspec.data.hidden_states import SavedHiddenStates
from trtspec.errors import ConfigError, RequestError
from trtspec.executor.request import ContextChunk

PAGE, K = 8, 3
PROMPT = [(11 * i) % VOCAB for i in range(37)]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=K)


@pytest.fixture(scope="module")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"), oracle)


def cache_config(pool: int | None = None, **options: Any) -> KvCacheConfig:
    return KvCacheConfig(max_tokens=pool, tokens_per_block=PAGE, **options)


def chunks_of(llm: LLM) -> list[ContextChunk]:
    """Every part of a prompt that is computed from now on."""
    seen: list[ContextChunk] = []
    run = llm.executor.runner.run

    def watched(plan: Any) -> Any:
        seen.extend(plan.batch.contexts)
        return run(plan)

    llm.executor.runner.run = watched  # type: ignore[method-assign]
    return seen


# -- who shares with whom ----------------------------------------------------------------------
def test_outputs_and_statistics_say_what_was_found(target_dir: Path) -> None:
    llm = cpu_engine(target_dir, None, kv_cache_config=cache_config())
    first, again = llm.generate(PROMPT, GREEDY), llm.generate(PROMPT, GREEDY)
    assert (first.cached_tokens, again.cached_tokens) == (0, len(PROMPT) - 1)
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    answer = first.outputs[0].token_ids
    second = llm.generate([*PROMPT, *answer, 5, 6], GREEDY)
    assert second.cached_tokens == 48 > len(PROMPT) + PAGE, "whole blocks of the answer too"
    stats = llm.stats().prefix_cache
    assert stats.queried_tokens == 3 * len(PROMPT) + len(answer) + 2
    assert stats.hit_tokens == again.cached_tokens + second.cached_tokens
    assert stats.hit_rate == stats.hit_tokens / stats.queried_tokens
    assert stats.cached_blocks == (len(PROMPT) + len(answer) + 2 + GREEDY.max_tokens - 1) // PAGE
    assert stats.evicted_blocks == 0
    llm.reset_stats()
    cleared = llm.stats().prefix_cache
    assert cleared.queried_tokens == cleared.hit_tokens == 0
    assert cleared.hit_rate == 0 and cleared.cached_blocks == stats.cached_blocks


def test_a_preempted_prompt_is_counted_once(target_dir: Path) -> None:
    llm = cpu_engine(target_dir, None, kv_cache_config=cache_config(8 * PAGE))
    prompts = [[3 + i, *PROMPT[:20]] for i in range(3)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    stats = llm.stats()
    assert stats.num_preemptions > 0
    assert [output.cached_tokens for output in outputs] == [0, 0, 0]
    assert stats.prefix_cache.queried_tokens == sum(map(len, prompts))
    assert stats.prefix_cache.hit_tokens == 0, "what it finds of itself later does not count"


def test_salts_do_not_share(target_dir: Path) -> None:
    llm = cpu_engine(target_dir, None, kv_cache_config=cache_config())
    outputs = [
        llm.generate(PROMPT, GREEDY, cache_salt=salt).cached_tokens
        for salt in (None, "a", "b", "a", None)
    ]
    assert outputs == [0, 0, 0, 36, 36]
    salts = ["a", "c", None]
    hits = [o.cached_tokens for o in llm.generate([PROMPT] * 3, GREEDY, cache_salt=salts)]
    assert hits == [36, 0, 36]
    assert [o.cached_tokens for o in llm.generate([PROMPT] * 2, GREEDY, cache_salt="d")] == [0, 32]
    *_, last = llm.generate_stream(PROMPT, GREEDY, cache_salt="c")
    assert last.cached_tokens == 36
    for bad in ("", 3, b"a", ["a"], ["a", 3]):
        with pytest.raises(RequestError, match="cache_salt"):
            llm.generate([PROMPT, PROMPT], GREEDY, cache_salt=bad)
    with pytest.raises(RequestError, match="cache_salt"):
        llm.executor.enqueue(PROMPT, GREEDY, cache_salt=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["enable_block_reuse", "enable_partial_reuse"])
def test_it_can_be_turned_off(target_dir: Path, option: str) -> None:
    llm = cpu_engine(target_dir, None, kv_cache_config=cache_config(**{option: False}))
    hits = [llm.generate(PROMPT, GREEDY).cached_tokens for _ in range(2)]
    assert hits == ([0, 0] if option == "enable_block_reuse" else [0, 32])
    whole = [*PROMPT, 3, 4, 5]  # of whole blocks, the last of which is computed again
    assert llm.generate(whole, GREEDY).cached_tokens == hits[1]
    assert llm.generate(whole, GREEDY).cached_tokens == hits[1]
    with pytest.raises(ConfigError, match=option):
        KvCacheConfig(**{option: "no"})


def test_completions_of_one_prompt_compute_it_once(target_dir: Path) -> None:
    llm = cpu_engine(target_dir, None, kv_cache_config=cache_config())
    seen = chunks_of(llm)
    params = SamplingParams(max_tokens=6, n=4, temperature=2.0, seed=1, ignore_eos=True)
    together = llm.generate(PROMPT, params)
    assert [(c.start, c.end) for c in seen] == [(0, 37)] + [(32, 37)] * 3
    ids = [c.request.request_id for c in seen]
    assert ids == sorted(ids), "those that wait keep their places"
    assert together.cached_tokens == 0
    alone = cpu_engine(
        target_dir, None, kv_cache_config=cache_config(enable_block_reuse=False)
    ).generate(PROMPT, params)
    assert [o.token_ids for o in together.outputs] == [o.token_ids for o in alone.outputs]


def test_a_prompt_waits_for_one_that_computes_most_of_it_alone(target_dir: Path) -> None:
    llm = cpu_engine(target_dir, None, kv_cache_config=cache_config())
    seen, executor = chunks_of(llm), llm.executor
    prompts = [PROMPT, [*PROMPT, 3, 4], [*PROMPT[:8], *range(50, 80)], [90, 91]]
    requests = [executor.enqueue(prompt, GREEDY) for prompt in prompts]
    executor.run_until_done()
    firsts = [next(c.start for c in seen if c.request is r) for r in requests]
    assert firsts == [0, 32, 0, 0], "a quarter is not worth the wait"
    order = [requests.index(c.request) for c in seen if c.is_first]
    assert order.index(3) < order.index(1), "nobody else waits"
    cancelled = [executor.enqueue([1, *PROMPT], GREEDY) for _ in range(2)]
    executor.step()
    executor.cancel(cancelled[0].request_id)
    executor.run_until_done()
    assert cancelled[1].finish_reason == "length", "it does not wait for ever"


@pytest.mark.slow
@spread(
    mode=MODES if full() else ["none", "draft_target", "mtp", "pard", "dspark"], chunk=[None, 21]
)  # fmt: skip
def test_what_else_a_step_reads_of_a_prompt(
    target_dir: Path, drafters: Drafters, mode: str, chunk: int | None
) -> None:
    """Penalties, biases, bans and log probabilities are those of the whole prompt."""
    shaped = [
        SamplingParams(max_tokens=9, repetition_penalty=1.7, ignore_eos=True),
        SamplingParams(max_tokens=9, logprobs=3, presence_penalty=1.0, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=2.0, seed=4, bad_words=[[PROMPT[-1], 7]]),
    ]
    config = config_of(mode, K, drafters)
    results = []
    for reuse in (False, True):
        llm = cpu_engine(
            target_dir, config, chunk=chunk,
            kv_cache_config=cache_config(enable_block_reuse=reuse),
        )  # fmt: skip
        outputs = [llm.generate(PROMPT, params) for params in shaped]
        assert [o.cached_tokens > 24 for o in outputs] == [False, reuse, reuse]
        results.append([o.outputs[0] for o in outputs])
    for one, other in zip(*results, strict=True):
        assert one.token_ids == other.token_ids
        for entry, same in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert list(entry) == list(same)
            for token, value in entry.items():
                assert value.logprob == pytest.approx(same[token].logprob, abs=1e-4)


def test_saved_states_have_every_row(target_dir: Path, tmp_path: Path) -> None:
    config = SaveHiddenStatesDecodingConfig(
        output_directory=tmp_path, eagle3_layers_to_capture=[0, 2]
    )
    llm = cpu_engine(target_dir, config, kv_cache_config=cache_config())
    outputs = [llm.generate(PROMPT, GREEDY) for _ in range(2)]
    assert [output.cached_tokens for output in outputs] == [0, 0]
    assert [len(s["token_ids"]) for s in SavedHiddenStates(tmp_path)] == [len(PROMPT) + 13] * 2


# -- what a drafter reads ahead ----------------------------------------------------------------
def measured_ahead(llm: LLM, parting: int, count: int) -> int:
    """How many tokens before the first one that differs keys or values differ already."""
    executor, caches = llm.executor, []
    for change in (0, 1):
        prompt = [(5 * i + 3) % VOCAB for i in range(count)]
        prompt[parting] = (prompt[parting] + change) % VOCAB
        request = executor.enqueue(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
        while len(request.output_token_ids) < 3:
            executor.step()
        tables = executor.kv_cache._tables[request.request_id]
        rows = [
            (kv.k_cache[:, table].flatten(1, 2)[:, :count].clone(),
             kv.v_cache[:, table].flatten(1, 2)[:, :count].clone())
            for kv, table in zip(executor.kv_cache.groups, tables, strict=True)
        ]  # fmt: skip
        caches.append(rows)
        executor.cancel(request.request_id)
        executor.run_until_done()
    first = parting
    for (k, v), (other_k, other_v) in zip(*caches, strict=True):
        for row in range(parting):
            same = torch.allclose(k[:, row], other_k[:, row], atol=1e-5)
            same = same and torch.allclose(v[:, row], other_v[:, row], atol=1e-5)
            first = first if same else min(first, row)
    return parting - first


@pytest.mark.parametrize("mode", ["ngram", *NETWORKS])
def test_workers_say_how_far_they_read_ahead(
    target_dir: Path, drafters: Drafters, mode: str
) -> None:
    llm = cpu_engine(
        target_dir, config_of(mode, K, drafters), overlap=False,
        kv_cache_config=cache_config(enable_block_reuse=False),
    )  # fmt: skip
    assert measured_ahead(llm, parting=20, count=31) == llm.executor.worker.num_tokens_ahead


def test_an_assistant_without_keys_reads_nothing_ahead(tmp_path: Path) -> None:
    """Its worker allows for one token all the same, as for any MTP-Eagle head."""
    path = gemma_dir(tmp_path, "gemma4_text", seed=5, layers_weigh=4, sliding_window=60)
    config = assistant_config(assistant_dir(tmp_path, "gemma4_text", sliding_window=60), K)
    llm = cpu_engine(
        path, config, overlap=False, kv_cache_config=cache_config(enable_block_reuse=False)
    )
    assert measured_ahead(llm, parting=20, count=31) == 0
    assert llm.executor.worker.num_tokens_ahead == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "ngram", "draft_target", "eagle3", "mtp", "dflash"])
def test_a_block_is_published_when_no_step_writes_to_it_any_more(
    target_dir: Path, drafters: Drafters, oracle: Oracle, mode: str
) -> None:
    """The last token of an answer has no keys; what reads ahead is not settled before it."""
    llm = cpu_engine(target_dir, config_of(mode, K, drafters), kv_cache_config=cache_config())
    unsettled = max(1, llm.executor.worker.num_tokens_ahead)
    short = replace(GREEDY, max_tokens=4)
    for count in range(1, 2 * PAGE + 1) if full() else range(4, PAGE + 4):
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        said = llm.generate(PROMPT[:27], params, cache_salt=f"{count}").outputs[0].token_ids
        text = [*PROMPT[:27], *said]
        output = llm.generate([*text, 90, 91, 92, 93], short, cache_salt=f"{count}")
        assert output.cached_tokens == (len(text) - unsettled) // PAGE * PAGE
        assert output.outputs[0].token_ids == oracle.extend(output.prompt_token_ids, 4)


@pytest.mark.parametrize("mode", NETWORKS)
def test_a_step_too_many_at_the_maximum_length_writes_to_no_shared_block(
    target_dir: Path, drafters: Drafters, mode: str
) -> None:
    """Under overlap a step used to be launched behind the one that ended the text. Its rows were
    guarded, at position 0, and its drafts at 1, 2, …, in the blocks of the prompt."""
    llm = cpu_engine(
        target_dir, config_of(mode, K, drafters), max_seq_len=40, kv_cache_config=cache_config()
    )
    executor = llm.executor
    executor.worker.force_num_accepted_tokens = K  # so that the last steps pass the maximum
    request = executor.enqueue(PROMPT[:20], replace(GREEDY, max_tokens=100))
    while not request.output_token_ids:
        executor.step()
    tables = executor.kv_cache._tables[request.request_id]
    places = [
        (kv, list(table[:2])) for kv, table in zip(executor.kv_cache.groups, tables, strict=True)
    ]

    def rows() -> list[torch.Tensor]:
        return [cache[:, b].clone() for kv, b in places for cache in (kv.k_cache, kv.v_cache)]

    before = rows()
    executor.run_until_done()
    assert request.num_tokens == 40
    assert all(torch.equal(a, b) for a, b in zip(before, rows(), strict=True))


@pytest.mark.parametrize("mode", ["none", "eagle3", "mtp"])
def test_a_prompt_that_is_cut_off_leaves_what_it_computed(
    target_dir: Path, drafters: Drafters, oracle: Oracle, mode: str
) -> None:
    config = config_of(mode, K, drafters)
    llm = cpu_engine(target_dir, config, chunk=24, kv_cache_config=cache_config(), max_batch_size=2)
    request = llm.executor.enqueue([*PROMPT, *PROMPT], GREEDY)
    llm.executor.step()
    llm.executor.cancel(request.request_id)
    output = llm.generate([*PROMPT, *PROMPT], GREEDY)
    settled = 25 - max(1, llm.executor.worker.num_tokens_ahead)
    assert output.cached_tokens == settled // PAGE * PAGE
    assert output.outputs[0].token_ids == oracle.extend(output.prompt_token_ids, 14)


# -- ends --------------------------------------------------------------------------------------
@pytest.mark.slow
@spread(
    mode=MODES if full() else ["ngram", "eagle3", "mtp", "pard"],
    **{"overlap,chunk,partial": [
        (True, 24, True), (False, None, True), (True, None, False), (False, 24, False),
    ]},
)  # fmt: skip
def test_random_schedules(
    target_dir: Path, drafters: Drafters, oracle: Oracle, mode: str, overlap: bool,
    chunk: int | None, partial: bool,
) -> None:  # fmt: skip
    """Prompts share, part and go on from answers; blocks run out; some requests are cancelled."""
    llm = cpu_engine(
        target_dir, config_of(mode, K, drafters), overlap=overlap, chunk=chunk,
        kv_cache_config=cache_config(144, enable_partial_reuse=partial),
    )  # fmt: skip
    executor, rng = llm.executor, random.Random(f"{mode} {overlap} {chunk}")
    seen = chunks_of(llm)
    prompts = sharing_prompts(rng, 29) + sharing_prompts(rng, 26)
    texts = oracle.extend_all(prompts, 40)
    prompts += [
        [*prompt, *said[: rng.randint(1, 20)], *random_tokens(rng, 3)]
        for prompt, said in zip(prompts, texts, strict=True)
    ]
    rng.shuffle(prompts)
    requests, waiting = [], list(prompts)
    while waiting or executor.has_work:
        if waiting and rng.random() < 0.6:
            params = SamplingParams(max_tokens=rng.randint(1, 36), ignore_eos=True)
            requests.append(executor.enqueue(waiting.pop(), params))
        executor.step()
        executor.kv_cache.check_integrity()
        if requests and rng.random() < 0.04:
            executor.cancel(rng.choice(requests).request_id)
    expected = oracle.extend_all([r.prompt_token_ids for r in requests], 36)
    for request, said in zip(requests, expected, strict=True):
        assert request.finish_reason in ("length", "cancelled")
        assert request.output_token_ids == said[: len(request.output_token_ids)]
    assert executor.kv_cache.num_free_blocks == executor.kv_cache.num_blocks - 2
    stats = executor.stats()
    assert stats.num_preemptions > 0 and stats.prefix_cache.evicted_blocks > 0
    assert stats.prefix_cache.hit_rate > 0.15
    again = [c for c in seen if c.is_first and c.request.output_token_ids]
    assert any(c.start > 0 for c in again), "a preempted request finds its own blocks"


@pytest.mark.parametrize("overlap", [False, True])
def test_nan_does_not_spread(target_dir: Path, oracle: Oracle, overlap: bool) -> None:
    nan = 96
    llm = cpu_engine(target_dir, None, overlap=overlap, kv_cache_config=cache_config(120))
    llm.executor.target.embed_tokens.weight.data[nan] = torch.nan
    good = [token % nan for token in PROMPT]
    bad = [*good[:20], nan, *good[20:]]
    for prompts in ([bad], [bad, bad, good], [[*good[:20], 5, 6, 7], bad, good], [good] * 3):
        requests = [llm.executor.enqueue(p, GREEDY) for p in prompts]
        while llm.executor.has_work:
            llm.executor.step()
            llm.executor.kv_cache.check_integrity()
        for request in requests:
            if nan in request.prompt_token_ids:
                assert request.error is not None and "NaN" in request.error
            elif nan not in (said := oracle.extend(request.prompt_token_ids, 14)):
                assert request.output_token_ids == said
    assert llm.executor.kv_cache.reserve(9999, 120)
    assert all(torch.isfinite(group.k_cache).all() for group in llm.executor.kv_cache.groups)


def test_an_exception_forgets_all_prefixes(target_dir: Path, oracle: Oracle) -> None:
    llm = cpu_engine(target_dir, None, kv_cache_config=cache_config())
    llm.generate(PROMPT, GREEDY)
    request = llm.executor.enqueue([*PROMPT, 4], GREEDY)
    run = llm.executor.runner.run

    def broken(plan: Any) -> Any:
        raise KeyboardInterrupt

    llm.executor.runner.run = broken  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.executor.step()
    llm.executor.runner.run = run  # type: ignore[method-assign]
    assert llm.stats().prefix_cache.cached_blocks == 0
    assert all(not group.k_cache.any() for group in llm.executor.kv_cache.groups)
    llm.executor.run_until_done()
    assert request.output_token_ids == oracle.extend([*PROMPT, 4], 14)
    assert request.num_reused == 0


def test_changed_weights_need_a_reset(target_dir: Path) -> None:
    """Also for requests that were running: what they publish afterwards is of both."""
    llm = cpu_engine(target_dir, None, kv_cache_config=cache_config())
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    running = llm.executor.enqueue(PROMPT, long)
    llm.executor.step()
    before = llm.generate(PROMPT, GREEDY).outputs[0].token_ids
    llm.executor.target.layers[0].input_layernorm.weight.data.mul_(-1)
    llm.reset_prefix_cache()
    while not running.is_finished:
        llm.executor.step()
    prompts = [PROMPT, running.token_ids[:57], running.token_ids[:70]]
    after = [llm.generate(prompt, GREEDY) for prompt in prompts]
    assert after[0].cached_tokens == 0
    assert after[2].cached_tokens < 60, "the running one's blocks are found"
    plain = cpu_engine(target_dir, None, kv_cache_config=cache_config(enable_block_reuse=False))
    plain.executor.target.layers[0].input_layernorm.weight.data.mul_(-1)
    expected = plain.generate(prompts, GREEDY)
    assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in expected]
    assert after[0].outputs[0].token_ids != before


def test_equal_prompts_do_not_wait_for_one_answer(target_dir: Path) -> None:
    """With `prefill_batch_size` a prompt that stepped aside would wait for slots."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with cpu_engine(target_dir, None, max_batch_size=4, prefill_batch_size=4) as llm:
        for _ in range(4):
            llm.executor.enqueue(list(range(20)), params)
        steps = 0
        while llm.executor.has_work:
            llm.executor.step()
            steps += 1
    assert steps < 30


@pytest.mark.parametrize("reuse", [False, True])
def test_a_prompt_that_is_preempted_halfway_counts_once(target_dir: Path, reuse: bool) -> None:
    cache = KvCacheConfig(max_tokens=112, tokens_per_block=PAGE, enable_block_reuse=reuse)
    llm = LLM(
        target_dir, device="cpu", dtype="float32", max_batch_size=4, max_seq_len=96,
        max_num_tokens=12, enable_chunked_prefill=True, kv_cache_config=cache,
    )  # fmt: skip
    prompts = [[(7 * i + 3 * j) % 90 + 3 for j in range(60)] for i in range(4)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    stats = llm.stats()
    assert stats.num_preemptions > 2
    assert stats.prefix_cache.queried_tokens == 4 * 60
    assert stats.prefix_cache.hit_tokens == sum(output.cached_tokens for output in outputs)
