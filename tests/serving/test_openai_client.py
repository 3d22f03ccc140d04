"""The `openai` package against a server: its answers are those of `LLM`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from guided import VOCAB, token_texts
from served import PROMPTS, Served, greedy, make_llm, served_model_dir
from tokenizers import AddedToken
from transformers import AutoTokenizer

from trtspec import LLM, SamplingParams
from trtspec.api.outputs import Logprob
from trtspec.serving import chat
from trtspec.serving.completions import LogprobsWriter
from trtspec.serving.reasoning import ReasoningMarkers
from trtspec.serving.sampling import make_params
from trtspec.serving.token_names import TokenNames
from trtspec.serving.tool_calls import Content, ToolCallDelta
from trtspec.serving.tool_formats import HERMES

MESSAGES: Any = [{"role": "user", "content": "abc 12"}]
EXTRA = {"ignore_eos": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model_dir(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Iterator[LLM]:
    with make_llm(model_dir) as llm:
        yield llm


@pytest.fixture(scope="module")
def served(model_dir: Path) -> Iterator[Served]:
    served = Served(make_llm(model_dir))
    yield served
    served.wait_for_rest()
    served.close()


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    defaults = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "extra_body": EXTRA}
    return client.chat.completions.create(**({"max_tokens": 30} | defaults | fields))


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    defaults = {"model": "tiny", "prompt": PROMPTS[0], "temperature": 0, "extra_body": EXTRA}
    return client.completions.create(**({"max_tokens": 30} | defaults | fields))


def test_chat(client: openai.OpenAI, reference: LLM) -> None:
    want = reference.chat(MESSAGES, greedy(30))
    for token_field in ("max_tokens", "max_completion_tokens"):
        answer = ask(client, **{"max_tokens": openai.NOT_GIVEN} | {token_field: 30})
        assert answer.choices[0].message.content == want.outputs[0].text
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "length"
    assert answer.object == "chat.completion" and answer.model == "tiny"
    usage = answer.usage
    assert usage.prompt_tokens == len(want.prompt_token_ids)
    assert (usage.completion_tokens, usage.total_tokens) == (30, usage.prompt_tokens + 30)
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    found = answer.metrics["speculative_decoding"]
    stats = want.spec_stats
    assert found["mean_acceptance_length"] == pytest.approx(stats.acceptance_length)
    assert found["acceptance_histogram"] == stats.acceptance_histogram
    assert found["num_spec_steps"] == stats.num_steps
    assert found["num_accepted_draft_tokens"] == stats.num_accepted_draft_tokens > 0
    assert found["num_draft_tokens"] >= found["num_accepted_draft_tokens"]
    rate = found["num_accepted_draft_tokens"] / found["num_draft_tokens"]
    assert found["draft_acceptance_rate"] == pytest.approx(rate)


def test_streamed_chat(client: openai.OpenAI, reference: LLM) -> None:
    want = reference.chat(MESSAGES, greedy(30, logprobs=2)).outputs[0]
    usage = {"include_usage": True}
    chunks = list(ask(client, stream=True, stream_options=usage, logprobs=True, top_logprobs=2))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == want.text
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-2:] == [None, "length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 30
    assert chunks[-1].metrics["speculative_decoding"]["num_spec_steps"] > 0
    assert len({chunk.id for chunk in chunks}) == 1
    entries = [
        entry
        for chunk in chunks[:-1]
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    names = token_texts()
    for entry, token, known in zip(entries, want.token_ids, want.logprobs, strict=True):
        assert entry.token == names[token] and bytes(entry.bytes).decode() == entry.token
        assert entry.logprob == pytest.approx(known[token].logprob, abs=1e-4)
        top = sorted(known, key=lambda t: known[t].rank)[:2]
        assert [e.token for e in entry.top_logprobs] == [names[t] for t in top]


def test_token_sources(client: openai.OpenAI, reference: LLM) -> None:
    want = reference.chat(MESSAGES, greedy(30)).outputs[0]
    extra = EXTRA | {"include_token_sources": True}
    chunks = list(ask(client, stream=True, extra_body=extra))
    tokens = [
        token
        for chunk in chunks
        for token in (getattr(chunk, "trtspec", None) or {}).get("tokens", ())
    ]
    assert "".join(token["text"] for token in tokens) == want.text
    assert len(tokens) == 30 and {0, 1} <= {token["source"] for token in tokens} <= {0, 1, 2, 3}
    assert chunks[-1].metrics["speculative_decoding"]["num_spec_steps"] > 0
    whole = ask(client, extra_body=extra)
    assert whole.choices[0].trtspec["tokens"] == tokens
    assert not hasattr(ask(client).choices[0], "trtspec")


def test_completions(client: openai.OpenAI, reference: LLM) -> None:
    ids = [reference.tokenizer.encode(text) for text in PROMPTS]
    wanted = [output.outputs[0].text for output in reference.generate(PROMPTS, greedy(30))]
    assert [c.text for c in complete(client, prompt=PROMPTS).choices] == wanted
    assert [c.text for c in complete(client, prompt=ids).choices] == wanted
    one = complete(client, prompt=ids[1], echo=True, logprobs=None)
    assert one.choices[0].text == PROMPTS[1] + wanted[1]
    texts = {index: "" for index in range(4)}
    reasons = []
    for chunk in complete(client, prompt=PROMPTS, stream=True, echo=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert list(texts.values()) == [p + t for p, t in zip(PROMPTS, wanted, strict=True)]
    assert reasons == ["length"] * 4
    known = complete(client, logprobs=1).choices[0].logprobs
    assert len(known.tokens) == len(known.text_offset) == 30
    ends = [*known.text_offset[1:], len(wanted[0])]
    parts = [wanted[0][i:j] for i, j in zip(known.text_offset, ends, strict=True)]
    assert parts == known.tokens
    assert all(len(top) == 1 for top in known.top_logprobs)
    assert len(complete(client, max_tokens=None).choices[0].text) > 16  # null: the default


def assert_named(
    known: Any, ids: list[int], wanted: list[dict[int, Logprob] | None], count: int
) -> None:
    """Compares `choices[].logprobs` with what an engine says of the tokens."""
    names = token_texts()
    assert known.tokens == [names[token] for token in ids]
    assert len(known.top_logprobs) == len(known.token_logprobs) == len(ids)
    assert known.token_logprobs[0] is known.top_logprobs[0] is wanted[0] is None
    columns = zip(ids, known.token_logprobs, known.top_logprobs, wanted, strict=True)
    for token, own, top, entry in [*columns][1:]:
        assert own == pytest.approx(entry[token].logprob, abs=1e-4)
        likeliest = sorted(entry, key=lambda other: entry[other].rank)[:count]
        assert top.keys() == {names[other] for other in (*likeliest, token)}
        for name, logprob in top.items():
            assert logprob == pytest.approx(entry[names.index(name)].logprob, abs=1e-4)


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("max_tokens", [0, 1, 20])
def test_echo_with_log_probabilities(
    client: openai.OpenAI, reference: LLM, count: int, max_tokens: int
) -> None:
    """As lm-eval-harness asks, of several prompts of token ids; and of one text."""
    prompts = PROMPTS[:3]  # the other has a character without a token
    ids = [reference.tokenizer.encode(text) for text in prompts]
    params = greedy(max(max_tokens, 1), logprobs=count, prompt_logprobs=count)
    wanted = reference.generate(prompts, params)
    fields: dict[str, Any] = {"echo": True, "logprobs": count, "max_tokens": max_tokens}
    answer = complete(client, prompt=ids, **fields)
    for choice, prompt, output in zip(answer.choices, prompts, wanted, strict=True):
        tokens, said = list(output.prompt_token_ids), list(output.prompt_logprobs)
        text = prompt
        if max_tokens:
            tokens += output.outputs[0].token_ids
            said += output.outputs[0].logprobs
            text += output.outputs[0].text
        assert choice.text == text and choice.finish_reason == "length"
        assert_named(choice.logprobs, tokens, said, count)
        ends = [*choice.logprobs.text_offset[1:], len(text)]
        parts = [text[i:j] for i, j in zip(choice.logprobs.text_offset, ends, strict=True)]
        assert parts == choice.logprobs.tokens
        if count == 1:  # whether a prompt's token is the likeliest, as lm-eval tells
            owns, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
            columns = zip(tokens, owns, tops, said, strict=True)
            for token, own, top, entry in [*columns][1:]:
                assert (own == max(top.values())) == (entry[token].rank == 1)
    usage = answer.usage
    assert usage.completion_tokens == max_tokens * len(ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0
    one = complete(client, prompt=PROMPTS[1], **fields).choices[0]
    other = answer.choices[1].logprobs
    assert one.text == answer.choices[1].text and one.logprobs.tokens == other.tokens
    assert one.logprobs.token_logprobs[1:] == pytest.approx(other.token_logprobs[1:], abs=1e-4)


def test_a_prompt_alone(client: openai.OpenAI) -> None:
    """The token that an engine makes all the same is not shown, streamed or not."""
    extra = EXTRA | {"include_token_sources": True}
    fields: dict[str, Any] = dict(prompt=PROMPTS, echo=True, max_tokens=0, extra_body=extra)
    whole = complete(client, **fields)
    assert [choice.text for choice in whole.choices] == PROMPTS
    assert all(choice.trtspec["tokens"] == [] for choice in whole.choices)
    options = {"include_usage": True}
    *chunks, last = complete(client, **fields, stream=True, stream_options=options)
    texts = {chunk.choices[0].index: chunk.choices[0].text for chunk in chunks}
    assert [texts[i] for i in range(4)] == PROMPTS
    assert {chunk.choices[0].finish_reason for chunk in chunks} == {"length"}
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 0


def test_several_completions_echo_the_same(client: openai.OpenAI, reference: LLM) -> None:
    prompt = PROMPTS[3]
    answer = complete(client, prompt=prompt, echo=True, logprobs=2, n=3, temperature=1, seed=3)
    wanted = reference.generate(prompt, greedy(1, prompt_logprobs=2))
    length = len(wanted.prompt_token_ids)
    for choice in answer.choices:
        known = choice.logprobs
        assert len(known.tokens) == length + 30 and choice.text.startswith(prompt)
        assert known.text_offset[length] == len(prompt)
        known.tokens, known.token_logprobs = known.tokens[:length], known.token_logprobs[:length]
        known.top_logprobs = known.top_logprobs[:length]
        assert_named(known, wanted.prompt_token_ids, wanted.prompt_logprobs, 2)
    assert len({choice.text for choice in answer.choices}) == 3


def test_prompt_logprobs_as_vllm_has_them(client: openai.OpenAI, reference: LLM) -> None:
    names, extra = token_texts(), EXTRA | {"prompt_logprobs": 2}
    chat = ask(client, extra_body=extra)
    texts = complete(client, prompt=PROMPTS[:2], extra_body=extra, echo=True, logprobs=1)
    wanted = [reference.chat(MESSAGES, greedy(1, prompt_logprobs=2))]
    wanted += reference.generate(PROMPTS[:2], greedy(1, prompt_logprobs=2))
    said = [chat.prompt_logprobs, *(choice.prompt_logprobs for choice in texts.choices)]
    for entries, output in zip(said, wanted, strict=True):
        assert entries[0] is output.prompt_logprobs[0] is None
        for entry, known in zip(entries[1:], output.prompt_logprobs[1:], strict=True):
            assert list(entry) == [str(token) for token in known]
            for token, one in known.items():
                logprob = entry[str(token)]["logprob"]
                assert logprob == pytest.approx(one.logprob, abs=1e-4)
                assert entry[str(token)] == {
                    "logprob": logprob, "rank": one.rank, "decoded_token": names[token]
                }  # fmt: skip
    assert chat.choices[0].message.content == reference.chat(MESSAGES, greedy(30)).outputs[0].text
    assert all(len(top) in (1, 2) for top in texts.choices[0].logprobs.top_logprobs[1:])
    assert not hasattr(ask(client), "prompt_logprobs")


def test_offsets_of_characters_of_several_tokens() -> None:
    """A token for each byte: a character's text comes with its last one."""

    class Bytes:
        def decode(self, token_ids: list[int], **_: Any) -> str:
            return bytes(token_ids).decode("utf-8", "replace")

    ids = list("añ😀b".encode())
    known = [{token: Logprob(-1.0, 1)} for token in ids]
    entries = LogprobsWriter(TokenNames(Bytes()), Bytes(), 0).of(ids, known)
    assert entries["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]


def test_sampling_fields(client: openai.OpenAI, reference: LLM) -> None:
    params = SamplingParams(
        max_tokens=20,
        temperature=0.9,
        top_p=0.9,
        top_k=30,
        min_p=0.01,
        seed=7,
        n=3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.1,
        stop=["zz", "12"],
        logit_bias={20: 3.0},
        ignore_eos=True,
        min_tokens=2,
        bad_words=["ab"],
        stop_token_ids=[40],
    )
    want = reference.chat(MESSAGES, params)
    extra = EXTRA | {
        "top_k": 30,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "bad_words": ["ab"],
        "stop_token_ids": [40],
    }
    fields: dict[str, Any] = dict(
        max_tokens=20,
        temperature=0.9,
        top_p=0.9,
        seed=7,
        n=3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        stop=["zz", "12"],
        logit_bias={"20": 3.0},
        extra_body=extra,
    )
    answer = ask(client, **fields)
    assert [c.message.content for c in answer.choices] == [c.text for c in want.outputs]
    assert [c.finish_reason for c in answer.choices] == [c.finish_reason for c in want.outputs]
    texts = [""] * 3
    for chunk in ask(client, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.text for c in want.outputs]


def test_negative_seeds(client: openai.OpenAI, reference: LLM) -> None:
    """OpenAI's API has them. Each is a seed of its own."""
    texts = {}
    for seed, same in ((-2, 2**63 - 2), (1 - 2**63, 1), (-(2**63), 0), (-3, 2**63 - 3)):
        params = SamplingParams(max_tokens=30, temperature=1.0, seed=same, ignore_eos=True)
        want = reference.generate("abc", params).outputs[0].text
        answer = complete(client, prompt="abc", max_tokens=30, temperature=1, seed=seed)
        texts[seed] = answer.choices[0].text
        assert texts[seed] == want
    assert len(set(texts.values())) == 4


def test_salts_share_no_prefix(client: openai.OpenAI) -> None:
    chat: Any = {"messages": [{"role": "user", "content": "salt " * 20}]}
    for make, fields in ((ask, chat), (complete, {"prompt": "pepper " * 10})):

        def cached(salt: str | None) -> int:
            extra = EXTRA | {"cache_salt": salt}
            answer = make(client, max_tokens=2, extra_body=extra, **fields)  # noqa: B023
            return answer.usage.prompt_tokens_details.cached_tokens

        found = [cached(salt) for salt in ("a", "a", "b", None, "b", None)]
        assert [count > 0 for count in found] == [False, True, False, False, True, True]


def test_a_developer_is_the_system(client: openai.OpenAI, reference: LLM) -> None:
    want = reference.chat([{"role": "system", "content": "be (xy"}, *MESSAGES], greedy(30))
    for role in ("developer", "system"):
        answer = ask(client, messages=[{"role": role, "content": "be (xy"}, *MESSAGES])
        assert answer.choices[0].message.content == want.outputs[0].text
        assert answer.usage.prompt_tokens == len(want.prompt_token_ids)


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    for make in (ask, complete):
        for continuous in (True, False):
            options = {"include_usage": True, "continuous_usage_stats": continuous}
            chunks = list(make(client, stream=True, stream_options=options))
            used = [c.usage and c.usage.completion_tokens for c in chunks if c.choices]
            assert used and chunks[-1].usage.completion_tokens == 30
            if continuous:
                assert None not in used and used == sorted(set(used)) and used[-1] == 30
            else:
                assert set(used) == {None}


@pytest.mark.parametrize("has_usage", [True, False])
def test_the_last_chunk_alone_has_metrics(client: openai.OpenAI, has_usage: bool) -> None:
    for make in (ask, complete):
        chunks = list(make(client, stream=True, stream_options={"include_usage": has_usage}))
        assert [chunk for chunk in chunks if hasattr(chunk, "metrics")] == chunks[-1:]


SCHEMA = {"type": "array", "items": {"enum": ["ab", 12, True]}, "minItems": 2, "maxItems": 4}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_json_schema(client: openai.OpenAI, is_streamed: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    fields: dict[str, Any] = dict(response_format=form, max_tokens=200, extra_body={})
    if is_streamed:
        text = "".join(c.choices[0].delta.content or "" for c in ask(client, stream=True, **fields))
    else:
        text = ask(client, **fields).choices[0].message.content
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("extra", "allowed"),
    [
        ({"guided_choice": ["ab12", "true"]}, {"ab12", "true"}),
        ({"guided_regex": "(ab|zz){2}"}, {"abab", "abzz", "zzab", "zzzz"}),
        ({"guided_grammar": 'root ::= "x" | "true"'}, {"x", "true"}),
        ({"guided_json": {"enum": ["ab"]}}, {'"ab"'}),
        ({"response_format": {"type": "text"}, "guided_choice": ["a"]}, {"a"}),
        (
            {"structured_outputs": {"choice": ["ab12", "true"], "json_object": False}},
            {"ab12", "true"},
        ),
        ({"structured_outputs": {"json": {"enum": ["ab"]}}}, {'"ab"'}),
    ],
)
def test_other_grammars(client: openai.OpenAI, extra: Any, allowed: set[str]) -> None:
    assert ask(client, extra_body=extra).choices[0].message.content in allowed


def test_a_wrong_grammar_is_status_400(client: openai.OpenAI) -> None:
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": "(("}}
    for extra in (
        {"guided_regex": "(("},
        {"guided_grammar": "x"},
        {"response_format": tag},
        {"structured_outputs": {"regex": "(("}},
    ):
        for make in (ask, complete):
            for is_streamed in (False, True):
                with pytest.raises(openai.BadRequestError, match="cannot be compiled") as error:
                    make(client, stream=is_streamed, extra_body=extra)
                assert [error.value.param] == list(extra)


class Shouts:
    """Reads `;name;arguments;` as a tool call."""

    def __init__(self, form: Any, tools: Any) -> None:
        self.text = ""

    def feed(self, text: str) -> list[Any]:
        self.text += text
        return []

    def finish(self, is_cut: bool = False) -> list[Any]:
        half = self.text[: len(self.text) // 2]
        return [Content(half), ToolCallDelta(0, "get", '{"x": 1}', None)]


def test_tools(client: openai.OpenAI, reference: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tools: Any = [
        {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
    ]
    rendered = "[user]abc 12\n1 tools\n[assistant]"
    want = reference.generate(rendered, greedy(30)).outputs[0]
    quiet = ask(client, tools=tools, tool_choice="none")
    assert quiet.choices[0].message.content == want.text
    with pytest.raises(openai.BadRequestError, match="no form of tool calls"):
        ask(client, tools=tools)
    monkeypatch.setattr(chat, "format_of", lambda template: HERMES)
    monkeypatch.setattr(chat, "ToolCallParser", Shouts)
    answer = ask(client, tools=tools).choices[0]
    (call,) = answer.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == (
        "function",
        "get",
        '{"x": 1}',
    )
    assert answer.message.content == want.text[:15] and answer.finish_reason == "length"
    stopped = ask(client, tools=tools, stop=[want.text[12:14]])
    assert stopped.choices[0].finish_reason == "tool_calls"
    chunks = list(ask(client, tools=tools, stream=True))
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert [(c.index, c.function.name) for c in calls] == [(0, "get")]
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "12"},
    ]
    assert ask(client, messages=history, tools=tools).choices[0].message
    message = answer.message  # as most programs send it back
    for said in (message, message.model_dump()):
        again = [*MESSAGES, said, history[-1]]
        assert ask(client, messages=again, tools=tools).choices[0].message


PARAMETERS = {
    "type": "object",
    "properties": {"x": {"enum": ["ab", 12]}, "y": {"type": "boolean"}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("get", "put")
]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A model whose markers of tool calls are special tokens."""
    path = served_model_dir(tmp_path_factory.mktemp("models"), vocab_size=VOCAB + 3)
    tokenizer = AutoTokenizer.from_pretrained(path)
    markers = [AddedToken(text, special=True) for text in ("<tool_call>", "</tool_call>")]
    assert tokenizer.add_tokens(markers, special_tokens=True) == 2
    assert tokenizer.add_tokens(["}"]) == 1  # which the others lack
    tokenizer.chat_template += "{# <tool_call> #}"
    tokenizer.save_pretrained(path)
    served = Served(make_llm(path))
    yield openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
    served.wait_for_rest()
    served.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "get", "put"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_calls_are_forced(caller: openai.OpenAI, name: str | None, is_streamed: bool) -> None:
    choice: Any = "required" if name is None else {"type": "function", "function": {"name": name}}
    fields: dict[str, Any] = dict(tools=TOOLS, tool_choice=choice, max_tokens=150, extra_body={})
    for seed in range(3):
        fields |= {"temperature": 1, "seed": seed, "parallel_tool_calls": seed != 2}
        if is_streamed:
            chunks = [c.choices[0] for c in ask(caller, stream=True, **fields)]
            calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
            content, reason = None, chunks[-1].finish_reason
            assert not any(chunk.delta.content for chunk in chunks)
        else:
            choice_0 = ask(caller, **fields).choices[0]
            calls, content = choice_0.message.tool_calls, choice_0.message.content
            reason = choice_0.finish_reason
        assert content is None and reason == ("tool_calls" if name is None else "stop")
        assert name is None or [call.function.name for call in calls] == [name]
        assert len(calls) == 1 or seed != 2
        for call in calls:
            assert call.id and call.function.name in ("get", "put")
            jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


TWO_CALLS = "ab" + "".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {{"x": 12}}}}\n</tool_call>'
    for name in ("put", "get")
)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_without_parallel_calls_the_answer_ends_after_the_first(
    caller: openai.OpenAI, is_streamed: bool
) -> None:
    """The model is made to write two calls."""
    form = {"type": "structural_tag", "format": {"type": "const_string", "value": TWO_CALLS}}
    fields: dict[str, Any] = dict(tools=TOOLS, max_tokens=150, n=2, logprobs=True, temperature=1)
    fields["extra_body"] = {"response_format": form}
    counts = {}
    for is_parallel in (True, False):
        fields["parallel_tool_calls"] = is_parallel
        if is_streamed:
            usage = {"stream_options": {"include_usage": True}}
            *chunks, answer = ask(caller, stream=True, **fields, **usage)
            deltas = [chunk.choices[0] for chunk in chunks]
        else:
            answer = ask(caller, **fields)
            deltas = answer.choices
        counts[is_parallel] = answer.usage.completion_tokens
        worth = answer.metrics["speculative_decoding"]  # also of what was cut
        steps, accepted = worth["num_spec_steps"], worth["num_accepted_draft_tokens"]
        assert steps + accepted + 2 >= counts[is_parallel]
        for index in range(2):
            own = [choice for choice in deltas if choice.index == index]
            parts = [choice.delta if is_streamed else choice.message for choice in own]
            names = [call.function.name for part in parts for call in part.tool_calls or []]
            assert names == (["put", "get"] if is_parallel else ["put"])
            assert not is_streamed or "".join(part.content or "" for part in parts) == "ab"
            reasons = [choice.finish_reason for choice in own if choice.finish_reason]
            assert reasons == ["tool_calls"] and own[-1].finish_reason
    assert counts[False] < 0.75 * counts[True]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_stop_strings_are_found_in_text_with_markers(
    caller: openai.OpenAI, is_streamed: bool
) -> None:
    """The marker is a special token, which the text of other answers does not have."""
    form = {"type": "structural_tag", "format": {"type": "const_string", "value": TWO_CALLS}}
    fields: dict[str, Any] = dict(tools=TOOLS, max_tokens=150, extra_body={"response_format": form})
    for stop, content, reason in (("b<tool_", "a", "stop"), ("b\n{", "ab", "tool_calls")):
        fields["stop"] = stop
        if is_streamed:
            usage = {"stream_options": {"include_usage": True}}
            *chunks, answer = ask(caller, stream=True, **fields, **usage)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            last = chunks[-1].choices[0]
        else:
            answer = ask(caller, **fields)
            last = answer.choices[0]
            text = last.message.content
        assert (text, last.finish_reason) == (content, reason)
        assert reason != "stop" or answer.usage.completion_tokens == 2


def test_calls_that_cannot_be_forced(caller: openai.OpenAI, client: openai.OpenAI) -> None:
    other: Any = {"type": "function", "function": {"name": "other"}}
    form = {"response_format": {"type": "json_object"}}
    for fields, param in (
        ({"tool_choice": other}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": "required", "extra_body": form}, "tool_choice"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            ask(caller, **({"tools": TOOLS} | fields))
        assert error.value.param == param
    with pytest.raises(openai.BadRequestError, match="no form of tool calls"):
        ask(client, tools=TOOLS, tool_choice="required")


def test_reasoning_is_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template begins it. Its end is a piece of what the model writes."""
    path = served_model_dir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = tokenizer.chat_template.replace("[assistant]", "[assistant]<think>")
    tokenizer.save_pretrained(path)
    llm = make_llm(path)
    want = llm.chat(MESSAGES, greedy(30)).outputs[0].text
    end = next(want[i : i + 3] for i in range(8, 20) if want.find(want[i : i + 3]) == i)
    before, _, after = want.partition(end)

    def answers(markers: ReasoningMarkers, **extra: Any) -> tuple[Any, str, str]:
        monkeypatch.setattr(chat, "split_for", lambda tokenizer: markers)
        served = Served(make_llm(path))
        try:
            client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
            whole = ask(client, extra_body=EXTRA | extra).choices[0].message
            chunks = list(ask(client, extra_body=EXTRA | extra, stream=True))
        finally:
            served.close()
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        reasons = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
        return whole, "".join(reasons), "".join(delta.content or "" for delta in deltas)

    whole, reasoning, content = answers(ReasoningMarkers("<think>", end))
    assert (whole.reasoning_content, whole.content) == (reasoning, content) == (before, after)
    # A grammar begins behind the end, which does not come here.
    never = ReasoningMarkers("<think>", "</think>")
    whole, reasoning, content = answers(never, guided_regex="(ab|zz){2,5}")
    assert whole.reasoning_content == reasoning == want and not (whole.content or content)


CHANNELS = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>ab 12",
    '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"x": 12}<|end|>',
)


def test_gpt_oss_channels_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its markers are special tokens. The model is made to write both texts, without which a
    grammar would hold for the last channel alone."""
    path = served_model_dir(tmp_path, vocab_size=VOCAB + 8)
    tokenizer = AutoTokenizer.from_pretrained(path)
    names = ("start", "channel", "message", "end", "return", "call", "constrain")
    markers = [AddedToken(f"<|{name}|>", special=True) for name in names]
    assert tokenizer.add_tokens(markers, special_tokens=True) == 7
    assert tokenizer.add_tokens(["}"]) == 1
    tokenizer.chat_template += f"{{# {CHANNELS[0]} <|channel|>commentary functions. #}}"
    tokenizer.save_pretrained(path)
    ends = []

    def from_the_start(*args: Any, reasoning_end: str | None, **fields: Any) -> SamplingParams:
        ends.append(reasoning_end)
        return make_params(*args, reasoning_end=None, **fields)

    monkeypatch.setattr(chat, "make_params", from_the_start)
    seen: list[Any] = []
    monkeypatch.setattr(chat.channels, "name_thinking", seen.append)
    served = Served(make_llm(path))
    try:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
        forms = [{"type": "const_string", "value": text} for text in CHANNELS]
        said, called = (
            ask(
                client, tools=TOOLS, max_tokens=100,
                extra_body={"response_format": {"type": "structural_tag", "format": form}},
            ).choices[0].message
            for form in forms
        )  # fmt: skip
        forced = ask(client, tools=TOOLS, tool_choice="required", max_tokens=150, extra_body={})
    finally:
        served.close()
    (call,) = forced.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    assert call.function.name in ("get", "put") and forced.choices[0].message.content is None
    assert ends.pop() is None  # a grammar's text is the whole answer
    assert (said.reasoning_content, said.content, said.tool_calls) == ("hm", "ab 12", None)
    (call,) = called.tool_calls
    assert (call.function.name, call.function.arguments) == ("get", '{"x": 12}')
    assert called.content is None and ends == ["<|channel|>final<|message|>"] * 2
    assert len(seen) == 3


def test_async_client(served: Served, reference: LLM) -> None:
    wanted = [output.outputs[0].text for output in reference.generate(PROMPTS, greedy(30))]

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any") as client:

            async def one(i: int) -> str:
                fields: Any = dict(
                    model="tiny",
                    prompt=PROMPTS[i % 4],
                    max_tokens=30,
                    temperature=0,
                    extra_body=EXTRA,
                    stream=True,
                )
                stream = await client.completions.create(**fields)
                return "".join([c.choices[0].text async for c in stream])

            texts = await asyncio.gather(*map(one, range(12)))
            assert texts == [wanted[i % 4] for i in range(12)]

    asyncio.run(main())


def test_models(client: openai.OpenAI, served: Served) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.max_model_len == 256
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served"):
        client.models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError) as error:
        ask(client, model="gpt")
    assert error.value.code == "model_not_found" and error.value.param == "model"
