"""The acceptance report: what was measured, in numbers and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..data.acceptance_prompts import AcceptancePrompt, load_prompts
from ..errors import ConfigError
from ..executor.dead_drafter import DOCTOR, HOTTEST, complaint
from ..models.drafters.base import HeadConfig
from .advice import Advice
from .collect import Encode, Interrupted, Progress, Sample, collect_samples
from .statistics import (
    CONFIDENCE,
    RESAMPLES,
    Cluster,
    Group,
    acceptance_of,
    bucket_name,
    by_bucket,
)

if TYPE_CHECKING:
    from ..llm import LLM

INTERVAL = f"{CONFIDENCE:.0%} percentile bootstrap over prompts, {RESAMPLES} resamples"
FADED = 0.9  # of the best acceptance length, in the longest texts
MIN_TO_JUDGE = 32  # first drafts; fewer do not show that a drafter is dead


@dataclass(frozen=True)
class AcceptanceReport:
    """`overall` and `by_category` count prompts as they are; `by_context` also padded ones."""

    settings: dict[str, Any]
    max_draft_len: int
    overall: tuple[Group, ...]  # one per temperature, in the order given
    by_category: tuple[Group, ...]
    by_context: tuple[Group, ...]
    samples: tuple[Sample, ...]
    warning: str | None  # what to say of a dead drafter, or one that is bad at long texts
    advice: Advice | None = None

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(group.temperature for group in self.overall)

    @property
    def rates_to_advise(self) -> list[float | None]:
        """Conditional rates at the first temperature, where a draft that was not made counts as
        not accepted: `advise` then expects of the longest draft what was measured. For a head,
        which always proposes, they are its conditional rates.

        Where steps draft or verify fewer than K they are too low to advise by: with
        `draft_len_schedule`, `max_concurrency` or `max_verified_drafts`."""
        found = self.overall[0].acceptance
        before = (found.num_steps, *found.accepted)
        return [n / b if b else None for n, b in zip(found.accepted, before, strict=False)]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.settings,
            "interval": INTERVAL,
            "warning": self.warning,
            "overall": [group.to_json() for group in self.overall],
            "by_category": [group.to_json() for group in self.by_category],
            "by_context": [group.to_json() for group in self.by_context],
            "advice": None if self.advice is None else self.advice.to_json(),
            "samples": [sample.to_json() for sample in self.samples],
        }


class InterruptedReport(KeyboardInterrupt):
    """An interrupt of a measurement; `report` is of the answers that had ended, one at least."""

    def __init__(self, report: AcceptanceReport):
        super().__init__()
        self.report = report


def measure_acceptance(
    llm: LLM,
    prompts: Sequence[AcceptancePrompt] | None = None,
    *,
    temperatures: Sequence[float] = (0.0,),
    contexts: Sequence[int] = (),
    max_tokens: int = 128,
    seed: int = 0,
    encode: Encode | None = None,
    progress: Progress | None = None,
) -> AcceptanceReport:
    """Runs the prompts (the built-in set by default). Arguments as in `collect_samples`.

    Raises:
        ConfigError: the engine drafts nothing, or an argument cannot be.
        RequestError: a prompt is too long, or a request failed.
        InterruptedReport: for a KeyboardInterrupt once an answer had ended.
    """
    if llm.max_draft_len == 0:
        raise ConfigError(f"Mode {llm.mode.name} drafts nothing: there is no acceptance.")
    prompts = load_prompts() if prompts is None else list(prompts)
    temperatures = list(dict.fromkeys(temperatures))
    if not prompts or not temperatures:
        raise ConfigError("Give at least one prompt and one temperature.")
    interrupt: Interrupted | None = None
    try:
        samples = collect_samples(
            llm,
            prompts,
            temperatures=temperatures,
            contexts=list(dict.fromkeys(contexts)),
            max_tokens=max_tokens,
            seed=seed,
            encode=encode,
            progress=progress,
        )
    except Interrupted as error:
        if not error.samples:
            raise
        samples, interrupt = error.samples, error
    settings = {
        "mode": llm.mode.name.lower(),
        "max_draft_len": llm.max_draft_len,
        "device": str(llm.device),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "max_batch_size": llm.executor.config.max_batch_size,
        "num_prompts": len(prompts),
        "temperatures": temperatures,
        "contexts": list(contexts),
        "max_tokens": max_tokens,
        "seed": seed,
        "forced_acceptance": llm.stats().forced_acceptance,
    }
    report = _report(llm, settings, samples)
    if interrupt is not None:
        wanted = len(prompts) * len(temperatures) * (1 + len(dict.fromkeys(contexts)))
        said = f"interrupted: {len(samples)} of {wanted} answers had ended, short ones first"
        warning = "; ".join(filter(None, (said, report.warning)))
        raise InterruptedReport(replace(report, warning=warning)) from interrupt
    return report


def _report(llm: LLM, settings: dict[str, Any], samples: Sequence[Sample]) -> AcceptanceReport:
    """Returns the report of samples, in groups, with a warning where there is cause."""
    k, temperatures = llm.max_draft_len, settings["temperatures"]
    as_they_are = [sample for sample in samples if sample.context is None]

    def group(name: str, temperature: float, clusters: Sequence[Cluster]) -> Group:
        return Group(name, temperature, acceptance_of(clusters, k))

    overall = [group("all", t, _steps(as_they_are, t)) for t in temperatures]
    by_category = [
        group(category, t, _steps(as_they_are, t, category))
        for category in dict.fromkeys(sample.category for sample in as_they_are)
        for t in temperatures
    ]
    buckets = {t: by_bucket(_steps(samples, t)) for t in temperatures}
    by_context = [
        group(bucket_name(bucket), t, buckets[t][bucket])
        for bucket in sorted({bucket for found in buckets.values() for bucket in found})
        for t in temperatures
        if bucket in buckets[t]
    ]
    warning = None
    if not any(sample.steps for sample in samples):
        warning = "no step had drafts: every answer ended with its first token"
    elif llm.mode.drafts_with_network() and not settings["forced_acceptance"]:
        warning = dead(overall, _trained_acceptance(llm)) or _undrafted(overall[0])
        if warning is None and _may_take_window(llm):
            warning = fading(by_context, temperatures[0])
    return AcceptanceReport(
        settings, k, tuple(overall), tuple(by_category), tuple(by_context), tuple(samples), warning
    )


def _steps(
    samples: Sequence[Sample], temperature: float, category: str | None = None
) -> list[Cluster]:
    return [
        (sample.prompt_id, sample.steps)
        for sample in samples
        if sample.temperature == temperature and category in (None, sample.category)
    ]


def dead(overall: Sequence[Group], trained: float | None = None) -> str | None:
    """Returns what to say if hardly any first draft was accepted at a temperature, or far fewer
    than at the end of training.

    At a high one the target's choice is nearly uniform: it rejects the best drafter's drafts.

    Args:
        trained: the share of them at the end of training; None is not known.
    """
    for group in overall:
        proposed, accepted = group.acceptance.proposed[0], group.acceptance.accepted[0]
        if group.temperature > HOTTEST or proposed < MIN_TO_JUDGE:
            continue
        if (wrong := complaint(proposed, accepted, trained)) is not None:
            return (
                f"of {proposed} first drafts {accepted} were accepted ({accepted / proposed:.1%}): "
                f"{wrong}. To find out why: {DOCTOR}"
            )
    return None


def _undrafted(overall: Group) -> str | None:
    """Says so if most steps verified no draft: their one token is not the drafter's fault."""
    steps, proposed = overall.acceptance.num_steps, overall.acceptance.proposed[0]
    if 2 * proposed >= steps:
        return None
    return (
        f"in {steps - proposed} of {steps} steps no draft was verified, and each counts as one "
        "token. A step's size decides that (max_concurrency, draft_len_schedule, "
        "max_verified_drafts): measure with a smaller max_batch_size, or without these."
    )


def _may_take_window(llm: LLM) -> bool:
    """Whether the drafter is a head that sees whole texts and could do without."""
    config = _head_config(llm)
    return config is not None and not config.draft_window and config.kind != "gemma4_assistant"


def _trained_acceptance(llm: LLM) -> float | None:
    config = _head_config(llm)
    return None if config is None else config.trained_acceptance


def _head_config(llm: LLM) -> HeadConfig | None:
    config = getattr(llm.executor.runner.step.draft_model, "config", None)
    return config if isinstance(config, HeadConfig) else None


def fading(by_context: Sequence[Group], temperature: float) -> str | None:
    """Returns what to say if acceptance is surely less in the longest texts than in others.

    Contexts that few prompts reach do not count: their text may be of another kind.
    """
    groups = [group for group in by_context if group.temperature == temperature]
    most = max((group.acceptance.num_prompts for group in groups), default=0)
    groups = [group for group in groups if 2 * group.acceptance.num_prompts >= most]
    lengths = [(group.acceptance.acceptance_length, group.name) for group in groups]
    values = [(length.value, name) for length, name in lengths[:-1] if length.value is not None]
    if not values or (high := lengths[-1][0].high) is None:
        return None
    (best, where), (longest, there) = max(values), lengths[-1]
    if high >= FADED * best:
        return None
    return (
        f"acceptance falls from {best:.2f} tokens per step in contexts of {where} to "
        f"{longest.value:.2f} in {there}. A head does so behind texts longer than its training's: "
        "try --draft-window with that length, such as 1024 or 2048."
    )
