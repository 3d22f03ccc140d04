"""Compiles grammars in threads of their own, so that no step waits for one."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any, NamedTuple

from ..api.guided_decoding import MAX_MARKER_TOKENS, GuidedDecodingParams
from ..api.text_stream import special_token_ids
from ..errors import ConfigError, RequestError, TrtspecError, described, shown
from .grammar import Grammar, WhiteSpace, Without
from .schema import LENGTHS, find_in_tag, find_unenforced, find_unread

CACHE_BYTES = 2**28
"""Memory of compiled grammars that is kept for later requests; the oldest go first."""
NUM_THREADS = 2
MAX_GROUPS = 4096
"""Parentheses of a grammar. With some 30,000 within each other XGrammar 0.2.8 overflows its stack,
which ends the process."""
_GROUP = re.compile(r"\(|\\[xuU]\{?0*28")
"""One, or its escape in a literal: one that is a regular expression has groups, too."""
_PLACE = re.compile(r"^\[[^]]*\] \S+: ")
"""Where in XGrammar's source a message comes from."""


class _OfVocabulary(NamedTuple):
    compiler: Any  # XGrammar's
    white_space: WhiteSpace | None


class Compilation:
    """A grammar that is being compiled."""

    def __init__(self, compiler: GrammarCompiler):
        self.future: Future[Grammar] = Future()
        self.started: float | None = None  # once a thread has taken it
        self._compiler = compiler

    @property
    def seconds(self) -> float:
        """Since a thread has taken it."""
        return 0.0 if self.started is None else time.monotonic() - self.started

    def give_up(self) -> None:
        """Leaves the thread to it, and starts another for those that wait."""
        self._compiler.add_thread()


class GrammarCompiler:
    """Turns a request's parameters into its grammar.

    Args:
        tokenizer: of transformers.
        vocab_size: of the model's logits.
        end_ids: tokens that end an output.

    Raises:
        ConfigError: XGrammar is not installed, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]):
        self.xgrammar = _import_xgrammar()
        self.tokenizer, self.vocab_size, self.end_ids = tokenizer, vocab_size, tuple(end_ids)
        self._special = [i for i in special_token_ids(tokenizer) if i < vocab_size]
        self._build = threading.Lock()
        self._tasks: _Tasks = queue.SimpleQueue()
        self._num_threads = 0
        weakref.finalize(self, self._tasks.put, None)

    @cached_property
    def _of_vocabulary(self) -> _OfVocabulary:
        """Reads the vocabulary: a second for a large one."""
        try:
            info = self.xgrammar.TokenizerInfo.from_huggingface(
                self.tokenizer,
                vocab_size=self.vocab_size,
                stop_token_ids=list(self.end_ids) or None,
            )
        except Exception as error:
            raise ConfigError(
                f"XGrammar cannot read this tokenizer ({described(error)}): grammars "
                "need a fast tokenizer of transformers."
            ) from error
        compiler = self.xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)
        return _OfVocabulary(compiler, _white_space(info.decoded_vocab))

    @property
    def num_words(self) -> int:
        """Words of 32 bits in a mask of the vocabulary."""
        return (self.vocab_size + 31) // 32

    def ends_of(self, end_ids: Iterable[int]) -> list[int]:
        """Returns the tokens that may end a text once its grammar allows it.

        They are the model's, and those of `stop_token_ids` that are special. Others are text, which
        a grammar allows where it fits; the output then ends there.
        """
        special = [token for token in end_ids if token in self._special]
        return sorted({*self.end_ids, *special})

    def compile(
        self, params: GuidedDecodingParams, end_ids: Sequence[int], prompt: Sequence[int]
    ) -> Compilation:
        """Starts to compile. The future's exception is a RequestError if the grammar is wrong.

        Args:
            end_ids: as of `ends_of`.
            prompt: token ids, of which the last may end the reasoning already.

        Raises:
            RequestError: `reasoning_end` is not a text of a few tokens.
        """
        marker = self.marker(params)
        if marker and _ends_with(self.tokenizer, prompt, marker):
            marker = ()
        compilation = Compilation(self)

        def task() -> None:
            future = compilation.future
            if not future.set_running_or_notify_cancel():
                return
            compilation.started = time.monotonic()
            try:
                future.set_result(self._grammar(params, tuple(end_ids), marker))
            except BaseException as error:  # noqa: BLE001 - it is the future's
                future.set_exception(error)

        self._tasks.put(task)
        if self._num_threads < NUM_THREADS:
            self.add_thread()
        return compilation

    def add_thread(self) -> None:
        """Starts another thread, also in place of one that a grammar keeps for ever."""
        # A daemon: a grammar that takes for ever must not keep the process alive.
        arguments = (self._tasks,)
        threading.Thread(target=_work, args=arguments, name="trtspec-grammar", daemon=True).start()
        self._num_threads += 1

    def marker(self, params: GuidedDecodingParams) -> tuple[int, ...]:
        """Returns the tokens that end the reasoning, () for none.

        Raises:
            RequestError: they are no text of a few tokens.
        """
        marker = params.reasoning_end
        if isinstance(marker, str):
            ids = tuple(self.tokenizer.encode(marker, add_special_tokens=False))
        else:
            ids = tuple(marker or ())
        if marker is not None and not 0 < len(ids) <= MAX_MARKER_TOKENS:
            raise RequestError(
                f"GuidedDecodingParams.reasoning_end={shown(marker)} has {len(ids)} tokens: it "
                f"must have 1 … {MAX_MARKER_TOKENS}."
            )
        wrong = [token for token in ids if token >= self.vocab_size or token in self.end_ids]
        if wrong:
            raise RequestError(
                f"GuidedDecodingParams.reasoning_end has token {wrong[0]}, which ends an output or "
                f"is not in the vocabulary 0 … {self.vocab_size - 1}: it could never come."
            )
        return ids

    def _grammar(
        self, params: GuidedDecodingParams, end_ids: tuple[int, ...], marker: tuple[int, ...]
    ) -> Grammar:
        name = f"GuidedDecodingParams.{params.kind}"
        try:
            compiled = self._compiled(params)
        except TrtspecError:
            raise
        except Exception as error:
            reason = _PLACE.sub("", str(error).strip())[:300]
            raise RequestError(f"{name} cannot be compiled ({reason}): correct it.") from error
        ends = [token for token in end_ids if token < self.vocab_size]
        never = [token for token in self._special if token not in ends]
        is_json = params.kind in ("json", "json_object")
        may_be_special = params.kind in ("grammar", "structural_tag")
        grammar = Grammar(
            self.xgrammar.GrammarMatcher(
                compiled,
                override_stop_tokens=ends or None,
                terminate_without_stop_token=not ends,
            ),
            marker=marker,
            end_ids=frozenset(ends),
            never=Without.of(() if may_be_special else never),
            white_space=self._of_vocabulary.white_space if is_json else None,
        )
        if grammar.is_stuck(self.num_words):
            raise RequestError(f"{name} allows no output at all: correct it.")
        return grammar

    def _compiled(self, params: GuidedDecodingParams) -> Any:
        with self._build:
            compiler = self._of_vocabulary.compiler
            if params.kind in ("regex", "grammar", "structural_tag") and self._ends_too_early:
                version = importlib.metadata.version("xgrammar")
                raise RequestError(
                    f"GuidedDecodingParams.{params.kind} cannot be held: XGrammar {version} lets "
                    "outputs end before they match. Install 0.2.8: pip install 'xgrammar<0.2.9'."
                )
        if params.kind in ("json", "json_object"):
            schema = params.json or '{"type": "object", "additionalProperties": true}'
            _check_schema(schema, "json")
            if _is_json(json.loads(schema)):
                return compiler.compile_json_schema(schema)
            return compiler.compile_grammar(self._grammar_of(schema))
        if params.kind == "regex":
            _check_groups(params.regex or "", "regex")
            _check_regex(params.regex or "", "GuidedDecodingParams.regex")
            return compiler.compile_regex(params.regex)
        if params.kind == "grammar":
            _check_groups(params.grammar or "", "grammar")
            return compiler.compile_grammar(params.grammar)
        if params.kind == "structural_tag":
            _check_schema(params.structural_tag, "structural_tag", is_tag=True)
            tag = self._with_grammars(json.loads(params.structural_tag))
            return compiler.compile_structural_tag(json.dumps(tag, ensure_ascii=False))
        texts = " | ".join(_quoted(choice) for choice in params.choice or ())
        return compiler.compile_grammar(f"root ::= {texts}")

    @cached_property
    def _ends_too_early(self) -> bool:
        """Whether XGrammar takes nothing for one or more characters of a class, as 0.2.9 does where
        the class goes beyond ASCII and ends the text."""
        end = 256
        vocabulary = [*(bytes([byte]) for byte in range(end)), b"</s>"]
        tokens = self.xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[end])
        compiled = self.xgrammar.GrammarCompiler(tokens).compile_regex("[^a]+")
        return bool(self.xgrammar.GrammarMatcher(compiled).accept_token(end))

    def _grammar_of(self, schema: str) -> str:
        return _as_json(self.xgrammar.Grammar.from_json_schema(schema))

    def _with_grammars(self, tag: Any) -> Any:
        """Returns a structural tag with grammars in place of schemas that are not `_is_json`."""
        if isinstance(tag, list):
            return [self._with_grammars(part) for part in tag]
        if not isinstance(tag, dict):
            return tag
        schema = tag.get("json_schema") if tag.get("type") == "json_schema" else None
        if schema is None:
            return {name: self._with_grammars(part) for name, part in tag.items()}
        if _is_json(schema) or tag.get("style", "json") != "json":
            return tag
        return {"type": "grammar", "grammar": self._grammar_of(json.dumps(schema))}


_Tasks = queue.SimpleQueue[Callable[[], None] | None]


def _work(tasks: _Tasks) -> None:
    """Does one task after another, until None comes, which it leaves to the other threads."""
    while True:
        task = tasks.get()
        if task is None:
            tasks.put(None)
            return
        task()
        del task  # it holds the compiler, whose end ends this thread


def _import_xgrammar() -> Any:
    try:
        return importlib.import_module("xgrammar")
    except ImportError as error:
        raise ConfigError(
            f"Grammars need the package xgrammar, which is not installed ({error}): "
            "pip install 'trtspec[guided]'."
        ) from error


def _check_schema(text: str, name: str, is_tag: bool = False) -> None:
    """Raises RequestError for a schema of which something would be ignored."""
    try:
        schema = json.loads(text)
        _check_groups(json.dumps(schema, ensure_ascii=False), name)
        found = find_in_tag(schema) if is_tag else find_unenforced(schema)
    except json.JSONDecodeError as error:
        raise RequestError(f"GuidedDecodingParams.{name} is not JSON: {error}.") from error
    except RecursionError as error:
        raise RequestError(f"GuidedDecodingParams.{name} is nested too deeply.") from error
    if found is not None:
        raise RequestError(
            f"GuidedDecodingParams.{name} has {found}: no grammar can hold it, and it would be "
            "ignored. Leave it out, and check the output for it."
        )


def _check_groups(text: str, name: str) -> None:
    """Raises RequestError for more parentheses than XGrammar may be given."""
    count = sum(1 for _ in _GROUP.finditer(text))
    if count > MAX_GROUPS:
        raise RequestError(
            f"GuidedDecodingParams.{name} has {count} parentheses: at most {MAX_GROUPS} are read."
        )


def _check_regex(text: str, name: str) -> None:
    """Raises RequestError for what XGrammar would not read as it is meant."""
    found = find_unread(text)
    if found is not None:
        raise RequestError(
            f"{name} has {found}, which would be passed over or misread: write it otherwise."
        )


def _is_json(schema: Any) -> bool:
    """Whether XGrammar lets nothing but JSON come of a schema."""
    text = json.dumps(schema)
    return not any(name in text for name in (*LENGTHS, "email", "json-pointer"))


def _as_json(grammar: Any) -> str:
    """Returns a grammar whose texts of a length or format hold nothing that JSON would escape.

    XGrammar lets control characters stand in texts of a length; these, quotation marks and
    backslashes in JSON pointers; and any character behind a backslash in e-mail addresses.
    """
    text = str(grammar).replace(r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]")
    text = text.replace(r"([\0-.]) | ([0-}]) | ([\x7f-", r"([ !#-.]) | ([0-[\]-}]) | ([\x7f-")
    return text.replace(r'("\\" [ -~])', r'("\\\\" [ !#-[\]-~])')


def _quoted(text: str) -> str:
    """Returns a literal of the EBNF notation."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(c, _escaped(c)) for c in text) + '"'


def _escaped(character: str) -> str:
    return character if character.isprintable() else f"\\U{ord(character):08x}"


def _white_space(texts: Sequence[bytes]) -> WhiteSpace | None:
    """Returns the vocabulary's white space; None if no token is a line break alone."""
    lengths = {token: len(text) for token, text in enumerate(texts) if text and not text.strip()}
    line_break = next((token for token in lengths if texts[token] == b"\n"), None)
    if line_break is None:
        return None
    return WhiteSpace(lengths=lengths, line_break=line_break, others=Without.of(lengths))


def _ends_with(tokenizer: Any, prompt: Sequence[int], marker: tuple[int, ...]) -> bool:
    """Whether the prompt ends with the marker, and perhaps white space."""
    end = len(prompt)
    while end and not tokenizer.decode([prompt[end - 1]]).strip():
        if prompt[end - 1] in marker:
            break
        end -= 1
    return tuple(prompt[max(0, end - len(marker)) : end]) == marker
