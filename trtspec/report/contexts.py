"""Makes prompts longer: puts conversation turns before them, with other prompts' text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

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


def pad_prompt(
    prompt: AcceptancePrompt, texts: Sequence[str], length: int, encode: Encode
) -> list[int]:
    """Returns the prompt's token ids after as many turns as bring it to `length` tokens.

    It may be longer by less than what the chat template puts around a turn.

    A prompt that is that long by itself stays as it is.

    Raises:
        ConfigError: `encode` leaves earlier turns out, so that no context gets longer.
    """
    ids = encode(list(prompt.messages))
    if len(ids) >= length:
        return ids
    turns: list[Message] = []
    for turn in _turns(texts):
        shorter, ids = len(ids), encode(_before(prompt, turns + turn))
        if len(ids) >= length:
            break
        if len(ids) <= shorter:
            raise ConfigError(
                f"Turns before prompt {prompt.id!r} make it no longer than {len(ids)} tokens, not "
                f"{length}: the chat template leaves earlier turns out. Give no contexts."
            )
        turns += turn
    # The last turn's text is cut after the word that reaches the length. `ids` is known to.
    instruction, _, text = turn[0]["content"].partition("\n\n")
    words = text.split(" ")

    def cut(count: int) -> list[int]:
        content = f"{instruction}\n\n{' '.join(words[:count])}"
        return encode(_before(prompt, [*turns, {"role": "user", "content": content}, turn[1]]))

    count = 1 + bisect_left(range(1, len(words)), length, key=lambda n: len(cut(n)))
    return cut(count)


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
