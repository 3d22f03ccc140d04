"""Loads the prompts that acceptance is measured on, and recognises them in training data.

One line is one conversation: `{"id": …, "category": …, "messages": [{"role": …, "content": …}]}`.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import ConfigError
from .jsonl import LineError, check_messages, parse_line, read_lines

BUILT_IN = Path(__file__).parent / "acceptance_prompts.jsonl"
CATEGORIES = ("chat", "code", "maths", "summarise", "translate", "rewrite")  # of the built-in set
MIN_PARAGRAPH_WORDS = 8  # shorter paragraphs are common phrases
_KEYS = {"id", "category", "messages"}


@dataclass(frozen=True)
class AcceptancePrompt:
    """One conversation that ends where the assistant is to answer."""

    id: str
    category: str
    messages: tuple[dict[str, str], ...]

    @property
    def passage(self) -> str | None:
        """The text that the last message asks to work on: what follows its first blank line."""
        head, _, rest = self.messages[-1]["content"].partition("\n\n")
        return rest.strip() if head and len(rest.split()) >= 40 else None


def load_prompts(path: str | os.PathLike[str] | None = None) -> list[AcceptancePrompt]:
    """Loads the prompts of a JSONL file, by default the built-in set.

    Raises:
        ConfigError: the file cannot be read, or a line (named) is not a prompt.
    """
    file = BUILT_IN if path is None else Path(path)
    prompts: list[AcceptancePrompt] = []
    line_of: dict[str, int] = {}
    for number, line in read_lines(file, f"The prompt file {file}", ConfigError):
        where = f"{file}:{number}"
        try:
            prompt = _parse(line)
        except LineError as error:
            raise ConfigError(f"{where}: {error}") from error
        if prompt.id in line_of:
            raise ConfigError(
                f"{where}: the id {prompt.id!r} is that of line {line_of[prompt.id]} too. "
                "Give each prompt its own."
            )
        line_of[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"The prompt file {file} has no prompts: give one JSON object per line.")
    return prompts


def _parse(line: str) -> AcceptancePrompt:
    value = parse_line(line)
    if not isinstance(value, dict) or set(value) != _KEYS:
        got = ", ".join(map(repr, value)) if isinstance(value, dict) else type(value).__name__
        raise LineError(
            f"got {got or 'no keys'}; a prompt is an object with the keys 'id', 'category' and "
            "'messages'."
        )
    for key in ("id", "category"):
        if not isinstance(value[key], str) or not value[key].strip():
            raise LineError(f"{key!r} is {value[key]!r}; it must be text.")
    messages = check_messages(value["messages"], blank=False)
    _check_turns([message["role"] for message in messages])
    return AcceptancePrompt(value["id"], value["category"], tuple(messages))


def _check_turns(roles: list[str]) -> None:
    turns = roles[1:] if roles[0] == "system" else roles
    expected = ["user" if i % 2 == 0 else "assistant" for i in range(len(turns))]
    if turns != expected or not turns or turns[-1] != "user":
        raise LineError(
            f"the roles are {', '.join(roles)}; they must be user, assistant, user, … and end "
            "with user, after at most one system message."
        )


# -- keeping training data apart ---------------------------------------------------------------
def fingerprint(text: str) -> str:
    """Hashes the words of a text, without case, punctuation, spacing and Unicode form."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    words = "".join(c if c.isalnum() else " " for c in folded).split()
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:32]


def text_fingerprints(text: str) -> frozenset[str]:
    """Returns fingerprints of a message and of its longer paragraphs.

    So a passage is recognised under another instruction.
    """
    paragraphs = [p for p in text.split("\n\n") if len(p.split()) >= MIN_PARAGRAPH_WORDS]
    return frozenset(fingerprint(part) for part in (text, *paragraphs))


@cache
def prompt_fingerprints(path: str | os.PathLike[str] | None = None) -> frozenset[str]:
    """Returns the fingerprints of all user messages in the set. Training data must have none:

    if text_fingerprints(message) & prompt_fingerprints(): leave the sample out
    """
    return frozenset().union(
        *(
            text_fingerprints(message["content"])
            for prompt in load_prompts(path)
            for message in prompt.messages
            if message["role"] == "user"
        )
    )


def select_prompts(
    prompts: Sequence[AcceptancePrompt],
    categories: Sequence[str] | None = None,
    per_category: int | None = None,
) -> list[AcceptancePrompt]:
    """Selects the prompts of the named categories, at most the first `per_category` of each.

    Raises:
        ConfigError: a category is not in the set.
    """
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    for category in categories or ():
        if category not in known:
            raise ConfigError(
                f"No prompt has the category {category!r}. Allowed: {', '.join(known)}."
            )
    if per_category is not None and per_category < 1:
        raise ConfigError(f"per_category={per_category}: it must be at least 1.")
    taken = dict.fromkeys(known, 0)
    selected = []
    for prompt in prompts:
        if categories and prompt.category not in categories:
            continue
        taken[prompt.category] += 1
        if per_category is None or taken[prompt.category] <= per_category:
            selected.append(prompt)
    return selected
