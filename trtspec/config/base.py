"""What all decoding configs have alike: frozen, and checked where they are made.

Class and field names are those of TensorRT-LLM's LLM API. A field that means something only to
another engine is refused or warned about, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ..checks import is_int
from ..errors import ConfigError, shown
from ..metadata.mode import SpeculativeDecodingMode
from ..other_names import NamesFields
from .fields import check_choice, made_of_dict, require_int

MAX_DRAFT_LEN = 64
"""A sanity bound: a chain this long has never paid."""

ACCEPTANCE_RULES = ("strict", "exact_match", "rejection", "block")


@dataclass(frozen=True, kw_only=True)
class DecodingBaseConfig(NamesFields):
    """Base of the speculative decoding configs.

    Args:
        max_draft_len: K, draft tokens per generation request and step, >= 1.
        max_concurrency: with more requests than this in a step nothing is drafted; None is no
            such limit. (Verifying K + 1 rows each stops paying in large batches.)
        draft_len_schedule: drafts by the number of requests in a step. {4: 4, 8: 2, 32: 1} drafts 4
            with up to 4 requests, 2 with up to 8, 1 with up to 32, and nothing with more. None is K
            with any number. "auto" chooses 0 … K while serving: what gives the most tokens per
            second, by the steps' times and the drafts that are accepted. K itself may be "auto":
            that is this, with the drafter's usual K as the most.
        max_verified_drafts: drafts that a step verifies at most, of all its requests together; None
            is all. Where they propose more, the likeliest are verified, by the drafter's own
            probabilities or a DSpark head's confidence head (of all requests' first drafts, then
            second ones …, where it has none). So a step of n requests costs the target n rows and
            at most this many more. A pass that also reads prompts verifies all. Under "rejection"
            and "block" a seeded request's tokens then depend on the requests beside it. Not with K
            = "auto", nor with enable_attention_dp. "auto" chooses the number while serving, from
            none to all, by the steps' times and how likely the drafts are: for drafters with a
            network of their own, in the step, on one device. Where `runtime_draft_len` lowers K all
            are verified. A clock decides, so seeded tokens then depend on it under these rules.
        acceptance: how drafts of *sampled* requests are made and judged. A greedy request accepts
            a draft that is the target's best token. All four rules are lossless.
            "rejection": drawn from the drafter's distribution; accepted by rejection sampling.
            "block": the same drafts, judged together; accepts at least as many.
            "exact_match": drawn with the noise that the target's sample will be drawn with;
            accepted while they are that sample. A seeded request gets the same tokens as without
            speculation, under this rule and under "strict".
            "strict": the drafter's best tokens; accepted while they are the target's sample.
            Without a network (NGRAM, USER_PROVIDED) drafts have no distribution: the four rules
            are one.

    Raises:
        ConfigError: a value is out of range.
    """

    max_draft_len: int = 4
    max_concurrency: int | None = None
    draft_len_schedule: Mapping[int, int] | Literal["auto"] | None = field(default=None, hash=False)
    max_verified_drafts: int | Literal["auto"] | None = None
    acceptance: str = "rejection"

    mode: ClassVar[SpeculativeDecodingMode]
    decoding_type: ClassVar[str]  # TensorRT-LLM's name
    draft_len_field: ClassVar[str] = "max_draft_len"  # the field that a user gives K in
    least_draft_len: ClassVar[int] = 1  # 0 where that is the drafter's own number
    auto_draft_len: ClassVar[int] = 4  # the most drafts of K = "auto"
    needs_python: ClassVar[str] = ""  # what it takes that a command line cannot give

    def __post_init__(self) -> None:
        self._resolve_auto()
        require_int(self, "max_draft_len", self.least_draft_len, MAX_DRAFT_LEN)
        self._check_common()

    def _resolve_auto(self) -> None:
        """Makes K = "auto" the drafter's usual number, with `draft_len_schedule="auto"`."""
        name = self.draft_len_field
        if "auto" not in (getattr(self, name), self.max_draft_len):
            return
        if self.draft_len_schedule not in (None, "auto"):
            raise ConfigError(
                f"{type(self).__name__}: {name}='auto' chooses K itself; give a number with "
                f"draft_len_schedule={shown(self.draft_len_schedule)}, or leave that out."
            )
        for given in (getattr(self, name), self.max_draft_len):
            if given not in ("auto", 0, getattr(type(self), name)):
                raise ConfigError(
                    f"{type(self).__name__}: {shown(given)} drafts beside 'auto': {name} and "
                    "max_draft_len are the same. Give one of them."
                )
        for each in {name, "max_draft_len"}:
            object.__setattr__(self, each, self.auto_draft_len)
        object.__setattr__(self, "draft_len_schedule", "auto")

    def _check_common(self) -> None:
        """Checks the fields that all decoding configs have, but for K."""
        require_int(self, "max_concurrency", 1, None, or_none=True)
        self._check_schedule()
        if self.max_verified_drafts == "auto":
            self._check_auto_verified()
        else:
            require_int(self, "max_verified_drafts", 1, None, or_none=True)
        if self.max_verified_drafts is not None and self.draft_len_schedule == "auto":
            raise ConfigError(
                f"{type(self).__name__}: max_verified_drafts={self.max_verified_drafts} with "
                'draft_len_schedule="auto" is not offered: auto counts what was accepted of all '
                "drafts. Give K as a number, or leave max_verified_drafts out."
            )
        check_choice(f"{type(self).__name__}.acceptance", self.acceptance, ACCEPTANCE_RULES)

    def _check_auto_verified(self) -> None:
        """Raises ConfigError where nothing says how likely drafts are, or another setting lowers
        K."""
        name, problem = f'{type(self).__name__}: max_verified_drafts="auto"', None
        if self.draft_len_schedule is not None or self.max_concurrency is not None:
            problem = "beside draft_len_schedule or max_concurrency is not offered: leave them out"
        elif not self.spec_dec_mode.drafts_with_network():
            problem = "needs a drafter with a network, which says how likely its drafts are"
        elif self.spec_dec_mode.drafts_in_passes():
            problem = "needs a drafter inside the target's step"
        if problem is not None:
            raise ConfigError(f"{name} {problem}. Or give a number.")

    def _check_schedule(self) -> None:
        schedule, most = self.draft_len_schedule, self.max_draft_len or MAX_DRAFT_LEN
        if schedule is None or schedule == "auto":
            return
        is_one = isinstance(schedule, Mapping) and bool(schedule)
        if not is_one or not all(is_int(n, 1) and is_int(k, 0, most) for n, k in schedule.items()):
            raise ConfigError(
                f"{type(self).__name__}.draft_len_schedule={shown(schedule)}: it must be a dict "
                f"from numbers of requests (>= 1) to draft lengths in 0 … {most}, like "
                f'{{4: {min(4, most)}, 8: {min(2, most)}, 32: 1}}, "auto" or None.'
            )
        object.__setattr__(self, "draft_len_schedule", dict(schedule))  # not the caller's

    @property
    def spec_dec_mode(self) -> SpeculativeDecodingMode:
        return self.mode

    @property
    def max_total_draft_tokens(self) -> int:
        """K for a chain; trees are not offered."""
        return self.max_draft_len

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DecodingBaseConfig:
        """Returns the config of these fields; refuses unknown ones by name.

        TensorRT-LLM's `decoding_type` may be among them. It must be this class's; of
        `DecodingBaseConfig` it is needed, and says which class.

        Raises:
            ConfigError: not a mapping, an unknown key, another class's `decoding_type`, a value
                not allowed.
        """
        from .modes import CONFIG_OF_TYPE, METHODS

        if not isinstance(values, Mapping):
            raise ConfigError(f"{cls.__name__}.from_dict({shown(values)}): give a dict of fields.")
        values = dict(values)
        kind = values.pop("decoding_type", None)
        if kind is None and "method" in values:  # vLLM's form, of which the error names ours
            method = str(values["method"])
            kind = METHODS.get(method, method)
        if kind is None and hasattr(cls, "decoding_type"):
            kind = cls.decoding_type
        of_type = {name.lower(): entry for name, entry in CONFIG_OF_TYPE.items()}
        made, implied = of_type.get(str(kind).replace("_", "").lower(), (None, {}))
        if made is None or not issubclass(made, cls):
            mine = [name for name, (of, _) in CONFIG_OF_TYPE.items() if issubclass(of, cls)]
            raise ConfigError(
                f"{cls.__name__}.from_dict: decoding_type={shown(kind)}: it must be "
                f"{', '.join(map(repr, mine))}. Others belong to other classes, or are not here."
            )
        return made_of_dict(made, {**implied, **values}, made.__name__, ("decoding_type",))
