"""What goes wrong with a grammar ends its request alone."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guided import of_choice, save_tokenizer
from matrix import config_of, cpu_engine, make_drafters
from tiny import tiny_model_dir

from trtspec import LLM, EagleDecodingConfig, GuidedDecodingParams, SamplingParams
from trtspec.errors import RequestError
from trtspec.executor import guide
from trtspec.guided.compiler import GrammarCompiler
from trtspec.guided.grammar import Grammar

PROMPT = [5, 17, 33]


def guided(max_tokens: int = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, guided_decoding=GuidedDecodingParams(**fields))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_model_dir(tmp_path_factory.mktemp("models"), num_hidden_layers=6)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def config(target: Path) -> EagleDecodingConfig:
    config = config_of("eagle3", 3, make_drafters(target.parent))
    assert isinstance(config, EagleDecodingConfig)
    return config


@pytest.fixture
def llm(target: Path, config: EagleDecodingConfig) -> Iterator[LLM]:
    with cpu_engine(target, config) as llm:
        yield llm


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has nothing: give exactly one"),
        ({"regex": "a", "choice": ["a"]}, "has regex, choice: give exactly one"),
        ({"regex": 3}, "regex=3 is not allowed"),
        ({"choice": "ab"}, "choice='ab' is not allowed"),
        ({"choice": ["a", ""]}, "none empty"),
        ({"json": {"a": {1, 2}}}, "json is not JSON"),
        ({"regex": "a" * 2**19}, "at most 262144 bytes"),
        ({"regex": "a", "reasoning_end": []}, "reasoning_end=() is not allowed|reasoning_end="),
        ({"regex": "a", "reasoning_end": [1] * 9}, "1 … 8 token ids"),
    ],
)
def test_malformed_parameters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        GuidedDecodingParams(**fields)


def test_min_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens=2 with guided_decoding"):
        SamplingParams(min_tokens=2, guided_decoding=GuidedDecodingParams(regex="a"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "(("}, "regex cannot be compiled .*parenthesis"),
        ({"grammar": 'root := "a"'}, "grammar cannot be compiled"),
        ({"grammar": "root ::= root"}, "allows no output at all"),
        ({"json": "{"}, "json is not JSON"),
        ({"json": {"type": "nosuch"}}, "json cannot be compiled .*nosuch"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "json cannot be compiled"),
        ({"json": {"not": {"type": "integer"}}}, '"not" at #'),
        ({"structural_tag": "{"}, "structural_tag cannot be compiled"),
    ],
)
def test_a_wrong_grammar_ends_its_request_alone(
    llm: LLM, fields: dict[str, Any], message: str
) -> None:
    good = of_choice("abc", "xyz")
    params = [SamplingParams(max_tokens=6), guided(**fields), guided(choice=good.params.choice)]
    free, wrong, right = llm.generate([PROMPT] * 3, params)
    assert wrong.outputs[0].finish_reason == "error" and re.search(message, wrong.error)
    assert free.error is None and len(free.outputs[0].token_ids) <= 6
    assert right.outputs[0].finish_reason == "stop" and right.outputs[0].text in ("abc", "xyz")
    assert not llm.executor.has_work


def test_a_grammar_that_raises_ends_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = Grammar.fill

    def raising(self: Grammar, masks: Any, first: int, drafts: Any) -> None:
        if len(self.tokens) >= 4 and self.end_ids == frozenset({2, 90}):
            raise ValueError("broken on purpose")
        fill(self, masks, first, drafts)

    monkeypatch.setattr(Grammar, "fill", raising)
    marked = GuidedDecodingParams(regex="[cdef]{40}")
    params = [
        SamplingParams(max_tokens=20, guided_decoding=marked, stop_token_ids=[90]),
        SamplingParams(max_tokens=20, guided_decoding=marked),
    ]
    broken, right = llm.generate([PROMPT] * 2, params)
    assert broken.outputs[0].finish_reason == "error" and "broken on purpose" in broken.error
    assert right.error is None and len(right.outputs[0].token_ids) == 20


def test_contradicting_parameters_end_the_request(llm: LLM) -> None:
    banned = SamplingParams(
        guided_decoding=GuidedDecodingParams(choice=["c"]), bad_words=["c"], max_tokens=4
    )
    output = llm.generate(PROMPT, banned)
    assert output.outputs[0].finish_reason == "error" and "bans tokens" in output.error


def test_compiling_holds_no_other_request_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, compiled = threading.Event(), GrammarCompiler._compiled

    def slow(self: GrammarCompiler, params: GuidedDecodingParams) -> Any:
        go_on.wait(30)
        return compiled(self, params)

    monkeypatch.setattr(GrammarCompiler, "_compiled", slow)
    executor = llm.executor
    held = executor.enqueue(PROMPT, guided(choice=["abc"]))
    cancelled = executor.enqueue(PROMPT, guided(choice=["abc"]))
    free = executor.enqueue(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
    while not free.is_finished:
        executor.step()
    assert not held.is_finished and not held.output_token_ids
    assert executor.cancel(cancelled.request_id)
    go_on.set()
    executor.run_until_done()
    assert held.finish_reason == "stop" and cancelled.finish_reason == "cancelled"
    assert not executor.book.held and not executor.guide.compiling


def test_a_grammar_that_compiles_too_long_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(guide, "COMPILE_SECONDS", 0.2)
    monkeypatch.setattr(GrammarCompiler, "_compiled", lambda self, params: go_on.wait(30))
    output = llm.generate(PROMPT, guided(choice=["abc"]))
    go_on.set()
    assert output.outputs[0].finish_reason == "error" and "to compile" in output.error


def test_without_a_tokenizer_or_xgrammar(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = llm.tokenizer
    llm.tokenizer = None
    with pytest.raises(RequestError, match="needs the model's tokenizer"):
        llm.generate(PROMPT, guided(choice=["abc"]))
    llm.tokenizer = tokenizer
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestError, match=r"pip install 'trtspec\[guided\]'"):
        llm.generate(PROMPT, guided(choice=["abc"]))
    assert not llm.executor.has_work


def test_forced_acceptance_ends_no_request(
    target: Path, config: EagleDecodingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "2")
    with cpu_engine(target, config) as llm:
        output = llm.generate(PROMPT, guided(max_tokens=20, regex="[cdef]{40}"))
    assert output.error is None and len(output.outputs[0].token_ids) == 20


def test_after_an_exception_outputs_are_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars go back to the tokens that were read."""
    params = guided(max_tokens=20, regex="([cdef]|ab|xy){40}")
    expected = llm.generate(PROMPT, params).outputs[0].token_ids
    executor = llm.executor
    for fails_at in range(1, 7):
        request, reads, read = executor.enqueue(PROMPT, params), 0, executor.reader.read

        def failing(launched: Any, read: Any = read, fails_at: int = fails_at) -> Any:
            nonlocal reads
            reads += 1
            if reads == fails_at:
                raise KeyboardInterrupt
            return read(launched)

        monkeypatch.setattr(executor.reader, "read", failing)
        with pytest.raises(KeyboardInterrupt):
            executor.run_until_done()
        monkeypatch.setattr(executor.reader, "read", read)
        executor.run_until_done()
        assert request.output_token_ids == expected


def test_end_tokens_come_only_where_the_grammar_ends(llm: LLM) -> None:
    """Also if the request ignores them: its grammar ends it."""
    params = SamplingParams(
        max_tokens=20, ignore_eos=True, guided_decoding=GuidedDecodingParams(choice=["abc", "xyz"])
    )
    output = llm.generate(PROMPT, params)
    assert output.outputs[0].finish_reason == "stop" and output.outputs[0].text in ("abc", "xyz")


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=8, logprobs=2, guided_decoding=GuidedDecodingParams(regex="[cdef]{8}")
    )
    entries = llm.generate(PROMPT, params).outputs[0].logprobs
    ranks = [next(iter(entry.values())).rank for entry in entries]
    assert max(ranks) > 1, "a masked distribution would have rank 1 alone"
