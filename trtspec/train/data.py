"""Training text: JSON lines in, masked tokens out.

A file is JSON lines, one conversation each, in two forms that may be mixed:

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}
    {"input_ids": [1, 2, …], "loss_mask": [0, 1, …], "kind": "code", "temperature": 0.8}

Text is rendered with the target's chat template. Tokens are used unchanged, so they need a header
line before them that names their tokenizer:

    {"format": "trtspec-train-1", "tokenizer": "<fingerprint>", "model": "<name>"}

A header holds for the lines up to the next one: files may be joined with `cat`. Other keys of a
line or header are ignored. The loss mask marks the tokens to be predicted, those the assistant
wrote, end-of-turn token included.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..api.text_stream import special_token_ids
from ..checks import is_number
from ..data.acceptance_prompts import prompt_fingerprints, text_fingerprints
from ..data.jsonl import LineError, check_messages, parse_line, short
from ..errors import TrtspecError, described
from ..utils import renamed

logger = logging.getLogger(__name__)

FORMAT = "trtspec-train-1"
_LINE_FORMS = (
    '{"messages": [{"role": …, "content": …}, …]} or {"input_ids": […], "loss_mask": [0 or 1, …]}'
)


class DataError(TrtspecError, ValueError):
    """A file of training text, or a line of it, that cannot be used."""


@dataclass(frozen=True, eq=False)
class Example:
    """One conversation as tokens.

    input_ids: [T] int64. loss_mask: [T] bool, True for tokens to be predicted.
    digest: hex sha256 of the line's content before truncation, the same for every max_len.
    kind, temperature: how the text was generated, if the line says so.
    """

    input_ids: Tensor
    loss_mask: Tensor
    digest: str
    kind: str | None = None
    temperature: float | None = None


@dataclass
class ReadCounts:
    """Counts of one pass over a file: lines used, and lines dropped by reason. Truncated examples
    are used."""

    kept: int = 0
    truncated: int = 0
    without_loss: int = 0
    measured: int = 0  # they hold an evaluation prompt
    bad: int = 0


# -- the tokenizer ---------------------------------------------------------------------------------
def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Returns 16 hex digits of a tokenizer's ids: which token each id is, and which are special.

    Merges and chat template do not count: they change which ids text is encoded to, not what the
    ids mean.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    content = json.dumps([vocabulary, sorted(tokenizer.all_special_ids)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def render_chat(
    tokenizer: Any, messages: Sequence[dict[str, str]], add_generation_prompt: bool
) -> str:
    """Renders messages by the chat template.

    Raises:
        DataError: the messages do not fit the template.
    """
    try:
        return tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=add_generation_prompt, tokenize=False
        )
    except Exception as error:  # a template is code, which may raise anything
        reason = described(error)
        raise DataError(f"the chat template cannot render the messages ({reason})") from error


def render_conversation(
    tokenizer: Any, messages: Sequence[dict[str, str]]
) -> tuple[list[int], list[bool]]:
    """Returns the token ids of a conversation, and which of them the assistant wrote.

    A turn of the assistant begins where the template's generation prompt ends. It ends with its
    end-of-turn token, which is included. Whitespace that the template puts after that is not: the
    model never writes it. A token that straddles the beginning is excluded too, for at inference
    the prompt's tokens are fixed before the answer begins.

    Raises:
        DataError: the messages do not fit the template, or the template rewrites earlier turns,
            so that the assistant's text cannot be found again.
    """
    text = render_chat(tokenizer, messages, False)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, offsets = list(encoding["input_ids"]), encoding["offset_mapping"]
    special = set(special_token_ids(tokenizer))
    special_spans = [span for i, span in zip(ids, offsets, strict=True) if i in special]
    mask = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start, end = _turn_span(tokenizer, messages, turn, text, special_spans)
        for i, (first, last) in enumerate(offsets):
            mask[i] |= start <= first and last <= end
    return ids, mask


def _turn_span(
    tokenizer: Any,
    messages: Sequence[dict[str, str]],
    turn: int,
    text: str,
    special_spans: list[tuple[int, int]],
) -> tuple[int, int]:
    """Returns [start, end) of an assistant's turn in the rendered `text`, in characters."""
    if turn == 0:
        raise DataError("the first message is the assistant's: it must answer something")
    before = render_chat(tokenizer, messages[:turn], True)
    content = messages[turn]["content"].strip()  # many templates trim
    start = len(before)
    found = text.find(content, start) if text.startswith(before) else -1
    if found < 0:
        raise DataError(
            f"the chat template writes message {turn} of {len(messages)} in another way once more "
            "follow, so the assistant's tokens cannot be told: give one line per answer, or "
            "input_ids and loss_mask"
        )
    end = found + len(content)
    through = render_chat(tokenizer, messages[: turn + 1], False)
    limit = len(through) if text.startswith(through) else len(text)
    for first, last in special_spans:
        if end <= first and last <= limit:
            return start, last if not text[end:first].strip() else end
    return start, end


def is_measured(messages: Sequence[dict[str, str]]) -> bool:
    """Returns whether a user's turn, or a long paragraph of it, is in the acceptance prompts.

    A head must not be trained on these.
    """
    measured = prompt_fingerprints()
    users = [message["content"] for message in messages if message["role"] == "user"]
    return any(not measured.isdisjoint(text_fingerprints(text)) for text in users)


# -- reading ---------------------------------------------------------------------------------------
class TrainingText:
    """The examples of a file. Every iteration reads it again; `counts` are those of the last one.

    Examples without a token to predict are dropped, also when truncation left none. So are messages
    that hold an acceptance prompt. (Lines of tokens are not searched for these.)

    Args:
        path: a file of JSON lines, as at the top of this module.
        tokenizer: the target's transformers tokenizer.
        vocab_size: the target's; ids must be below it.
        max_len: longer examples lose their tail; None keeps all.
        skip_bad: bad lines are left out and counted, with one warning at the end. A fault of the
            file as a whole (another tokenizer, another format) is raised all the same.

    Raises:
        DataError: while iterating, "file:line: what was found, what is allowed".
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tokenizer: Any,
        vocab_size: int,
        *,
        max_len: int | None = None,
        skip_bad: bool = False,
    ):
        if max_len is not None and max_len < 2:
            raise DataError(f"max_len={max_len}: it must be at least 2, a token and its next.")
        self.path, self.tokenizer, self.vocab_size = Path(path), tokenizer, vocab_size
        self.max_len, self.skip_bad = max_len, skip_bad
        self.counts = ReadCounts()
        self._fingerprint = tokenizer_fingerprint(tokenizer)

    def __iter__(self) -> Iterator[Example]:
        self.counts = counts = ReadCounts()
        header: dict[str, Any] | None = None
        first_bad = ""
        for number, line, is_whole in _lines(self.path):
            where = f"{self.path}:{number}"
            try:
                record = _parse(line)
                if "format" in record:
                    header = _check_header(record, where)
                    continue
                example = self._example(record, header, where)
            except LineError as error:
                if isinstance(error, _Torn) and header is not None and not is_whole:
                    logger.warning("%s ends inside a line that was being written: left out.", where)
                    break
                if not self.skip_bad:
                    raise DataError(f"{where}: {error}") from error.__cause__
                first_bad = first_bad or f"{where}: {error}"
                counts.bad += 1
                continue
            if example is not None:
                counts.kept += 1
                yield example
        if counts.measured:
            logger.warning(
                "%s: %d conversation(s) with prompts that acceptance is measured on left out",
                self.path,
                counts.measured,
            )
        if counts.without_loss:
            logger.warning(
                "%s: %d line(s) without a token to train on left out",
                self.path,
                counts.without_loss,
            )
        if counts.truncated:
            logger.warning(
                "%s: %d line(s) cut at %s tokens", self.path, counts.truncated, self.max_len
            )
        if counts.bad:
            logger.warning(
                "%s: %d bad line(s) left out, the first: %s", self.path, counts.bad, first_bad
            )

    def _example(
        self, record: dict[str, Any], header: dict[str, Any] | None, where: str
    ) -> Example | None:
        """Returns the line's example, or None if it has nothing to predict."""
        if ("messages" in record) == ("input_ids" in record):
            keys = ", ".join(map(repr, record)) or "none"
            raise LineError(f"an object with the keys {keys}; allowed is {_LINE_FORMS}.")
        kind, temperature = _check_labels(record)
        if "messages" in record:
            check_messages(record["messages"])
            if is_measured(record["messages"]):
                self.counts.measured += 1
                return None
            ids, mask, content = self._from_messages(record["messages"], where)
        else:
            self._check_tokenizer(header, where)
            ids, mask = _check_tokens(record)
            content = " ".join(map(str, ids))
        # One comparison for both forms: a tokenizer may know more ids than the model has rows.
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise LineError(f"token id {wrong}; ids must be in 0 … {self.vocab_size - 1}.")
        is_long = self.max_len is not None and len(ids) > self.max_len
        ids, mask = ids[: self.max_len], mask[: self.max_len]
        if not any(mask):
            self.counts.without_loss += 1
            return None
        self.counts.truncated += is_long
        return Example(
            torch.tensor(ids, dtype=torch.int64),
            torch.tensor(mask, dtype=torch.bool),
            hashlib.sha256(content.encode()).hexdigest(),
            kind,
            temperature,
        )

    def _from_messages(self, messages: Any, where: str) -> tuple[list[int], list[bool], str]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError(
                f"{where}: 'messages' need a chat template, which this tokenizer does not have. "
                "Give input_ids and loss_mask."
            )
        try:
            ids, mask = render_conversation(self.tokenizer, messages)
        except DataError as error:
            raise LineError(f"{error}.") from error
        return ids, mask, json.dumps(messages, sort_keys=True)

    def _check_tokenizer(self, header: dict[str, Any] | None, where: str) -> None:
        if header is None:
            raise DataError(
                f"{where}: input_ids, and no header line before them says whose tokens they are. "
                f'Begin the file with {{"format": "{FORMAT}", "tokenizer": "{self._fingerprint}"}} '
                "if they are this tokenizer's."
            )
        fingerprint = header.get("tokenizer")
        if fingerprint != self._fingerprint:
            raise DataError(
                f"{where}: input_ids of tokenizer {fingerprint} (model {header.get('model')!r}); "
                f"the target's is {self._fingerprint}. Use text of this target, or its messages."
            )


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yields (number from 1, line, whether it ends with a newline) of lines that are not blank."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield number, line, line.endswith(b"\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


class _Torn(LineError):
    """A line that is no JSON, as one that was cut would be."""


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = parse_line(line)
    except LineError as error:
        raise _Torn(f"{error}; allowed is {_LINE_FORMS}.") from error
    if not isinstance(record, dict):
        raise LineError(f"a JSON {type(record).__name__}, not an object; allowed is {_LINE_FORMS}.")
    return record


def _check_header(record: dict[str, Any], where: str) -> dict[str, Any]:
    if record["format"] != FORMAT:
        raise DataError(
            f"{where}: format {record['format']!r}; this version reads {FORMAT!r}. Convert it, or "
            "generate it again."
        )
    return record


def _check_labels(record: dict[str, Any]) -> tuple[str | None, float | None]:
    kind, temperature = record.get("kind"), record.get("temperature")
    if kind is not None and not isinstance(kind, str):
        raise LineError(f"kind={kind!r}; allowed is a text.")
    if temperature is None:
        return kind, None
    if not is_number(temperature) or not (math.isfinite(temperature) and temperature >= 0):
        raise LineError(f"temperature={temperature!r}; allowed is a number >= 0.")
    return kind, float(temperature)


def _check_tokens(record: dict[str, Any]) -> tuple[list[int], list[bool]]:
    ids, mask = record["input_ids"], record.get("loss_mask")
    if not isinstance(ids, list) or set(map(type, ids)) - {int}:  # bool is a type of its own here
        raise LineError(f"input_ids={short(ids)}; allowed is a list of ints.")
    if not isinstance(mask, list) or set(map(type, mask)) - {int} or set(mask) - {0, 1}:
        raise LineError(f"loss_mask={short(mask)}; allowed is a list of 0 and 1.")
    if len(mask) != len(ids):
        raise LineError(f"{len(ids)} input_ids and a loss_mask of {len(mask)}; they must be equal.")
    return ids, [m == 1 for m in mask]


__getattr__ = renamed(
    __name__,
    {
        name: f"trtspec.train.{home}.{name}"
        for home, names in {
            "draft_vocabulary": ("DraftVocabulary", "d2t_offsets", "draft_vocabulary"),
            "packing": ("PADDING", "Packed", "first_fit", "pack", "split"),
        }.items()
        for name in names
    },
)
