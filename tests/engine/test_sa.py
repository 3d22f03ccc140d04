"""Mode SA in the engine: what it drafts, from whose texts, and what is counted."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import cpu_engine
from oracle import Oracle, random_prompts
from suffix_search import Pool, search_text, vote_in_lists
from tiny import tiny_model_dir
from torch.utils._python_dispatch import TorchDispatchMode

from trtspec import LLM, KvCacheConfig, NGramDecodingConfig, SADecodingConfig, SamplingParams
from trtspec.config import DecodingBaseConfig
from trtspec.executor.request import Request
from trtspec.metadata.mode import SpeculativeDecodingMode
from trtspec.ops.tokens.suffix import Search
from trtspec.workers import WORKER_OF_MODE, SAWorker, create_worker, lookup, texts
from trtspec.workers.lookup import COUNT_IN_RING, COUNT_IN_TEXT, LONGEST
from trtspec.workers.protocols import EndedText

K, LEAST, DECAY, POOL = 4, 0.25, 0.5, 1024


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="module")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


def config_of(**fields: Any) -> SADecodingConfig:
    given: dict[str, Any] = {
        "max_draft_len": K, "min_matching_ngram_size": 1, "min_token_prob": LEAST,
        "match_decay": DECAY, "global_pool_tokens": POOL,
    }  # fmt: skip
    return SADecodingConfig(**given | fields)


class TorchCalls(TorchDispatchMode):
    """Names the calls of torch inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(call))
        return call(*args, **(kwargs or {}))


def count_writes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Returns a list that gets an entry for each copy of texts, the slots that are written by it.

    A second write of the same copy is no entry but an error."""
    begin, copy = texts.begin_texts, texts.to_device
    writes: list[list[int]] = []

    def begun(*given: Any) -> None:
        assert not writes[-1]
        writes[-1] += [slot for slot, _ in given[-1]]
        begin(*given)

    monkeypatch.setattr(texts, "begin_texts", begun)
    monkeypatch.setattr(texts, "to_device", lambda *given: (writes.append([]), copy(*given))[1])
    return writes


def drafts_of(llm: LLM, request: Request) -> list[int]:
    return llm.executor.state.next_tokens[request.slot, 1:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("has_pool", [True, False])
def test_proposals_are_those_of_a_search_in_lists(
    target_dir: Path, oracle: Oracle, has_pool: bool
) -> None:
    """After every step, chunked prompts and preemption included, the drafts in the slots are what
    the vote of a search in the request's own tokens and in ended texts finds."""
    llm = LLM(
        target_dir, config_of(enable_global_pool=has_pool), device="cpu", dtype="float32",
        max_batch_size=3, max_seq_len=96, max_num_tokens=20, enable_chunked_prefill=True,
        disable_overlap_scheduler=True,
        kv_cache_config=KvCacheConfig(max_tokens=112, tokens_per_block=8),
    )  # fmt: skip
    executor, pool, compared, from_pool = llm.executor, Pool(POOL), 0, 0
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = random_prompts(5, 30)
    requests = [executor.enqueue(p, params, cache_salt=s) for s in ("a", "b") for p in prompts * 2]
    while executor.has_work:
        finished = executor.step()
        for request in requests:
            if not request.is_generation:
                continue
            text, own = request.token_ids, Search(LONGEST, 1, COUNT_IN_TEXT, K)
            sources = [search_text(text, own)]
            alone = vote_in_lists(sources, K, Fraction(DECAY), Fraction(LEAST))
            if has_pool:
                others = Search(LONGEST, 1, COUNT_IN_RING, K)
                sources.append(pool.search(text, request.cache_salt or "", others))
            expected = vote_in_lists(sources, K, Fraction(DECAY), Fraction(LEAST))
            assert drafts_of(llm, request) == expected
            compared += 1
            from_pool += expected != alone
        for request in finished:
            assert request.output_token_ids == oracle.extend(request.prompt_token_ids, 40)
            first = max(0, len(request.prompt_token_ids) - LONGEST)
            pool.add(request.token_ids[first:], request.cache_salt or "")
    assert compared > 150 and executor.stats().num_preemptions > 0
    assert (from_pool > 20) == has_pool


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("salts", "sees"), [("aa", True), ("ab", False), ("a-", False)])
def test_a_tenant_drafts_from_its_own_texts_alone(
    target_dir: Path, salts: str, sees: bool, overlap: bool
) -> None:
    """The same prompt again is drafted from the first answer if the salt is the same."""
    llm = cpu_engine(target_dir, config_of(max_draft_len=8), overlap=overlap)
    prompt, params = random_prompts(2)[1], SamplingParams(max_tokens=40, ignore_eos=True)
    lengths = []
    for salt in salts:
        salt_given = None if salt == "-" else salt
        output = llm.generate(prompt, params, cache_salt=salt_given)
        lengths.append(output.spec_stats.acceptance_length)
    assert lengths[1] > 5 if sees else lengths[1] == lengths[0]


def test_what_did_not_end_by_itself_is_not_kept(target_dir: Path) -> None:
    llm = cpu_engine(target_dir, config_of())
    executor = llm.executor
    request = executor.enqueue([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(8):
        executor.step()
    executor.cancel(request.request_id)
    executor.run_until_done()
    assert len(request.output_token_ids) > 4
    assert executor.state.worker["ring_tokens"].max() == 0
    llm.generate([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
    assert executor.state.worker["ring_tokens"].max() > 0


def test_texts_longer_than_the_pool_leave_their_ends(target_dir: Path, oracle: Oracle) -> None:
    llm = cpu_engine(target_dir, config_of(), max_batch_size=2)
    worker, state = llm.executor.worker, llm.executor.state.worker
    text = [i % 89 for i in range(3 * POOL)]
    worker.remember_text(state, EndedText(text, 5, None))
    kept = (state["ring_tokens"] - 1).tolist()
    assert kept == [*text[1 - POOL :], -1]
    prompts = random_prompts(4)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, 20)


def test_texts_that_end_together_are_added_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one after another, those too that overwrite each other and those too short to match."""
    ended = [
        EndedText([i * i % 7 for i in range(n)], n // 3, salt)
        for n, salt in [(700, "a"), (2, "b"), (90, None), (33, "a"), (800, "b"), (10, None)]
    ]
    workers = [SAWorker(config_of()) for _ in range(2)]
    states = [worker.allocate_state(2, 64, torch.device("cpu")) for worker in workers]
    for text in ended:
        workers[0].remember_text(states[0], text)
    real, calls = lookup.add_texts, []
    monkeypatch.setattr(lookup, "add_texts", lambda *given: calls.append(real(*given)))
    workers[1].remember_texts(states[1], ended)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert workers[0].lookup._ring_end == workers[1].lookup._ring_end == states[1]["ring_end"]
    workers[1].remember_texts(states[1], [ended[1]])  # nothing to add
    assert len(calls) == 1


def test_a_worker_that_takes_texts_one_by_one_still_gets_each(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[EndedText] = []

    class Taking(SAWorker):
        def remember_text(self, state: dict[str, torch.Tensor], text: EndedText) -> None:
            taken.append(text)
            super().remember_text(state, text)

    monkeypatch.setitem(WORKER_OF_MODE, SpeculativeDecodingMode.SA, Taking)
    llm = cpu_engine(target_dir, config_of())
    prompts, params = random_prompts(3), SamplingParams(max_tokens=8, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    said = sorted(p + o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True))
    assert sorted(text.token_ids for text in taken) == said
    assert llm.executor.state.worker["ring_tokens"].count_nonzero() >= 8 * 3


def test_a_salt_is_its_slots_until_the_next_admission() -> None:
    worker = SAWorker(config_of())
    state = worker.allocate_state(2, 64, torch.device("cpu"))
    owners = state["owners"]
    worker.admit(state, 1, [5, 6])
    of_none = owners[1].clone()
    worker.set_salt(state, 1, "a")
    own = owners[1].clone()
    assert of_none.any() and own.any() and not torch.equal(of_none, own) and not owners[0].any()
    worker.admit(state, 0, [5])
    worker.set_salt(state, 0, "a")
    worker.admit(state, 1, [7])
    assert torch.equal(owners[:2], torch.stack([own, of_none]))


WITH_TEXTS = pytest.mark.parametrize(
    "config",
    [config_of(), config_of(enable_global_pool=False), NGramDecodingConfig(max_draft_len=K)],
)


@WITH_TEXTS
def test_texts_that_begin_together_are_written_at_once(
    config: DecodingBaseConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one after another. Until then nothing is written, and no call of torch is made."""
    workers = [create_worker(config) for _ in range(2)]
    states = [worker.allocate_state(3, 64, torch.device("cpu")) for worker in workers]
    texts_of_1 = workers[1].slot_texts
    assert texts_of_1 is not None
    texts_of_1.wait(states[1])
    for worker, state in zip(workers, states, strict=True):
        with TorchCalls() as calls:
            for slot, text, salt in [
                *((0, [5, 6, 7], "a"), (2, [8], None)),
                *((1, list(range(40)), "b"), (2, [9, 9], "a")),  # a slot again, before any step
            ]:
                worker.admit(state, slot, text)
                worker.set_salt(state, slot, salt)
        assert bool(calls.names) == (worker is workers[0])
    assert states[1]["history_lens"].tolist() == [0, 0, 0, 0]
    writes = count_writes(monkeypatch)
    texts_of_1.write(states[1])
    texts_of_1.write(states[1])  # nothing is left
    assert writes == [[0, 2, 1]]
    assert states[1]["history_lens"].tolist() == [3, 40, 2, 0]
    assert states[1].keys() == states[0].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
@WITH_TEXTS
@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_writes_the_texts_of_its_admissions_at_once(
    target_dir: Path, config: DecodingBaseConfig, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of requests that were preempted, too."""
    llm = cpu_engine(target_dir, config, pool=112, max_batch_size=6, overlap=overlap)
    executor, runner = llm.executor, llm.executor.runner
    writes, admit, entered = count_writes(monkeypatch), runner.admit, list[int]()
    monkeypatch.setattr(runner, "admit", lambda r: (admit(r), entered.append(r.slot)))
    params, most = SamplingParams(max_tokens=20, ignore_eos=True), 0
    for number, prompt in enumerate(random_prompts(12, 12)):
        executor.enqueue(prompt, params, cache_salt=str(number))
    while executor.has_work:
        executor.step()
        assert writes == ([entered] if entered else [])
        most = max(most, len(entered))
        writes.clear()
        entered.clear()
    assert most > 2 and executor.stats().num_preemptions > 0


def test_a_text_without_room_is_refused() -> None:
    worker = SAWorker(config_of())
    state = worker.allocate_state(2, 8, torch.device("cpu"))
    columns = state["history"].shape[1]
    before = {name: tensor.clone() for name, tensor in state.items()}
    for slot, count in [(0, columns + 1), (3, 1), (-1, 1)]:
        with pytest.raises(ValueError, match=f"No room for {count} tokens in slot {slot}"):
            worker.admit(state, slot, [1] * count)
    assert all(torch.equal(state[name], before[name]) for name in state)
    worker.admit(state, 0, [1] * columns)
    assert state["history"].sum(1).tolist() == [columns, 0, 0]


@pytest.mark.parametrize("config", [config_of(), NGramDecodingConfig(max_draft_len=K)])
def test_texts_that_no_draft_reads_are_not_gathered(
    target_dir: Path, config: DecodingBaseConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without drafts add what was accepted, and later ones look it up."""
    real, calls = texts.gather_texts, []

    def gathered(*given: Any) -> torch.Tensor:
        calls.append(given)
        return real(*given)

    monkeypatch.setattr(texts, "gather_texts", gathered)
    llm = cpu_engine(target_dir, config, overlap=False)
    executor = llm.executor
    request = executor.enqueue([1, 2, 3] * 4, SamplingParams(max_tokens=40, ignore_eos=True))
    for length in [0] * 9 + [K]:
        assert not calls
        executor.runtime_draft_len = length
        executor.step()
        text, state = request.token_ids, executor.state.worker
        assert state["history_lens"][request.slot] == len(text)
        assert state["history"][request.slot, : len(text)].tolist() == text
        assert length or drafts_of(llm, request) == [-1] * K
    assert len(calls) == 1 and len(request.output_token_ids) == 10


def test_only_what_was_proposed_is_counted(target_dir: Path) -> None:
    """A step's record has the drafts that there were, not those that pad its rows."""
    llm = cpu_engine(target_dir, config_of(max_draft_len=8), overlap=False)
    executor = llm.executor
    executor.record_steps = True
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [executor.enqueue(prompt, params) for prompt in random_prompts(4) * 2]
    proposed: dict[int, list[int]] = {request.request_id: [] for request in requests}
    while executor.has_work:
        for request in requests:
            if request.is_generation:
                count = sum(token >= 0 for token in drafts_of(llm, request))
                proposed[request.request_id].append(count)
        executor.step()
    lengths = set()
    for request in requests:
        assert request.steps is not None
        counted = [step.proposed for step in request.steps]
        assert counted == proposed[request.request_id][: len(counted)]
        assert all(step.accepted <= step.proposed for step in request.steps)
        lengths |= set(counted)
    assert len(lengths) > 3, "lengths adapt"


def test_drafting_can_rest_and_go_on(target_dir: Path, oracle: Oracle) -> None:
    llm = cpu_engine(target_dir, config_of(), overlap=False)
    executor, prompt = llm.executor, random_prompts(1)[0]
    request = executor.enqueue(prompt, SamplingParams(max_tokens=60, ignore_eos=True))
    lengths = itertools.cycle([0, 0, 2, K])
    while executor.has_work:
        executor.runtime_draft_len = length = next(lengths)
        executor.step()
        if request.is_generation:
            assert sum(token >= 0 for token in drafts_of(llm, request)) <= length
    assert request.output_token_ids == oracle.extend(prompt, 60)


def test_the_pool_of_tensorrt_llm_is_counted_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    values = {"decoding_type": "SA", "max_draft_len": 4, "enable_global_pool": True}
    SADecodingConfig.from_dict(values)
    assert not caplog.text
    SADecodingConfig.from_dict(values | {"global_pool_size": 64})
    assert "global_pool_tokens bounds the pool" in caplog.text


def test_an_interrupt_while_a_text_is_kept_loses_nothing(
    target_dir: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is half written when the step ends; the request is returned by the next one."""
    llm = cpu_engine(target_dir, config_of())
    executor, ring_ends = llm.executor, llm.executor.state.worker["ring_end"]
    params, prompts = SamplingParams(max_tokens=20, ignore_eos=True), random_prompts(5)
    requests = [executor.enqueue(prompt, params) for prompt in prompts]
    real, calls = lookup.add_texts, itertools.count()

    def interrupted(ring: Any, *others: Any) -> None:
        real(ring, *others)
        if next(calls) in (0, 2):
            ring.owners.zero_()
            raise KeyboardInterrupt

    monkeypatch.setattr(lookup, "add_texts", interrupted)
    done, interrupts = [], 0
    while executor.has_work or executor.book.finished:
        try:
            done += executor.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts > 0 and sorted(r.request_id for r in done) == [r.request_id for r in requests]
    for request in requests:
        assert request.output_token_ids == oracle.extend(request.prompt_token_ids, 20)
    assert ring_ends.item() == executor.worker.lookup._ring_end


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "exact_match"])
def test_sampled_texts_are_those_without_speculation(target_dir: Path, rule: str) -> None:
    """Drafts that are certain accept by being the target's own sample, so seeds give the same
    tokens. Each seed comes twice, in another company: the second time the pool has its text."""
    prompts = [prompt for prompt in random_prompts(3) for _ in range(4)] * 2
    params = [
        SamplingParams(max_tokens=24, temperature=(0.5, 2.0)[i % 2], seed=i % 12, ignore_eos=True)
        for i in range(len(prompts))
    ]
    said, accepted = [], 0
    for config in (None, config_of(min_token_prob=0.0, acceptance=rule)):
        llm = cpu_engine(target_dir, config, max_batch_size=5)
        outputs = llm.generate(prompts, params)
        said.append([output.outputs[0].token_ids for output in outputs])
        accepted = sum(output.spec_stats.num_accepted_draft_tokens for output in outputs)
    assert said[0] == said[1]
    assert len({tuple(text) for text in said[0]}) > 6 and accepted > 150
