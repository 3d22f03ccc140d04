"""The executor end to end on tiny random models, against transformers' greedy decoding."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrix import (
    MODES,
    Drafters,
    config_of,
    cpu_engine,
    full,
    make_drafters,
    pairwise,
    spread,
    thinned,
)
from oracle import VOCAB, Oracle, Scripted, random_prompts
from tiny import tiny_model_dir
from tiny_heads import mtp_model_dir

from trtspec import (
    LLM,
    DraftTargetDecodingConfig,
    KvCacheConfig,
    NGramDecodingConfig,
    SamplingParams,
    UserProvidedDecodingConfig,
)
from trtspec.acceptance.forced import FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR
from trtspec.checkpoints.hf_config import load_config
from trtspec.config import EngineConfig
from trtspec.errors import ConfigError, RequestError
from trtspec.executor import device, py_executor
from trtspec.executor.build import _executor_config
from trtspec.executor.request import StepPlan


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With MTP layers in its checkpoint, which the other modes leave alone."""
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=8)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"), oracle)


@pytest.fixture(scope="module")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


GREEDY_AXES = {"chunk": [None, 24], "overlap": [False, True], "pool": [None, 112], "batch": [1, 4]}
# Every mode in what is hardest for it; the rest, whose code asks no mode, with two of them.
GREEDY_SETS = (
    pairwise(mode=MODES, **GREEDY_AXES)
    if full()
    else [(mode, 24, True, 112, 4) for mode in MODES]
    + [("eagle3", *others) for others in pairwise(**GREEDY_AXES)]
    + [("draft_target", None, False, None, 1)]
)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", *GREEDY_AXES), GREEDY_SETS)
def test_greedy_equals_transformers(
    target_dir: Path, drafters: Drafters, oracle: Oracle,
    mode: str, chunk: int | None, overlap: bool, pool: int | None, batch: int,
) -> None:  # fmt: skip
    llm = cpu_engine(
        target_dir, config_of(mode, 3, drafters), chunk=chunk, overlap=overlap, pool=pool,
        max_batch_size=batch,
    )  # fmt: skip
    # In the small pool short prompts are admitted together and outgrow it.
    prompts, count = (random_prompts(6), 20) if pool is None else (random_prompts(6, 12), 32)
    prompts = prompts[: 6 if batch > 1 or full() else 3]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
    expected = oracle.extend_all(prompts, count)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].finish_reason == "length"
        assert output.prompt_token_ids == prompt
    stats = llm.stats()
    assert (stats.num_preemptions > 0) == (pool is not None and batch == 4)
    assert stats.generated_tokens == count * len(prompts)
    if mode == "user_provided":
        assert stats.acceptance_length > 1.5
    cache = llm.executor.kv_cache
    cache.check_integrity()
    assert cache.num_free_blocks == cache.num_blocks - 2


@pytest.mark.slow
@spread(k=[1, 2, 5, 8], overlap=[False, True])
def test_a_perfect_draft_model_is_always_accepted(target_dir: Path, k: int, overlap: bool) -> None:
    """The target drafting for itself: any error in draft KV, positions or rows costs acceptance."""
    llm = LLM(
        target_dir,
        DraftTargetDecodingConfig(max_draft_len=k, speculative_model=target_dir),
        device="cpu", dtype="float32", max_batch_size=3, max_seq_len=256,
        max_num_tokens=32, enable_chunked_prefill=True, disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    outputs = llm.generate(
        random_prompts(5), SamplingParams(max_tokens=1 + 6 * (k + 1), ignore_eos=True)
    )
    for output in outputs:
        assert output.spec_stats.acceptance_length == k + 1
        assert output.spec_stats.acceptance_per_position == [1.0] * k
        assert output.spec_stats.num_steps == 6


def test_a_draft_model_with_fewer_positions(target_dir: Path, tmp_path: Path) -> None:
    """It sets the default length. A length that was asked for is not cut without a word."""
    draft_dir = tiny_model_dir(tmp_path, max_position_embeddings=64)
    drafts = DraftTargetDecodingConfig(max_draft_len=2, speculative_model=draft_dir)
    assert LLM(target_dir, drafts, device="cpu").executor.config.max_seq_len == 64
    with pytest.raises(ConfigError, match="max_seq_len=65: the draft model has 64 positions"):
        LLM(target_dir, drafts, device="cpu", max_seq_len=65)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_draft_model_runs_as_often_as_it_drafts(target_dir: Path, overlap: bool) -> None:
    """Once at least, for its KV. Drafting for itself, every draft is accepted whatever K was."""
    llm = LLM(
        target_dir, DraftTargetDecodingConfig(max_draft_len=4, speculative_model=target_dir),
        device="cpu", dtype="float32", max_batch_size=2, max_seq_len=256,
        disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    executor, calls = llm.executor, []
    executor.draft_model.register_forward_pre_hook(lambda *_: calls.append(1))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    requests = [executor.enqueue(p, params) for p in random_prompts(2)]
    executor.step()
    rng, seen = random.Random(1), []
    while all(len(request.output_token_ids) < 50 for request in requests):
        executor.runtime_draft_len = rng.randrange(5)
        calls.clear()
        executor.step()
        seen.append((executor.last_draft_len, len(calls)))
    assert {k for k, _ in seen} == set(range(5))
    assert all(count == max(1, k) for k, count in seen)
    for request in requests:
        accepted = sum(count * steps for count, steps in request.accepted_lens.items())
        assert accepted == request.num_draft_tokens > 0


@pytest.mark.slow
def test_draft_model_proposals_equal_recomputation(target_dir: Path, drafters: Drafters) -> None:
    """After every step the drafts left in the slot are what the draft model alone, run from
    scratch over the accepted text, would say: its KV survives rejections of every length."""
    k = 4
    llm = LLM(
        target_dir, DraftTargetDecodingConfig(max_draft_len=k, speculative_model=drafters.draft),
        device="cpu", dtype="float32", max_batch_size=2, max_seq_len=128,
        max_num_tokens=16, enable_chunked_prefill=True, disable_overlap_scheduler=True,
    )  # fmt: skip
    draft_oracle, executor = Oracle(drafters.draft), llm.executor
    requests = [executor.enqueue(p, SamplingParams(max_tokens=30)) for p in random_prompts(3)]
    compared = 0
    while executor.has_work:
        executor.step()
        for request in requests:
            if request.is_generation:
                drafts = executor.state.next_tokens[request.slot, 1:].tolist()
                assert drafts == draft_oracle.extend(request.token_ids, k)
                compared += 1
    assert compared > 30


def test_every_accepted_length_happens(target_dir: Path, oracle: Oracle) -> None:
    for k in (1, 2, 3, 4):
        llm = LLM(
            target_dir, UserProvidedDecodingConfig(max_draft_len=k, drafter=Scripted(oracle)),
            device="cpu", dtype="float32", max_seq_len=128,
        )  # fmt: skip
        executor = llm.executor
        requests = [
            executor.enqueue(p, SamplingParams(max_tokens=60)) for p in random_prompts(4, 8)
        ]
        executor.run_until_done()
        seen = set().union(*(request.accepted_lens for request in requests))
        assert seen == set(range(k + 1))
        for request in requests:
            assert request.output_token_ids == oracle.extend(request.prompt_token_ids, 60)


# -- sampling ----------------------------------------------------------------------------------
@pytest.mark.slow
def test_sampled_tokens_depend_on_seed_alone(
    target_dir: Path, drafters: Drafters, oracle: Oracle
) -> None:
    """Same request and seed: the same tokens alone or together, in any order, chunked or not,
    preempted or not, and whatever drafts (an exact match is the target's own sample)."""
    prompts = random_prompts(5)
    params = [
        SamplingParams(max_tokens=18, temperature=t, top_k=k, top_p=p, seed=i, ignore_eos=True)
        for i, (t, k, p) in enumerate(
            [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (0.0, 0, 1.0), (2.0, 20, 0.9)]
        )
    ]
    common: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_seq_len": 96}
    alone = LLM(target_dir, max_batch_size=1, **common)
    expected = [
        alone.generate(p, s).outputs[0].token_ids for p, s in zip(prompts, params, strict=True)
    ]
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)
    order = [3, 1, 4, 0, 2]
    engines = [(mode, (None, 112)[i % 2]) for i, mode in enumerate(MODES)]
    for mode, pool in itertools.product(MODES, [None, 112]) if full() else engines:
        config = config_of(mode, 3, drafters)
        if config is not None:
            config = replace(config, acceptance="strict")
        llm = LLM(
            target_dir, config, max_batch_size=4, max_num_tokens=32, enable_chunked_prefill=True,
            kv_cache_config=KvCacheConfig(max_tokens=pool, tokens_per_block=8), **common,
        )  # fmt: skip
        outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order])
        for i, output in zip(order, outputs, strict=True):
            assert output.outputs[0].token_ids == expected[i]


def test_unseeded_requests_differ(target_dir: Path) -> None:
    llm = LLM(target_dir, device="cpu", dtype="float32", max_seq_len=64)
    params = SamplingParams(max_tokens=12, temperature=2.0, ignore_eos=True)
    outputs = llm.generate([[5, 6, 7]] * 4, params)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 4


def test_auto_dtype_is_the_one_that_the_cpu_is_fast_in(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, config = torch.device("cpu"), replace(load_config(target_dir), dtype="bfloat16")
    for has_instructions, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(device, "_multiplies_bfloat16", lambda found=has_instructions: found)
        assert device.resolve_dtype("auto", config, cpu) == expected
        assert device.resolve_dtype("bfloat16", config, cpu) == torch.bfloat16
    for name in ("float16", "float64"):  # which no CPU engine computes in
        assert device.resolve_dtype("auto", replace(config, dtype=name), cpu) == torch.float32
        with pytest.raises(ConfigError, match=f"dtype='{name}' on cpu"):
            device.resolve_dtype(name, config, cpu)


def test_auto_dtype_of_four_bits_is_the_one_they_stay_so_in(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, plain = torch.device("cuda"), replace(load_config(target_dir), dtype="float16")
    packed = replace(plain, has_four_bits=True)
    monkeypatch.setattr(device, "_keeps_four_bits", lambda device: True)
    assert device.resolve_dtype("auto", packed, gpu) == torch.bfloat16
    assert device.resolve_dtype("auto", replace(packed, dtype="float32"), gpu) == torch.float32
    assert device.resolve_dtype("float16", packed, gpu) == torch.float16
    assert device.resolve_dtype("auto", plain, gpu) == torch.float16
    monkeypatch.setattr(device, "_keeps_four_bits", lambda device: False)
    assert device.resolve_dtype("auto", packed, gpu) == torch.float16


# -- stopping ----------------------------------------------------------------------------------
@pytest.mark.slow
@spread(mode=MODES, overlap=[False, True])
def test_stop_token_inside_an_accepted_run(
    target_dir: Path, drafters: Drafters, oracle: Oracle, mode: str, overlap: bool
) -> None:
    prompt = random_prompts(1)[0]
    full = oracle.extend(prompt, 30)
    llm = LLM(
        target_dir, config_of(mode, 4, drafters), device="cpu", dtype="float32",
        max_seq_len=128, disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    stops = list(dict.fromkeys(full))
    for stop in stops if mode == "user_provided" else thinned(stops, 8):  # which is often right
        expected = full[: full.index(stop) + 1]
        output = llm.generate(
            prompt, SamplingParams(max_tokens=30, stop_token_ids=[stop], ignore_eos=True)
        )
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].finish_reason == "stop"


@pytest.mark.slow
@spread(mode=MODES, overlap=[False, True])
def test_generation_up_to_the_maximum_length(
    target_dir: Path, drafters: Drafters, oracle: Oracle, mode: str, overlap: bool
) -> None:
    """Drafts may run past the maximum; the text must end exactly there, and be right."""
    prompts = random_prompts(3, 12)
    llm = LLM(
        target_dir, config_of(mode, 5, drafters), device="cpu", dtype="float32",
        max_seq_len=30, kv_cache_config=KvCacheConfig(tokens_per_block=4),
        disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    for prompt, output in zip(
        prompts, llm.generate(prompts, SamplingParams(max_tokens=500)), strict=True
    ):
        assert output.outputs[0].token_ids == oracle.extend(prompt, 30 - len(prompt))
        assert output.outputs[0].finish_reason == "length"


# -- random schedules --------------------------------------------------------------------------
@pytest.fixture(scope="module")
def engine_of(target_dir: Path, drafters: Drafters) -> Callable[[str, bool, bool], LLM]:
    """Engines are reused between examples: a leak or a dirty slot would show in a later one."""

    @functools.cache
    def make(mode: str, overlap: bool, chunked: bool) -> LLM:
        return LLM(
            target_dir, config_of(mode, 3, drafters), device="cpu", dtype="float32",
            max_batch_size=3, max_seq_len=64, max_num_tokens=20 if chunked else 64,
            kv_cache_config=KvCacheConfig(max_tokens=80, tokens_per_block=4),
            enable_chunked_prefill=chunked, disable_overlap_scheduler=not overlap,
        )  # fmt: skip

    return make


SCHEDULED = ["ngram", "sa", "draft_target", "eagle3", "mtp", "dflash"]
"""A mode of every kind of state that a slot keeps."""


@pytest.mark.slow
@settings(
    max_examples=200 if full() else 25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(data=st.data())
def test_random_schedules(engine_of: Any, oracle: Oracle, data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(MODES if full() else SCHEDULED))
    llm = engine_of(mode, data.draw(st.booleans()), data.draw(st.booleans()))
    executor, live, done = llm.executor, [], []
    for request_id in list(executor.book.live):  # what a failed example left behind
        executor.cancel(request_id)
    executor.run_until_done()
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "cancel"]))
        if action == "add" and len(live) < 8:
            length, stem = data.draw(st.integers(1, 30)), data.draw(st.integers(0, 5))
            prompt = [(stem * 7 + i * i) % VOCAB for i in range(length)]
            tokens = data.draw(st.integers(1, 16))
            live.append(
                executor.enqueue(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
            )
        elif action == "cancel" and live:
            executor.cancel(data.draw(st.sampled_from(live)).request_id)
        else:
            done += executor.step()
        executor.kv_cache.check_integrity()
    done += executor.run_until_done()
    assert {r.request_id for r in done} == {r.request_id for r in live}
    for request in live:
        got = request.output_token_ids
        assert got == oracle.extend(request.prompt_token_ids, len(got))
        if request.finish_reason == "length":
            assert len(got) == request.sampling_params.max_tokens
        else:
            assert request.finish_reason == "cancelled"
    assert executor.kv_cache.num_free_blocks == executor.kv_cache.num_blocks - 2


def test_what_is_known_of_a_batch_is_of_its_requests(target_dir: Path) -> None:
    """A batch of the same generations is the last one's record, until one of them leaves."""
    llm = LLM(target_dir, device="cpu", dtype="float32", max_batch_size=2, max_seq_len=64)
    executor, batches = llm.executor, []
    launch = executor._launch

    def launched(plan: StepPlan) -> Any:
        batches.append(plan.batch)
        return launch(plan)

    executor._launch = launched  # type: ignore[method-assign]
    for temperature, count in ((0.0, 12), (1.0, 6), (0.0, 9)):
        params = SamplingParams(max_tokens=count, temperature=temperature, ignore_eos=True)
        executor.enqueue([3, 5], params)
    executor.run_until_done()
    decoding = [batch for batch in batches if not batch.contexts]
    assert len({id(batch) for batch in decoding}) < len(decoding) / 2
    assert {batch.all_greedy for batch in decoding} == {True, False}
    for batch in batches:
        params_of = [request.sampling_params for request in batch.requests]
        assert batch.all_greedy == all(params.temperature == 0 for params in params_of)
    assert executor.scheduler._last.generations == [], "it keeps no request that has ended"


@pytest.mark.slow
def test_many_operations_leak_nothing(engine_of: Any) -> None:
    import tracemalloc

    executor, rng = engine_of("ngram", True, True).executor, random.Random(3)

    def churn(operations: int) -> None:
        live = []
        for _ in range(operations):
            if rng.random() < 0.4 and len(live) < 6:
                prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
                live.append(executor.enqueue(prompt, SamplingParams(max_tokens=rng.randint(1, 8))))
            elif rng.random() < 0.2 and live:
                executor.cancel(rng.choice(live).request_id)
            else:
                executor.step()
            live = [r for r in live if not r.is_finished]
        executor.run_until_done()

    churn(300 if full() else 100)
    tracemalloc.start()
    churn(300 if full() else 100)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    churn(2000 if full() else 200)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    executor.kv_cache.check_integrity()
    assert executor.kv_cache.num_free_blocks == executor.kv_cache.num_blocks - 2
    assert not executor.book.live
    assert after - before < 100_000


def test_a_worker_is_told_of_the_engine_it_is_in(target_dir: Path, drafters: Drafters) -> None:
    """Every field of SpecMetadata that our executor can know."""
    llm = LLM(
        target_dir,
        DraftTargetDecodingConfig(max_draft_len=3, speculative_model=str(drafters.draft)),
        device="cpu", dtype="float32", max_seq_len=64,
    )  # fmt: skip
    worker, seen = llm.executor.worker, []
    forward = worker.forward
    worker.forward = lambda *a, **k: (seen.append(a[5]), forward(*a, **k))[1]  # type: ignore
    llm.generate([5, 6], SamplingParams(max_tokens=3))
    assert {spec.num_layers for spec in seen} == {llm.executor.target.config.num_layers}
    assert {spec.num_extra_kv_tokens for spec in seen} == {worker.num_extra_kv_tokens} != {0}
    assert {spec.is_cuda_graph for spec in seen} == {False}


# -- one request's trouble is its own ----------------------------------------------------------
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("when", ["context", "generation"])
def test_nan_fails_one_request_and_spares_the_rest(
    target_dir: Path, oracle: Oracle, overlap: bool, when: str
) -> None:
    """Token 96's embedding is NaN: whoever reads it fails, and its blocks poison nobody."""
    llm = LLM(
        target_dir, NGramDecodingConfig(max_draft_len=3), device="cpu", dtype="float32",
        max_batch_size=2, max_seq_len=64, disable_overlap_scheduler=not overlap,
        kv_cache_config=KvCacheConfig(max_tokens=96, tokens_per_block=4),
    )  # fmt: skip
    prompts = [p[:12] for p in random_prompts(8) if 96 not in p[:12]]
    full = oracle.extend(prompts[1], 10)
    poison = 96 if when == "context" else full[3]
    llm.executor.target.embed_tokens.weight.data[poison] = float("nan")
    bad = [1, 2, poison] if when == "context" else prompts[1]
    outputs = llm.generate(
        [prompts[0], bad, *prompts[2:]], SamplingParams(max_tokens=10, ignore_eos=True)
    )
    failed = [o for o in outputs if o.outputs[0].finish_reason == "error"]
    assert outputs[1] in failed and "NaN" in (outputs[1].error or "")
    clean = 0
    for prompt, output in zip([prompts[0], bad, *prompts[2:]], outputs, strict=True):
        expected = oracle.extend(prompt, 10)
        if poison not in prompt + expected[:-1]:
            assert output.outputs[0].token_ids == expected
            clean += 1
    assert clean >= 2


def test_nan_of_a_cancelled_request_poisons_nobody(target_dir: Path, oracle: Oracle) -> None:
    """Under overlap its last step is still in flight when it goes; its blocks are cleared first."""
    llm = LLM(
        target_dir, device="cpu", dtype="float32", max_batch_size=1, max_seq_len=64,
        kv_cache_config=KvCacheConfig(max_tokens=64, tokens_per_block=4),
        disable_overlap_scheduler=False,
    )  # fmt: skip
    prompt = random_prompts(2)[1]
    expected = oracle.extend(prompt, 8)
    poison = min(set(range(VOCAB)) - set(prompt + expected))
    llm.executor.target.embed_tokens.weight.data[poison] = float("nan")
    bad = llm.executor.enqueue([1, poison] * 15, SamplingParams(max_tokens=9))
    llm.executor.step()
    assert llm.executor.cancel(bad.request_id)
    out = llm.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
    assert out.outputs[0].token_ids == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_check_that_raises_fails_its_request_only(
    target_dir: Path, oracle: Oracle, overlap: bool
) -> None:
    llm = LLM(
        target_dir, device="cpu", dtype="float32", max_seq_len=64,
        disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    executor = llm.executor

    def check(request: Any) -> bool:
        if request.prompt_token_ids == [1, 2] and len(request.output_token_ids) == 3:
            raise ZeroDivisionError("boom")
        if request.prompt_token_ids[0] == 5:
            executor.cancel(request.request_id)
        if request.prompt_token_ids == [5, 7]:
            raise ZeroDivisionError("boom")
        return False

    executor.stop_check = check
    requests = [
        executor.enqueue(p, SamplingParams(max_tokens=6, ignore_eos=True))
        for p in ([1, 2], [3, 4], [5, 6], [5, 7])
    ]
    finished = executor.run_until_done()
    assert len(finished) == 4
    assert requests[0].finish_reason == "error" and "boom" in (requests[0].error or "")
    assert requests[1].output_token_ids == oracle.extend([3, 4], 6)
    for request in requests[2:]:
        assert (request.finish_reason, request.error) == ("cancelled", None)
        assert len(request.output_token_ids) == 1
    executor.kv_cache.check_integrity()
    assert executor.kv_cache.num_free_blocks == executor.kv_cache.num_blocks - 2


def test_what_follows_a_cancel_in_a_run_of_drafts_is_dropped(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "3")
    llm = cpu_engine(target_dir, NGramDecodingConfig(max_draft_len=3))
    executor = llm.executor

    def check(request: Any) -> bool:
        if len(request.output_token_ids) == 3:
            executor.cancel(request.request_id)
        return False

    executor.stop_check = check
    request = executor.enqueue([1, 2], SamplingParams(max_tokens=9, ignore_eos=True, logprobs=1))
    executor.run_until_done()
    assert request.finish_reason == "cancelled"
    assert len(request.output_token_ids) == len(request.logprobs or []) == 3


def test_token_0_after_a_part_of_a_prompt_is_no_end_of_it(target_dir: Path, oracle: Oracle) -> None:
    config = NGramDecodingConfig(max_draft_len=2)
    llm = cpu_engine(target_dir, config, chunk=6, max_batch_size=2)
    prompt = [3, *[0] * 20, 4]
    output = llm.generate(prompt, SamplingParams(max_tokens=5, ignore_eos=True))
    assert output.outputs[0].token_ids == oracle.extend(prompt, 5)


def test_an_interrupt_while_reading_loses_nothing(target_dir: Path, oracle: Oracle) -> None:
    llm = LLM(target_dir, device="cpu", dtype="float32", max_seq_len=64)
    executor = llm.executor

    def check(request: Any) -> bool:
        if len(request.output_token_ids) == 3:
            raise KeyboardInterrupt
        return False

    executor.stop_check = check
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    requests = [executor.enqueue([i, 2], params) for i in range(3)]
    with pytest.raises(KeyboardInterrupt):
        executor.run_until_done()
    executor.stop_check = None
    executor.run_until_done()
    assert all(r.is_finished for r in requests)
    for request in requests:
        assert request.output_token_ids == oracle.extend(request.prompt_token_ids, 6)
    executor.kv_cache.check_integrity()


class Raising:
    def draft(self, request_id: int, token_ids: Sequence[int], max_draft_len: int) -> Any:
        if token_ids[0] == 1:
            raise KeyError("boom")
        answers: dict[int, Any] = {
            2: [[1, 2]], 3: 7, 4: itertools.count(), 5: [VOCAB], 6: ["a"], 7: [-1],
            8: (1 // 0 for _ in range(3)),
        }  # fmt: skip
        return answers.get(token_ids[0], [])


def test_bad_drafters_fail_their_request_only(target_dir: Path, oracle: Oracle) -> None:
    llm = LLM(
        target_dir, UserProvidedDecodingConfig(max_draft_len=3, drafter=Raising()),
        device="cpu", dtype="float32", max_seq_len=64,
    )  # fmt: skip
    prompts = [[i, 20, 21] for i in range(10)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=5, ignore_eos=True))
    for i, output in enumerate(outputs):
        if 1 <= i <= 8:
            assert output.outputs[0].finish_reason == "error"
            assert "Raising.draft" in (output.error or "")
        else:
            assert output.outputs[0].token_ids == oracle.extend(prompts[i], 5)


@pytest.mark.parametrize("what", ["generate", "stream", "shutdown"])
def test_a_drafter_cannot_use_the_engine_it_drafts_for(
    target_dir: Path, oracle: Oracle, what: str
) -> None:
    class Reentering:
        def draft(self, request_id: int, token_ids: Sequence[int], max_draft_len: int) -> Any:
            if token_ids[0] == 2:
                calls[what]()
            return []

    llm = LLM(
        target_dir, UserProvidedDecodingConfig(max_draft_len=3, drafter=Reentering()),
        device="cpu", dtype="float32", max_seq_len=64,
    )  # fmt: skip
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    calls = {
        "generate": lambda: llm.generate([9, 9], params),
        "stream": lambda: next(llm.generate_stream([9, 9], params)),
        "shutdown": llm.shutdown,
    }
    wrong, right = llm.generate([[2, 20], [3, 20]], params)
    assert "Let them use another LLM" in (wrong.error or "")
    assert right.outputs[0].token_ids == oracle.extend([3, 20], 5)
    (again,) = llm.generate([[3, 20]], params)
    assert again.outputs[0].token_ids == oracle.extend([3, 20], 5)


def test_host_drafting_says_once_that_it_cannot_overlap(
    target_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        llm = LLM(
            target_dir, UserProvidedDecodingConfig(max_draft_len=2, drafter=Raising()),
            device="cpu", dtype="float32", disable_overlap_scheduler=False,
        )  # fmt: skip
        llm.generate([[9, 9]], SamplingParams(max_tokens=4))
    assert caplog.text.count("steps do not overlap") == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1, VOCAB], rf"token 1 is {VOCAB}.*0 … {VOCAB - 1}"),
        ([-1], "token 0 is -1"),
        ([1, "a"], "'a', not an int"),
        ([5, True], "token 1 is True, not an int"),
        (list(range(64)), "64 tokens; max_seq_len=64"),
        (list(range(40)), "max_num_tokens=32.*enable_chunked_prefill"),
    ],
)
def test_bad_prompts_start_nothing(
    target_dir: Path, oracle: Oracle, prompt: list[Any], message: str
) -> None:
    llm = LLM(
        target_dir,
        device="cpu",
        dtype="float32",
        max_batch_size=2,
        max_seq_len=64,
        max_num_tokens=32,
    )
    running = llm.executor.enqueue([3, 4], SamplingParams(max_tokens=5, ignore_eos=True))
    with pytest.raises(RequestError, match=message):
        llm.generate([[1, 2], prompt])
    assert len(llm.executor.scheduler.waiting) == 1
    llm.executor.run_until_done()
    assert running.output_token_ids == oracle.extend([3, 4], 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_seq_len": 10**6}, "max_position_embeddings"),
        ({"max_batch_size": 0}, "max_batch_size=0"),
        (
            {
                "max_batch_size": 8,
                "max_num_tokens": 8,
                "speculative_config": NGramDecodingConfig(max_draft_len=3),
            },
            r"K \+ 1",
        ),
        ({"device": "tpu"}, "device='tpu'"),
        ({"dtype": "int8"}, "dtype='int8'.*float32"),
        ({"attn_backend": "xformers"}, "attn_backend='xformers'"),
        ({"attn_backend": "triton"}, "needs device='cuda'|needs the package"),
        ({"cuda_graph_config": True}, "cuda_graph_config=True"),
        ({"kv_cache_config": {"max_token": 3}}, "kv_cache_config has no field max_token"),
    ],
)  # fmt: skip
def test_bad_engine_arguments(target_dir: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(target_dir, **{"device": "cpu", **arguments})
    with pytest.raises(TypeError, match="max_batchsize"):
        LLM(target_dir, max_batchsize=3)  # type: ignore[call-arg]


def test_a_draft_model_with_another_vocabulary_is_refused(target_dir: Path, tmp_path: Path) -> None:
    other = tiny_model_dir(tmp_path, seed=3, vocab_size=101)
    with pytest.raises(ConfigError, match="101 entries"):
        LLM(target_dir, DraftTargetDecodingConfig(speculative_model=other), device="cpu")


# -- forced acceptance -------------------------------------------------------------------------
@pytest.mark.parametrize(("forced", "expected"), [("2", 3.0), ("7", 4.0)])
@pytest.mark.parametrize("mode", ["ngram", "draft_target"])
def test_forced_acceptance_in_the_engine(
    target_dir: Path, drafters: Drafters, oracle: Oracle, monkeypatch: pytest.MonkeyPatch,
    mode: str, forced: str, expected: float,
) -> None:  # fmt: skip
    monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, forced)
    llm = LLM(
        target_dir, config_of(mode, 3, drafters), device="cpu", dtype="float32",
        max_seq_len=64,
    )  # fmt: skip
    outputs = llm.generate(random_prompts(3, 9), SamplingParams(max_tokens=25, ignore_eos=True))
    assert llm.stats().forced_acceptance == min(float(forced), 3)
    for output in outputs:
        assert output.spec_stats.forced_acceptance == min(float(forced), 3)
        assert output.spec_stats.acceptance_length == expected
        assert len(output.outputs[0].token_ids) == 25
        assert all(0 <= token < VOCAB for token in output.outputs[0].token_ids)


def test_nothing_is_forced_without_drafts(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, "2")
    llm = LLM(target_dir, device="cpu", dtype="float32", max_seq_len=64)
    assert llm.stats().forced_acceptance is None
    assert "Forced" not in caplog.text


# -- streaming and cancelling ------------------------------------------------------------------
def test_streams_interleave_and_add_up(target_dir: Path, oracle: Oracle) -> None:
    llm = LLM(
        target_dir,
        NGramDecodingConfig(max_draft_len=3),
        device="cpu",
        dtype="float32",
        max_seq_len=96,
    )
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = random_prompts(3)
    streams = [llm.generate_stream(prompt, params) for prompt in prompts]
    got: list[list[int]] = [[] for _ in prompts]
    for snapshots in itertools.zip_longest(*streams):
        for tokens, snapshot in zip(got, snapshots, strict=True):
            if snapshot is not None:
                tokens += snapshot.outputs[0].token_ids_diff
                assert snapshot.outputs[0].token_ids == tokens
    for tokens, prompt in zip(got, prompts, strict=True):
        assert tokens == oracle.extend(prompt, 24)


def test_closing_a_stream_and_abort_cancel(target_dir: Path) -> None:
    llm = LLM(target_dir, device="cpu", dtype="float32", max_seq_len=96)
    stream = llm.generate_stream([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    first = next(stream)
    assert llm.abort(first.request_id) and not llm.abort(first.request_id)
    last = list(stream)[-1]
    assert last.finished and last.outputs[0].finish_reason == "cancelled"
    other = llm.generate_stream([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    next(other)
    other.close()
    assert not llm.executor.has_work


def test_a_stream_nobody_started_can_be_closed_or_dropped(target_dir: Path) -> None:
    llm = LLM(target_dir, device="cpu", dtype="float32", max_batch_size=1, max_seq_len=96)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    llm.generate_stream([1, 2], params).close()
    assert not llm.executor.has_work
    for _ in range(5):
        llm.generate_stream([1, 2], params)
    gc.collect()
    llm.generate([3, 4], SamplingParams(max_tokens=1))
    assert not llm.executor.has_work
    assert llm.stats().generated_tokens == 1


def test_abort_from_another_thread_does_not_wait_for_a_generation(target_dir: Path) -> None:
    llm = LLM(target_dir, device="cpu", dtype="float32", max_batch_size=2, max_seq_len=250)
    stream = llm.generate_stream([1, 2], SamplingParams(max_tokens=240, ignore_eos=True))
    generated: list[Any] = []
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    thread = threading.Thread(target=lambda: generated.append(llm.generate([3, 4], params)))
    thread.start()
    assert llm.abort(stream.request_id)
    thread.join()
    last = list(stream)[-1]
    assert last.outputs[0].finish_reason == "cancelled"
    assert len(last.outputs[0].token_ids) < 200
    assert len(generated[0].outputs[0].token_ids) == 200


@pytest.mark.parametrize(
    "arguments",
    [
        (None,), (5,), (b"ab",), ([1, 2], 5), ([1, 2], [SamplingParams()] * 2),
        ([1, 2], {"max_tokens": 3}), ("text without a tokenizer",),
        ([[5, 6], [7, 8]], [SamplingParams(), SamplingParams(stop="x")]),
    ],
)  # fmt: skip
def test_bad_arguments_of_generate_start_nothing(
    target_dir: Path, arguments: tuple[Any, ...]
) -> None:
    llm = LLM(target_dir, device="cpu", dtype="float32", max_seq_len=64)
    with pytest.raises(RequestError):
        llm.generate(*arguments)
    assert not llm.executor.has_work


def test_numpy_and_tensors_are_prompts(target_dir: Path, oracle: Oracle) -> None:
    import numpy as np

    llm = LLM(target_dir, device="cpu", dtype="float32", max_seq_len=64)
    params, expected = SamplingParams(max_tokens=4, ignore_eos=True), oracle.extend([5, 6], 4)
    for prompt in (np.array([5, 6]), torch.tensor([5, 6]), [np.int64(5), np.int64(6)], (5, 6)):
        assert llm.generate(prompt, params).outputs[0].token_ids == expected
    assert llm.generate([], params) == []
    many = llm.generate([np.array([5, 6]), [5, 6]], params)
    assert [o.outputs[0].token_ids for o in many] == [expected] * 2


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0}, {"max_tokens": True}, {"temperature": -1}, {"temperature": 10**400},
        {"temperature": float("nan")}, {"top_k": 2**31}, {"top_k": -1}, {"top_p": 0.0},
        {"top_p": 1.1}, {"seed": -1}, {"seed": 2**63}, {"stop": 5}, {"stop": [""]},
        {"stop_token_ids": 5}, {"stop_token_ids": [-1]},
    ],
)  # fmt: skip
def test_bad_sampling_params(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(fields))):
        SamplingParams(**fields)


@pytest.mark.slow
@spread(mode=MODES, overlap=[False, True])
def test_no_block_is_given_back_while_it_is_needed(
    target_dir: Path, drafters: Drafters, oracle: Oracle, monkeypatch: pytest.MonkeyPatch,
    mode: str, overlap: bool,
) -> None:  # fmt: skip
    """Freed blocks are filled with junk at once, as another request might do."""
    llm = LLM(
        target_dir, config_of(mode, 3, drafters), device="cpu", dtype="float32",
        max_batch_size=3, max_seq_len=96, kv_cache_config=KvCacheConfig(tokens_per_block=2),
        disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    cache = llm.executor.kv_cache
    for group, pool in zip(cache.groups, cache._pools, strict=True):

        def free(blocks: list[int], group: Any = group, original: Any = pool.free) -> None:
            original(blocks)
            group.k_cache[:, blocks] = 50.0
            group.v_cache[:, blocks] = 50.0

        monkeypatch.setattr(pool, "free", free)
    prompts = random_prompts(5, 20)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=14, ignore_eos=True))
    expected = oracle.extend_all(prompts, 14)
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_ngram_proposals_come_from_the_accepted_text_alone(target_dir: Path) -> None:
    """After every step, chunked prompts and preemption included, the drafts in the slot are what
    a search in the request's own tokens finds."""
    from ngram_search import ngram_search

    k = 3
    llm = LLM(
        target_dir, NGramDecodingConfig(max_draft_len=k, min_matching_ngram_size=1),
        device="cpu", dtype="float32", max_batch_size=3, max_seq_len=96, max_num_tokens=16,
        enable_chunked_prefill=True, disable_overlap_scheduler=True,
        kv_cache_config=KvCacheConfig(max_tokens=112, tokens_per_block=8),
    )  # fmt: skip
    executor, compared = llm.executor, 0
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [executor.enqueue(p, params) for p in random_prompts(4, 30)]
    while executor.has_work:
        executor.step()
        for request in requests:
            if request.is_generation:
                drafts = executor.state.next_tokens[request.slot, 1:].tolist()
                assert drafts == ngram_search(request.token_ids, k, 4, 1, oldest=False)
                compared += 1
    assert compared > 50 and executor.stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_prompts_start_together(
    target_dir: Path, oracle: Oracle, overlap: bool, chunked: bool
) -> None:
    """Beside generations, prompts start only when three slots are free; the text is the same."""
    llm = LLM(
        target_dir, NGramDecodingConfig(max_draft_len=2), device="cpu", dtype="float32",
        max_batch_size=6, max_seq_len=64, prefill_batch_size=3, enable_chunked_prefill=chunked,
        max_num_tokens=24 if chunked else None, disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    scheduler, starts = llm.executor.scheduler, []
    start_waiting = scheduler._start_waiting

    def watch(budget: int) -> list[Any]:
        free = len(scheduler._free_slots)
        generating = any(r.is_generation for r in scheduler.running)
        chunks = start_waiting(budget)
        if chunks:
            starts.append((free, generating))
        return chunks

    scheduler._start_waiting = watch  # type: ignore[method-assign]
    prompts = [[3 + i, 7, 5] for i in range(25)]
    params = [SamplingParams(max_tokens=4 + i % 9, ignore_eos=True) for i in range(25)]
    outputs = llm.generate(prompts, params)
    for prompt, output, wanted in zip(prompts, outputs, params, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, wanted.max_tokens)
    assert all(free >= 3 or not generating for free, generating in starts)
    assert any(generating for _, generating in starts) and len(starts) < 12
    for wrong in (3, 0, True, "all"):
        with pytest.raises(ConfigError, match=r'prefill_batch_size=.* an int in 1 … 2, or "auto"'):
            EngineConfig("m", max_batch_size=2, prefill_batch_size=wrong)  # type: ignore[arg-type]
    for wrong in (0, True, "64"):  # before weights are read
        with pytest.raises(ConfigError, match=r"max_num_tokens=.*: it must be an int >= 1 or None"):
            EngineConfig("m", max_num_tokens=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "is_cuda", "expected"),
    [(None, True, "auto"), (None, False, 1), (1, True, 1), (3, False, 3), ("auto", False, "auto")],
)
def test_when_prompts_start_by_default(given: Any, is_cuda: bool, expected: Any) -> None:
    engine = EngineConfig("model", max_batch_size=4, prefill_batch_size=given)
    config = _executor_config(engine, max_seq_len=64, rows=1, is_cuda=is_cuda, cuda_graph=None)
    assert config.prefill_batch_size == expected


@pytest.mark.parametrize(
    ("given", "max_seq_len", "graph_rows", "expected"),
    [
        (None, 300, 0, 64 * 5), (None, 300, 8192, 8192), (None, 20_000, 8192, 20_000),
        (None, 2000, 1031, 2000), (None, 30, 8192, 64 * 35), (700, 300, 8192, 700),
    ],
)  # fmt: skip
def test_rows_of_a_pass_by_default(
    given: int | None, max_seq_len: int, graph_rows: int, expected: int
) -> None:
    """A whole sequence or a full batch, or what graphs have, but no more than ever run."""
    engine = EngineConfig("model", max_batch_size=64, max_num_tokens=given)
    config = _executor_config(
        engine, max_seq_len=max_seq_len, rows=5, is_cuda=True, cuda_graph=None,
        graph_rows=graph_rows,
    )  # fmt: skip
    assert config.max_num_tokens == expected


def _engine_of_16(target_dir: Path, size: int | str) -> LLM:
    return LLM(
        target_dir, device="cpu", dtype="float32", max_batch_size=16, max_seq_len=64,
        prefill_batch_size=size,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.slow
def test_prompts_wait_no_longer_than_they_would_delay_others(
    target_dir: Path, oracle: Oracle
) -> None:
    """By "auto", where a pass over prompts counts as a step: fewer of both than if each began at
    once, and about as few as with the best fixed number."""
    lens = [12 + 7 * i % 24 for i in range(60)]
    prompts, cost = [[3 + i % 40, 7, 5] for i in range(len(lens))], {}
    for size in (*thinned([1, 2, 3, 4, 6], 2), "auto"):
        llm = _engine_of_16(target_dir, size)
        scheduler, passes = llm.executor.scheduler, [0]
        schedule = scheduler.schedule

        def count(*asked: Any, schedule: Any = schedule, passes: list[int] = passes) -> Any:
            batch, preempted = schedule(*asked)
            passes[0] += bool(batch.contexts) + bool(batch.generations)
            return batch, preempted

        scheduler.schedule = count  # type: ignore[method-assign]
        outputs = llm.generate(prompts, [SamplingParams(n, ignore_eos=True) for n in lens])
        cost[size] = passes[0]
        for i in range(0, len(lens), 20):
            assert outputs[i].outputs[0].token_ids == oracle.extend(prompts[i], lens[i])
    assert cost["auto"] < 0.9 * cost[1]
    assert cost["auto"] <= 1.05 * min(cost.values())


def test_generations_fill_a_pass_where_no_prompt_waits(target_dir: Path) -> None:
    """Two with K = 3 are 8 rows, all that a pass may have."""
    llm = LLM(
        target_dir, NGramDecodingConfig(max_draft_len=3), device="cpu", dtype="float32",
        max_batch_size=2, max_seq_len=64, max_num_tokens=8, enable_chunked_prefill=True,
    )  # fmt: skip
    executor, params = llm.executor, SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [executor.enqueue([3 + i, 7], params) for i in range(2)]
    while not all(request.is_generation for request in requests):
        executor.step()
    for _ in range(4):
        before = [request.past_upper for request in requests]
        executor.step()
        assert all(r.past_upper > b for r, b in zip(requests, before, strict=True))
    executor.run_until_done()


def test_prompts_begin_at_once_where_slots_are_for_all(target_dir: Path) -> None:
    executor = _engine_of_16(target_dir, "auto").executor
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for i in range(16):  # one after another: never more wait than slots are free
        request = executor.enqueue([3 + i, 7], params)
        executor.step()
        assert request.num_computed == 2
    waiting = [executor.enqueue([3, 9 + i], params) for i in range(3)]
    executor.run_until_done()
    assert all(len(request.output_token_ids) == 40 for request in waiting)


def test_a_request_that_its_owner_fails_ends_alone(target_dir: Path, oracle: Oracle) -> None:
    llm = LLM(target_dir, device="cpu", dtype="float32", max_batch_size=2, max_seq_len=64)
    first, second = (
        llm.executor.enqueue(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
        for prompt in random_prompts(2)
    )
    llm.executor.step()
    llm.executor.fail(first, "no longer wanted")
    assert llm.executor.run_until_done() == [first, second]
    assert (first.finish_reason, first.error) == ("error", "no longer wanted")
    assert second.output_token_ids == oracle.extend(second.prompt_token_ids, 8)


@pytest.mark.parametrize("overlap", [False, True])
def test_time_is_of_the_step_that_was_waited_for(
    target_dir: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under overlap the host launches a step while it waits for the one before."""
    llm = LLM(
        target_dir, device="cpu", dtype="float32", max_batch_size=2, max_seq_len=64,
        disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    executor, now = llm.executor, 0.0
    launch, read = executor._launch, executor._read
    spent = {True: 0.0, False: 0.0}  # by whether the step has generations

    def spend(seconds: float, has_generations: bool) -> None:
        nonlocal now
        now += seconds
        spent[has_generations] += seconds

    def slow_launch(plan: StepPlan) -> Any:
        generates = bool(plan.batch.generations)
        spend(0.25 if generates else 16.0, generates)
        return launch(plan)

    def slow_read(launched: Any) -> None:
        spend(1.0 if launched.batch.generations else 256.0, bool(launched.batch.generations))
        read(launched)

    monkeypatch.setattr(executor, "_launch", slow_launch)
    monkeypatch.setattr(executor, "_read", slow_read)
    monkeypatch.setattr(py_executor, "time", SimpleNamespace(perf_counter=lambda: now))
    llm.generate([[3, 4, 5], [6, 7]], SamplingParams(max_tokens=6, ignore_eos=True))
    stats = llm.stats()
    assert (stats.prefill_seconds, stats.decode_seconds) == (272.0, 5 * 1.25)
    assert spent == {False: 272.0, True: 5 * 1.25}
