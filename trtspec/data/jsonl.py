"""Reading JSON lines and the messages of a chat in them: one reader for prompts and training text.

A wrong line raises a `LineError`, to which the caller adds the file's name and the line's number.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..checks import is_list

Messages = list[dict[str, str]]
MAX_SHOWN = 80


class LineError(ValueError):
    """What is wrong with one line: what was found and what is allowed."""


def read_lines(path: Path, name: str, error_type: type[Exception]) -> list[tuple[int, str]]:
    """Returns (number from 1, line) of the lines of a UTF-8 file that are not blank.

    Args:
        name: what messages call the file. error_type: what they are raised as.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise error_type(f"{name} is not UTF-8 text ({error}).") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise error_type(f"{name} cannot be read: {reason}.") from error
    lines = enumerate(content.split("\n"), start=1)
    return [(number, line) for number, line in lines if line.strip()]


def parse_line(line: str | bytes) -> Any:
    """Returns the JSON value of a line, bytes in UTF-8. Raises LineError."""
    try:
        return json.loads(line if isinstance(line, str) else line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise LineError(f"not JSON in UTF-8 ({error})") from error
    except (ValueError, RecursionError) as error:
        raise LineError(f"not JSON ({error})") from error


def check_messages(messages: Any, *, other_keys: bool = False, blank: bool = True) -> Messages:
    """Returns the messages of a chat, once each is known to be two texts.

    Args:
        other_keys: a message may have keys beside "role" and "content".
        blank: a text may be empty.

    Raises:
        LineError: they are something else, or no Unicode text.
    """
    if not is_list(messages) or not messages:
        raise LineError(
            f"'messages' must be a list of at least one message, got {short(messages)}."
        )
    for index, message in enumerate(messages):
        pair = isinstance(message, dict) and (message.get("role"), message.get("content"))
        is_good = pair and all(isinstance(text, str) and (blank or text.strip()) for text in pair)
        if not is_good or not (other_keys or len(message) == 2):
            more = "" if other_keys else " and nothing else"
            raise LineError(
                f"message {index} must be an object with the texts 'role' and 'content'{more}, "
                f"got {short(message)}."
            )
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can hold
            raise LineError(f"message {index} is not valid Unicode text ({error}).") from error
    return [{key: message[key] for key in ("role", "content")} for message in messages]


def short(value: Any) -> str:
    """Returns a value as JSON, cut where that is long."""
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
