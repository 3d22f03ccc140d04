"""An engine from its first stream to its end: threads, streams nobody reads, shutting down."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_model_dir
from tiny_heads import eagle3_dir

from trtspec import LLM, CudaGraphConfig, EagleDecodingConfig, NGramDecodingConfig, SamplingParams
from trtspec.api.text_stream import TextStream
from trtspec.errors import RequestError
from trtspec.executor.cuda_graphs import graphs
from trtspec.executor.request import Request
from trtspec.state.kv_cache import KVGroupSpec


class Letters:
    """A tokenizer of one letter a token. Slow, so that another thread may come between."""

    chat_template = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) % 97 for letter in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target"))


@pytest.fixture
def llm(target_dir: Path) -> Iterator[LLM]:
    llm = LLM(
        target_dir, NGramDecodingConfig(max_draft_len=2), device="cpu", dtype="float32",
        max_batch_size=4, max_seq_len=64,
    )  # fmt: skip
    llm.tokenizer = Letters()
    yield llm


# -- threads -----------------------------------------------------------------------------------
def test_streams_in_many_threads_bring_every_token_and_the_reason(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of another thread right after the tokens are read, before text and reason are."""
    extend = TextStream.extend

    def slowly(self: TextStream, token_ids: Any) -> bool:
        stopped = extend(self, token_ids)
        stepper = threading.Thread(target=llm.advance)
        stepper.start()
        stepper.join(timeout=0.002)  # with the lock held it waits; without, it steps
        return stopped

    monkeypatch.setattr(TextStream, "extend", slowly)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    expected = llm.generate([[i, 1] for i in range(12)], params)
    got: dict[int, list[Any]] = {}

    def consume(first: int) -> None:
        for i in range(first, 12, 4):
            got[i] = list(llm.generate_stream([i, 1], params))

    threads = [threading.Thread(target=consume, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, whole in enumerate(expected):
        tokens = [t for s in got[i] for t in s.outputs[0].token_ids_diff]
        text = "".join(s.outputs[0].text_diff for s in got[i])
        last = got[i][-1].outputs[0]
        assert tokens == last.token_ids == whole.outputs[0].token_ids
        assert text == last.text == whole.outputs[0].text
        assert last.finish_reason == "length" and got[i][-1].finished


def test_a_stream_takes_one_prompt(llm: LLM) -> None:
    with pytest.raises(RequestError, match="one prompt, not a list of 2"):
        llm.generate_stream(["a", "b"])  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [tuple, np.array, torch.tensor])
def test_a_stream_takes_token_ids_as_generate_does(llm: LLM, make: Any) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    *_, last = llm.generate_stream(make([3, 1]), params)
    assert last.outputs[0].token_ids == llm.generate([3, 1], params).outputs[0].token_ids


def test_one_stream_read_by_two_threads_gives_each_token_once(llm: LLM) -> None:
    stream = llm.generate_stream([3, 1], SamplingParams(max_tokens=40, ignore_eos=True))
    snapshots: list[Any] = []
    threads = [threading.Thread(target=lambda: snapshots.extend(stream)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(s.outputs[0].token_ids_diff for s in snapshots)
    tokens = [token for s in snapshots for token in s.outputs[0].token_ids_diff]
    whole = llm.generate([3, 1], SamplingParams(max_tokens=40, ignore_eos=True))
    assert sorted(tokens) == sorted(whole.outputs[0].token_ids)


def test_text_that_an_interrupt_met_is_whole_afterwards() -> None:
    """At whichever call of the tokenizer it comes."""
    ids = list(range(12))
    for when in range(1, 20):
        letters, calls = Letters(), 0
        stream = TextStream(letters, ("zz",))

        def decode(given: list[int], **_: Any) -> str:
            nonlocal calls
            calls += 1
            if calls == when:  # noqa: B023
                raise KeyboardInterrupt
            return Letters().decode(given)

        letters.decode = decode  # type: ignore[method-assign]
        for count in range(1, len(ids) + 1):
            try:
                stream.extend(ids[:count])
            except KeyboardInterrupt:
                stream.extend(ids[:count])
        assert stream.final() == "abcdefghijkl"


# -- streams nobody reads ----------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "drop", "abort"])
def test_streams_that_end_before_any_step_are_not_held(llm: LLM, how: str) -> None:
    executor, params = llm.executor, SamplingParams(max_tokens=5)

    def open_and_leave(count: int) -> None:
        for _ in range(count):
            stream = llm.generate_stream([1] * 30, params)
            if how == "close":
                stream.close()
            elif how == "abort":
                llm.abort(stream.request_id)

    open_and_leave(20)
    gc.collect()
    tracemalloc.start()
    open_and_leave(20)
    before, _ = tracemalloc.get_traced_memory()
    open_and_leave(2000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 100_000
    assert len(executor.book.live) <= 2 and len(executor.book.finished) <= 1
    assert len(executor._cancel_later) <= 2


# -- shutting down -----------------------------------------------------------------------------
def _with_head(target_dir: Path, tmp_path: Path) -> LLM:
    config = EagleDecodingConfig(
        max_draft_len=2,
        speculative_model=str(eagle3_dir(tmp_path)),
        eagle3_layers_to_capture=[0, 1, 2],
    )
    return LLM(target_dir, config, device="cpu", dtype="float32", max_seq_len=64)


@contextmanager
def _collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_shutdown_gives_all_memory_back_without_the_collector(
    target_dir: Path, tmp_path: Path
) -> None:
    llm = _with_head(target_dir, tmp_path)
    llm.generate([[1, 2], [3, 4]], SamplingParams(max_tokens=4, temperature=1.0))
    executor = llm.executor
    held = {
        "target": executor.target.norm.weight,
        "head": next(executor.draft_model.parameters()),  # type: ignore[union-attr]
        "keys": executor.kv_cache.groups[0].k_cache,
        "slots": executor.state.next_tokens,
        "memory": executor.worker.draft_memory.logits,  # type: ignore[union-attr]
        "captured": executor.state.captured.buffer,  # type: ignore[union-attr]
    }
    refs = {name: weakref.ref(tensor) for name, tensor in held.items()}
    del held, executor
    with _collector_off():
        llm.shutdown()
        alive = [name for name, ref in refs.items() if ref() is not None]
    assert not alive


def test_an_engine_that_nobody_holds_is_gone_without_the_collector(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graphs too: destroyed by the collector, they could spoil another engine's capture. A
    stream that was left early holds nothing either."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))  # nothing is captured
    monkeypatch.setattr(graphs, "capture_stream", lambda device: None)
    with _collector_off():
        llm = _with_head(target_dir, tmp_path)
        executor = llm.executor
        executor.runner.graphs = graphs.CudaGraphs(
            executor.runner.step, executor.config, CudaGraphConfig(), executor.device
        )
        held = {
            "llm": llm,
            "executor": executor,
            "runner": executor.runner,
            "graphs": executor.graphs,
            "step": executor.runner.step,
            "scheduler": executor.scheduler,
            "cache": executor.kv_cache,
            "target": executor.target,
            "head": executor.draft_model,
        }
        refs = {name: weakref.ref(thing) for name, thing in held.items()}
        executor.runner.graphs.run = lambda plan: None  # type: ignore[method-assign]
        executor.runner.graphs.shape_for = lambda chunks: None  # type: ignore[method-assign]
        llm.generate([[1, 2], [3, 4]], SamplingParams(max_tokens=4, temperature=1.0))
        stream = llm.generate_stream([5, 6], SamplingParams(max_tokens=30, ignore_eos=True))
        next(stream)
        del llm, executor, held, stream
        alive = [name for name, ref in refs.items() if ref() is not None]
    assert not alive


def test_stop_strings_are_found_after_the_llm_is_gone(target_dir: Path) -> None:
    """Whoever keeps the executor alone keeps what it asks."""
    llm = LLM(target_dir, device="cpu", dtype="float32", max_seq_len=64)
    llm.tokenizer = Letters()
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    text = llm.generate([3, 1], params).outputs[0].text
    executor = llm.executor
    del llm
    stop = replace(params, stop=text[4])
    request = executor.enqueue([3, 1], stop)
    executor.run_until_done()
    assert request.finish_reason == "stop"
    assert len(request.output_token_ids) == text.index(text[4]) + 1


def test_a_stop_string_is_found_again_after_an_interrupt(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which came when the string was found, before the last tokens counted as read."""
    llm = LLM(target_dir, device="cpu", dtype="float32", max_seq_len=64)
    llm.tokenizer = Letters()
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    text = llm.generate([3, 1], params).outputs[0].text
    executor, add_tokens = llm.executor, llm.executor.book.add_tokens

    def add_and_raise(result: Any, *arguments: Any, **options: Any) -> int:
        if len(result.request.output_token_ids) < 1:
            return add_tokens(result, *arguments, **options)
        if result.request.append(result.tokens, executor._stop_checks) is None:
            return 1
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(executor.book, "add_tokens", add_and_raise)
    request = executor.enqueue([3, 1], replace(params, stop=text[4]))
    with pytest.raises(KeyboardInterrupt):
        executor.run_until_done()
    executor.run_until_done()
    assert request.finish_reason == "stop"
    assert len(request.output_token_ids) == text.index(text[4]) + 1


def test_a_stop_check_is_asked_of_all_beside_stop_strings(target_dir: Path) -> None:
    llm = LLM(target_dir, device="cpu", dtype="float32", max_seq_len=64)
    llm.tokenizer = Letters()
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    text = llm.generate([3, 1], params).outputs[0].text
    asked: list[int] = []

    def check(request: Any) -> bool:
        asked.append(request.request_id)
        return len(request.output_token_ids) == 7

    executor = llm.executor
    executor.stop_check = check
    stopped = executor.enqueue([3, 1], replace(params, stop=text[4]))
    checked = executor.enqueue([3, 1], params)
    executor.run_until_done()
    assert stopped.finish_reason == checked.finish_reason == "stop"
    assert len(stopped.output_token_ids) == text.index(text[4]) + 1 < 7
    assert len(checked.output_token_ids) == 7 == asked.count(checked.request_id)
    assert asked.count(stopped.request_id) == len(stopped.output_token_ids)


def test_after_shutdown_outputs_can_be_read_and_nothing_new_begins(llm: LLM) -> None:
    stream = llm.generate_stream([1, 2], SamplingParams(max_tokens=30, ignore_eos=True))
    first = next(stream)
    with llm:
        llm.generate([5, 6], SamplingParams(max_tokens=2))
    (last,) = list(stream)
    assert last.outputs[0].finish_reason == "cancelled"
    assert last.outputs[0].token_ids[: len(first.outputs[0].token_ids)] == (
        first.outputs[0].token_ids
    )
    for call in (llm.generate, llm.generate_stream, llm.executor.enqueue):
        with pytest.raises(RequestError, match="shut down"):
            call([1, 2])
    llm.shutdown()
    assert llm.executor.step() == [] or not llm.executor.has_work
    assert llm.stats().generated_tokens > 0 and not llm.abort(last.request_id)


def test_a_shutdown_that_was_interrupted_can_be_finished(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = llm.executor.kv_cache

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "release_memory", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.shutdown()
    monkeypatch.undo()
    llm.shutdown()
    assert not cache.groups and not hasattr(llm.executor, "target")


def test_a_request_that_an_interrupt_kept_from_the_queue_leaves_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(dict[int, Any]):
        def __setitem__(self, *_: Any) -> None:
            raise KeyboardInterrupt

    executor = llm.executor
    monkeypatch.setattr(executor.book, "live", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        llm.generate([1, 2])
    monkeypatch.undo()
    assert llm.generate([5, 6], SamplingParams(max_tokens=2)).outputs[0].token_ids
    executor.run_until_done()
    assert not executor.has_work and not executor.book.live
    executor.kv_cache.check_integrity()


def test_a_batch_whose_queueing_was_interrupted_does_not_run(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, add, added = llm.executor, llm.executor.add, []

    def interrupted(request: Request) -> None:
        if len(added) == 3:
            raise KeyboardInterrupt
        add(request)
        added.append(request)

    monkeypatch.setattr(executor, "add", interrupted)
    params = SamplingParams(max_tokens=9, temperature=1.0, n=2)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3, 4], [5, 6]], params)
    assert [request.finish_reason for request in added] == ["cancelled"] * 3
    assert not executor.has_work and not executor.book.live


def test_leaving_by_an_exception_shuts_down_too(llm: LLM) -> None:
    with pytest.raises(ZeroDivisionError), llm:
        raise ZeroDivisionError
    with pytest.raises(RequestError, match="shut down"):
        llm.generate([1, 2])


# -- memory ------------------------------------------------------------------------------------
def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_cache_takes_memory_when_it_is_used(dtype: torch.dtype) -> None:
    """All zeros, aligned as torch's own tensors, keys and values apart; 512 MiB of each."""
    num_blocks, page, cpu = 2**29 // (64 * dtype.itemsize) // 32, 32, torch.device("cpu")
    before = _resident_bytes()
    group = KVGroupSpec(2, 4, 8, dtype).allocate(num_blocks, page, cpu)
    assert group.k_cache.nbytes == group.v_cache.nbytes == 2**29
    assert _resident_bytes() - before < 2**26
    group.k_cache[1, -1, -1] = 1
    assert group.k_cache[:, -1].sum() == 4 * 8 and not group.v_cache[:, -1].any()
    for cache in (group.k_cache, group.v_cache):
        assert cache.dtype == dtype and cache.is_contiguous() and cache.data_ptr() % 64 == 0
        assert not cache[:, :8].any()


@pytest.mark.parametrize("method", ["step", "shutdown"])
def test_a_stop_check_cannot_step_or_shut_down_its_engine(llm: LLM, method: str) -> None:
    """It runs within a step. Its request fails, and says so."""

    def check(request: Any) -> bool:
        getattr(llm.executor, method)()
        return False

    llm.executor.stop_check = check
    output = llm.generate([3, 4], SamplingParams(max_tokens=4))
    assert "which cannot step or shut down meanwhile" in str(output.error)
    llm.executor.stop_check = None
    assert llm.generate([3, 4], SamplingParams(max_tokens=4)).error is None
