"""`AsyncLLM`: the outputs of `LLM`, for many tasks at once; what goes wrong stays in its task."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from served import MAX_SEQ_LEN, PROMPTS, greedy, is_at_rest, make_llm, served_model_dir
from torch.cuda._utils import _get_device_index

from trtspec import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineError,
    KvCacheConfig,
    QueueFullError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from trtspec.frontend.engine_thread import SHUT_DOWN, Bell, EngineThread, Feed, LoopPort
from trtspec.frontend.time_limit import MAX_THREADS, TimeLimit

LONG = greedy(200)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model_dir(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Iterator[LLM]:
    with make_llm(model_dir) as llm:
        yield llm


@pytest.mark.parametrize(("given", "expected"), [({}, 1), ({"prefill_batch_size": 3}, 3)])
def test_prompts_start_at_once(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, int], expected: int
) -> None:
    """Not as in an `LLM` on a GPU, which is asked for throughput."""
    arguments: dict[str, Any] = {}

    class Recording(LLM):
        def __init__(self, *args: Any, **named: Any):
            arguments.update(named)
            super().__init__(*args, **named)

    monkeypatch.setattr("trtspec.async_llm.LLM", Recording)

    async def main() -> None:
        async with AsyncLLM(model_dir, device="cpu", dtype="float32", max_seq_len=64, **given):
            pass

    asyncio.run(main())
    assert arguments["prefill_batch_size"] == expected


@pytest.mark.slow
def test_over_ranks(model_dir: Path, reference: LLM) -> None:
    """Two ranks behind the engine thread."""
    llm = make_llm(model_dir, tensor_parallel_size=2)

    async def one(engine: AsyncLLM, prompt: str) -> list[int]:
        outputs = [output async for output in engine.generate(prompt, greedy())]
        return outputs[-1].outputs[0].token_ids

    async def main() -> list[list[int]]:
        async with AsyncLLM(llm) as engine:
            return await asyncio.gather(*(one(engine, prompt) for prompt in PROMPTS))

    wanted = [output.outputs[0].token_ids for output in reference.generate(PROMPTS, greedy())]
    assert asyncio.run(main()) == wanted


@pytest.mark.parametrize(("name", "index"), [("cuda", 3), ("cuda:1", 1)])
def test_the_thread_uses_the_executors_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, index: int
) -> None:
    """torch takes a number, and no device without one."""
    used = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: used.append(_get_device_index(device))
    )
    executor: Any = SimpleNamespace(device=torch.device(name), has_work=False)
    thread = EngineThread(executor, nullcontext())
    thread.stop()
    assert used == [index] and thread.failure == SHUT_DOWN


def test_a_loop_that_works_on_news_rests_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would take Python's lock from each step. An end is told at once."""
    requests: list[Any] = [SimpleNamespace(request_id=i, num_read=0) for i in range(2)]
    scheduler = SimpleNamespace(running=requests, waiting=[])
    executor: Any = SimpleNamespace(
        device=torch.device("cpu"), has_work=False, scheduler=scheduler, report_lost=print
    )
    thread = EngineThread(executor, nullcontext())
    now, posted = 0.0, []  # type: float, list[Any]
    monkeypatch.setattr("time.perf_counter", lambda: now)
    soon: list[Any] = []
    loop: Any = SimpleNamespace(
        call_soon_threadsafe=lambda *call: posted.append(call),
        call_soon=lambda *call: soon.append(call),
    )
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    thread.bind(LoopPort(loop))
    feeds = [Feed(request, Bell(), lambda feed: None) for request in requests]
    thread._feeds.update(enumerate(feeds))

    def step(count: int, *finished: Any) -> int:
        for request in requests:
            request.num_read += count
            request.output_token_ids = [0] * request.num_read
        thread._hand_over(finished)
        return len(posted)

    assert step(2) == 1 and step(1) == 1  # the loop has not begun with the first news
    now = 1.0
    deliver, *arguments = posted[0]
    deliver(*arguments)
    assert [feed.num_tokens for feed in feeds] == [2, 2]
    now = 4.0
    end, *arguments = soon.pop()
    end(*arguments)
    now = 6.5
    assert step(1) == 1
    now = 7.0
    assert step(1) == 2 and [news.num_tokens for news in posted[1][1]] == [5, 5]
    assert step(1) == 2 and step(1, requests[1]) == 3
    assert [(n.feed, n.num_tokens, n.is_done) for n in posted[2][1]] == [
        (feeds[0], 7, False),
        (feeds[1], 7, False),
        (feeds[1], 7, True),
    ]
    thread.bind(LoopPort(loop))  # another loop owes nothing
    assert step(1) == 4
    thread._feeds.clear()
    thread.stop()


def test_a_thread_without_its_gpu_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(device: int) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    executor: Any = SimpleNamespace(device=torch.device("cuda:1"), has_work=False)
    thread = EngineThread(executor, nullcontext())

    async def ask() -> None:
        await thread.call(lambda: None)

    with pytest.raises(EngineError, match="cannot use its GPU"):
        asyncio.run(ask())
    thread.stop()
    assert "cannot use its GPU" in caplog.text


def run(
    model_dir: Path, test: Callable[[AsyncLLM], Awaitable[None]], queue: int = 64, **changes: Any
) -> None:
    """Runs a test with an engine. Whatever it left, nothing is held a moment later."""

    async def main() -> None:
        async with AsyncLLM(make_llm(model_dir, **changes), max_num_requests_in_queue=queue) as llm:
            await asyncio.wait_for(test(llm), 60)
            if llm.failure is None:
                await rest(llm)

    asyncio.run(main())


async def rest(llm: AsyncLLM) -> None:
    for _ in range(500):
        if await llm._engine.call(lambda: is_at_rest(llm.llm)) and llm.num_live == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("requests or blocks are left")


async def read(llm: AsyncLLM, prompt: Any, params: SamplingParams, **more: Any) -> RequestOutput:
    """Returns the last snapshot. The snapshots before it make up its tokens and text."""
    text, tokens, last = "", [], None
    async for last in llm.generate(prompt, params, **more):
        text += last.outputs[0].text_diff
        tokens += last.outputs[0].token_ids_diff
        assert text == last.outputs[0].text and tokens == last.outputs[0].token_ids
    assert last is not None and last.finished
    return last


def same(output: RequestOutput, other: RequestOutput) -> bool:
    pairs = zip(output.outputs, other.outputs, strict=True)
    return all(
        (a.text, a.token_ids, a.finish_reason, *map(list, a.logprobs or []))
        == (b.text, b.token_ids, b.finish_reason, *map(list, b.logprobs or []))
        for a, b in pairs
    )


def test_outputs_are_those_of_llm(model_dir: Path, reference: LLM) -> None:
    params = [
        greedy(40),
        greedy(30, stop=["12", "b"]),
        SamplingParams(max_tokens=20, temperature=1.0, seed=5, logprobs=2),
        SamplingParams(max_tokens=20, temperature=1.0, seed=6, n=3, prompt_logprobs=2),
    ]
    wanted = reference.generate(PROMPTS, params)

    async def test(llm: AsyncLLM) -> None:
        outputs = await asyncio.gather(*map(lambda t, p: read(llm, t, p), PROMPTS, params))
        for output, want in zip(outputs, wanted, strict=True):
            assert same(output, want)
            assert output.prompt == want.prompt
            assert output.prompt_token_ids == want.prompt_token_ids
            _, *said = output.prompt_logprobs or [None]
            _, *expected = want.prompt_logprobs or [None]
            assert [*map(list, said)] == [*map(list, expected)]
        assert wanted[3].prompt_logprobs
        assert outputs[0].spec_stats == wanted[0].spec_stats
        assert outputs[0].spec_stats.num_accepted_draft_tokens > 0
        assert (await llm.stats()).generated_tokens == sum(
            len(c.token_ids) for output in outputs for c in output.outputs
        )

    run(model_dir, test)


def test_chat_and_tokens_are_those_of_llm(model_dir: Path, reference: LLM) -> None:
    messages = [{"role": "user", "content": "abc"}]
    want = reference.chat(messages, greedy())

    async def test(llm: AsyncLLM) -> None:
        outputs = [output async for output in llm.chat(messages, greedy())]
        assert same(outputs[-1], want)
        assert (await llm.tokenize("abc")).ids == reference.tokenizer.encode("abc")
        ids = (await llm.tokenize_chat(messages)).ids
        assert ids == reference.apply_chat_template(messages) == want.prompt_token_ids

    run(model_dir, test)


def test_a_late_reader_finds_all_in_one_piece(model_dir: Path, reference: LLM) -> None:
    want = reference.generate(PROMPTS[0], LONG)

    async def test(llm: AsyncLLM) -> None:
        stream = llm.generate(PROMPTS[0], LONG)
        await stream.start()
        while llm.num_live:  # the engine waits for no reader
            await asyncio.sleep(0.01)
        outputs = [output async for output in stream]
        assert len(outputs) == 1 and same(outputs[0], want)
        assert outputs[0].outputs[0].text_diff == want.outputs[0].text

    run(model_dir, test)


@pytest.mark.slow
def test_tokens_of_a_preempted_request_are_told_while_it_waits(
    model_dir: Path, reference: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under overlap some are read in the step that takes its blocks."""
    texts, told, late = PROMPTS[:3], dict[int, int](), list[int]()
    wanted = [reference.generate(text, greedy(60)) for text in texts]
    post = LoopPort.post

    def note(port: LoopPort, news: Any) -> bool:
        told.update((feed.request.request_id, count) for feed, count, _ in news)
        return post(port, news)

    async def test(llm: AsyncLLM) -> None:
        executor = llm.llm.executor
        step = executor.step

        def look_and_step() -> Any:
            began = [request for request in executor.scheduler.waiting if request.num_read]
            late.extend(r.request_id for r in began if told.get(r.request_id, 0) < r.num_read)
            return step()

        monkeypatch.setattr(executor, "step", look_and_step)
        outputs = await asyncio.gather(*(read(llm, text, greedy(60)) for text in texts))
        assert all(same(a, b) for a, b in zip(outputs, wanted, strict=True))
        assert executor.stats().num_preemptions > 0

    monkeypatch.setattr(LoopPort, "is_free", lambda port: True)
    monkeypatch.setattr(LoopPort, "post", note)
    cache = KvCacheConfig(max_tokens=96, tokens_per_block=4)
    run(model_dir, test, max_seq_len=80, kv_cache_config=cache, disable_overlap_scheduler=False)
    assert not late


def test_a_second_reader_is_refused_and_the_first_goes_on(model_dir: Path, reference: LLM) -> None:
    want = reference.generate(PROMPTS[0], LONG)

    async def last(stream: Any) -> RequestOutput:
        return [output async for output in stream][-1]

    async def test(llm: AsyncLLM) -> None:
        for first_starts in (True, False):
            stream = llm.generate(PROMPTS[0], LONG)
            if first_starts:
                await stream.start()
            answers = await asyncio.gather(last(stream), last(stream), return_exceptions=True)
            refused = [a for a in answers if isinstance(a, RuntimeError)]
            (output,) = [a for a in answers if isinstance(a, RequestOutput)]
            assert len(refused) == 1 and "Another task" in str(refused[0])
            assert same(output, want)

    run(model_dir, test)


def test_a_stream_that_was_refused_may_be_started_again(model_dir: Path, reference: LLM) -> None:
    want = reference.generate(PROMPTS[0], greedy())

    async def test(llm: AsyncLLM) -> None:
        first, second = llm.generate(PROMPTS[1], LONG), llm.generate(PROMPTS[0], greedy())
        await first.start()
        llm.max_live = 1
        with pytest.raises(QueueFullError):
            await second.start()
        await first.aclose()
        while llm.num_live:
            await asyncio.sleep(0.01)
        await second.start()
        assert same([output async for output in second][-1], want)

    run(model_dir, test)


def test_a_stream_that_is_closed_while_it_starts_ends(model_dir: Path) -> None:
    async def test(llm: AsyncLLM) -> None:
        gate = threading.Event()
        llm._preparer.submit(gate.wait)
        stream = llm.generate(PROMPTS[0], LONG)
        starting = asyncio.create_task(stream.start())
        await asyncio.sleep(0)
        await stream.aclose()
        gate.set()
        await starting
        (output,) = [output async for output in stream]
        assert output.outputs[0].finish_reason == "cancelled"

    run(model_dir, test)


def test_places_of_a_closed_loop_are_not_given_back_to_the_next(model_dir: Path) -> None:
    engine = make_llm(model_dir)
    llm, gate = AsyncLLM(engine), threading.Event()
    first = asyncio.new_event_loop()
    llm._preparer.submit(gate.wait)  # so that the first loop's prompt is not tokenised yet

    async def begin() -> Any:
        stream = llm.generate(PROMPTS[0], greedy())
        coroutine = stream.start()
        coroutine.send(None)
        return coroutine

    coroutine = first.run_until_complete(begin())
    first.close()
    gate.set()

    async def test() -> None:
        await read(llm, PROMPTS[1], greedy())
        coroutine.close()
        assert llm.num_live == 0
        await asyncio.wait_for(llm.shutdown(timeout=60), 20)

    asyncio.run(test())


def test_sources_say_which_draft_a_token_was(model_dir: Path) -> None:
    async def test(llm: AsyncLLM) -> None:
        stream = llm.generate(PROMPTS[0], greedy(60), keep_sources=True)
        sources: list[int] = []
        while pieces := await stream.pieces():
            for _, piece in pieces:
                assert piece.sources is not None
                assert len(piece.sources) == len(piece.token_ids)
                sources += piece.sources
        assert len(sources) == 60 and sources[0] == 0
        histogram: dict[int, int] = {}
        run_length = 0
        for source in sources[1:]:  # 1, 2, …, then the bonus, 0
            assert source in (0, run_length + 1)
            if source == 0:
                histogram[run_length] = histogram.get(run_length, 0) + 1
            run_length = source
        accepted = dict(stream.requests[0].accepted_lens)
        whole = {n: histogram.get(n, 0) for n in accepted}
        assert sum(accepted.values()) - sum(whole.values()) <= 1  # max_tokens cuts the last step
        assert max(sources) == 3
        async for _ in llm.generate(PROMPTS[0], greedy(4)):
            pass

    run(model_dir, test)


def test_abort_ends_one_request(model_dir: Path, reference: LLM) -> None:
    want = reference.generate(PROMPTS[1], greedy(60))

    async def test(llm: AsyncLLM) -> None:
        other = asyncio.create_task(read(llm, PROMPTS[1], greedy(60)))
        stream = llm.generate(PROMPTS[0], LONG)
        first = await anext(stream)
        assert await llm.abort(first.request_id)
        rest_of_it = [output async for output in stream]
        assert rest_of_it[-1].outputs[0].finish_reason == "cancelled"
        assert not await llm.abort(first.request_id)
        with pytest.raises(RequestError, match="give an int"):
            await llm.abort("x")  # type: ignore[arg-type]
        assert same(await other, want)

    run(model_dir, test)


def test_abort_ends_all_completions_of_a_prompt(model_dir: Path) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=1.0, seed=1, n=3)

    async def test(llm: AsyncLLM) -> None:
        stream = llm.generate(PROMPTS[0], params)
        first = await anext(stream)
        assert await llm.abort(first.request_id)
        *_, last = [output async for output in stream]
        assert [output.finish_reason for output in last.outputs] == ["cancelled"] * 3
        assert not await llm.abort(first.request_id)

    run(model_dir, test)


def test_a_completion_that_is_ended_is_cancelled_alone(model_dir: Path) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=1.0, seed=1, n=2)

    async def test(llm: AsyncLLM) -> None:
        stream = llm.generate(PROMPTS[0], params)
        await anext(stream)
        stream.end(0)
        while await stream.pieces():
            pass
        await rest(llm)
        assert [request.finish_reason for request in stream.requests] == ["cancelled", "length"]

    run(model_dir, test)


@pytest.mark.parametrize("how", ["drop", "close", "cancel", "break", "cancel before"])
def test_a_reader_that_goes_away_aborts_its_request(model_dir: Path, how: str) -> None:
    async def test(llm: AsyncLLM) -> None:
        async def consume() -> None:
            async for _ in llm.generate(PROMPTS[0], LONG):
                if how == "break":
                    return

        if how in ("cancel", "break", "cancel before"):
            task = asyncio.create_task(consume())
            await asyncio.sleep(0 if how == "cancel before" else 0.05)
            if how != "break":
                task.cancel()
            await asyncio.wait([task])
        else:
            stream = llm.generate(PROMPTS[0], LONG)
            await anext(stream)
            if how == "close":
                await stream.aclose()
            del stream
            gc.collect()
        await rest(llm)
        assert (await llm.stats()).generated_tokens < 200

    run(model_dir, test)


def test_the_queue_is_bounded(model_dir: Path) -> None:
    async def test(llm: AsyncLLM) -> None:
        streams = [llm.generate(PROMPTS[i % 4], LONG) for i in range(6)]
        for stream in streams:
            await stream.start()
        for late in (llm.generate("a", LONG), llm.chat([{"role": "user", "content": "a"}])):
            with pytest.raises(QueueFullError, match="6 requests run or wait; at most 6"):
                await anext(late)
        await streams[0].aclose()
        while llm.num_live == 6:
            await asyncio.sleep(0.01)
        several = llm.generate("a", SamplingParams(temperature=1.0, n=2))
        with pytest.raises(QueueFullError):
            await several.start()
        assert (await read(llm, "a", greedy(4))).finished
        with pytest.raises(RequestError, match=r"7 completions .* at most 6"):  # it would never fit
            await llm.generate("a", SamplingParams(temperature=1.0, n=7)).start()

    run(model_dir, test, queue=2)
    with pytest.raises(ConfigError, match="max_num_requests_in_queue=-1"):
        AsyncLLM(model_dir, max_num_requests_in_queue=-1)


def test_what_is_refused_leaves_others_alone(model_dir: Path, reference: LLM) -> None:
    want = reference.generate(PROMPTS[0], greedy(60))

    async def test(llm: AsyncLLM) -> None:
        other = asyncio.create_task(read(llm, PROMPTS[0], greedy(60)))
        refused: list[tuple[Any, Any]] = [
            ("", greedy()),
            ([1, 2, 97], greedy()),
            ([], greedy()),
            ("a" * MAX_SEQ_LEN, greedy()),
            (b"abc", greedy()),
            ("a", SamplingParams(logit_bias={500: 1.0})),
            ("a", greedy(bad_words=["abcdefghijklmnop"])),
        ]
        for prompt, params in refused:
            with pytest.raises(RequestError):
                await anext(llm.generate(prompt, params))
        with pytest.raises(RequestError, match=r"list of 2 text\(s\): give one text"):
            await anext(llm.generate(["a", "b"]))  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="give SamplingParams"):
            llm.generate("a", {"max_tokens": 3})  # type: ignore[arg-type]
        for empty in ({}, [], 0, ""):
            with pytest.raises(RequestError, match="give SamplingParams"):
                llm.generate("a", empty)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="a chat takes text"):
            await anext(llm.chat([{"role": "user", "content": [{"type": "image_url"}]}]))  # type: ignore[list-item]
        assert same(await other, want)

    def broken(request: Any) -> bool:
        if request.sampling_params.stop_strings:
            raise ZeroDivisionError
        return False

    async def test_stop_check(llm: AsyncLLM) -> None:
        llm.llm.executor.stop_check = broken
        bad, good = await asyncio.gather(
            read(llm, "abc", greedy(60, stop="zz")), read(llm, PROMPTS[0], greedy(60))
        )
        assert bad.outputs[0].finish_reason == "error" and "ZeroDivision" in str(bad.error)
        assert same(good, want)

    run(model_dir, test)
    run(model_dir, test_stop_check)


def test_a_template_that_takes_for_ever_is_stopped(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": "abc"}]

    async def test(llm: AsyncLLM) -> None:
        llm._templates.seconds = 0.2
        started = time.monotonic()
        with pytest.raises(RequestError, match=r"chat template took more than 0\.2 s"):
            await anext(llm.chat(messages, template_variables={"slow": True}))
        for _ in range(200):
            names = [thread.name for thread in threading.enumerate()]
            if "trtspec-template" not in names:
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError("the template still runs")
        assert time.monotonic() - started < 10
        assert (await llm.render_chat(messages)).startswith("[user]abc")
        with pytest.raises(RequestError, match="'chat_template' is no variable"):
            await llm.render_chat(messages, variables={"chat_template": "{{ 1 }}"})

    run(model_dir, test)


def test_after_a_step_that_fails_all_go_on(
    model_dir: Path, reference: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = reference.generate(PROMPTS, greedy(40))

    async def test(llm: AsyncLLM) -> None:
        runner, left = llm.llm.executor.runner, [5, 12]
        original = runner.run

        def fails_twice(plan: Any) -> Any:
            left[:] = [n - 1 for n in left]
            if 0 in left:
                raise MemoryError("no memory for once")
            return original(plan)

        monkeypatch.setattr(runner, "run", fails_twice)
        outputs = await asyncio.gather(*(read(llm, text, greedy(40)) for text in PROMPTS))
        assert all(same(a, b) for a, b in zip(outputs, wanted, strict=True))
        assert llm.failure is None and left[1] < 0

    run(model_dir, test)


def test_a_step_that_always_fails_at_one_place_ends_the_engine(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though each time the prompts are computed again before, which does not fail."""

    async def test(llm: AsyncLLM) -> None:
        runner, num_failed = llm.llm.executor.runner, 0
        original = runner.run

        def fails_there(plan: Any) -> Any:
            nonlocal num_failed
            if any(len(request.output_token_ids) == 5 for request in plan.batch.generations):
                num_failed += 1
                raise RuntimeError("always here")
            return original(plan)

        monkeypatch.setattr(runner, "run", fails_there)
        with pytest.raises(EngineError, match="always here"):
            await asyncio.wait_for(read(llm, "a", LONG), 30)
        assert num_failed == 2 and llm.failure is not None

    run(model_dir, test)


@pytest.mark.slow
@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, KeyboardInterrupt])
def test_what_a_stop_check_raises_ends_its_request_alone(
    model_dir: Path, reference: LLM, error: type[BaseException]
) -> None:
    (wanted,) = reference.generate(PROMPTS[:1], greedy(40))

    async def test(llm: AsyncLLM) -> None:
        def check(request: Any) -> bool:
            if request.sampling_params == LONG and len(request.output_token_ids) == 3:
                raise error
            return False

        llm.llm.executor.stop_check = check
        bad, good = await asyncio.gather(
            asyncio.wait_for(read(llm, "a", LONG), 30), read(llm, PROMPTS[0], greedy(40))
        )
        assert bad.outputs[0].finish_reason == "error" and error.__name__ in str(bad.error)
        assert same(good, wanted) and llm.failure is None

    run(model_dir, test)


def test_an_exception_of_another_kind_in_a_step_is_a_failed_step(
    model_dir: Path, reference: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wanted,) = reference.generate(PROMPTS[:1], greedy(40))

    async def test(llm: AsyncLLM) -> None:
        runner = llm.llm.executor.runner

        def fails(plan: Any) -> Any:
            monkeypatch.undo()
            raise SystemExit

        monkeypatch.setattr(runner, "run", fails)
        output = await asyncio.wait_for(read(llm, PROMPTS[0], greedy(40)), 30)
        assert same(output, wanted) and llm.failure is None

    run(model_dir, test)


def test_a_shutdown_is_an_engine_error_wherever_a_request_is(model_dir: Path) -> None:
    """Also where its prompt waits for its turn to be tokenised."""

    async def main(num_turns: int) -> list[Any]:
        llm = AsyncLLM(make_llm(model_dir))
        tasks = [asyncio.create_task(read(llm, "a b c", LONG)) for _ in range(6)]
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await llm.shutdown()
        return await asyncio.gather(*tasks, return_exceptions=True)

    for num_turns in range(8):
        for outcome in asyncio.run(main(num_turns)):
            if not isinstance(outcome, EngineError):
                assert outcome.outputs[0].finish_reason == "cancelled"


def test_a_second_shutdown_returns_with_the_first(model_dir: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(make_llm(model_dir))
        stream = llm.generate("a", LONG)
        await anext(stream)
        first = asyncio.create_task(llm.shutdown(timeout=30))
        await asyncio.sleep(0)
        await asyncio.gather(*(llm.shutdown() for _ in range(40)))  # more than a pool has threads
        assert not llm._engine._thread.is_alive()
        await first

    asyncio.run(main())


def test_an_engine_that_fails_says_why_to_all(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(llm: AsyncLLM) -> None:
        def fails(plan: Any) -> Any:
            raise RuntimeError("the device is gone")

        streams = [llm.generate(text, LONG) for text in PROMPTS]
        await anext(streams[0])
        monkeypatch.setattr(llm.llm.executor.runner, "run", fails)
        for stream in streams:
            with pytest.raises(EngineError, match="RuntimeError: the device is gone"):
                while True:
                    await anext(stream)
        assert llm.failure is not None
        with pytest.raises(EngineError, match="the device is gone"):
            await anext(llm.generate("a"))
        with pytest.raises(EngineError):
            await llm.stats()
        assert llm.num_live == 0

    run(model_dir, test)


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_cancellation_that_raises_is_a_failed_step(
    model_dir: Path, reference: LLM, monkeypatch: pytest.MonkeyPatch, is_dead: bool
) -> None:
    want = reference.generate(PROMPTS[0], greedy(80))

    async def test(llm: AsyncLLM) -> None:
        def fails(*_: Any) -> Any:
            if not is_dead:
                monkeypatch.undo()
            raise RuntimeError("the device is gone")

        first, second = llm.generate("a", LONG), llm.generate(PROMPTS[0], greedy(80))
        await asyncio.gather(anext(first), anext(second))
        if is_dead:
            monkeypatch.setattr(llm.llm.executor.runner, "run", fails)
        monkeypatch.setattr(llm.llm.executor, "cancel", fails)
        await first.aclose()
        if is_dead:
            with pytest.raises(EngineError, match="the device is gone"):
                _ = [output async for output in second]
            monkeypatch.undo()  # the shutdown cancels too
        else:
            *_, output = [output async for output in second]
            assert same(output, want) and llm.failure is None
            assert await llm.abort(first.request_id)

    run(model_dir, test)


def test_shutdown_finishes_or_aborts(model_dir: Path, reference: LLM) -> None:
    want = reference.generate(PROMPTS[0], LONG)

    async def main() -> None:
        for timeout, reason in ((30.0, "length"), (0.01, "cancelled"), (0.0, "cancelled")):
            llm = AsyncLLM(make_llm(model_dir))
            stream = llm.generate(PROMPTS[0], LONG)
            await anext(stream)
            await llm.shutdown(timeout)
            await llm.shutdown(timeout)
            outputs = [output async for output in stream]
            assert outputs[-1].outputs[0].finish_reason == reason
            assert reason != "length" or outputs[-1].outputs[0].text == want.outputs[0].text
            with pytest.raises(EngineError, match="shut down"):
                await anext(llm.generate("a"))
            with pytest.raises(EngineError, match="shut down"):
                await llm.reset_prefix_cache()
            with pytest.raises(EngineError, match="shut down"):
                await llm.__aenter__()
            with pytest.raises(TypeError, match="not a copy"):
                copy.copy(llm)

    asyncio.run(main())


def test_one_loop_after_another(model_dir: Path, reference: LLM) -> None:
    """The first loop ends in the middle of a request."""
    want = reference.generate(PROMPTS[0], greedy(20))

    async def leave(llm: AsyncLLM) -> None:
        await anext(llm.generate(PROMPTS[1], LONG))

    async def use(llm: AsyncLLM) -> None:
        assert same(await read(llm, PROMPTS[0], greedy(20)), want)
        await rest(llm)

    llm = AsyncLLM(make_llm(model_dir))
    asyncio.run(leave(llm))
    held = [feed.request for feed in llm._live]  # a reader that ends with its loop may not cancel
    asyncio.run(use(llm))
    assert len(held) <= 1 and all(request.is_finished for request in held)
    thread = llm._engine._thread
    del llm
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_stop_token_is_no_text(model_dir: Path, reference: LLM) -> None:
    """Whether it is drafted, streamed, or in the middle of a step."""
    whole = reference.generate(PROMPTS[0], greedy(24)).outputs[0]
    stop = whole.token_ids[-1]
    count = whole.token_ids.index(stop) + 1
    text = reference.tokenizer.decode(whole.token_ids[: count - 1])
    params = greedy(40, stop_token_ids=[stop])

    def check(output: RequestOutput) -> None:
        found = output.outputs[0]
        assert found.finish_reason == "stop" and found.token_ids == whole.token_ids[:count]
        assert found.text == text != whole.text

    check(reference.generate(PROMPTS[0], params))
    check(list(reference.generate_stream(PROMPTS[0], params))[-1])

    async def test(llm: AsyncLLM) -> None:
        outputs = [output async for output in llm.generate(PROMPTS[0], params)]
        check(outputs[-1])
        assert "".join(output.outputs[0].text_diff for output in outputs) == text

    run(model_dir, test)


def test_requests_of_a_closed_loop_end(model_dir: Path, reference: LLM) -> None:
    """Though their stream is still held."""
    want, streams = reference.generate(PROMPTS[0], greedy(20)), []

    async def leave(llm: AsyncLLM) -> None:
        streams.append(llm.generate(PROMPTS[1], LONG))
        await anext(streams[0])
        for _ in range(3):
            streams.append(llm.generate(PROMPTS[2], LONG))
            await anext(streams[-1])

    async def use(llm: AsyncLLM) -> None:
        assert same(await read(llm, PROMPTS[0], greedy(20)), want)
        await rest(llm)

    llm = AsyncLLM(make_llm(model_dir))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave(llm))
    held = [feed.request for feed in llm._live]
    loop.close()
    asyncio.run(use(llm))
    assert held and {request.finish_reason for request in held} == {"cancelled"}
    assert asyncio.run(llm.shutdown()) is None


def test_a_bell_of_a_closed_loop_holds_no_news_back() -> None:
    bell, loop = Bell(), asyncio.new_event_loop()
    task = loop.create_task(bell.wait())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    bell.ring()
    assert not task.done()


def test_a_task_that_is_cancelled_as_its_result_comes_ends() -> None:
    """Python 3.11's wait_for returned the result then, and a chat went on without its client."""
    limit = TimeLimit("It", 5.0)

    async def cancelled_after(turns: int) -> None:
        task = asyncio.create_task(limit.run(lambda: 1))
        await asyncio.sleep(0)
        time.sleep(0.02)  # meanwhile the thread ends, and its result waits for the loop
        for _ in range(turns):
            await asyncio.sleep(0)
        took = task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError) if took else outcome == 1

    for turns in range(6):
        asyncio.run(cancelled_after(turns))


def test_a_time_limit_in_one_loop_after_another() -> None:
    """Threads that outlast their loop are free again when they end."""
    limit, gate = TimeLimit("It", 5.0), threading.Event()

    async def many() -> list[int]:
        runs = (limit.run(lambda i=i: time.sleep(0.01) or i) for i in range(3 * MAX_THREADS))
        return await asyncio.gather(*runs)

    async def leave() -> None:
        tasks = [asyncio.create_task(limit.run(gate.wait)) for _ in range(MAX_THREADS)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in tasks)

    assert asyncio.run(many()) == asyncio.run(many()) == list(range(3 * MAX_THREADS))
    asyncio.run(leave())
    gate.set()
    assert asyncio.run(many()) == list(range(3 * MAX_THREADS))

    async def full() -> None:
        gate.clear()
        held = [asyncio.create_task(limit.run(gate.wait)) for _ in range(MAX_THREADS)]
        await asyncio.sleep(0.1)
        limit.seconds = 0.05
        with pytest.raises(EngineError, match="all threads for it are taken"):
            await limit.run(gate.wait)
        limit.seconds = 5.0
        gate.set()
        assert await asyncio.gather(*held) == [True] * MAX_THREADS

    asyncio.run(full())
    limit.seconds = 1.0

    async def client(number: int) -> None:
        for _ in range(4):  # others never overtake it: it waits for 64 runs of 10 ms at most
            await limit.run(lambda: time.sleep(0.01))

    async def busy() -> None:
        await asyncio.gather(*map(client, range(64)))

    asyncio.run(busy())
    assert limit._num_free == MAX_THREADS and not limit._waiting


@pytest.mark.slow
def test_many_requests_at_random(model_dir: Path, reference: LLM) -> None:
    """With few blocks, so that some are preempted, and tasks cancelled at any moment."""
    params = [greedy(5 + 9 * i % 60) for i in range(24)]
    prompts = [PROMPTS[i % 4] + "ab" * (i % 7) for i in range(24)]
    wanted = reference.generate(prompts, params)

    async def test(llm: AsyncLLM) -> None:
        async def one(i: int) -> RequestOutput:
            await asyncio.sleep(0.002 * (i % 5))
            return await read(llm, prompts[i], params[i])

        tasks = [asyncio.create_task(one(i)) for i in range(24)]
        await asyncio.sleep(0.02)
        for task in tasks[::3]:
            task.cancel()
            await asyncio.sleep(0.003)
        outputs = await asyncio.gather(*tasks, return_exceptions=True)
        for output, want in zip(outputs, wanted, strict=True):
            assert isinstance(output, asyncio.CancelledError) or same(output, want)  # type: ignore[arg-type]
        assert sum(isinstance(output, RequestOutput) for output in outputs) >= 16
        assert (await llm.stats()).num_preemptions > 0

    cache = KvCacheConfig(max_tokens=128, tokens_per_block=8)
    run(model_dir, test, kv_cache_config=cache)
