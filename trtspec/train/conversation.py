"""One conversation with the target, as a coroutine that yields a line of training text.

It asks for a completion, is sent the target's tokens, and in the end returns the line, or raises
`Drop`. Its requests depend only on the seed, on its number and on what it was sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from ..api.sampling_params import MAX_TEMPERATURE, SamplingParams
from ..api.text_stream import special_token_ids
from ..checks import is_int
from ..config import require_int
from ..errors import ConfigError
from ..llm import LLM
from .data import FORMAT, is_measured, render_chat, tokenizer_fingerprint
from .seeds import LONG, PASSAGE, draw_follow_up, draw_seed

Messages = list[dict[str, str]]

# Shorter text is dropped: it teaches little.
MIN_ANSWER_TOKENS = 4  # end of turn included
MIN_PROMPT_CHARS = 8
MIN_PASSAGE_CHARS = 80
# Loops: the same n-gram of up to MAX_PERIOD tokens at the end, for LOOP_REPEATS times and
# LOOP_TOKENS tokens at least.
MAX_PERIOD, LOOP_REPEATS, LOOP_TOKENS = 64, 3, 24

_MARK = "QZXuserturnXZQ"  # stands for a user's text where the template is taken apart


@dataclass(frozen=True)
class Mix:
    """What to generate. Shares are in 0 … 1.

    self_written: of conversations whose user turns the target writes too; the others start from
        templates. Without effect if prompts are given.
    second_turn: of conversations that get a second user turn.
    max_turns: of a conversation with a second one; how many is drawn from 2 … max_turns.
    greedy: of conversations whose answers are greedy; the others are sampled at `temperature`.
    max_user_tokens, max_passage_tokens: of a user's turn or passage that the target writes.
    max_long_tokens: of a first answer to a prompt of kind `seeds.LONG`.
    """

    self_written: float = 0.4
    second_turn: float = 0.25
    max_turns: int = 2
    greedy: float = 0.5
    temperature: float = 0.8
    max_user_tokens: int = 160
    max_passage_tokens: int = 224
    max_long_tokens: int = 1536

    def __post_init__(self) -> None:
        for name in ("self_written", "second_turn", "greedy"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"Mix.{name}={getattr(self, name)!r}: it must be in 0 … 1.")
        if not 0 < self.temperature <= MAX_TEMPERATURE:
            raise ConfigError(
                f"Mix.temperature={self.temperature!r}: it must be above 0 and at most "
                f"{MAX_TEMPERATURE:g}; greedy=1 samples none."
            )
        require_int(self, "max_user_tokens", 1, None)
        require_int(self, "max_passage_tokens", 1, None)
        require_int(self, "max_long_tokens", 1, None)
        require_int(self, "max_turns", 2, None)


@dataclass(frozen=True)
class Ask:
    """A completion that a conversation needs to go on."""

    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Reply:
    ids: list[int]
    is_ended: bool  # by an end token, which is the last of `ids`


class Drop(Exception):
    """Raised to leave a conversation out. Its message is the reason, as counted in the report."""


@dataclass
class Line:
    """A finished conversation."""

    kind: str
    temperature: float
    input_ids: list[int]
    loss_mask: list[int]
    prompt: bytes  # digest of the first prompt
    is_retokenised: bool = False

    def to_json(self, index: int) -> bytes:
        record = {
            "index": index,
            "kind": self.kind,
            "temperature": self.temperature,
            "input_ids": self.input_ids,
            "loss_mask": self.loss_mask,
        }
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"


Conversation = Generator[Ask, Reply, Line]


class Job:
    """What to generate, and the target's tokenizer and template."""

    def __init__(
        self, llm: LLM, seed: int, max_tokens: int, mix: Mix, prompts: list[Messages] | None
    ):
        if not is_int(seed):
            raise ConfigError(f"seed={seed!r}: it must be an int.")
        if not is_int(max_tokens):
            raise ConfigError(f"max_tokens={max_tokens!r}: it must be an int.")
        if max_tokens < MIN_ANSWER_TOKENS:
            raise ConfigError(f"max_tokens={max_tokens}: it must be >= {MIN_ANSWER_TOKENS}.")
        if llm.tokenizer is None or not llm.tokenizer.chat_template:
            raise ConfigError(
                f"{llm.model_dir.name} has no chat template, so it cannot be talked to. Give a "
                "model that was tuned for chat."
            )
        _check_own_text(llm)
        self.llm, self.tokenizer = llm, llm.tokenizer
        self.seed, self.max_tokens, self.mix, self.prompts = seed, max_tokens, mix, prompts
        config = llm.executor.config
        self.max_prompt = config.max_seq_len - 1
        if not config.enable_chunked_prefill:
            self.max_prompt = min(self.max_prompt, config.max_num_tokens)
        self.special = set(special_token_ids(self.tokenizer))
        self.seen: set[bytes] = set()  # digests of the prompts of kept conversations

    def header(self) -> dict[str, Any]:
        """Returns the file's first line: the tokenizer's name and the settings."""
        settings: dict[str, Any] = {"seed": self.seed, "max_tokens": self.max_tokens}
        settings.update(asdict(self.mix))
        if self.prompts is not None:
            content = json.dumps(self.prompts, sort_keys=True).encode()
            settings["prompts"] = hashlib.sha256(content).hexdigest()[:16]
        return {
            "format": FORMAT,
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "model": self.llm.model_dir.name,
            "settings": settings,
        }

    def converse(self, index: int) -> Conversation:
        """Runs conversation number `index`. Raises Drop."""
        # Seeded by a string, which `random` hashes the same way in every process.
        rng = Random(f"self_generate {self.seed} {index}")
        temperature = 0.0 if rng.random() < self.mix.greedy else self.mix.temperature
        kind, messages = yield from self._first_turn(rng, index)
        _keep_apart(messages)
        prompt = self._prompt_ids(messages)
        digest = prompt_digest(prompt)
        if digest in self.seen:  # before it costs an answer; checked again when written
            raise Drop("duplicate prompt")
        turns = 1
        if rng.random() < self.mix.second_turn:
            turns = rng.randint(2, self.mix.max_turns)
        limit = self.mix.max_long_tokens if kind == LONG else self.max_tokens
        reply = yield self._ask(rng, prompt, temperature, limit)
        self._check_answer(reply)
        ids = prompt + reply.ids
        line = Line(kind, temperature, ids, _mask(prompt, reply), digest)
        for _ in range(turns - 1):
            if not reply.is_ended:
                break
            try:
                line, reply = yield from self._next_turn(rng, line, messages, self._text(reply))
            except Drop:
                break  # the turns before are still good training text
        return line

    def _first_turn(self, rng: Random, index: int) -> Generator[Ask, Reply, tuple[str, Messages]]:
        """Returns its kind, and the messages up to the first answer."""
        if self.prompts is not None:
            return "given", list(self.prompts[index])
        if rng.random() < self.mix.self_written:
            text = yield from self._user_turn(rng, [])
            return "self", [{"role": "user", "content": text}]
        seed = draw_seed(rng)
        text = seed.prompt
        if seed.passage_prompt is not None:
            asked = self._prompt_ids([{"role": "user", "content": seed.passage_prompt}])
            limit = self.mix.max_passage_tokens
            reply = yield self._ask(rng, asked, self.mix.temperature, limit)
            text = text.replace(PASSAGE, self._passage(reply))
        return seed.kind, [{"role": "user", "content": text}]

    def _user_turn(self, rng: Random, messages: Messages) -> Generator[Ask, Reply, str]:
        """Lets the target write the user's turn."""
        before, after = split_at_user_turn(self.tokenizer, messages)
        prefix = self.tokenizer.encode(before, add_special_tokens=False)
        if not prefix:
            raise ConfigError(
                "The chat template writes nothing before the user's first turn, so the target "
                "cannot write it. Set Mix(self_written=0), or give prompts."
            )
        closing = self.tokenizer.encode(after, add_special_tokens=False)
        ends = [i for i in closing if i in self.special][:1]
        if len(prefix) > self.max_prompt:
            raise Drop("too long")
        params = SamplingParams(
            max_tokens=self.mix.max_user_tokens,
            temperature=1.0,
            seed=rng.getrandbits(62),
            stop_token_ids=ends,
        )
        reply = yield Ask(prefix, params)
        text = self._text(reply)
        if not reply.is_ended:
            raise Drop("unfinished prompt")
        if self._is_broken(reply, text) or len(text) < MIN_PROMPT_CHARS:
            raise Drop("poor prompt")
        return text

    def _passage(self, reply: Reply) -> str:
        """Returns the passage in a reply, up to its last complete sentence, without "Here is …:"
        before."""
        text = self._text(reply)
        first, _, rest = text.partition("\n")
        if first.rstrip().endswith(":"):
            text = rest.strip()
        if not reply.is_ended:
            text = text[: max(text.rfind(mark) for mark in ".!?") + 1]
        if self._is_broken(reply, text) or len(text) < MIN_PASSAGE_CHARS:
            raise Drop("poor passage")
        return text

    def _next_turn(
        self, rng: Random, line: Line, messages: Messages, answer: str
    ) -> Generator[Ask, Reply, tuple[Line, Reply]]:
        """Adds the answer and a further user's turn to the messages.

        Returns the line with that turn and its answer, and the answer.
        """
        messages.append({"role": "assistant", "content": answer})
        if line.kind == "self":
            text = yield from self._user_turn(rng, messages)
        else:
            text = draw_follow_up(rng, line.kind)
        messages.append({"role": "user", "content": text})
        _keep_apart(messages)
        prompt = self._prompt_ids(messages)
        reply = yield self._ask(rng, prompt, line.temperature, self.max_tokens)
        self._check_answer(reply)
        # A server renders the answers' texts again, which may give other tokens than those
        # generated. After the first difference they are not what the target wrote.
        common = _common_prefix(line.input_ids, prompt)
        mask = _mask(prompt, reply)
        mask[:common] = line.loss_mask[:common]
        longer = replace(
            line,
            input_ids=prompt + reply.ids,
            loss_mask=mask,
            is_retokenised=line.is_retokenised or common < len(line.input_ids),
        )
        return longer, reply

    def _ask(self, rng: Random, prompt: list[int], temperature: float, max_tokens: int) -> Ask:
        if len(prompt) > self.max_prompt:
            raise Drop("too long")
        seed = rng.getrandbits(62)
        return Ask(prompt, SamplingParams(max_tokens, temperature, seed=seed))

    def _prompt_ids(self, messages: Messages) -> list[int]:
        return self.llm.apply_chat_template(messages)

    def _text(self, reply: Reply) -> str:
        return self.tokenizer.decode(reply.ids, skip_special_tokens=True).strip()

    def _is_broken(self, reply: Reply, text: str) -> bool:
        return "\ufffd" in text or self._has_special(reply) or has_loop(_body(reply))

    def _has_special(self, reply: Reply) -> bool:
        return any(i in self.special for i in _body(reply))

    def _check_answer(self, reply: Reply) -> None:
        if len(reply.ids) < MIN_ANSWER_TOKENS:
            raise Drop("short answer")
        if self._has_special(reply):
            raise Drop("special token in answer")
        if has_loop(_body(reply)):
            raise Drop("loop")


def _check_own_text(llm: LLM) -> None:
    """Raises ConfigError for engines whose output is not what the target alone would write."""
    worker = llm.executor.worker
    if worker.force_num_accepted_tokens > 0 and llm.max_draft_len > 0:
        raise ConfigError(
            "Acceptance is forced (TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS): the text would be "
            "the drafter's. Unset it."
        )
    if getattr(worker.config, "use_relaxed_acceptance_for_thinking", False):
        raise ConfigError(
            "use_relaxed_acceptance_for_thinking keeps tokens that the target would not write. "
            "Leave it out to generate training text."
        )


def _keep_apart(messages: Messages) -> None:
    """Raises Drop for prompts that acceptance is measured on: no head may be trained on them."""
    if is_measured(messages):
        raise Drop("evaluation prompt")


def split_at_user_turn(tokenizer: Any, messages: Messages) -> tuple[str, str]:
    """Returns the template's text before and after a user's message.

    Raises:
        ConfigError: the template does not write the user's text as it is.
    """
    marked = [*messages, {"role": "user", "content": _MARK}]
    before, mark, after = render_chat(tokenizer, marked, True).rpartition(_MARK)
    if not mark:
        raise ConfigError(
            "The chat template does not write the user's text as it is, so the target cannot "
            "write it. Set Mix(self_written=0), or give prompts."
        )
    return before, after


def prompt_digest(prompt: Sequence[int]) -> bytes:
    return hashlib.blake2b(" ".join(map(str, prompt)).encode(), digest_size=16).digest()


def _mask(prompt: Sequence[int], reply: Reply) -> list[int]:
    return [0] * len(prompt) + [1] * len(reply.ids)


def _body(reply: Reply) -> list[int]:
    """Returns a reply's tokens without its end token."""
    return reply.ids[:-1] if reply.is_ended else reply.ids


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def has_loop(ids: Sequence[int]) -> bool:
    """Returns whether tokens end in a loop: one n-gram, n <= MAX_PERIOD, repeated.

    It must occur at least LOOP_REPEATS times, with LOOP_TOKENS tokens in all. The last repeat may
    be cut.
    """
    for period in range(1, min(MAX_PERIOD, len(ids) // LOOP_REPEATS) + 1):
        span = max(LOOP_REPEATS * period, LOOP_TOKENS)
        if len(ids) < span:
            continue
        tail = ids[len(ids) - span :]
        # Tokens of period p equal themselves shifted by p.
        if tail[period:] == tail[:-period]:
            return True
    return False
