"""`Inputs`: prompts of text and conversations become token ids."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..api.embeds_prompt import EmbedsPrompt
from ..api.sampling_params import SamplingParams
from ..errors import RequestError, shown
from ..metadata.logits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS

Prompt = str | Sequence[int] | EmbedsPrompt | Mapping[str, Any]
Messages = Sequence[dict[str, Any]]
NOTHING: Mapping[str, Any] = {}
# Arguments of transformers' function, which no caller may set through the template's variables.
NOT_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


class TokenizedPrompt(NamedTuple):
    """A prompt as an engine takes it, and its text if it came as text."""

    text: str | None
    ids: list[int] | EmbedsPrompt


def check_variables(names: Iterable[str]) -> None:
    """Raises RequestError for a name that is no variable of a chat template."""
    reserved = sorted(NOT_VARIABLES.intersection(names))
    if reserved:
        raise RequestError(f"{reserved[0]!r} is no variable of a chat template: leave it out.")


class Inputs:
    """Tokenises for one model.

    Args:
        model_dir: named in messages.
        tokenizer: of transformers, or None.
    """

    def __init__(self, model_dir: Path, tokenizer: Any):
        self.model_dir, self.tokenizer = model_dir, tokenizer

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """Returns a prompt's tokens.

        Raises:
            RequestError: it is no prompt, or text without a tokenizer.
        """
        prompt = plain(prompt)
        if isinstance(prompt, EmbedsPrompt):
            return TokenizedPrompt(None, prompt)
        if isinstance(prompt, bytes) or not isinstance(prompt, str | Sequence):
            raise RequestError(f"prompt={shown(prompt)}: give text or a list of token ids.")
        if not isinstance(prompt, str):
            if len(prompt) > 0 and all(isinstance(part, str) for part in prompt):
                raise RequestError(
                    f"The prompt is a list of {len(prompt)} text(s): give one text, or token ids."
                )
            return TokenizedPrompt(None, list(prompt))
        if self.tokenizer is None:
            raise RequestError(
                f"{self.model_dir} holds no tokenizer: give token ids instead of text."
            )
        if not prompt:
            raise RequestError("The prompt is empty: give at least one token.")
        _check_unicode(prompt)
        # The length is checked later.
        return TokenizedPrompt(prompt, self.tokenizer.encode(prompt, verbose=False))

    def render_chat(
        self,
        messages: Messages,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] = NOTHING,
    ) -> str:
        """Returns the text of a conversation, up to where the assistant answers.

        Args:
            tools: functions that the model may call, in OpenAI's form.
            variables: what else the template reads, as `enable_thinking`.

        Raises:
            RequestError: the messages do not fit the template, or the model has none.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise RequestError(
                f"{self.model_dir.name} has no chat template: give text in place of messages, to "
                "generate() or /v1/completions."
            )
        if not isinstance(messages, list | tuple) or not all(isinstance(m, dict) for m in messages):
            raise RequestError(
                f"messages={messages!r}: give a list like [{{'role': 'user', 'content': '…'}}]."
            )
        check_variables(variables)
        conversation = [with_plain_text(message) for message in messages]
        try:
            return self.tokenizer.apply_chat_template(
                conversation,
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
                **variables,
            )
        except Exception as error:  # a template is code and may raise anything
            raise RequestError(
                f"The chat template cannot render {shown(messages)} ({type(error).__name__}: "
                f"{error}). Give a list of {{'role': …, 'content': …}}."
            ) from error

    def encode_rendered(self, text: str) -> list[int]:
        """Returns the tokens of a rendered conversation, which has its special tokens already.

        Raises:
            RequestError: it is not valid Unicode.
        """
        _check_unicode(text)
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def with_token_ids(self, params: SamplingParams) -> SamplingParams:
        """Returns the same parameters with `bad_words` as token ids.

        Raises:
            RequestError: `stop` or `bad_words` hold text and there is no tokenizer, or a bad word
                has too many tokens.
        """
        words = params.bad_words or ()
        has_text = any(isinstance(word, str) for word in words)
        if self.tokenizer is None and (params.stop_strings or has_text):
            name = "stop" if params.stop_strings else "bad_words"
            raise RequestError(
                f"{name}={getattr(params, name)!r} needs a tokenizer; {self.model_dir} has none."
            )
        if not has_text or self.tokenizer is None:
            return params
        ids: list[Sequence[int]] = []
        for word in words:
            bare = word.removeprefix(" ") if isinstance(word, str) else ""
            forms = (bare, f" {bare}") if bare.strip() else (word,)
            for form in forms:
                tokens: Sequence[int] = form  # type: ignore[assignment]
                if isinstance(form, str):
                    tokens = self.tokenizer.encode(form, add_special_tokens=False)
                if not 0 < len(tokens) <= MAX_BAD_WORD_TOKENS:
                    raise RequestError(
                        f"SamplingParams.bad_words has {form!r}, which is {len(tokens)} tokens: "
                        f"a word may have 1 … {MAX_BAD_WORD_TOKENS}."
                    )
                ids.append(tokens)
        if len(ids) > MAX_BAD_WORDS:
            raise RequestError(
                f"SamplingParams.bad_words: {len(words)} words, {len(ids)} with and without space "
                f"before the texts among them; at most {MAX_BAD_WORDS} are possible."
            )
        return replace(params, bad_words=ids)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"The prompt is not valid Unicode text: {error}.") from None


def checked_id(request_id: Any) -> int:
    """Returns the id as an int. Raises RequestError for what is none."""
    try:
        return operator.index(request_id)
    except TypeError:
        raise RequestError(
            f"request_id={shown(request_id)}: give an int, as a RequestOutput has it."
        ) from None


def plain(prompt: Any) -> Any:
    """Converts numpy arrays and tensors to lists, and a prompt in a dict to what it holds.

    Raises:
        RequestError: a dict that is no prompt.
    """
    if isinstance(prompt, Mapping):
        prompt = _of_dict(prompt)
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt


def _of_dict(prompt: Mapping[str, Any]) -> Any:
    given = {str(name): value for name, value in prompt.items() if value is not None}
    other = sorted(given.keys() - {"prompt", "prompt_token_ids"})
    if len(given) != 1 or other:
        image = " Images are embeddings here: give an EmbedsPrompt." if other else ""
        raise RequestError(
            f"A prompt has {', '.join(sorted(given)) or 'nothing'}: a dict has one of 'prompt' "
            f"(text) and 'prompt_token_ids'.{image}"
        )
    ((name, value),) = given.items()
    if isinstance(value, str) != (name == "prompt") or isinstance(value, bytes | Mapping):
        what = "text" if name == "prompt" else "a list of token ids"
        raise RequestError(f"{name!r} of a prompt is {shown(value)}: it must be {what}.")
    return value


def with_plain_text(message: dict[str, Any]) -> dict[str, Any]:
    """Joins a message's parts of text (OpenAI's form) to one text.

    Raises:
        RequestError: there is no text, or something else.
    """
    parts = message.get("content")
    is_text = isinstance(parts, str | list)
    if not is_text and not (parts is None and message.get("role") == "assistant"):
        found = shown(parts) if "content" in message else "missing"
        found = f"is {found}: give text. Only an assistant's may be None, beside tool calls."
        raise RequestError(f"The content of a message of role {shown(message.get('role'))} {found}")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return message
    other = [part.get("type") for part in parts if part.get("type") != "text"]
    if other:
        raise RequestError(
            f"The content has a part of type {other[0]!r}: a chat takes text. Of an image give "
            "generate() what the model's encoder makes, as an EmbedsPrompt."
        )
    return {**message, "content": "".join(str(part.get("text", "")) for part in parts)}
