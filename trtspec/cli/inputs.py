"""Prompts from the command line and from JSONL files, and how they become model input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CliError
from .options import PromptOptions

if TYPE_CHECKING:
    from ..llm import LLM

_LINE_FORMS = 'a string, {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}]}'


@dataclass(frozen=True)
class Prompt:
    """One prompt as the user gave it: text, or the messages of a chat."""

    given: str | list[dict[str, str]]

    @property
    def messages(self) -> list[dict[str, str]]:
        if isinstance(self.given, str):
            return [{"role": "user", "content": self.given}]
        return self.given

    @property
    def title(self) -> str:
        """The prompt on one line, for headings."""
        text = self.given if isinstance(self.given, str) else self.given[-1]["content"]
        line = " ".join(text.split())
        return line if len(line) <= 70 else line[:69] + "…"


def read_prompts(given: PromptOptions) -> list[Prompt]:
    """Returns the prompts of `--prompt` or `--prompt-file`, none where neither is given.

    Raises:
        CliError: both are given, one cannot be read, or `--raw` meets messages.
    """
    texts, file = given.prompt, given.prompt_file
    if texts and file is not None:
        raise CliError("--prompt and --prompt-file were both given: use one of them.")
    if file is not None:
        prompts = _read_file(file)
        if given.raw:
            _refuse_messages(prompts)
        return prompts
    for text in texts or ():
        if not text.strip():
            raise CliError("--prompt is empty: give the text the model should answer.")
    return [Prompt(text) for text in texts or ()]


def _read_file(path: Path) -> list[Prompt]:
    from ..data.jsonl import LineError, read_lines

    prompts = []
    for number, line in read_lines(path, f"--prompt-file {path}", CliError):
        try:
            prompts.append(_parse_line(line))
        except LineError as error:
            raise CliError(f"--prompt-file {path}, line {number}: {error}") from error
    if not prompts:
        raise CliError(f"--prompt-file {path} has no prompts: one JSON per line, {_LINE_FORMS}.")
    return prompts


def _parse_line(line: str) -> Prompt:
    from ..data.jsonl import LineError, check_messages, parse_line

    try:
        value = parse_line(line)
    except LineError as error:
        raise LineError(f"{error}. Allowed: {_LINE_FORMS}.") from error
    if isinstance(value, dict) and set(value) == {"prompt"}:
        value = value["prompt"]
    elif isinstance(value, dict) and set(value) == {"messages"}:
        return Prompt(check_messages(value["messages"]))
    elif isinstance(value, dict):
        keys = ", ".join(repr(key) for key in value) or "none"
        raise LineError(f"an object with the keys {keys}. Allowed: {_LINE_FORMS}.")
    if not isinstance(value, str):
        raise LineError(f"got {type(value).__name__}. Allowed: {_LINE_FORMS}.")
    if not value.strip():
        raise LineError("the prompt is empty. Give the text the model should answer.")
    return Prompt(value)


def _refuse_messages(prompts: Sequence[Prompt]) -> None:
    """Raises CliError for messages, which have no form that `--raw` could leave as it is."""
    for number, prompt in enumerate(prompts, start=1):
        if not isinstance(prompt.given, str):
            raise CliError(
                f"--raw takes plain text, but prompt {number} is a list of messages: leave --raw "
                'out, or write the prompt as {"prompt": "..."}.'
            )


_RAW = "--raw gives the text to the model as it is."


def to_token_ids(llm: LLM, prompt: Prompt, without: str = _RAW) -> list[int]:
    """Returns the prompt's tokens, the model's chat template applied.

    Args:
        without: what helps where the model has no template.
    """
    try:
        return llm.apply_chat_template(prompt.messages)
    except ValueError as error:
        raise CliError(f"{error} ({without})") from error


def encoder(llm: LLM, raw: bool) -> Callable[[Sequence[dict[str, str]]], list[int]]:
    """Returns what makes token ids of messages: of their text if `raw`, else the chat template."""

    def of_text(messages: Sequence[dict[str, str]]) -> list[int]:
        ids = llm.inputs.tokenize("\n\n".join(message["content"] for message in messages)).ids
        assert isinstance(ids, list)
        return ids

    def of_template(messages: Sequence[dict[str, str]]) -> list[int]:
        return to_token_ids(llm, Prompt(list(messages)))

    return of_text if raw else of_template


def to_inputs(llm: LLM, prompts: Sequence[Prompt], raw: bool) -> list[str] | list[list[int]]:
    """Returns what `llm.generate` takes: text if `raw`, else token ids by the chat template."""
    if raw:
        return [prompt.given for prompt in prompts if isinstance(prompt.given, str)]
    return [to_token_ids(llm, prompt) for prompt in prompts]
