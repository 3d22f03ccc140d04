"""Parts of answers: JSON, server-sent events, log probabilities, the texts of tokens."""

from __future__ import annotations

import json
import re
from json.encoder import encode_basestring
from typing import Any

from ..api.outputs import Logprob
from ..api.text_stream import TextStream
from ..executor.request import Request
from ..frontend.outputs import Piece
from .token_names import TokenName, TokenNames

LEAST_LOGPROB = -9999.0  # JSON has no infinity
Json = dict[str, Any]
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
"""Ends of lines to Python's `splitlines`, and so to clients, that JSON does not escape."""


def dumped(value: Any) -> str:
    return _one_line(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def text_of(value: str) -> str:
    """Returns a text as `dumped` writes it, at a tenth of the cost."""
    return _one_line(encode_basestring(value))


def _one_line(text: str) -> str:
    """Returns JSON that no client takes for two lines."""
    if text.isascii():
        return text
    return _LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def event_of(value: Any) -> bytes:
    """Returns one server-sent event."""
    return f"data: {dumped(value)}\n\n".encode("utf-8", "replace")


def chat_logprobs(names: TokenNames, piece: Piece, count: int) -> list[Json]:
    """Returns entries of `choices[].logprobs.content`."""
    pairs = zip(piece.token_ids, piece.logprobs or [], strict=False)
    return [
        _entry(names[token], known[token])
        | {"top_logprobs": [_entry(names[t], p) for t, p in top_of(known, count)]}
        for token, known in pairs
    ]


def _entry(name: TokenName, known: Logprob) -> Json:
    return {"token": name.text, "logprob": finite(known.logprob), "bytes": name.bytes}


def logprobs_by_text(
    names: TokenNames, known: dict[int, Logprob], count: int, token: int
) -> dict[str, float]:
    """Returns an entry of `choices[].logprobs.top_logprobs` of completions: of the `count`
    likeliest tokens, and of `token` itself.

    Its keys are texts. Where two tokens have the same, it is the one of `token`, or else of the
    likelier one. The other is `token_id:7`.
    """
    top: dict[str, float] = {}
    own = names[token].text
    for other, logprob in {**dict(top_of(known, count)), token: known[token]}.items():
        text = names[other].text
        is_taken = text in top or (text == own and other != token)
        top[f"token_id:{other}" if is_taken else text] = finite(logprob.logprob)
    return top


def top_of(known: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """Returns the `count` likeliest tokens. `known` has them and the chosen one."""
    return sorted(known.items(), key=lambda item: item[1].rank)[:count]


def prompt_logprobs_of(names: TokenNames, request: Request, count: int) -> list[Json | None]:
    """Returns `prompt_logprobs` as vLLM has it: a prompt's log probabilities by token id."""
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": finite(known.logprob),
                "rank": known.rank,
                "decoded_token": names[token].text,
            }
            for token, known in entry.items()
        }
        for entry in prompt_entries(request, count)
    ]


def prompt_entries(request: Request, count: int) -> list[dict[int, Logprob] | None]:
    """Returns the log probabilities of a request's prompt, once there is a token."""
    assert request.prompt_logprobs is not None
    return request.prompt_logprobs.entries(request.prompt_token_ids, count)


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


class TokenTexts:
    """The text of each token of one output, for a page that colours them.

    Together they are the output's text, and a stop string that ended it. A character of several
    tokens is the last one's, also where the output ends inside it.
    """

    def __init__(self, tokenizer: Any):
        self._stream = TextStream(tokenizer)
        self._length = 0

    def of(self, piece: Piece) -> list[Json]:
        """Returns the tokens of a piece: text, and 0 or the number of the accepted draft."""
        tokens: list[Json] = [
            {"text": self.add(token), "source": source}
            for token, source in zip(piece.token_ids, piece.sources or [], strict=False)
        ]
        if tokens and piece.finish_reason is not None:
            tokens[-1]["text"] += self._stream.final()[self._length :]
        return tokens

    def add(self, token: int) -> str:
        """Returns the text that a token adds."""
        self._stream.extend_with([token])
        text = self._stream.safe_text()
        start, self._length = self._length, len(text)
        return text[start:]
