"""An exception at any line of a step: no request is lost, no block leaks, the engine goes on.

The step holds a prompt's first chunk, a later one, greedy and sampled generations, one that asks
for log probabilities and one that stops at a token. An exception is raised where a line of the
executor, the scheduler or the cache begins, at each of them in turn; afterwards every request must
end as if nothing had happened.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from interrupts import OUTSIDE, PACKAGE, RaiseAtLine, begin, check, finish
from matrix import full, thinned
from tiny import tiny_model_dir
from tiny_heads import eagle3_dir

from trtspec import LLM, EagleDecodingConfig, KvCacheConfig, NGramDecodingConfig, SamplingParams
from trtspec.config import UserProvidedDecodingConfig
from trtspec.executor.book import RequestBook
from trtspec.executor.request import Request


class Repeat:
    """A drafter on the host: what came after the last token before."""

    def draft(self, request_id: int, token_ids: Any, max_draft_len: int) -> list[int]:
        return [token_ids[-1]] * max_draft_len


CONFIGS: dict[str, Any] = {
    "ngram": NGramDecodingConfig(max_draft_len=2, max_matching_ngram_size=1),
    "user_provided": UserProvidedDecodingConfig(max_draft_len=2, drafter=Repeat()),
}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one layer: the lines are those of the host, and each is followed by whole texts."""
    return tiny_model_dir(tmp_path_factory.mktemp("target"), num_hidden_layers=1)


def _engine(target_dir: Path, mode: str, overlap: bool) -> LLM:
    config = CONFIGS.get(mode)
    if mode == "eagle3_rests":  # with more than two requests
        head = eagle3_dir(target_dir.parent, captured=1)
        config = EagleDecodingConfig(
            max_draft_len=2,
            speculative_model=head,
            draft_len_schedule={2: 2},
            eagle3_layers_to_capture=[0],
        )
    return LLM(
        target_dir, config, device="cpu", dtype="float32", max_batch_size=4,
        max_seq_len=64, max_num_tokens=16, enable_chunked_prefill=True,
        disable_overlap_scheduler=not overlap,
        kv_cache_config=KvCacheConfig(max_tokens=192, tokens_per_block=4),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "overlap", "every"),
    [
        ("ngram", True, 1),
        ("ngram", False, 3),
        ("user_provided", False, 3),
        ("eagle3_rests", True, 3),
    ]
    if full()
    else [
        ("ngram", True, 17),
        ("ngram", False, 31),
        ("user_provided", False, 29),
        ("eagle3_rests", True, 43),
    ],
)
def test_an_interrupt_at_any_line_of_a_step_loses_nothing(
    target_dir: Path, mode: str, overlap: bool, every: int
) -> None:
    """`every`: of the lines that other cases run as well, so many are passed over."""
    llm = _engine(target_dir, mode, overlap)
    begin(llm)
    finish(llm)
    expected = begin(llm)  # prompts are found in the prefix cache, or copied in part
    with RaiseAtLine(None, KeyboardInterrupt) as trace:
        finish(llm)
    places, raised = list(trace.seen)[::every], 0
    for place in places:
        requests = begin(llm)
        try:
            with RaiseAtLine(place, KeyboardInterrupt):
                finish(llm)
        except KeyboardInterrupt:
            raised += 1
        finish(llm)
        check(llm, requests, expected, place)
        errors = [request for request in requests if request.finish_reason == "error"]
        assert not errors, "texts are computed again, not given up"
        if not llm.stats().prefix_cache.cached_blocks or not requests[3].cached_tokens:
            begin(llm)  # an exception forgets all prefixes: later ones shall meet the same lines
            finish(llm)
    assert raised * every > 250 and raised > 0.97 * len(places), "some lines are run once an engine"


def test_what_was_added_of_a_step_is_taken_back_whole(target_dir: Path) -> None:
    """An interrupt behind the last token, before the step counts as read: what stands beside the
    tokens, and a stop string that was found, are the next try's again."""
    llm = _engine(target_dir, "ngram", True)
    lines = inspect.getsourcelines(RequestBook.add_tokens)
    here = next(i for i, line in enumerate(lines[0], lines[1]) if "request.num_read = " in line)
    place = inspect.getfile(RequestBook), here
    for after in range(12):
        runs = []
        for is_interrupted in (False, True):
            requests = begin(llm)
            for request in requests:
                request.sources = [0] * len(request.output_token_ids)
            try:
                with RaiseAtLine(place if is_interrupted else None, KeyboardInterrupt, after):
                    finish(llm)
            except KeyboardInterrupt:
                finish(llm)
            runs.append(requests)
        check(llm, runs[1], runs[0], after)
        for request in runs[1]:
            assert request.sources is not None
            assert len(request.sources) == len(request.output_token_ids), after


@pytest.mark.slow
def test_an_error_at_any_line_of_a_step_harms_nobody_else(target_dir: Path) -> None:
    """Code that is made to fail alone says so in its own request; all else is as above."""
    llm = _engine(target_dir, "ngram", True)
    expected = begin(llm)
    with RaiseAtLine(None, ArithmeticError) as trace:
        finish(llm)
    raised, places = 0, thinned(list(trace.seen)[::3], 3)
    for place in places:
        requests = begin(llm)
        try:
            with RaiseAtLine(place, ArithmeticError):
                finish(llm)
        except ArithmeticError:
            raised += 1
        finish(llm)
        check(llm, requests, expected, place)
        assert sum(request.finish_reason == "error" for request in requests) <= 1, place
    assert 0 < raised < len(places)


def test_an_admission_that_raises_fails_its_request_alone(target_dir: Path) -> None:
    llm = _engine(target_dir, "ngram", True)
    expected = begin(llm)
    finish(llm)
    worker = llm.executor.worker
    admit = worker.admit

    def refuse(state: Any, slot: int, token_ids: Any, count: int) -> None:
        if count == 2:
            raise OverflowError("a number too large for a tensor")
        admit(state, slot, token_ids, count)

    worker.admit = refuse  # type: ignore[method-assign]
    requests = begin(llm)
    finish(llm)
    assert requests[4].finish_reason == "error"
    assert "OverflowError: a number too large" in (requests[4].error or "")
    assert not requests[4].output_token_ids
    check(llm, requests, expected, "admission")


def test_an_admission_that_raises_leaves_nothing_of_the_slots_last_request(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ban that it had not yet overwritten must not reach who comes next."""
    llm = LLM(target_dir, device="cpu", dtype="float32", max_batch_size=2, max_seq_len=64)
    executor, params = llm.executor, SamplingParams(max_tokens=3, ignore_eos=True)
    expected = llm.generate([3, 4], params).outputs[0].token_ids
    shaping = SamplingParams(max_tokens=30, ignore_eos=True, presence_penalty=0.5)
    executor.enqueue([8, 9], shaping)  # stays, so that logits are shaped in every step
    banned = SamplingParams(max_tokens=2, ignore_eos=True, bad_token_ids=expected)
    llm.generate([1, 2], banned)

    def broken(*_: Any) -> Any:
        raise MemoryError("no room for it")

    monkeypatch.setattr("trtspec.metadata.logits.to_device", broken)
    failed = executor.enqueue([5, 6], params)
    executor.step()
    monkeypatch.undo()
    assert failed.finish_reason == "error" and "no room" in (failed.error or "")
    assert llm.generate([3, 4], params).outputs[0].token_ids == expected
    llm.shutdown()


@pytest.fixture
def states_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "states"


@pytest.mark.slow
def test_an_interrupt_while_states_are_saved_leaves_whole_samples(
    target_dir: Path, states_dir: Path
) -> None:
    """Finished requests are samples, whole and once; those under way say that they are none."""
    from trtspec import SaveHiddenStatesDecodingConfig
    from trtspec.data.hidden_states import SavedHiddenStates, prompt_digest

    config = SaveHiddenStatesDecodingConfig(
        output_directory=str(states_dir), eagle3_layers_to_capture=[0], tokens_per_file=16
    )
    llm = LLM(target_dir, config, device="cpu", dtype="float32", max_batch_size=4, max_seq_len=64)
    saving = str(PACKAGE / "data" / "hidden_states.py"), str(PACKAGE / "executor" / "saving.py")

    class AtSaving(RaiseAtLine):
        def _call(self, frame: FrameType, event: str, arg: object) -> Any:
            inside = frame.f_code.co_filename in saving
            return self._line if inside and frame.f_code.co_name not in OUTSIDE else None

    def begin(number: int) -> list[Request]:
        return [
            llm.executor.enqueue(
                [number % 90, number // 90, i],
                SamplingParams(max_tokens=2 + i, ignore_eos=True),
            )
            for i in range(6)
        ]

    begin(0)
    with AtSaving(None, KeyboardInterrupt) as trace:
        finish(llm)
    done: list[Request] = []
    places = thinned(list(trace.seen), 2)
    for number, place in enumerate(places, start=1):
        requests = begin(number)
        try:
            with AtSaving(place, KeyboardInterrupt, after=number % 8):
                finish(llm)
        except KeyboardInterrupt:
            pass
        finish(llm)
        assert all(r.finish_reason in ("length", "error") for r in requests), place
        whole = [r for r in requests if r.finish_reason == "length"]
        assert len(whole) >= 2, "those that waited for a slot have no sample yet"
        done += whole
    assert 20 < len(done) < 6 * len(places) - 20
    saved = SavedHiddenStates(states_dir)
    digests = [sample["prompt_sha256"] for sample in saved._index["samples"]]
    assert len(digests) == len(set(digests)), "a sample is there twice"
    of_prompt = dict(zip(digests, saved, strict=True))
    for request in done:
        sample = of_prompt[prompt_digest(request.prompt_token_ids)]
        text = request.token_ids
        assert sample["token_ids"].tolist() == text[:-1]
        assert sample["next_token_ids"].tolist() == text[1:]
        assert sample["positions"].tolist() == list(range(len(text) - 1))
