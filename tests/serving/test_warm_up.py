"""Warming up runs every kind of request, says what goes wrong, and leaves nothing behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from served import PROMPTS, greedy, is_at_rest, make_llm, served_model_dir
from tiny_heads import eagle3_dir

from trtspec import LLM, EagleDecodingConfig, RequestError
from trtspec.cli import main
from trtspec.executor import drafters
from trtspec.executor.draft_lens.auto_draft_len import AutoDraftLen
from trtspec.report.step_times import measure_step_ms, step_seconds_without_drafts
from trtspec.serving import warm_up as module
from trtspec.serving.metrics import StepMetrics
from trtspec.serving.warm_up import Shapes, kinds_of, shapes_of, warm_up

SHAPES = Shapes([8, 16, 40], [1, 2, 4])  # as on a GPU


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model_dir(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eagle3_dir(tmp_path_factory.mktemp("head"))


@pytest.fixture
def llm(model_dir: Path, head: Path) -> Iterator[LLM]:
    config = EagleDecodingConfig(
        max_draft_len=2, speculative_model=head, eagle3_layers_to_capture=[0, 1, 2],
        draft_len_schedule="auto",
    )  # fmt: skip
    with make_llm(model_dir, speculative_config=config) as llm:
        yield llm


@pytest.mark.slow
def test_nothing_is_left(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """Of statistics, the prefix cache, and of how well a head drafts that was given noise."""
    executor = llm.executor
    fresh = executor.stats()
    assert executor.dead_drafter_watch is not None
    executor.dead_drafter_watch.window = 4
    seen: list[Any] = []
    make = executor.admission.make_request

    def made(prompt: Any, params: Any, salt: Any = None) -> Any:
        seen.append(make(prompt, params, salt))
        return seen[-1]

    object.__setattr__(executor.admission, "make_request", made)
    with caplog.at_level(logging.WARNING):
        warm_up(llm, shapes=SHAPES)
    assert executor.stats() == fresh and is_at_rest(llm) and not caplog.records
    assert {len(r.prompt_token_ids) for r in seen} == {8, 9, 16, 40}
    long = [r for r in seen if len(r.prompt_token_ids) == 40]
    assert any(r.sampling_params.prompt_logprobs is not None for r in long)
    params = {kind.name: kind.params for kind in kinds_of(llm)}
    assert list(params) == [
        "greedy", "sampled", "filtered", "penalised", "logprobs", "prompt logprobs", "guided",
    ]  # fmt: skip
    for wanted in params.values():
        like = [
            r for r in seen if all(getattr(r.sampling_params, k) == v for k, v in wanted.items())
        ]
        assert like and all(r.finish_reason == "cancelled" and r.num_steps for r in like)
    metrics = StepMetrics(llm.max_draft_len)
    executor.observer = metrics
    again = executor.enqueue(seen[0].prompt_token_ids, greedy(4))
    executor.run_until_done()
    assert again.cached_tokens == metrics.prefix_hits == 0
    assert metrics.generated_tokens == 4 and dict(metrics.finished) == {"length": 1}


def test_what_was_seen_of_drafts_is_forgotten(llm: LLM) -> None:
    executor = llm.executor
    executor.runtime_draft_len = 1
    before, watch = executor._draft_len, executor.dead_drafter_watch
    assert isinstance(before, AutoDraftLen) and watch is not None
    warm_up(llm, shapes=SHAPES)
    after = executor._draft_len
    assert isinstance(after, AutoDraftLen) and after is not before and after._steps == 0
    assert executor.runtime_draft_len == 1
    assert executor.dead_drafter_watch is not None and executor.dead_drafter_watch is not watch


@pytest.mark.slow
def test_lengths_that_choose_themselves_go_on_doing_so(
    model_dir: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default they give way to a `runtime_draft_len`. What a server does before its first
    request must not look like one."""
    monkeypatch.setattr(drafters, "may_choose", lambda *where: True)
    monkeypatch.setattr(AutoDraftLen, "_choose", lambda self, batch, most: 1)
    config = EagleDecodingConfig(speculative_model=head, eagle3_layers_to_capture=[0, 1, 2])
    with make_llm(model_dir, speculative_config=config) as llm:
        executor = llm.executor
        warm_up(llm, shapes=SHAPES)
        assert step_seconds_without_drafts(llm) is not None
        with make_llm(model_dir, speculative_config=None) as plain:
            assert set(measure_step_ms(plain, llm, [0, 3], [[5, 6]], steps=4)) == {0, 3}
        llm.generate([5, 6], greedy())
        assert executor.runtime_draft_len == executor.max_draft_len == 4
        assert executor.last_draft_len == 1
        executor.runtime_draft_len = 3
        warm_up(llm, shapes=SHAPES)
        llm.generate([5, 6], greedy())
        assert executor.last_draft_len == 3


@pytest.mark.slow
def test_outputs_are_those_of_an_engine_that_is_not_warm(llm: LLM, model_dir: Path) -> None:
    warm_up(llm, shapes=SHAPES)
    params = [greedy(), greedy(seed=3, temperature=1.0), greedy(logprobs=2), greedy(top_k=3)]
    with make_llm(model_dir, speculative_config=None) as plain:
        for one in (params[0], params[2], params[3]):
            wanted = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, one)]
            assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, one)] == wanted


def test_on_a_cpu_one_request_is_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    enqueue = llm.executor.enqueue
    monkeypatch.setattr(llm.executor, "enqueue", lambda *a: (made.append(a), enqueue(*a))[1])
    said: list[str] = []
    warm_up(llm, said.append)
    assert len(made) == 1 and said == ["warming up: greedy requests"]


class Gpu:
    type = "cuda"


def gpu_shapes(llm: LLM, room: int) -> Shapes:
    llm.executor.device, device = Gpu(), llm.executor.device
    try:
        return shapes_of(llm.executor, room)
    finally:
        llm.executor.device = device


@pytest.mark.slow
@pytest.mark.parametrize("max_seq_len", [4, 20, 60])
def test_short_sequences(model_dir: Path, max_seq_len: int) -> None:
    with make_llm(model_dir, max_seq_len=max_seq_len) as llm:
        shapes = gpu_shapes(llm, room=30)
        assert shapes.batches == [1, 2, 4] and all(0 < n < max_seq_len for n in shapes.prompts)
        warm_up(llm, shapes=shapes)
        assert is_at_rest(llm) and llm.stats().generated_tokens == 0


def test_prompts_of_all_lengths_that_choose_kernels(llm: LLM) -> None:
    assert list(gpu_shapes(llm, 56).prompts) == [8, 16, 32, 64, 128, 200]


@pytest.mark.slow
def test_long_prompts_run_beside_others(
    llm: LLM, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after them: what a step has room for is asked of it."""
    mixed, run = [], llm.executor.runner.run

    def noted(plan: Any) -> Any:
        chunks = plan.batch.contexts
        mixed.append((len(plan.batch.generations), sum(c.end - c.start for c in chunks)))
        return run(plan)

    monkeypatch.setattr(llm.executor.runner, "run", noted)
    most = llm.executor.config.max_num_tokens
    warm_up(llm, shapes=Shapes([8, most - 4], [1, 4]))
    assert {(0, most - 4), (1, most - 4), (3, most - 9)} <= set(mixed)  # K = 2


@pytest.mark.slow
def test_prompts_of_a_full_batch_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and beside others, of a number of tokens that 16 divides, and of one that it does not:
    the first clients' prompts are such a pass, and no graph holds it."""
    passes, run = set(), llm.executor.runner.run

    def noted(plan: Any) -> Any:
        chunks = plan.batch.contexts
        count = sum(c.end - c.start for c in chunks)
        passes.add((len(plan.batch.generations), len(chunks), count))
        return run(plan)

    monkeypatch.setattr(llm.executor.runner, "run", noted)
    warm_up(llm, shapes=Shapes([8, 140], [1, 2, 4]))
    wanted = {(0, 4, 128), (0, 4, 129), (0, 3, 96), (0, 3, 97), (2, 2, 64), (2, 2, 65), (1, 1, 33)}
    assert wanted <= passes


def test_an_error_is_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the engine can go on."""
    step = llm.executor._launch_and_read

    def fails() -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(llm.executor, "_launch_and_read", fails)
    with pytest.raises(RuntimeError, match="no such kernel"):
        warm_up(llm, shapes=SHAPES)
    monkeypatch.setattr(llm.executor, "_launch_and_read", step)
    run = llm.executor.runner.run

    def poisoned(plan: Any) -> Any:
        launch = run(plan)
        bad = torch.ones_like(launch.outputs.bad_requests)
        return replace(launch, outputs=replace(launch.outputs, bad_requests=bad))

    monkeypatch.setattr(llm.executor.runner, "run", poisoned)
    with pytest.raises(RequestError, match=r"greedy request failed.*NaN.*--no-warm-up"):
        warm_up(llm, shapes=SHAPES)
    monkeypatch.undo()
    assert is_at_rest(llm) and llm.stats().generated_tokens == 0
    assert len(llm.generate("abc", greedy(5)).outputs[0].token_ids) == 5


@pytest.mark.slow
def test_grammars_that_cannot_be_had(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where they are refused they are left out. Where one fails, the others are served."""
    compiler = llm.executor.guide.compiler

    def fails(*_: Any) -> Any:
        raise ValueError("no such vocabulary")

    monkeypatch.setattr(compiler, "_grammar", fails)
    warm_up(llm, shapes=SHAPES)
    assert "guided request failed" in caplog.text and "no such vocabulary" in caplog.text
    assert is_at_rest(llm)
    llm.executor.set_tokenizer(None)
    assert [kind.name for kind in kinds_of(llm)][-1] == "prompt logprobs"


@pytest.mark.parametrize("options", [[], ["--no-warm-up"]])
def test_the_command_warms_up(
    model_dir: Path,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before it takes requests. If that fails it ends, and says why."""
    order: list[str] = []

    def fails(llm: LLM, *_: Any) -> None:
        order.append("warm up")
        raise RequestError("A greedy request failed.")

    monkeypatch.setattr(module, "warm_up", fails)
    monkeypatch.setattr("trtspec.serving.processes.serve", lambda *_: order.append("serve"))
    words = ["serve", str(model_dir), "--port", "0", "--device", "cpu", "--dtype", "float32"]
    code = main([*words, *options])
    assert order == (["serve"] if options else ["warm up"])
    assert code == (0 if options else 1)
    assert ("A greedy request failed." in capsys.readouterr().err) == (not options)
