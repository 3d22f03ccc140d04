"""`GuidedDecodingParams`: the grammar that an output must follow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..checks import is_int
from ..errors import RequestError, shown
from ..other_names import NamesFields

MAX_GRAMMAR_BYTES = 2**18
MAX_CHOICES = 1024
MAX_MARKER_TOKENS = 8


@dataclass(frozen=True)
class GuidedDecodingParams(NamesFields):
    """What an output must be. Exactly one of the first six is given (TensorRT-LLM's names).

    Args:
        json: JSON that fits this schema: a dict, its text, or a pydantic model class.
        json_object: any JSON object.
        regex: text that this regular expression matches as a whole.
        grammar: text of this EBNF grammar, whose first rule is `root` (XGrammar's notation, GBNF).
        choice: one of these texts.
        structural_tag: XGrammar's structural tag: its JSON text or a dict. Text is free but for
            tags, inside of which a schema holds.
        reasoning_end: the grammar holds after these tokens, or this text of at most 8 tokens, of
            the output ("</think>"). Before, anything but the output's end may come. A prompt that
            ends with them has no such part. None: the grammar holds from the start.

    Raises:
        RequestError: none or several are given, or one is malformed. What is malformed as a
            grammar ends its request with "error", since it is compiled while others run.
    """

    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: Any = None
    choice: Sequence[str] | None = None
    reasoning_end: str | Sequence[int] | None = None

    def __post_init__(self) -> None:
        given = [
            entry.name
            for entry in fields(self)
            if entry.name != "reasoning_end" and getattr(self, entry.name) not in (None, False)
        ]
        if len(given) != 1:
            raise RequestError(
                f"GuidedDecodingParams has {', '.join(given) or 'nothing'}: give exactly one of "
                "json, json_object, regex, grammar, choice and structural_tag."
            )
        object.__setattr__(self, "json", _json_text("json", self.json))
        object.__setattr__(
            self, "structural_tag", _json_text("structural_tag", self.structural_tag)
        )
        if not isinstance(self.json_object, bool):
            _refuse("json_object", self.json_object, "True or False")
        if self.choice is not None:
            self._check_choice()
        for name in ("regex", "grammar", "json", "structural_tag"):
            text = getattr(self, name)
            if text is None:
                continue
            if not isinstance(text, str) or not text:
                is_json = name in ("json", "structural_tag")
                _refuse(name, text, "a dict or JSON text" if is_json else "text, not empty")
            if len(text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
                raise RequestError(
                    f"GuidedDecodingParams.{name} has {len(text)} characters: at most "
                    f"{MAX_GRAMMAR_BYTES} bytes are allowed."
                )
        self._check_reasoning_end()

    def _check_choice(self) -> None:
        given = self.choice if isinstance(self.choice, list | tuple) else ()
        choice = tuple(given)
        if not 0 < len(choice) <= MAX_CHOICES or not all(isinstance(c, str) and c for c in choice):
            _refuse("choice", self.choice, f"a list of 1 … {MAX_CHOICES} texts, none empty")
        object.__setattr__(self, "choice", choice)

    def _check_reasoning_end(self) -> None:
        marker = self.reasoning_end
        if marker is None or (isinstance(marker, str) and marker):
            return
        ids = tuple(marker) if isinstance(marker, list | tuple) else ()
        if not 0 < len(ids) <= MAX_MARKER_TOKENS or not all(is_int(i, 0) for i in ids):
            allowed = f"text, or a list of 1 … {MAX_MARKER_TOKENS} token ids"
            _refuse("reasoning_end", marker, allowed)
        object.__setattr__(self, "reasoning_end", ids)

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        names = "json", "regex", "grammar", "json_object", "structural_tag"
        return next((name for name in names if getattr(self, name)), "choice")


def _json_text(name: str, value: Any) -> Any:
    """Returns a schema as JSON text; other values as they are, to be refused by the caller."""
    schema_of = getattr(value, "model_json_schema", None)  # pydantic's
    if schema_of is not None:
        value = schema_of()
    if isinstance(value, dict | bool) and value is not False:
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"GuidedDecodingParams.{name} is not JSON ({error}): give a schema of dicts, "
                "lists, texts, numbers, booleans and None."
            ) from error
    return value


def _refuse(name: str, value: object, allowed: str) -> None:
    raise RequestError(
        f"GuidedDecodingParams.{name}={shown(value)} is not allowed: it must be {allowed}."
    )
