"""Makes prompts longer: puts conversation turns before them, with other prompts' text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

from ..data.acceptance_prompts import AcceptancePrompt
from ..errors import ConfigError

Message = dict[str, str]
Encode = Callable[[list[Message]], list[int]]

_TURNS = (
    (
        "Here is something to read. Only tell me when you are done.",
        "I have read it.",
    ),
    ("Please keep this text in mind, I may ask about it later.", "Noted, I will keep it in mind."),
    ("Here is one more piece for the folder. Nothing to do yet.", "Thank you, I have added it."),
)


def encoded(
    prompt: AcceptancePrompt,
    context: int | None,
    others: Sequence[AcceptancePrompt],
    start: int,
    encode: Encode,
) -> list[int]:
    """Returns the prompt's token ids, as it is or made longer to `context` tokens.

    Args, Raises: as of `pad_prompt` and `padding_texts`.
    """
    if context is None:
        return encode(list(prompt.messages))
    return pad_prompt(prompt, padding_texts(others, prompt, start), context, encode)


def pad_prompt(
    prompt: AcceptancePrompt, texts: Sequence[str], length: int, encode: Encode
) -> list[int]:
    """Returns the prompt's token ids after as many turns as bring it to `length` tokens.

    It may be longer, by less than what the chat template puts around a turn. A prompt that is that
    long by itself stays as it is.

    Raises:
        ConfigError: `encode` leaves earlier turns out, so that no context gets longer.
    """
    ids = encode(list(prompt.messages))
    if len(ids) >= length:
        return ids
    pairs, coming = list[list[Message]](), _turns(texts)

    def before(count: int) -> list[Message]:
        while len(pairs) < count:
            pairs.append(next(coming))
        return [message for pair in pairs[:count] for message in pair]

    def with_turns(count: int) -> int:
        return len(encode(_before(prompt, before(count))))

    low, high = _Point(0, len(ids)), _Point(1, with_turns(1))
    while high.tokens < length:
        if high.tokens <= low.tokens:
            raise ConfigError(
                f"Turns before prompt {prompt.id!r} make it no longer than {high.tokens} tokens, "
                f"not {length}: the chat template leaves earlier turns out. Give no contexts."
            )
        each = (high.tokens - len(ids)) / high.parts
        count = max(high.parts + 1, int((length - len(ids)) / each) + 1)
        low, high = high, _Point(count, with_turns(count))
    low, high = _closest(low, high, length, with_turns)
    # The last turn's text is cut after the word that reaches the length. `high` is known to.
    *turns, request, answer = before(high.parts)
    instruction, _, text = request["content"].partition("\n\n")
    words = text.split(" ")

    def cut(count: int) -> list[int]:
        content = f"{instruction}\n\n{' '.join(words[:count])}"
        return encode(_before(prompt, [*turns, {"role": "user", "content": content}, answer]))

    nothing, everything = _Point(0, low.tokens), _Point(len(words), high.tokens)
    _, high = _closest(nothing, everything, length, lambda count: len(cut(count)))
    return cut(high.parts)


class _Point(NamedTuple):
    """How many tokens a prompt has with a number of turns, or words."""

    parts: int
    tokens: int


def _closest(
    low: _Point, high: _Point, length: int, tokens_of: Callable[[int], int]
) -> tuple[_Point, _Point]:
    """Returns two counts that follow each other: with the second one `length` is reached.

    It is between these two. Each try renders and tokenises the whole prompt, so few are made: in
    turns where a straight line reaches the length, and in the middle.
    """
    is_line = True
    while high.parts - low.parts > 1:
        span, share = high.parts - low.parts, 0.5
        if is_line:
            share = (length - low.tokens) / (high.tokens - low.tokens)
        count = low.parts + min(max(round(share * span), 1), span - 1)
        is_line, tried = not is_line, _Point(count, tokens_of(count))
        low, high = (tried, high) if tried.tokens < length else (low, tried)
    return low, high


def padding_texts(
    prompts: Sequence[AcceptancePrompt], besides: AcceptancePrompt, start: int = 0
) -> list[str]:
    """What the other prompts bring to read, beginning with a different one for each `start`.

    Raises:
        ConfigError: there is no other prompt.
    """
    others = [prompt for prompt in prompts if prompt.id != besides.id]
    texts = [prompt.passage for prompt in others if prompt.passage is not None]
    texts = texts or [prompt.messages[-1]["content"] for prompt in others]
    if not texts:
        raise ConfigError("Contexts are padded with other prompts' texts: give at least two.")
    start %= len(texts)
    return texts[start:] + texts[:start]


def _turns(texts: Sequence[str]) -> Iterator[list[Message]]:
    for text, (instruction, answer) in zip(cycle(texts), cycle(_TURNS), strict=False):
        yield [
            {"role": "user", "content": f"{instruction}\n\n{text}"},
            {"role": "assistant", "content": answer},
        ]


def _before(prompt: AcceptancePrompt, turns: list[Message]) -> list[Message]:
    """The turns after the system message, if there is one."""
    messages = list(prompt.messages)
    first = 1 if messages[0]["role"] == "system" else 0
    return messages[:first] + turns + messages[first:]
