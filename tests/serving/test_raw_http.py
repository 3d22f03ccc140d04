"""Malformed and hostile input over plain HTTP: a clear error, and a server that goes on."""

from __future__ import annotations

import gzip
import json
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as families
from served import Served, greedy, make_llm, raw_post, read_all, served_model_dir
from tiny import tiny_model_dir
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from trtspec.serving.completions import _offsets
from trtspec.serving.other_fields import NEUTRAL

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BASE = {"model": "tiny", "prompt": "abc 12", "temperature": 0, "ignore_eos": True}
LONG = BASE | {"max_tokens": 240}
USER = [{"role": "user", "content": "a"}]
SCHEMA = {"json_schema": {"name": "x", "schema": {"type": "object"}}}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model_dir(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def one(model_dir: Path) -> Iterator[Served]:
    served = Served(
        make_llm(model_dir),
        queue=2,
        max_body_bytes=20_000,
        body_timeout=0.5,
        header_timeout=0.5,
        write_timeout=0.5,
        max_n=4,
        max_prompts=3,
        max_stop=2,
        max_prompt_logprobs=50,
    )
    yield served
    served.close()


@pytest.fixture
def served(one: Served) -> Iterator[Served]:
    """Whatever a test sent, nothing is held afterwards, and the next request is answered."""
    yield one
    one.wait_for_rest()
    assert one.post(TEXT, BASE | {"max_tokens": 3}).status_code == 200


def refused(reply: httpx.Response, status: int, param: str | None = None) -> str:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param, error
    assert "Params." not in error["message"], "a class that the client does not know"
    return error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"{'a': 1}",
        b'{"model": "tiny", "prompt": "\xff\xfe"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "top_p": NaN}',
        b"[" * 15_000,
        b'{"a":' * 3_000,
        b'{"model": "tiny", "prompt": 1' + b"0" * 9_000 + b"}",
        b"\x00" * 50,
    ],
    ids=lambda body: repr(body[:14]),
)
def test_what_is_not_json(served: Served, body: bytes) -> None:
    refused(served.post(TEXT, body), 400)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**70}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 5, "temperature": 1}, "n"),
        ({"n": 2}, "n"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a", "b", "c"]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"stop": ["a", "a" * 1025]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        ({"store": 0}, "store"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 4}, "prompt"),
        ({"prompt": [97]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt.0.0"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"model": None}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"echo": True, "logprobs": 1, "stream": True}, "stream"),
        ({"echo": True, "logprobs": -1}, "logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 9}, "prompt_logprobs"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "stream"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": "1"}, "prompt_logprobs"),
        ({"prompt_logprobs": 3, "prompt": ["abc 12"] * 3}, "prompt_logprobs"),
        ({"prompt_logprobs": 3, "n": 4, "temperature": 1}, "prompt_logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2, "temperature": 1}, "best_of"),
        ({"best_of": 3, "n": 2, "temperature": 1}, "best_of"),
        ({"best_of": "2", "n": 2, "temperature": 1}, "best_of"),
        ({"tools": []}, "tools"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"guided_json": {}, "guided_regex": "a"}, None),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "structured_outputs"),
        (
            {"structured_outputs": {"whitespace_pattern": "a"}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"response_format": SCHEMA | {"type": "json_object"}}, "response_format.json_schema"),
        ({"response_format": SCHEMA | {"type": "text"}}, "response_format.json_schema"),
        ({"response_format": SCHEMA | TAG}, "response_format.json_schema"),
        ({"response_format": {"type": "structural_tag", "format": 3}}, "response_format"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"user": 5}, "user"),
        ({"n": 7, "temperature": 1}, None),  # the queue has six places
        ({"prompt": ["a"] * 4, "n": 2, "temperature": 1}, None),
    ],
    ids=str,
)
def test_wrong_fields_are_named(served: Served, fields: dict[str, Any], param: str | None) -> None:
    body = json.dumps({**BASE, "max_tokens": 4, **fields}).encode()
    refused(served.post(TEXT, body), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["a"]}, "messages.0"),
        ({"messages": [{"role": "boss", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": None}]}, "messages.0"),
        ({"messages": [{"role": "system", "content": []}, *USER]}, "messages.0"),
        ({"max_completion_tokens": 5}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
        ),
        ({"messages": [{"role": "user", "content": "a" * 300}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"prompt_logprobs": 9}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "stream"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": []}, "functions"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"parallel_tool_calls": 0}, "parallel_tool_calls"),
        ({"store": True}, "store"),
    ],
    ids=str,
)
def test_wrong_chats_are_named(served: Served, fields: dict[str, Any], param: str | None) -> None:
    body = {"model": "tiny", "messages": USER, "max_tokens": 4} | fields
    refused(served.post(CHAT, body), 400, param)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"max_new_tokens": 4}, "'max_new_tokens' is not supported: use 'max_tokens'."),
        (CHAT, {"reasoning_effort": "low"}, "'reasoning_effort' is .* 'chat_template_kwargs'"),
        (CHAT, {"prediction": {"type": "content"}}, "'prediction' is .* --speculative sa or ngram"),
        (CHAT, {"service_tier": "flex"}, "is 'flex', .*: it may be 'auto' or 'default', or left"),
        (CHAT, {"chat_template": "x"}, "it is the model's own; leave it out."),
        (CHAT, {"nothing": 1}, "'nothing' is not supported: leave it out."),
        (
            CHAT,
            {"continue_final_message": True},
            "it may be False; send the text as it is to /v1/c",
        ),
        (CHAT, {"messages": [USER[0] | {"cache_control": {}}]}, "the prefix cache needs no marks"),
        (CHAT, {"temperature": "0.5"}, r"a valid number \('0.5' was given\)."),
        (CHAT, {"top_logprobs": 2}, "'top_logprobs' is 2: it needs logprobs=true."),
        (
            CHAT,
            {"chat_template_kwargs": {"x": [1]}},
            r"a valid boolean or a valid integer or a valid number \(\[1\] was given\)\.",
        ),
        (CHAT, {"structured_outputs": {}}, "^The grammar has nothing: give exactly one of"),
        (CHAT, {"temperature": -1}, "^'temperature' is -1.0: it must be a number in 0 … 10000"),
        (CHAT, {"add_special_tokens": True}, r"Input should be False \(True was given\)."),
        (TEXT, {"add_special_tokens": False}, r"Input should be True \(False was given\)."),
        (
            CHAT,
            {"response_format": {"type": "json_object", "schema": {}}},
            "'response_format.schema' is not supported: its type is 'json_schema', with the sch",
        ),
        (TEXT, {"messages": USER}, "'messages' is not supported: send them to /v1/chat/comp"),
        (TEXT, {"max_completion_tokens": 3}, "use 'max_tokens'."),
        (TEXT, {"logprobs": True}, r"a valid integer \(True was given\)."),
    ],
    ids=str,
)
def test_what_is_refused_says_what_to_do(
    served: Served, path: str, fields: dict[str, Any], message: str
) -> None:
    body = BASE if path == TEXT else {"model": "tiny", "messages": USER}
    given = refused(served.post(path, body | {"max_tokens": 4} | fields), 400)
    assert re.search(message, given), given


def test_every_neutral_value_is_taken_by_both_endpoints(served: Served) -> None:
    bodies = ((CHAT, {"model": "tiny", "messages": USER, "max_tokens": 2}), (TEXT, BASE))
    for path, body in bodies:
        want = None
        for index in range(max(map(len, NEUTRAL.values()))):
            fields = {name: values[min(index, len(values) - 1)] for name, values in NEUTRAL.items()}
            reply = served.post(path, body | {"temperature": 0} | fields)
            assert reply.status_code == 200, reply.text
            text = [c.get("text", c.get("message")) for c in reply.json()["choices"]]
            want = text if want is None else want
            assert text == want


def test_offsets_count_special_tokens_of_the_prompt(served: Served) -> None:
    """They are characters of the text, which begins with the prompt as it was sent."""
    prompt = "ab</s>b c"
    body = {**BASE, "prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 1}
    (choice,) = served.post(TEXT, body).json()["choices"]
    text, known = choice["text"], choice["logprobs"]
    assert text.startswith(prompt)
    ends = [*known["text_offset"][1:], len(text)]
    parts = [text[i:j] for i, j in zip(known["text_offset"], ends, strict=True)]
    assert parts[:6] == ["a", "b", "</s>", "b", " ", "c"] and len(parts) == 9
    assert parts[:6] == known["tokens"][:6]


def test_offsets_of_tokenizers_that_leave_a_space_out() -> None:
    texts = {"hello": 0, "\u0120world": 1, "\u0120again": 2}
    tokenizer = Tokenizer(WordLevel(texts, unk_token="hello"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert _offsets(fast, "hello world again") == [0, 5, 11]


def test_fields_that_ask_for_nothing_are_taken(served: Served) -> None:
    body = {
        "model": "tiny",
        "messages": USER,
        "max_tokens": 4,
        "store": False,
        "user": "me",
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "stop": None,
        "tools": None,
        "metadata": {"run": "7"},
        "prompt_cache_key": "a",
        "safety_identifier": "b",
        "modalities": ["text"],
        "add_generation_prompt": True,
        "continue_final_message": False,
        "include_stop_str_in_output": False,
        "echo": False,
        "top_k": -1,
        "top_logprobs": 0,
        "add_special_tokens": False,
        "seed": -1,
    }
    assert served.post(CHAT, body).status_code == 200
    assert served.post(CHAT, body | {"tools": [], "max_completion_tokens": 4}).status_code == 200
    for fields in ({"best_of": 1}, {"best_of": None, "n": 2}, {"best_of": 2, "n": 2}):
        reply = served.post(CHAT, body | {"temperature": 1} | fields)
        assert len(reply.json()["choices"]) == fields.get("n", 1)
    said = {"role": "user", "content": "a", "type": "text", "annotations": [], "refusal": None}
    assert served.post(CHAT, body | {"messages": [said]}).status_code == 200
    refused(served.post(CHAT, body | {"messages": [said | {"annotations": [1]}]}), 400)


def test_a_prompt_that_is_too_long(served: Served) -> None:
    reply = served.post(TEXT, BASE | {"prompt": "ab " * 300})
    refused(reply, 400)
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_an_error_that_quotes_a_request_is_of_no_long_prompt(served: Served) -> None:
    words = BASE | {"bad_words": ["max_seq_len", ""]}
    message = refused(reply := served.post(TEXT, words), 400, "bad_words")
    assert "max_seq_len" in message and reply.json()["error"]["code"] is None


def test_a_bad_word_has_at_most_eight_tokens(served: Served) -> None:
    """With the space before it, of which it is banned, too."""
    assert served.post(TEXT, BASE | {"bad_words": ["abcdefg"]}).status_code == 200
    long = served.post(TEXT, BASE | {"bad_words": ["abcdefgh"]})
    assert "' abcdefgh', which is 9 tokens" in refused(long, 400, "bad_words")


def test_a_text_that_is_far_too_long_is_not_tokenised(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokenise(text: str) -> None:
        raise AssertionError("it holds the one thread for seconds")

    monkeypatch.setattr(served.llm.inputs, "tokenize", tokenise)
    monkeypatch.setattr(served.llm.inputs, "encode_rendered", tokenise)
    text = "ab " * 6_000
    for path, body in (
        (TEXT, {"prompt": text}),
        (CHAT, {"messages": [USER[0] | {"content": text}]}),
    ):
        reply = served.post(path, {"model": "tiny"} | body)
        refused(reply, 400)
        assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_methods_paths_and_kinds(served: Served) -> None:
    reply = httpx.get(served.url + TEXT)
    assert refused(reply, 405) == f"GET of '{TEXT}' is not allowed: use POST."
    assert reply.headers["allow"] == "POST"
    message = refused(httpx.get(served.url + "/chat/completions"), 404)
    assert message.startswith("There is no '/chat/completions': the paths are /, ")
    assert CHAT in message and "/health" in message and "/metrics" in message
    refused(httpx.get(served.url + "/v1/models/../../etc/passwd"), 404)
    body = json.dumps(BASE).encode()
    for kind in ("text/plain", "", "application/x-www-form-urlencoded"):
        refused(served.post(TEXT, body, **{"content-type": kind}), 415)
    packed = served.post(TEXT, gzip.compress(body), **{"content-encoding": "gzip"})
    assert "Content-Encoding is 'gzip': send the body as it is." in refused(packed, 415)
    assert served.post(TEXT, body, **{"content-encoding": "identity"}).status_code == 200
    assert "/v1/models/NAME, " in message


def test_origin_and_host(served: Served) -> None:
    message = refused(served.post(TEXT, BASE, origin="http://evil.example"), 403)
    assert "as of 'http://evil.example', are not served: send them from a program" in message
    message = refused(served.post(TEXT, BASE, host="evil.example:8000"), 403)
    assert "connect to localhost, or start the server with the --host" in message
    refused(served.post(TEXT, BASE, origin="http://["), 403)
    refused(served.post(TEXT, BASE, host="["), 403)
    assert served.post(TEXT, BASE, origin=served.url).status_code == 200


def test_bodies_that_are_too_large(served: Served) -> None:
    refused(served.post(TEXT, b" " * 20_001), 413)
    with served.connect() as connection:  # it says so, and sends nothing
        connection.sendall(raw_post(TEXT, b"", length=10**12))
        assert b" 413 " in read_all(connection).splitlines()[0]
    with served.connect() as connection:  # no length
        head = "Host: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
        connection.sendall(f"POST {TEXT} HTTP/1.1\r\n{head}\r\n\r\n".encode())
        try:
            for _ in range(100):
                connection.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
        except OSError:
            pass
        first = read_all(connection).splitlines()
        assert not first or b" 413 " in first[0]


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"x" * 200_000,
        b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 200_000 + b"\r\n\r\n",
    ],
    ids=["version", "tls", "no head", "long header"],
)
def test_what_is_not_http(served: Served, head: bytes) -> None:
    with served.connect() as connection:
        try:
            connection.sendall(head)
        except OSError:
            return
        lines = read_all(connection).splitlines()
        assert not lines or b" 400 " in lines[0]


def test_slow_heads_and_bodies_end(served: Served) -> None:
    started = time.monotonic()
    head, body = served.connect(), served.connect()
    try:
        head.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        body.sendall(raw_post(TEXT, b'{"model"', length=500))
        head.settimeout(0.1)
        for _ in range(100):  # a byte now and then does not help
            try:
                head.sendall(b"X")
                if not head.recv(1):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        assert b" 408 " in read_all(body).splitlines()[0]
        assert time.monotonic() - started < 8
    finally:
        head.close()
        body.close()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("how", ["close", "half", "reset", "before the body"])
def test_a_client_that_goes_away(served: Served, how: str, is_streamed: bool) -> None:
    before = served.llm.stats().generated_tokens
    connection = served.connect()
    body = json.dumps(LONG | {"stream": is_streamed}).encode()
    if how == "before the body":
        connection.sendall(raw_post(TEXT, body, length=len(body) + 1))
    else:
        connection.sendall(raw_post(TEXT, body))
        time.sleep(0.05)
    if how == "half":
        connection.shutdown(socket.SHUT_WR)
        time.sleep(0.1)
    elif how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    served.wait_for_rest()
    assert served.llm.stats().generated_tokens - before < 240


@pytest.mark.slow
def test_a_client_that_does_not_read(served: Served) -> None:
    """Its answer is finished without it, and its connection is cut."""
    served.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", served.port))
    body = LONG | {"stream": True, "logprobs": 20, "n": 2, "temperature": 1}
    connection.sendall(raw_post(TEXT, json.dumps(body).encode()))
    deadline = time.monotonic() + 15
    while not served.engine.num_live and time.monotonic() < deadline:
        time.sleep(0.002)  # else nothing may have begun yet
    served.wait_for_rest()
    time.sleep(1.2)
    text = read_all(connection)
    connection.close()
    assert text.startswith(b"HTTP/1.1 200") and b"[DONE]" not in text


def test_more_completions_than_there_are_places_are_status_400(served: Served) -> None:
    """To try again later would not help."""
    body = BASE | {"prompt": ["a", "b", "c"], "n": 4, "temperature": 1}
    assert "12 completions" in refused(served.post(TEXT, body), 400)


def test_a_full_queue_is_status_429(served: Served) -> None:
    connections = [served.connect() for _ in range(6)]
    for connection in connections:
        connection.sendall(raw_post(TEXT, json.dumps(LONG).encode()))
    deadline = time.monotonic() + 5
    while served.engine.num_live < 6 and time.monotonic() < deadline:
        time.sleep(0.002)
    reply = served.post(TEXT, BASE)
    assert "at most 6 may" in refused(reply, 429) and int(reply.headers["retry-after"]) > 0
    assert httpx.get(served.url + "/health").status_code == 200
    for connection in connections:
        connection.close()


def test_pipelined_requests_are_answered_in_turn(served: Served) -> None:
    body = json.dumps(BASE | {"max_tokens": 3}).encode()
    with served.connect() as connection:
        connection.sendall(raw_post(TEXT, body) * 3)
        received, deadline = b"", time.monotonic() + 10
        while received.count(b"HTTP/1.1 200") < 3 and time.monotonic() < deadline:
            received += connection.recv(65536)
    assert received.count(b"HTTP/1.1 200") == 3


UPGRADE = "Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nConnection: Upgrade, HTTP2-Settings"


def offering(body: bytes, is_chunked: bool = False) -> bytes:
    """Returns a request as Java's client sends it, which offers HTTP/2."""
    request = raw_post(TEXT, body).replace(b"\r\n", b"\r\n" + UPGRADE.encode() + b"\r\n", 1)
    if is_chunked:
        head = request.partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
        request = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return request


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("how", ["at once", "body later", "byte by byte", "pipelined"])
def test_offers_of_another_protocol_are_ignored(
    served: Served, caplog: pytest.LogCaptureFixture, how: str, is_chunked: bool
) -> None:
    body = json.dumps(BASE | {"max_tokens": 3}).encode()
    request, count = offering(body, is_chunked), 1
    pieces = [request]
    if how == "body later":
        head, _, rest = request.partition(b"\r\n\r\n")
        pieces = [head + b"\r\n\r\n", rest]
    elif how == "byte by byte":
        pieces = [request[i : i + 1] for i in range(len(request))]
    elif how == "pipelined":
        pieces, count = [request + raw_post(TEXT, body) + request], 3
    want = served.post(TEXT, body).json()["choices"][0]["text"]
    with served.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.05 if how == "body later" else 0)
        received, deadline = b"", time.monotonic() + 10
        while received.count(b'"usage"') < count and time.monotonic() < deadline:
            received += connection.recv(65536)
    assert received.count(b"HTTP/1.1 200") == received.count(json.dumps(want).encode()) == count
    assert not caplog.records


@pytest.mark.parametrize("end", [b"Connection: close\r\n", b""], ids=["close", "HTTP/1.0"])
def test_offers_before_the_connection_ends_are_ignored(served: Served, end: bytes) -> None:
    request = offering(json.dumps(BASE | {"max_tokens": 3}).encode())
    request = request.replace(b"Host", end + b"Host") if end else request.replace(b"1.1", b"1.0", 1)
    with served.connect() as connection:
        connection.sendall(request)
        received = read_all(connection)
    assert received.startswith(b"HTTP/1.1 200") and b'"usage"' in received


def test_tunnels_are_refused(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps(BASE | {"max_tokens": 3}).encode()
    with served.connect() as connection:
        connection.sendall(f"CONNECT {TEXT} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        connection.sendall(raw_post(TEXT, body).replace(b"Host", b"Connection: close\r\nHost"))
        received = read_all(connection)
    assert received.startswith(b"HTTP/1.1 405") and b"HTTP/1.1 200" in received
    assert not caplog.records


def test_streams_of_http_1_0_have_no_chunks(served: Served) -> None:
    """It has none: a body without a length ends as the connection does."""
    body = BASE | {"max_tokens": 20, "stream": True}
    want = served.post(TEXT, body).text
    with served.connect() as connection:
        connection.sendall(raw_post(TEXT, json.dumps(body).encode()).replace(b"1.1", b"1.0", 1))
        head, _, events = read_all(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert events.startswith(b"data: {") and events.endswith(b"}\n\ndata: [DONE]\n\n")
    assert text_of(events.decode()) == text_of(want) != ""


def text_of(events: str) -> str:
    lines = [line[6:] for line in events.split("\n\n") if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def test_other_answers_to_http_1_0_have_their_length(served: Served) -> None:
    body = json.dumps(BASE | {"max_tokens": 3}).encode()
    for given, status in ((body, b" 200 "), (b"{", b" 400 ")):
        with served.connect() as connection:
            connection.sendall(raw_post(TEXT, given).replace(b"1.1", b"1.0", 1))
            head, _, rest = read_all(connection).partition(b"\r\n\r\n")
        assert status in head and f"content-length: {len(rest)}\r".encode() in head
        assert b"transfer-encoding" not in head and json.loads(rest)


def test_a_client_of_http_1_0_that_goes_away(served: Served) -> None:
    before = served.llm.stats().generated_tokens
    connection = served.connect()
    body = json.dumps(LONG | {"stream": True}).encode()
    connection.sendall(raw_post(TEXT, body).replace(b"1.1", b"1.0", 1))
    assert connection.recv(1)
    connection.close()
    served.wait_for_rest()
    assert served.llm.stats().generated_tokens - before < 240


def test_tokens_and_small_endpoints(served: Served) -> None:
    ids = served.llm.tokenizer.encode("abc 12")
    reply = served.post("/tokenize", {"prompt": "abc 12"}).json()
    assert reply == {"tokens": ids, "count": len(ids), "max_model_len": 256}
    chat = served.post("/tokenize", {"messages": USER}).json()["tokens"]
    text = served.post("/detokenize", {"tokens": chat}).json()["prompt"]
    assert text == "[user]a\n[assistant]"
    refused(served.post("/tokenize", {}), 400, "prompt")
    refused(served.post("/detokenize", {"tokens": [5, 97]}), 400, "tokens")
    assert set(httpx.get(served.url + "/version").json()) == {"version"}
    assert httpx.get(served.url + "/health").json() == {"status": "ok"}
    served.post(TEXT, BASE)
    assert served.post("/reset_prefix_cache", {}).status_code == 200
    usage = served.post(TEXT, BASE | {"prompt": "b" * 100}).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_model_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    """Its answers have no text. A prompt that is echoed has none either, but log probabilities."""
    served = Served(make_llm(tiny_model_dir(tmp_path)))
    ids = BASE | {"prompt": [5, 6, 7], "max_tokens": 4}
    replies = [served.post(TEXT, ids | more) for more in ({}, {"echo": True})]
    assert [reply.json()["choices"][0]["text"] for reply in replies] == ["", ""]
    known = served.post(TEXT, ids | {"echo": True, "logprobs": 1}).json()["choices"][0]["logprobs"]
    assert known["tokens"][:3] == ["token_id:5", "token_id:6", "token_id:7"]
    assert len(known["tokens"]) == 7 and known["text_offset"] == [0] * 7
    refused(served.post(TEXT, BASE), 400)
    refused(served.post(CHAT, {"model": "tiny", "messages": USER}), 400, "messages")
    served.close()


def test_no_header_or_body_reaches_the_file_system(
    served: Served,
) -> None:
    opened: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if is_on and event == "open":
            opened.append(str(arguments[0]))

    is_on = True
    sys.addaudithook(watch)  # it stays, and does nothing later
    odd = "/etc/hostname"
    body = {"model": "tiny", "messages": [{"role": "user", "content": odd}], "user": odd}
    served.post(CHAT, body | {"max_tokens": 3, "stop": odd, "cache_salt": odd}, **{"x-a": odd})
    served.post(TEXT, BASE | {"guided_regex": odd, "model": odd})
    is_on = False
    assert odd not in opened


def test_an_error_of_one_request_stays_its_own(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = served.llm.executor.stop_string_check

    def broken(request: Any) -> bool:
        if request.sampling_params.stop_strings == ("zz",) and len(request.output_token_ids) > 3:
            raise ZeroDivisionError
        return want(request)

    monkeypatch.setattr(served.llm.executor, "stop_string_check", broken)
    refused(served.post(TEXT, LONG | {"stop": "zz"}), 500)

    def broken_at_once(request: Any) -> bool:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:  # before the first token, and beside a good grammar
        patch.setattr(served.llm.executor, "stop_string_check", broken_at_once)
        refused(served.post(TEXT, LONG | {"stop": "zz", "guided_choice": ["a", "b"]}), 500)
    reply = served.post(TEXT, LONG | {"stop": "zz", "stream": True})
    events = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    assert reply.status_code == 200 and events[-1] == "data: [DONE]"
    assert "ZeroDivisionError" in json.loads(events[-2][6:])["error"]["message"]


@pytest.mark.slow
def test_keys(model_dir: Path) -> None:
    served = Served(make_llm(model_dir), api_key="secret")
    try:
        wrong = [{"authorization": f"{given}"} for given in ("Bearer secre", "Basic secret")]
        odd: dict[str, Any] = {"authorization": "Bearer sécret".encode()}
        for headers in (*wrong, odd, {}, {"x-api-key": "secret"}):
            for path in (CHAT, TEXT, "/tokenize", "/reset_prefix_cache"):
                reply = httpx.post(served.url + path, json={}, headers=headers)
                assert refused(reply, 401) and reply.json()["error"]["code"] == "invalid_api_key"
            assert httpx.get(served.url + "/v1/models", headers=headers).status_code == 401
        assert httpx.get(served.url + "/health").status_code == 200
        good = {"authorization": "bearer secret"}
        assert served.post(TEXT, BASE, **good).status_code == 200
        # An engine that failed says so.
        runner = served.llm.executor.runner

        def fails(plan: Any) -> Any:
            raise RuntimeError("the device is gone")

        runner.run = fails  # type: ignore[method-assign]
        assert "the device is gone" in refused(served.post(TEXT, BASE, **good), 503)
        assert "the device is gone" in refused(httpx.get(served.url + "/health"), 503)
        refused(served.post(TEXT, BASE, **good), 503)
    finally:
        served.close()


def metric(served: Served, name: str, **labels: str) -> float:
    """Scrapes one value."""
    samples = [s for f in families(httpx.get(f"{served.url}/metrics").text) for s in f.samples]
    (value,) = [
        s.value for s in samples if s.name == f"vllm:{name}" and labels.items() <= s.labels.items()
    ]
    return value


@pytest.mark.slow
def test_the_first_token_counts_from_the_arrival(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the chat template and the tokenizer take is part of it; none of it is in the queue."""
    render, encode = served.llm.inputs.render_chat, served.llm.inputs.tokenize

    def slow(function: Any) -> Any:
        def after_a_while(*arguments: Any) -> Any:
            time.sleep(0.3)
            return function(*arguments)

        return after_a_while

    monkeypatch.setattr(served.llm.inputs, "render_chat", slow(render))
    monkeypatch.setattr(served.llm.inputs, "tokenize", slow(encode))
    names = "time_to_first_token", "e2e_request_latency", "request_queue_time"
    two: Any = {"prompt": ["abc 12", "a"]}  # the second is tokenised after the first
    for path, prompt, least in ((CHAT, {"messages": USER}, 0.3), (TEXT, two, 0.9)):
        before = [metric(served, f"{name}_seconds_sum") for name in names]
        reply = served.post(path, {"model": "tiny", "max_tokens": 2} | prompt)
        assert reply.status_code == 200
        after = [metric(served, f"{name}_seconds_sum") for name in names]
        first, whole, queue = (b - a for a, b in zip(before, after, strict=True))
        assert least <= first <= whole and queue < 0.2


def test_requests_that_end_with_the_engine_are_counted(model_dir: Path) -> None:
    served = Served(make_llm(model_dir))
    try:

        def fails(plan: Any) -> Any:
            raise RuntimeError("the device is gone")

        served.llm.executor.runner.run = fails  # type: ignore[method-assign]
        refused(served.post(TEXT, BASE | {"n": 3, "temperature": 1}), 503)
        counts = {
            reason: metric(served, "request_success_total", finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        assert counts == {"stop": 0, "length": 0, "abort": 0, "error": 3}
        observer: Any = served.llm.executor.observer
    finally:
        served.close()
    assert dict(observer.finished) == {"error": 3}


def test_a_request_that_the_server_cancels_is_status_503(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(model_dir)
    served, in_step, is_cancelled = Served(llm), threading.Event(), threading.Event()
    step = llm.executor.step

    def held() -> object:
        in_step.set()
        assert is_cancelled.wait(30)
        return step()

    monkeypatch.setattr(llm.executor, "step", held)
    try:
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(served.post, TEXT, BASE | {"max_tokens": 200})
            assert in_step.wait(30)
            served.engine.abort_all()  # before the next step
            is_cancelled.set()
            assert "the server ends" in refused(reply.result(30), 503)
            assert reply.result().json()["error"]["code"] == "cancelled"
        served.wait_for_rest()
    finally:
        served.close()


def test_texts_after_all_that_are_right(served: Served, model_dir: Path) -> None:
    with make_llm(model_dir) as llm:
        want = llm.generate("abc 12", greedy(60)).outputs[0].text
    assert served.post(TEXT, BASE | {"max_tokens": 60}).json()["choices"][0]["text"] == want
