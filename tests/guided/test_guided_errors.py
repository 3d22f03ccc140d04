"""What goes wrong with a grammar ends its request alone."""

from __future__ import annotations

import functools
import gc
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from guided import EOS, VOCAB, of_choice, save_tokenizer, token_texts
from interrupts import RaiseAtLine
from matrix import config_of, cpu_engine, full, make_drafters
from tiny import tiny_model_dir

from trtspec import (
    LLM,
    EagleDecodingConfig,
    GuidedDecodingParams,
    SamplingParams,
    UserProvidedDecodingConfig,
)
from trtspec.errors import RequestError
from trtspec.executor import guide, guided_batch
from trtspec.guided.compiler import GrammarCompiler
from trtspec.guided.grammar import Grammar
from trtspec.serving.metrics import StepMetrics

PROMPT = [5, 17, 33]
DEEP = "(" * 50_000 + "a" + ")" * 50_000  # XGrammar overflows its stack, and the process is gone
DEEP_IN_JSON = r"\u0028" * 30_000 + "a" + ")" * 30_000
DEEP_IN_EBNF = r"\x28" * 40_000 + "a" + ")" * 40_000


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
        ({"json": functools.reduce(lambda s, _: {"items": s}, range(10**5), {})}, "is not JSON"),
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
        ({"structural_tag": "{"}, "structural_tag is not JSON"),
        ({"structural_tag": {"type": "nosuch"}}, "structural_tag cannot be compiled"),
        ({"regex": "a$b"}, '"." in its middle'),
        ({"regex": "(?=a)b"}, "would be passed over"),
        ({"regex": DEEP}, "regex has 50000 parentheses"),
        ({"json": {"type": "string", "pattern": DEEP}}, "json has 50000 parentheses"),
        ({"json": f'{{"patternProperties": {{"{DEEP_IN_JSON}": true}}}}'}, "has 30000 parentheses"),
        ({"grammar": f'root ::= Regex("{DEEP}")'}, "grammar has 50001 parentheses"),
        ({"grammar": f'root ::= Regex("{DEEP_IN_EBNF}")'}, "grammar has 40001 parentheses"),
        (
            {"structural_tag": {"type": "structural_tag", "format":
                                {"type": "grammar", "grammar": f'root ::= Regex("{DEEP}")'}}},
            "structural_tag has 50001 parentheses",
        ),
        ({"regex": r"[\^a]"}, r'"\[\\\^" \(write it elsewhere in the class\)'),
        (
            {"structural_tag": {"type": "structural_tag",
                                "format": {"type": "regex", "pattern": "a$b"}}},
            '"." in its middle',
        ),
    ],
)  # fmt: skip
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
    fill, victims = Grammar.fill, []

    def raising(self: Grammar, masks: Any, first: int, drafts: Any) -> None:
        if len(self.tokens) >= 4 and victims in ([], [self]):
            victims[:] = [self]
            raise ValueError("broken on purpose")
        fill(self, masks, first, drafts)

    monkeypatch.setattr(Grammar, "fill", raising)
    params = guided(max_tokens=20, regex="[cdef]{40}")
    broken, right = sorted(llm.generate([PROMPT] * 2, params), key=lambda o: o.error is None)
    assert broken.outputs[0].finish_reason == "error" and "broken on purpose" in broken.error
    assert right.error is None and len(right.outputs[0].token_ids) == 20
    assert set(broken.outputs[0].text) <= set("cdef"), "no token that was chosen freely"


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


def test_an_interrupt_does_not_start_a_request_without_its_grammar(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, compiled = threading.Event(), GrammarCompiler._compiled

    def slow(self: GrammarCompiler, params: GuidedDecodingParams) -> Any:
        go_on.wait(30)
        return compiled(self, params)

    def interrupt(request: Any) -> bool:
        executor.stop_check = None
        raise KeyboardInterrupt

    monkeypatch.setattr(GrammarCompiler, "_compiled", slow)
    executor = llm.executor
    held = executor.enqueue(PROMPT, guided(choice=["abc"]))
    free = executor.enqueue(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
    executor.stop_check = interrupt
    with pytest.raises(KeyboardInterrupt):
        executor.run_until_done()
    while not free.is_finished:
        executor.step()
    assert not held.is_finished and not held.output_token_ids
    go_on.set()
    executor.run_until_done()
    assert held.finish_reason == "stop"
    assert llm.tokenizer.decode(held.output_token_ids, skip_special_tokens=True) == "abc"


def test_each_grammar_of_a_step_has_the_whole_time(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = Grammar.fill

    def slow(self: Grammar, *arguments: Any) -> Any:
        time.sleep(0.1)
        return fill(self, *arguments)

    monkeypatch.setattr(Grammar, "fill", slow)
    monkeypatch.setattr(guided_batch, "MASK_SECONDS", 0.25)
    outputs = llm.generate([PROMPT] * 4, guided(choice=["ab"]))
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop"] * 4


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


@pytest.mark.slow
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


@pytest.mark.parametrize("eos", [EOS, None])
def test_a_grammar_that_ends_at_the_token_limit_stops(tmp_path: Path, eos: int | None) -> None:
    """It is complete; one token fewer cuts it. Without an end token the last one completes it."""
    path = tiny_model_dir(tmp_path, eos_token_id=eos)
    save_tokenizer(path)
    count = 4 if eos is None else 5
    params = [
        SamplingParams(
            max_tokens=limit,
            ignore_eos=True,
            guided_decoding=GuidedDecodingParams(regex="[cdef]{4}"),
        )
        for limit in (count, count - 1)
    ]
    for config in (None, config_of("ngram", 3, make_drafters(tmp_path))):
        with cpu_engine(path, config) as llm:
            whole, cut = (output.outputs[0] for output in llm.generate([PROMPT] * 2, params))
        assert whole.finish_reason == "stop" and len(whole.token_ids) == count
        assert cut.finish_reason == "length" and len(cut.token_ids) == count - 1


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=8, logprobs=2, guided_decoding=GuidedDecodingParams(regex="[cdef]{8}")
    )
    entries = llm.generate(PROMPT, params).outputs[0].logprobs
    ranks = [next(iter(entry.values())).rank for entry in entries]
    assert max(ranks) > 1, "a masked distribution would have rank 1 alone"


class Proposes:
    """A drafter of the same tokens at every step."""

    def __init__(self, *tokens: int):
        self.tokens = list(tokens)

    def draft(self, request_id: int, token_ids: Any, max_draft_len: int) -> list[int]:
        return self.tokens


def proposing(*tokens: int) -> UserProvidedDecodingConfig:
    return UserProvidedDecodingConfig(
        max_draft_len=3, drafter=Proposes(*tokens), acceptance="strict"
    )


def test_nothing_follows_the_end_that_a_drafter_proposed(target: Path) -> None:
    """The row after it chooses any token, which is no output."""
    params = [
        SamplingParams(
            max_tokens=40,
            ignore_eos=True,
            temperature=4.0,
            seed=seed,
            guided_decoding=GuidedDecodingParams(regex="[cdef]{2,40}"),
            logprobs=1,
        )
        for seed in range(20)
    ]
    outputs = []
    for config in (
        None,
        proposing(EOS),
    ):
        with cpu_engine(target, config) as llm:
            done = [output.outputs[0] for output in llm.generate([PROMPT] * 20, params)]
            outputs.append([one.token_ids for one in done])
            assert all(len(one.logprobs) == len(one.token_ids) for one in done)
    assert outputs[0] == outputs[1]


def test_a_draft_that_ends_a_grammar_is_counted(target: Path) -> None:
    """It was taken for the bonus, which the step has behind it."""
    texts = token_texts()
    params = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["eab"]))
    with cpu_engine(target, proposing(texts.index("a"), texts.index("b"), EOS)) as llm:
        llm.executor.observer = counts = StepMetrics(llm.max_draft_len)
        request = llm.executor.enqueue(PROMPT, params)
        request.sources = []
        llm.executor.run_until_done()
        stats = llm.stats()
    assert request.output_token_ids[-1] == EOS and request.sources == [0, 1, 2, 3]
    assert list(counts.accepted_lens) == [0, 0, 0, 1] and counts.drafted_output_tokens == 3
    assert request.accepted_lens == {3: 1} and stats.acceptance_per_position == [1.0, 1.0, 1.0]


def test_drafts_behind_a_grammars_end_are_not_counted(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are accepted, whatever they are."""
    monkeypatch.setenv("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "3")
    texts = token_texts()
    params = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["ea"]))
    with cpu_engine(target, proposing(texts.index("a"), EOS, EOS)) as llm:
        llm.executor.observer = counts = StepMetrics(llm.max_draft_len)
        request = llm.executor.enqueue(PROMPT, params)
        llm.executor.run_until_done()
        stats = llm.stats()
    assert request.output_token_ids == [texts.index("e"), texts.index("a"), EOS]
    assert list(counts.accepted_lens) == [0, 0, 1, 0] and request.accepted_lens == {2: 1}
    assert stats.acceptance_per_position == [1.0, 1.0, 0.0]


def test_a_dead_end_behind_a_rejected_draft_is_no_error(target: Path) -> None:
    """After "ec" the grammar wants "d", which is banned; the target chooses "ea"."""
    texts = token_texts()
    params = SamplingParams(
        guided_decoding=GuidedDecodingParams(choice=["eab", "ecd"]),
        bad_token_ids=[texts.index("d")],
        logit_bias={texts.index("a"): 50.0},
    )
    for config in (
        None,
        proposing(texts.index("c")),
    ):
        with cpu_engine(target, config) as llm:
            output = llm.generate(PROMPT, params)
        assert output.error is None and output.outputs[0].text == "eab"


def test_a_dead_end_behind_an_accepted_draft_is_plain_decodings(target: Path) -> None:
    """After three letters the grammar wants a character that no token has."""
    grammar = GuidedDecodingParams(regex="[abcdef]{3}~")
    for most, reason in ((3, "length"), (8, "error")):
        params = SamplingParams(max_tokens=most, ignore_eos=True, guided_decoding=grammar)
        with cpu_engine(target, None) as llm:
            wanted = llm.generate(PROMPT, params)
        tokens = wanted.outputs[0].token_ids
        assert len(tokens) == 3 and wanted.outputs[0].finish_reason == reason
        with cpu_engine(target, proposing(*tokens[1:], tokens[0])) as llm:
            output = llm.generate(PROMPT, params)
        assert output.outputs[0].token_ids == tokens
        assert output.outputs[0].finish_reason == reason


@pytest.mark.slow
def test_an_interrupt_anywhere_in_a_grammar(llm: LLM) -> None:
    """At lines of `guided/grammar.py`, every one with --full: the output is the same afterwards."""
    params = guided(max_tokens=14, regex="([cdef]|ab|xy){40}")
    executor = llm.executor
    expected = executor.enqueue(PROMPT, params)
    executor.run_until_done()
    with RaiseAtLine(None, KeyboardInterrupt) as trace:
        executor.enqueue(PROMPT, params)
        executor.run_until_done()
    lines = [place for place in trace.seen if place[0].endswith("grammar.py")]
    assert len(lines) > 25
    for place in lines[:: 1 if full() else 3]:
        request = executor.enqueue(PROMPT, params)
        with suppress(KeyboardInterrupt), RaiseAtLine(place, KeyboardInterrupt):
            executor.run_until_done()
        executor.run_until_done()
        assert request.error is None, (place, request.error)
        assert request.output_token_ids == expected.output_token_ids, place


def test_a_slow_grammar_ends_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Grammar.fill

    def slow(self: Grammar, masks: Any, first: int, drafts: Any) -> None:
        time.sleep(0.1 if len(self.tokens) > 3 else 0)
        fill(self, masks, first, drafts)

    monkeypatch.setattr(guided_batch, "MASK_SECONDS", 0.05)
    monkeypatch.setattr(Grammar, "fill", slow)
    output = llm.generate(PROMPT, guided(max_tokens=20, regex="[cdef]{40}"))
    assert output.outputs[0].finish_reason == "error" and "masks of a step" in output.error


def test_a_start_that_fails_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: GrammarCompiler) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(GrammarCompiler, "add_thread", failing)
    with pytest.raises(RuntimeError, match="new thread"):
        llm.generate(PROMPT, guided(choice=["abc"]))
    assert not llm.executor.has_work


def test_grammars_that_wait_for_a_thread_have_time(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is that of compiling, not of waiting; cancelled ones are not compiled."""
    compiled, started = GrammarCompiler._compiled, []

    def slow(self: GrammarCompiler, params: GuidedDecodingParams) -> Any:
        started.append(params)
        time.sleep(0.15)
        return compiled(self, params)

    monkeypatch.setattr(guide, "COMPILE_SECONDS", 0.5)
    monkeypatch.setattr(GrammarCompiler, "_compiled", slow)
    executor = llm.executor
    requests = [executor.enqueue(PROMPT, guided(choice=["abc"])) for _ in range(12)]
    for request in requests[8:]:
        executor.cancel(request.request_id)
    executor.run_until_done()
    assert [request.finish_reason for request in requests[:8]] == ["stop"] * 8
    assert len(started) < 12 and not executor.guide.compiling


def test_an_engine_is_gone_after_a_grammar(target: Path, config: EagleDecodingConfig) -> None:
    gc.collect()
    gc.disable()
    try:
        llm = cpu_engine(target, config)
        llm.generate(PROMPT, guided(regex="[cdef]{8}"))
        ref = weakref.ref(llm.executor)
        del llm
        assert ref() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("marker", [[VOCAB], [EOS], [10, EOS]])
def test_a_marker_that_cannot_come_is_refused(llm: LLM, marker: list[int]) -> None:
    with pytest.raises(RequestError, match=f"reasoning_end has token {marker[-1]}"):
        llm.generate(PROMPT, guided(choice=["abc"], reasoning_end=marker))


def test_a_stop_token_that_is_text_ends_the_output(llm: LLM) -> None:
    texts = token_texts()
    params = SamplingParams(
        max_tokens=30,
        stop_token_ids=[texts.index("d")],
        logit_bias={texts.index("d"): 50.0},
        guided_decoding=GuidedDecodingParams(regex="c[cdef]{10}"),
    )
    output = llm.generate(PROMPT, params).outputs[0]
    assert output.text == "cd" and output.finish_reason == "stop"
