"""`sa_config`: suffix lookup beside a drafter with a network."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import Drafters, config_of, covering, cpu_engine, full, make_drafters, spread
from oracle import Oracle, random_prompts
from suffix_search import Pool, best_in_lists, search_text
from tiny_heads import mtp_model_dir
from torch import Tensor

from trtspec import (
    LLM,
    DFlashDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SAEnhancerConfig,
    SamplingParams,
)
from trtspec.errors import ConfigError
from trtspec.ops.tokens.suffix import Search
from trtspec.workers import create_worker
from trtspec.workers.lookup import COUNT_IN_RING, COUNT_IN_TEXT, LONGEST, LookupBesideNetwork
from trtspec.workers.protocols import DraftInputs, EndedText

K, POOL = 3, 1024
IN_STEP = [
    "draft_target", "eagle3", "mtp", "mtp_eagle", "p_eagle", "pard", "dflash", "dflash2", "dspark",
]  # fmt: skip


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=K)


@pytest.fixture(scope="module")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"))


def lookup_of(**fields: Any) -> SAEnhancerConfig:
    given: dict[str, Any] = {"threshold": 2, "min_token_prob": 0.25, "match_decay": 0.5}
    return SAEnhancerConfig(**given | {"global_pool_tokens": POOL} | fields)


class Spy:
    """Keeps what the network drafted for the requests of the last step."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch):
        self.drafts: dict[int, list[int]] = {}  # by slot
        real: Callable[..., Tensor] = LookupBesideNetwork.override

        def override(
            lookup: LookupBesideNetwork, inputs: DraftInputs, drafts: Tensor, memory: Any
        ) -> Tensor:
            slots = inputs.step.slot_ids.tolist()
            self.drafts |= dict(zip(slots, drafts.tolist(), strict=True))
            return real(lookup, inputs, drafts, memory)

        monkeypatch.setattr(LookupBesideNetwork, "override", override)


@pytest.mark.slow
@spread(mode=IN_STEP if full() else ["eagle3", "mtp", "dflash"], has_pool=[True, False])
def test_drafts_are_those_of_a_search_where_its_match_is_long(
    target_dir: Path, oracle: Oracle, drafters: Drafters, mode: str, has_pool: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """After every step, chunked prompts and preemption included. Else they are the network's."""
    config = config_of(mode, K, drafters, sa_config=lookup_of(enable_global_pool=has_pool))
    llm = cpu_engine(target_dir, config, chunk=24, overlap=False, pool=120, max_batch_size=3)
    spy, executor, pool = Spy(llm, monkeypatch), llm.executor, Pool(POOL)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [
        executor.enqueue(p, params, cache_salt=salt)
        for salt in ("a", "b")
        for p in random_prompts(4, 30) * 2
    ]
    looked_up = drawn = 0
    while executor.has_work:
        finished = executor.step()
        for request in requests:
            if not request.is_generation:
                continue
            text = request.token_ids
            sources = [search_text(text, Search(LONGEST, 1, COUNT_IN_TEXT, K))]
            if has_pool:
                others = Search(LONGEST, 1, COUNT_IN_RING, K)
                sources.append(pool.search(text, request.cache_salt or "", others))
            found = best_in_lists(sources, K, Fraction(1, 2), Fraction(1, 4))
            got = executor.state.next_tokens[request.slot, 1:].tolist()
            expected = found.tokens if found.length >= 2 else spy.drafts[request.slot]
            assert got == expected
            looked_up += found.length >= 2
            drawn += found.length < 2
        for request in finished:
            assert request.output_token_ids == oracle.extend(request.prompt_token_ids, 30)
            first = max(0, len(request.prompt_token_ids) - LONGEST)
            pool.add(request.token_ids[first:], request.cache_salt or "")
    assert looked_up > 20 and drawn > 20
    assert llm.stats().num_preemptions > 0
    assert looked_up <= llm.stats().num_looked_up_drafts


@pytest.mark.slow
@covering(mode=IN_STEP, overlap=[False, True], chunk=[None, 24], threshold=[1, 3])
def test_texts_are_those_of_greedy_decoding(
    target_dir: Path, oracle: Oracle, drafters: Drafters, mode: str, overlap: bool,
    chunk: int | None, threshold: int,
) -> None:  # fmt: skip
    """While the draft length changes too. The network's keys stay right beside drafts that are not
    its own: its drafts are accepted as often as before."""
    config = config_of(mode, K, drafters, sa_config=lookup_of(threshold=threshold))
    llm = cpu_engine(target_dir, config, overlap=overlap, chunk=chunk)
    executor, prompts = llm.executor, random_prompts(4, 20)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [executor.enqueue(prompt, params) for prompt in prompts * 2]
    lengths = itertools.cycle([K, K, 1, 0, K])
    while executor.has_work:
        executor.runtime_draft_len = next(lengths)
        executor.step()
    for request in requests:
        assert request.output_token_ids == oracle.extend(request.prompt_token_ids, 30)
    assert llm.stats().num_looked_up_drafts > 20
    llm.reset_stats()
    assert llm.stats().num_looked_up_drafts == 0


def test_drafts_after_a_part_of_a_prompt_are_not_counted(
    target_dir: Path, drafters: Drafters
) -> None:
    config = config_of("eagle3", K, drafters, sa_config=lookup_of(threshold=1))
    counts = []
    for chunk in (None, 8):
        llm = cpu_engine(target_dir, config, chunk=chunk, overlap=False, max_batch_size=2)
        llm.generate([3, 4, 5] * 10, SamplingParams(max_tokens=8, ignore_eos=True))
        counts.append(llm.stats().num_looked_up_drafts)
    assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", IN_STEP if full() else ["eagle3", "mtp", "pard", "dflash"])
def test_the_network_drafts_as_it_would_alone(
    target_dir: Path, drafters: Drafters, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each length of a text that both engines come by, the network proposes the same: what it
    reads and keeps does not depend on whose drafts were verified."""
    prompt, params = random_prompts(1)[0], SamplingParams(max_tokens=60, ignore_eos=True)
    seen: list[dict[int, list[int]]] = []
    for least in (0.25, 1.0):  # 1: no draft is certain enough
        config = config_of(mode, K, drafters, sa_config=lookup_of(min_token_prob=least))
        llm = cpu_engine(target_dir, config, overlap=False)
        llm.generate(prompt, params)  # the pool has the text from here on
        spy, executor, proposed = Spy(llm, monkeypatch), llm.executor, {}
        request = executor.enqueue(prompt, params)
        while executor.has_work:
            executor.step()
            if request.is_generation:
                proposed[len(request.token_ids)] = spy.drafts[request.slot]
        seen.append(proposed)
        monkeypatch.undo()
    both = seen[0].keys() & seen[1].keys()
    assert len(both) > 10 and len(seen[0]) < len(seen[1]) - 20
    assert all(seen[0][length] == seen[1][length] for length in both)


def test_a_draft_model_reads_what_was_looked_up(target_dir: Path, drafters: Drafters) -> None:
    """It used to read the last two tokens of a step, and kept keys of its own drafts before them,
    which had not been accepted. Blocks of the prefix cache had them too."""
    prompt, params = random_prompts(1)[0], SamplingParams(max_tokens=20, ignore_eos=True)
    texts, keys = [], []
    for fields in ({}, {"sa_config": lookup_of(threshold=1)}):
        config = config_of("draft_target", K, drafters, **fields)
        executor = cpu_engine(target_dir, config, overlap=False).executor
        if texts:
            executor.runner.remember([EndedText(texts[0], len(prompt), None)])
        request = executor.enqueue(prompt, params)
        while len(request.output_token_ids) < 14:
            executor.step()
        blocks = list(executor.kv_cache.table_of(request.request_id)[1])
        keys.append(executor.kv_cache.groups[1].k_cache[:, blocks].flatten(1, 2))
        texts.append(request.token_ids)
    assert request.num_steps < 9, "most drafts are accepted"
    known = len(prompt) + 13
    assert texts[0][:known] == texts[1][:known]
    torch.testing.assert_close(keys[1][:, :known], keys[0][:, :known], atol=1e-4, rtol=1e-4)


def test_a_tenant_sees_its_own_texts_alone(target_dir: Path, drafters: Drafters) -> None:
    llm = cpu_engine(target_dir, config_of("eagle3", K, drafters, sa_config=lookup_of()))
    prompt, params = random_prompts(2)[1], SamplingParams(max_tokens=40, ignore_eos=True)
    lengths = [
        llm.generate(prompt, params, cache_salt=salt).spec_stats.acceptance_length
        for salt in ("a", "b", "a")
    ]
    assert lengths[0] == lengths[1] < 3 < lengths[2]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["strict", "exact_match", "rejection", "block"])
def test_which_drafts_are_certain_is_known_where_it_matters(
    target_dir: Path, drafters: Drafters, rule: str
) -> None:
    config = config_of("eagle3", K, drafters, sa_config=lookup_of(), acceptance=rule)
    llm = cpu_engine(target_dir, config, overlap=False, max_batch_size=2)
    executor = llm.executor
    params = [SamplingParams(max_tokens=40, temperature=t, ignore_eos=True) for t in (0.01, 0.0)]
    requests = [executor.enqueue(random_prompts(1)[0], wish) for wish in params]
    memory, seen = executor.worker.draft_memory, set()
    assert (memory is None) == (rule in ("strict", "exact_match"))
    while executor.has_work:
        before = int(executor.state.worker["looked_up"][requests[0].slot or 0])
        executor.step()
        if memory is not None and requests[0].is_generation and requests[1].is_generation:
            slot = requests[0].slot
            added = int(executor.state.worker["looked_up"][slot]) - before
            assert bool(memory.are_certain[slot]) == (added > 0)
            seen.add(added > 0)
    assert memory is None or seen == {True, False}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SAEnhancerConfig(threshold=0), r"threshold=0.*1 … 64"),
        (lambda: SAEnhancerConfig(threshold=5, max_matching_ngram_size=4), "no match would do"),
        (lambda: SAEnhancerConfig(threshold=33), "above the 32 tokens.*max_matching_ngram_size"),
        (lambda: SAEnhancerConfig(match_decay=-1), "SAEnhancerConfig.match_decay=-1"),
        (lambda: EagleDecodingConfig(speculative_model="d", sa_config=4), "sa_config=4.*or None"),
        (
            lambda: EagleDecodingConfig(speculative_model="d", sa_config={"length": 4}),
            "no field length.*Known",
        ),
        (
            lambda: MTPDecodingConfig(sa_config=SADecodingConfig(max_draft_len=4)),
            "max_draft_len=4.*MTPDecodingConfig says that",
        ),
        (
            lambda: EagleDecodingConfig(
                speculative_model="d", eagle3_one_model=False, sa_config=lookup_of()
            ),
            "eagle3_one_model=False drafts outside",
        ),
        (
            lambda: MTPDecodingConfig(mtp_eagle_one_model=False, sa_config=lookup_of()),
            "mtp_eagle_one_model=False drafts outside",
        ),
        (lambda: NGramDecodingConfig.from_dict({"sa_config": {}}), "no field sa_config"),
    ],
)
def test_what_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_forms_of_the_config() -> None:
    """TensorRT-LLM's dict of a YAML file, its class, and mode SA's."""
    own = SADecodingConfig(match_decay=0.5, enable_global_pool=False)
    configs = [
        DFlashDecodingConfig.from_dict({"speculative_model": "d", "sa_config": given}).sa_config
        for given in ({"threshold": 4}, SAEnhancerConfig(), SADecodingConfig(), own)
    ]
    assert configs[:3] == [SAEnhancerConfig()] * 3
    assert configs[3] == SAEnhancerConfig(match_decay=0.5, enable_global_pool=False)
    worker = create_worker(EagleDecodingConfig(speculative_model="d", max_draft_len=2))
    assert worker.lookup is None and not worker.remembers_texts
    assert worker.num_looked_up_drafts({}) == 0


def test_a_loop_without_slots_is_refused_by_name(target_dir: Path, drafters: Drafters) -> None:
    config = config_of("eagle3", K, drafters, sa_config=lookup_of())
    worker = create_worker(config)
    state = worker.allocate_state(2, 64, torch.device("cpu"))
    assert {"history", "owners", "ring_tokens", "looked_up"} <= state.keys()
    worker.admit(state, 1, [5, 6, 7], 2)
    assert state["history"][1, :3].tolist() == [5, 6, 7] and state["history_lens"].tolist()[1] == 3
