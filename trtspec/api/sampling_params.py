"""`SamplingParams`: how a request samples, and where it stops."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from ..checks import is_int, is_number
from ..errors import RequestError, shown
from ..metadata.logits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from ..metadata.sampling import MAX_TOP_K
from ..other_names import NamesFields
from .guided_decoding import GuidedDecodingParams

MAX_SEED = MAX_TOKENS = 2**63 - 1
MAX_TEMPERATURE = 1e4
MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOPS = 1024
MAX_REPETITION_PENALTY = 100.0  # and 1 / 100: beyond, float32 may run out


@dataclass(frozen=True)
class SamplingParams(NamesFields):
    """Parameters of one request. The default is greedy. Equal ones have equal hashes.

    Args:
        max_tokens: most new tokens, >= 1; the engine's max_seq_len ends an output too ("length").
        n: completions of the prompt, each with a seed of its own, in `RequestOutput.outputs`. More
            than one needs a temperature.
        temperature: 0 is greedy, whatever top_k, top_p and min_p are. Otherwise logits are divided
            by it.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the smallest set with this probability; 1 is off.
        min_p: drop tokens less likely than this share of the likeliest one; 0 is off. Before top-k
            and top-p, after temperature.
        repetition_penalty: logits of tokens in prompt or output are divided by it where positive,
            else multiplied; 0.01 … 100, 1 is off.
        presence_penalty, frequency_penalty: taken off the logits of tokens in the output, once and
            for each time; -2 … 2, 0 is off.
        logit_bias: token id -> what is added to its logit, -100 … 100.
        bad_token_ids: tokens that are never chosen.
        bad_words: sequences of tokens that the output never completes, also where one begins in the
            prompt. Each is a list of token ids, or text, which counts as two: its tokens with and
            without a space before it. At most 64, of 8 tokens each. (Other tokens may spell the
            same text.)
        min_tokens: number of output tokens before which no end token is chosen, neither the model's
            nor one of `stop_token_ids`, with `ignore_eos` too; <= max_tokens. `stop` strings end
            the output all the same.
        seed: the same request and seed give the same tokens, whatever shares the batch. Under
            acceptance="rejection" and "block" that holds while the draft length stays the same
            (`max_concurrency`, `runtime_draft_len`). None draws a seed, so that unseeded requests
            differ.
        stop: a string that ends the output, or up to 1024 of them. It is not part of `text`.
        stop_token_ids: ids that end the output, as the model's end tokens do. The one that came is
            in `token_ids`, and not in `text` (but where a grammar allowed it). Ids beyond the
            vocabulary may be among them, and never come.
        ignore_eos: do not stop at the model's end tokens.
        logprobs: also return each output token's log probability and rank, and those of this many
            likeliest tokens at its position (0 … 20). All are of the model's distribution:
            temperature 1, before filters. None: no log probabilities.
        prompt_logprobs: the same of each prompt token but the first, in
            `RequestOutput.prompt_logprobs`. Such a prompt is computed whole: it takes nothing over
            from the prefix cache.
        guided_decoding: the grammar that the output follows, with any drafter and acceptance rule.
            Needs the extra `guided`. Not with `min_tokens`, since a grammar may end before.

    Raises:
        RequestError: a value is out of range.
    """

    max_tokens: int = 32
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] | None = field(default=None, compare=False)  # see stop_strings
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, compare=False)
    bad_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    min_tokens: int = 0
    guided_decoding: GuidedDecodingParams | None = None
    prompt_logprobs: int | None = None
    stop_strings: tuple[str, ...] = field(init=False, repr=False)
    logit_bias_items: tuple[tuple[int, float], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for entry in fields(self):
            if entry.init:
                object.__setattr__(self, entry.name, _plain(getattr(self, entry.name)))
        self._check(
            "max_tokens", is_int(self.max_tokens, 1, MAX_TOKENS), f"an int in 1 … {MAX_TOKENS}"
        )
        self._check("ignore_eos", isinstance(self.ignore_eos, bool), "True or False")
        self._check(
            "temperature",
            is_number(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE,
            f"a number in 0 … {MAX_TEMPERATURE:g} (0 is greedy)",
        )
        self._check("top_p", is_number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]")
        self._check(
            "top_k", is_int(self.top_k, 0, MAX_TOP_K), f"an int in 0 … {MAX_TOP_K} (0 is off)"
        )
        self._check(
            "seed",
            self.seed is None or is_int(self.seed, 0, MAX_SEED),
            f"None or an int in 0 … {MAX_SEED}",
        )
        stop = (self.stop,) if isinstance(self.stop, str) else _items(self.stop)
        self._check(
            "stop",
            stop is not None and len(stop) <= MAX_STOPS and all(_is_text(s) and s for s in stop),
            f"non-empty Unicode text, or a list of at most {MAX_STOPS} such",
        )
        self._check_ids("stop_token_ids")
        object.__setattr__(self, "stop_strings", stop)

        self._check_shaping()
        self._check("n", is_int(self.n, 1, MAX_N), f"an int in 1 … {MAX_N}")
        if self.n > 1 and self.is_greedy:
            raise RequestError(
                f"SamplingParams.n={self.n} with temperature={self.temperature:g}, "
                f"top_k={self.top_k}: a greedy request says the same {self.n} times. Set a "
                "temperature above 0, or n=1."
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            self._check(
                name,
                count is None or is_int(count, 0, MAX_LOGPROBS),
                f"None or an int in 0 … {MAX_LOGPROBS}",
            )

    def _check(self, name: str, is_right: bool, allowed: str) -> None:
        if not is_right:
            value = shown(getattr(self, name))
            raise RequestError(
                f"SamplingParams.{name}={value} is not allowed: it must be {allowed}."
            )

    def _check_ids(self, name: str) -> None:
        ids = _items(getattr(self, name))
        self._check(name, ids is not None and _are_ids(ids), "a list of token ids >= 0")
        object.__setattr__(self, name, tuple(dict.fromkeys(ids or ())))

    def _check_shaping(self) -> None:
        self._check("min_p", is_number(self.min_p) and 0 <= self.min_p < 1, "in [0, 1)")
        self._check(
            "repetition_penalty",
            is_number(self.repetition_penalty)
            and 1 / MAX_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
            f"in {1 / MAX_REPETITION_PENALTY:g} … {MAX_REPETITION_PENALTY:g} (1 is off)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            self._check(name, is_number(value) and -2 <= value <= 2, "in -2 … 2")
        bias = {} if self.logit_bias is None else self.logit_bias
        self._check(
            "logit_bias",
            isinstance(bias, Mapping)
            and _are_ids(bias)
            and all(is_number(v) and -100 <= v <= 100 for v in bias.values()),
            "a mapping of token ids >= 0 to numbers in -100 … 100",
        )
        object.__setattr__(self, "logit_bias_items", tuple(sorted(bias.items())))
        self._check_ids("bad_token_ids")
        self._check_words()
        self._check(
            "guided_decoding",
            self.guided_decoding is None or isinstance(self.guided_decoding, GuidedDecodingParams),
            "None or GuidedDecodingParams",
        )
        if self.guided_decoding is not None and self.min_tokens:
            raise RequestError(
                f"SamplingParams.min_tokens={self.min_tokens} with guided_decoding: a grammar may "
                "end before. Say in the grammar how long the output is."
            )
        self._check(
            "min_tokens",
            is_int(self.min_tokens, 0, self.max_tokens),
            f"an int in 0 … max_tokens={self.max_tokens}",
        )

    def _check_words(self) -> None:
        given = None if isinstance(self.bad_words, str | bytes) else _items(self.bad_words)
        words = [w if isinstance(w, str | bytes) else _items(w) for w in given or ()]
        self._check(
            "bad_words",
            given is not None
            and all(w and (_is_text(w) or (isinstance(w, tuple) and _are_ids(w))) for w in words),
            "a list of Unicode texts or of lists of token ids, none empty",
        )
        longest = max((len(w) for w in words if isinstance(w, tuple)), default=0)
        self._check(
            "bad_words",
            len(words) <= MAX_BAD_WORDS and longest <= MAX_BAD_WORD_TOKENS,
            f"at most {MAX_BAD_WORDS} words of at most {MAX_BAD_WORD_TOKENS} tokens",
        )
        object.__setattr__(self, "bad_words", tuple(words))

    def each(self) -> list[SamplingParams]:
        """Returns the n completions as separate requests.

        The first one has the seed set here, and computes what is asked of the prompt.
        """
        if self.n == 1:
            return [self]
        step = 0x9E3779B97F4A7C15
        seeds = [
            None if self.seed is None else (self.seed + i * step) % 2**63 for i in range(self.n)
        ]
        completions = [copy.copy(self) for _ in seeds]  # `replace` would check the lists again
        for one, seed in zip(completions, seeds, strict=True):
            vars(one).update(n=1, seed=seed)
        for one in completions[1:]:
            vars(one).update(prompt_logprobs=None)
        return completions

    def ends(self, eos: tuple[int, ...]) -> frozenset[int]:
        """Returns the tokens that end the output of a model with these end tokens."""
        eos = () if self.ignore_eos else eos
        if eos not in self._ends:
            self._ends[eos] = frozenset((*(self.stop_token_ids or ()), *eos))
        return self._ends[eos]

    @cached_property
    def _ends(self) -> dict[tuple[int, ...], frozenset[int]]:
        """Caches `ends`: there may be many stop tokens, and many requests with them."""
        return {}

    @cached_property
    def shapes_logits(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1
        bans = self.bad_token_ids, self.bad_words, self.min_tokens
        others = self.min_p, self.logit_bias_items, *bans
        return any(penalties) or any(others)

    @cached_property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @cached_property
    def has_filters(self) -> bool:
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1)


def _plain(value: Any) -> Any:
    """Converts scalars of numpy and torch to Python's, in a mapping too."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value.item() if getattr(value, "shape", None) == () else value


def _items(value: object) -> tuple[Any, ...] | None:
    """Converts a sequence to a tuple, None to an empty one. Returns None for anything else."""
    if value is None:
        return ()
    if hasattr(value, "tolist"):  # numpy and torch
        value = value.tolist()
    return tuple(value) if isinstance(value, Sequence | set | frozenset) else None


def _are_ids(values: Iterable[Any]) -> bool:
    return all(is_int(i, 0) for i in values)


def _is_text(value: object) -> bool:
    """Whether it is a valid string: a tokenizer refuses one with half a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
