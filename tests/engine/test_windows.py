"""Sliding windows: blocks behind them are given back, and nobody misses them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from freed_blocks import Ledger, assert_nothing_leaked, poison_free_blocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrix import EAGLE3, Drafters, config_of
from oracle import Oracle
from tiny import tiny_model_dir
from tiny_heads import eagle3_dir, mtp_model_dir

from trtspec import (
    LLM,
    KvCacheConfig,
    SamplingParams,
)
from trtspec.config import DecodingBaseConfig
from trtspec.errors import CheckpointError, KVCacheError
from trtspec.executor.cache_size import CacheNeeds, longest_sequence, size_cache
from trtspec.executor.request import Request
from trtspec.metadata.attention import NULL_BLOCK, NUM_RESERVED_BLOCKS
from trtspec.models.config import DecoderConfig
from trtspec.models.drafters.mtp import mtp_decoder_config
from trtspec.state.kv_cache import KVCacheManager, KVGroupSpec

VOCAB, CPU = 97, torch.device("cpu")
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]


# -- the manager alone -------------------------------------------------------------------------
def _spec(window: int | None) -> KVGroupSpec:
    return KVGroupSpec(1, 1, 2, torch.float32, window=window)


@settings(max_examples=60, deadline=None)
@given(
    page=st.integers(1, 6),
    windows=st.lists(st.one_of(st.none(), st.integers(1, 20)), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_exactly_the_blocks_behind_each_window_are_given_back(
    page: int, windows: list[int | None], seed: int
) -> None:
    rng = random.Random(seed)
    cache = KVCacheManager([_spec(window) for window in windows], 80, page, CPU)
    held = first = 0
    for _ in range(12):
        held = max(held, min(first + rng.randint(0, 12), 70 * page))
        assert cache.reserve(5, held)
        first = rng.randint(first, held)
        before = cache.version(5), [table.clone() for table in cache.block_tables([5])]
        cache.release_behind(5, first)
        cache.check_integrity()
        after = cache.block_tables([5])
        for window, old, new in zip(windows, before[1], after, strict=True):
            for i, block in enumerate(new[0].tolist()):
                last = (i + 1) * page - 1
                seen = window is None or last > first - window
                assert (block != NULL_BLOCK) == (seen and i < cache.blocks_for(held))
                assert block in (NULL_BLOCK, int(old[0, i]))
        changed = any(not torch.equal(a, b) for a, b in zip(before[1], after, strict=True))
        assert changed == (cache.version(5) != before[0])
    cache.trim(5, held)
    cache.scrub(5)
    cache.free(5)
    cache.check_integrity()
    assert cache.num_free_blocks == 80 - NUM_RESERVED_BLOCKS


def test_what_nobody_looked_at_is_zeroed_before_another_gets_it() -> None:
    """NaN in a prompt's rows can lie behind the windows of every row whose logits are read."""
    cache = KVCacheManager([_spec(4)], 12, 2, CPU)
    assert cache.reserve(0, 20)
    (group,), (table,) = cache.groups, cache.block_tables([0])
    for cached in (group.k_cache, group.v_cache):
        cached[:, table[0]] = float("nan")
    cache.release_behind(0, first=15, num_unseen=7)
    for cached in (group.k_cache, group.v_cache):
        is_zero = [not cached[:, block].any() for block in table[0].tolist()]
        assert is_zero == [True] * 4 + [False] * 6  # six are free, two of them a generation's
    assert cache.block_tables([0])[0][0].tolist()[:6] == [NULL_BLOCK] * 6


# -- how many blocks there are -----------------------------------------------------------------
def _needs(max_num_tokens: int = 64, batch: int = 4, seq_len: int = 4096) -> CacheNeeds:
    return CacheNeeds(batch, seq_len, max_num_tokens, rows=4, extra_kv=2, rewritten=2, page_size=8)


def test_a_windowed_group_has_the_blocks_it_can_use() -> None:
    specs, needs = [_spec(None), _spec(16)], _needs()
    full, windowed = size_cache(KvCacheConfig(max_tokens=4 * 4096), specs, needs, CPU)
    assert full == 2048 + NUM_RESERVED_BLOCKS
    assert windowed == needs.behind_window(16, 4) + NUM_RESERVED_BLOCKS < 40
    assert longest_sequence([full, windowed], specs, needs) == 4096
    # A cache that is small anyway: both groups have all of it, and texts are as long as it is.
    assert size_cache(KvCacheConfig(max_tokens=80), specs, needs, CPU) == [12, 12]
    assert longest_sequence([12, 12], specs, needs) == 80
    # Windows alone: texts outgrow the cache.
    assert longest_sequence([windowed], specs[1:], needs) == 4096
    assert longest_sequence([needs.behind_window(16, 1) + 1], specs[1:], needs) < 4096


def test_windows_leave_memory_to_the_other_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    specs, needs = [_spec(None), _spec(16)], _needs()
    per_token = specs[0].bytes_per_token()
    monkeypatch.setattr("trtspec.executor.cache_size._free_memory", lambda *_: 8000 * per_token)
    full, windowed = size_cache(KvCacheConfig(), specs, needs, CPU)
    total = (full + windowed - 2 * NUM_RESERVED_BLOCKS) * 8
    assert 8000 - 8 < total <= 8000 and full > 900
    same = size_cache(KvCacheConfig(), [_spec(None)] * 2, needs, CPU)
    assert same[0] == same[1] == 500 + NUM_RESERVED_BLOCKS


# -- models ------------------------------------------------------------------------------------
class Models:
    """Tiny models with MTP layers and what goes with them, made once for each window."""

    def __init__(self, root: Path):
        self.root = root
        self.made: dict[tuple[str, int], tuple[Path, Oracle]] = {}
        self.head: Path | None = None

    def target(self, kind: str, window: int) -> tuple[Path, Oracle]:
        if (kind, window) not in self.made:
            root = self.root / f"{kind}{window}"
            root.mkdir()
            if kind == "all":
                path = mtp_model_dir(
                    root, family="mistral", num_mtp_layers=4, sliding_window=window, seed=3
                )
            else:
                path = tiny_model_dir(
                    root, "qwen2", use_sliding_window=True, sliding_window=window,
                    layer_types=MIXED, seed=4,
                )  # fmt: skip
            self.made[kind, window] = path, Oracle(path)
        return self.made[kind, window]

    def config(self, mode: str, k: int, kind: str, window: int) -> DecodingBaseConfig | None:
        path, oracle = self.target(kind, window)
        self.head = self.head or eagle3_dir(self.root)
        # The draft model is the target: every draft is right, if every row is seen.
        return config_of(mode, k, Drafters(draft=path, head=self.head, oracle=oracle))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("windows"))


MODES_ON_MIXED = ["none", "ngram", "draft_target", "user_provided", *EAGLE3]
MODES = [*MODES_ON_MIXED, "mtp", "mtp_eagle"]


def _llm(models: Models, mode: str, kind: str, window: int, k: int = 3, **more: Any) -> LLM:
    page, chunked = more.pop("page", 4), more.pop("chunked", False)
    settings: dict[str, Any] = {
        "max_batch_size": 3, "max_seq_len": 192, "max_num_tokens": 16 if chunked else 128,
        "kv_cache_config": KvCacheConfig(
            max_tokens=more.pop("max_tokens", None), tokens_per_block=page
        ),
        "disable_overlap_scheduler": not more.pop("overlap", True),
    }  # fmt: skip
    return LLM(
        models.target(kind, window)[0], models.config(mode, k, kind, window), device="cpu",
        dtype="float32", enable_chunked_prefill=chunked, **{**settings, **more},
    )  # fmt: skip


def _prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]
    prompts[0] = (prompts[0][:3] * len(prompts[0]))[: len(prompts[0])]  # for the n-gram lookup
    return prompts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kind", "window", "page", "chunked", "overlap"),
    [
        ("none", "all", 5, 4, True, True),
        ("none", "mixed", 8, 8, False, False),
        ("ngram", "mixed", 5, 4, True, True),
        ("draft_target", "all", 8, 4, True, True),
        ("draft_target", "mixed", 5, 4, True, False),
        ("user_provided", "mixed", 16, 4, True, False),
        ("user_provided", "all", 5, 8, False, False),
        ("eagle3", "mixed", 8, 4, True, True),
        ("eagle3_two_engine", "all", 8, 4, False, True),
        ("mtp", "all", 5, 4, True, True),
        ("mtp", "all", 16, 8, False, False),
        ("mtp_eagle", "all", 8, 4, True, True),
    ],
)
def test_greedy_equals_transformers_while_blocks_are_given_back(
    models: Models, monkeypatch: pytest.MonkeyPatch,
    mode: str, kind: str, window: int, page: int, chunked: bool, overlap: bool,
) -> None:  # fmt: skip
    llm = _llm(models, mode, kind, window, page=page, chunked=chunked, overlap=overlap)
    Ledger(monkeypatch)
    poison_free_blocks(llm, monkeypatch)
    prompts, count, cache = _prompts([50, 33, 4]), 30, llm.executor.kv_cache
    requests = [
        llm.executor.enqueue(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
        for prompt in prompts
    ]
    # Behind the window, of one request: K-1 rows computed again, a step in flight and the next,
    # drafting, the ends of blocks.
    bound = (window + 2 + 2 * 4 + 3) // page + 2
    while llm.executor.has_work:
        llm.executor.step()
        for g, own in enumerate(cache.windows):
            generating = [r for r in requests if r.is_generation and r.num_steps > 1]
            for request in generating:
                held = sum(b != NULL_BLOCK for b in cache.block_tables([request.request_id])[g][0])
                assert own is None or held <= bound
    oracle = models.target(kind, window)[1]
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_token_ids == oracle.extend(prompt, count)
    if mode in ("draft_target", "user_provided"):
        assert llm.stats().acceptance_length > (3.4 if mode == "draft_target" else 1.5)
    assert_nothing_leaked(llm)


def test_long_prompts_fit_where_windows_are_short(models: Models) -> None:
    """180 tokens of text in 96 tokens of cache, two requests at a time."""
    llm = _llm(
        models, "draft_target", "all", 8, chunked=True, max_tokens=96, max_batch_size=2,
        max_num_tokens=16, max_seq_len=192,
    )  # fmt: skip
    assert llm.executor.config.max_seq_len == 192
    prompts, oracle = _prompts([150, 120, 90]), models.target("all", 8)[1]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    expected = oracle.extend_all(prompts, 20)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert_nothing_leaked(llm)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kind"), [("mtp", "all"), ("draft_target", "mixed")])
def test_preempted_requests_start_over(models: Models, mode: str, kind: str) -> None:
    llm = _llm(models, mode, kind, 8, chunked=True, max_tokens=80)
    prompts, oracle = _prompts([9, 12, 7, 11]), models.target(kind, 8)[1]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=45, ignore_eos=True))
    expected = oracle.extend_all(prompts, 45)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert (llm.stats().num_preemptions > 0) == (kind == "mixed")  # windows need few blocks
    assert_nothing_leaked(llm)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_of_nan_reaches_nobody_through_its_blocks(models: Models, overlap: bool) -> None:
    """Its first blocks are given back before the host has read that the request is lost."""
    llm = _llm(models, "none", "all", 5, chunked=True, overlap=overlap, page=2)
    nan, count = 96, 20
    llm.executor.target.embed_tokens.weight.data[nan] = torch.nan
    good = [[token % nan for token in prompt] for prompt in _prompts([37, 41, 3])]
    bad = [nan, *good[1][:17]]  # its second chunk takes fewer blocks than the first gives back
    requests = [
        llm.executor.enqueue(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
        for prompt in (good[2], [7, *good[2]], bad, bad, bad, good[0])
    ]
    oracle, cache = models.target("all", 5)[1], llm.executor.kv_cache
    while llm.executor.has_work:
        llm.executor.step()
        for group, pool in zip(cache.groups, cache._pools, strict=True):
            blank = [block for block in pool._blank if block not in pool._suspect]
            assert torch.isfinite(group.k_cache[:, blank]).all()
            assert torch.isfinite(group.v_cache[:, blank]).all()
    for request in requests:
        if request.prompt_token_ids == bad:
            assert request.error is not None and "NaN" in request.error
        else:
            expected = oracle.extend(request.prompt_token_ids, count)
            if nan in expected:  # from then on it is lost as well
                expected = expected[: expected.index(nan) + 1]
            assert request.output_token_ids == expected
    assert_nothing_leaked(llm)


@pytest.mark.parametrize("end", ["cancel", "finish"])
def test_nan_that_no_row_saw_leaves_with_the_request(models: Models, end: str) -> None:
    """Kernels skip what is behind the window, so it is not noticed; the blocks are free at once."""
    llm = _llm(models, "none", "all", 5, page=2, overlap=False)
    executor, cache = llm.executor, llm.executor.kv_cache
    count = 1 if end == "finish" else 20
    request = executor.enqueue(_prompts([30])[0], SamplingParams(max_tokens=count, ignore_eos=True))
    release = executor.scheduler.release_blocks

    def poison_and_release(request: Request) -> None:
        first = cache._tables[request.request_id][0][0]
        assert first != NULL_BLOCK, "given back before"
        cache.groups[0].k_cache[:, first] = torch.nan
        release(request)

    executor.scheduler.release_blocks = poison_and_release  # type: ignore[method-assign]
    executor.step()
    if end == "cancel":
        executor.cancel(request.request_id)
    assert request.finish_reason == ("cancelled" if end == "cancel" else "length")
    (group,), (pool,) = cache.groups, cache._pools
    lost = [block for block in pool.taken if not torch.isfinite(group.k_cache[:, block]).all()]
    assert all(pool.has_key(block) for block in lost), "the same prompt alone may find it"
    assert cache.reserve(99, pool.num_free * cache.page_size)
    assert torch.isfinite(group.k_cache).all(), "not cleaned for another"


# -- the ledger --------------------------------------------------------------------------------
@pytest.mark.slow
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_every_key_that_a_row_sees_has_a_block(models: Models, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["all", "mixed"]))
    mode = data.draw(st.sampled_from(MODES if kind == "all" else MODES_ON_MIXED))
    window, page = data.draw(st.sampled_from([1, 2, 5, 8])), data.draw(st.sampled_from([1, 4, 8]))
    chunked, overlap = data.draw(st.booleans()), data.draw(st.booleans())
    k = data.draw(st.integers(1, 4))
    max_tokens = data.draw(st.sampled_from([None, 72]))
    with pytest.MonkeyPatch.context() as patch:
        llm = _llm(
            models, mode, kind, window, k, page=page, chunked=chunked, overlap=overlap,
            max_tokens=max_tokens, max_num_tokens=data.draw(st.integers(15, 24)) if chunked else 64,
        )  # fmt: skip
        ledger = Ledger(patch)
        poison_free_blocks(llm, patch)
        # Random numbers of drafts are accepted, whatever the target says.
        llm.executor.worker.force_num_accepted_tokens = data.draw(st.sampled_from([0.0, 0.6, 2.3]))
        lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
        for prompt in _prompts(lengths, seed=data.draw(st.integers(0, 99))):
            llm.executor.enqueue(prompt, SamplingParams(max_tokens=20, ignore_eos=True))
        finished = llm.executor.run_until_done()
        assert [r.error for r in finished] == [None] * len(lengths)
        assert all(len(r.output_token_ids) == 20 for r in finished)
        assert ledger.num_rows > 0
        assert_nothing_leaked(llm)


@pytest.mark.parametrize("mode", ["none", "mtp", "draft_target"])
def test_one_position_less_is_noticed(
    models: Models, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The margin is exact: with pages of one token, one position more given back is missed."""
    release = KVCacheManager.release_behind

    def greedy(cache: KVCacheManager, request_id: int, first: int, num_unseen: int = 0) -> None:
        release(cache, request_id, first + 1, num_unseen)

    llm = _llm(models, mode, "all", 5, page=1, overlap=False)
    Ledger(monkeypatch)
    monkeypatch.setattr(KVCacheManager, "release_behind", greedy)
    with pytest.raises(AssertionError, match=r"block \d+ for row"):
        llm.generate(_prompts([30]), SamplingParams(max_tokens=20, ignore_eos=True))


@pytest.mark.parametrize("keeps_reading", [False, True])
def test_a_block_too_many_spoils_the_text(
    models: Models, monkeypatch: pytest.MonkeyPatch, keeps_reading: bool
) -> None:
    """Once, a block that is still seen is given back: the row reads zeros in its place, or, where
    the table keeps it, what these tests poison free blocks with."""
    done: list[int] = []

    def too_much(cache: KVCacheManager, request_id: int, first: int, num_unseen: int = 0) -> None:
        table = cache._tables[request_id][0]
        if first == 31 and not done:
            done.append(table[first // 4 - 1])
            cache._pools[0].forget(done[0])
            cache._pools[0].free(done)
            if not keeps_reading:
                table[first // 4 - 1] = NULL_BLOCK

    llm = _llm(models, "none", "all", 5, overlap=False)
    poison_free_blocks(llm, monkeypatch)
    monkeypatch.setattr(KVCacheManager, "release_behind", too_much)
    prompt = _prompts([30])[0]
    request = llm.executor.enqueue(prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    twice = pytest.raises(KVCacheError, match="not in use") if keeps_reading else nullcontext()
    with twice:  # it is given back again at the end
        llm.executor.run_until_done()
    if keeps_reading:
        assert request.error is not None and "NaN" in request.error
    else:
        assert request.output_token_ids != models.target("all", 5)[1].extend(prompt, 20)


# -- which windows MTP layers have -------------------------------------------------------------
def _config(windows: tuple[int | None, ...], types: tuple[str, ...] = ()) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_layers=3, num_heads=6,
        num_kv_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, layer_windows=windows,
        layer_types=types,
    )  # fmt: skip


def test_mtp_layers_have_their_own_window_or_the_targets() -> None:
    assert mtp_decoder_config(_config((5, 5, 5)), 2).layer_windows == (5, 5)
    assert mtp_decoder_config(_config(()), 2).layer_windows == ()
    own = mtp_decoder_config(_config((None, 5, 5, 5, None), ("a", "b", "b", "b", "a")), 2)
    assert own.layer_windows == (5, None) and own.layer_types == ("b", "a")
    for mixed in (_config((None, 5, 5)), _config((None, 5, 5, 5)), _config((), ("a", "b", "b"))):
        with pytest.raises(CheckpointError, match=r"several kinds.*the 2 MTP layers"):
            mtp_decoder_config(mixed, 2)
