"""Computes the target's sequences and states once, and tries a drafter's settings along them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..models.decoder import Decoder
from ..models.drafters.base import DraftHead
from ..models.drafters.dflash import DFlashHead
from ..models.drafters.mtp import MTPHead
from ..train.evaluation import Evaluation
from ..train.losses import StepScore, proposals_of, score
from ..train.records import DraftStep, Sequences
from ..train.unroll import teach, unroll
from .diagnosis import CERTAIN, Diagnosis, Finding
from .heads import Patient, trials_of
from .trials import Setting, Trial, pairs
from .weights import Ends

NUM_STEPS = 3
LEAST_GAIN, LEAST_GAIN_OF_USUAL = 0.10, 0.03
"""Drafts that a change must add to a step, on average, to be named. Less is enough where it brings
the usual setting: another RoPE base may gain a little on short sequences with nothing wrong."""
UNCERTAIN = 2.0
"""A gain of fewer standard errors may well be an accident."""
MAP_MAY_BE_WRONG = 0.25
"""A head whose first draft is accepted more often than this has the right vocabulary map."""
_REGISTERED = "_parameters", "_buffers", "_modules"
"""Attributes of an `nn.Module` that are dicts which it changes."""


@dataclass(frozen=True)
class Outcome:
    """The drafter's acceptance with one setting."""

    result: Evaluation
    accepted: Tensor  # [R] float64, drafts accepted at each position the target wrote
    sequences: Tensor  # [R] int64, the sequence of each position, 0 … N - 1

    def gain_over(self, other: Outcome) -> tuple[float, float]:
        """Returns (mean, standard error) of the drafts gained at a position.

        The error is that of sums by sequence, since the positions of one are alike.
        """
        gain = self.accepted - other.accepted
        mean = gain.mean()
        return float(mean), self._error_of_sum(gain - mean) / len(gain)

    def set_errors(self) -> None:
        """Sets the errors of `result`, of a ratio: right drafts over judged ones."""
        found = self.result.errors = []
        if int(self.sequences.max()) == 0:
            return
        for index in range(len(self.result.judged)):
            judged, right = self.accepted >= index, self.accepted > index
            count = max(1, int(judged.sum()))
            rest = right.double() - judged.double() * (int(right.sum()) / count)
            found.append(self._error_of_sum(rest) / count)

    def _error_of_sum(self, values: Tensor) -> float:
        """Returns the standard error of the sum of values at each position, [R], of mean 0."""
        num_texts = int(self.sequences.max()) + 1
        assert num_texts > 1
        sums = values.new_zeros(num_texts).index_add(0, self.sequences, values)
        return math.sqrt(float(sums.square().sum()) * num_texts / (num_texts - 1))

    def error_by_position(self, other: Outcome) -> float:
        """Returns the standard error of that mean as if positions were independent."""
        gain = self.accepted - other.accepted
        return float(gain.std()) / math.sqrt(len(gain))


class Exam(ABC):
    """A drafter along sequences; `trials` and `scores` are its kind's."""

    sequences: Sequences

    def __init__(self, drafter: nn.Module):
        self.drafter, self.setting = drafter, Setting()
        self.parts = drafter  # what a trial may change: also layers that are not in use
        self.d2t: Tensor | None = None
        self.num_steps = NUM_STEPS
        self.overflows = False  # whether what the drafter computed last is not all finite

    def notes(self) -> list[str]:
        """Returns what was not examined, and how the drafter is used now."""
        later = f"Drafts after number {NUM_STEPS} were not examined."
        return [later] if self.num_steps == NUM_STEPS else []

    @abstractmethod
    def trials(self) -> list[Trial]:
        """Returns the settings to try on the drafter as it is now."""

    @abstractmethod
    def scores(self, setting: Setting) -> list[StepScore]:
        """Scores each step."""

    @torch.no_grad()
    def evaluate(self, trial: Trial | None) -> Outcome:
        result, setting, self.overflows = Evaluation(), self.setting, False
        with unchanged_after(self.parts):
            if trial is not None:
                trial.change(self.drafter)
                setting = replace(setting, **trial.sets)
            scores = self.scores(setting)
        result.add(scores)
        counted = scores[0].is_counted
        right = torch.stack([each.is_right for each in scores])[:, counted]
        documents = self.sequences.document_ids
        rows = torch.arange(len(documents), device=documents.device)[:, None]
        names = documents + rows * (int(documents.max()) + 1)  # of different rows differ
        sequences = names.flatten()[counted].unique(return_inverse=True)[1]
        outcome = Outcome(result, right.double().cumprod(0).sum(0), sequences)
        outcome.set_errors()
        return outcome

    def see(self, step: DraftStep) -> None:
        """Notes whether a step's rows are finite."""
        self.overflows |= not bool(step.hidden[step.rows].isfinite().all())

    @abstractmethod
    def read_states(self) -> Tensor:
        """Returns what was computed of the target for the drafter."""

    def coverage(self) -> tuple[int, int] | None:
        """Returns (the target's tokens that the drafter can propose, all its tokens), None where it
        can propose any."""
        return None

    def refitted(self) -> tuple[int, int] | None:
        """Returns (first drafts that are right with other meanings, all of them): those that the
        head's tokens have in one half of the sequences are tried in the other. None where the head
        has the target's lm_head, and so its tokens."""
        return None

    def keep(self, trial: Trial) -> None:
        trial.change(self.drafter)
        self.setting = replace(self.setting, **trial.sets)


class HeadExam(Exam):
    """A head that reads the target's states.

    Args:
        mask_hidden: [1, n * Ht], what a P-EAGLE head's checkpoint has.
        special_tokens: that may be meant by a mask token: id -> name.
    """

    def __init__(
        self,
        target: Decoder,
        head: DraftHead,
        sequences: Sequences,
        mask_hidden: Tensor | None,
        special_tokens: Mapping[int, str],
    ):
        super().__init__(head)
        self.target, self.head, self.sequences = target, head, sequences
        self.captures = bool(head.layers_to_capture)
        num_layers = target.config.num_layers
        every = range(num_layers) if self.captures else range(num_layers - 1, num_layers)
        with _capturing(head, tuple(every)):
            self.teacher = teach(target, head, sequences)
        self.states = self.teacher.hidden.view(len(self.teacher.hidden), len(every), -1)
        self.d2t = head.d2t
        if head.config.mask_token_id is not None:
            self.num_steps = min(NUM_STEPS, head.config.trained_draft_len or NUM_STEPS)
        if isinstance(head, DFlashHead):  # whose drafts depend on the whole block
            self.num_steps = head.config.trained_draft_len or NUM_STEPS
        self.all_layers: nn.ModuleList | None = None  # of an MTP head that has several
        if isinstance(head, MTPHead) and len(head.layers) > 1:
            self.all_layers = head.layers
            self.num_steps = min(NUM_STEPS, len(self.all_layers))
            self.parts = nn.ModuleList([head, self.all_layers])
        size = float(self._hidden(self.setting).float().square().mean().sqrt())
        self.patient = Patient(
            head,
            target.config,
            mask_hidden,
            size,
            special_tokens,
            parts=self.parts,
            ends=Ends.of(target),
        )
        if isinstance(head, MTPHead) and self.all_layers is not None:
            head.layers = self.all_layers[:1]
            self._choose_layers()

    def _choose_layers(self) -> None:
        """Tries whether MTP layers draft a token each. No checkpoint says so; the better use is
        right."""
        other = self._other_layers()
        if self.evaluate(other).gain_over(self.evaluate(None))[0] > 0:
            self.keep(other)

    def _other_layers(self) -> Trial:
        every = self.all_layers
        assert every is not None and isinstance(self.head, MTPHead)
        is_vanilla = len(self.head.layers) == 1  # so it is the change to it
        layers = every if is_vanilla else every[:1]

        def use(head: MTPHead) -> None:
            head.layers = layers

        return Trial(
            "each draft has an MTP layer of its own"
            if is_vanilla
            else "the first MTP layer makes every draft",
            f"MTPDecodingConfig(use_mtp_vanilla={is_vanilla})",
            use,
        )

    def notes(self) -> list[str]:
        if self.all_layers is None:
            return super().notes()
        assert isinstance(self.head, MTPHead)
        is_vanilla = len(self.head.layers) > 1
        how = "one for each draft" if is_vanilla else "the first for all drafts"
        return [
            *super().notes(),
            f"Of its MTP layers it does best with {how}: serve it with "
            f"MTPDecodingConfig(use_mtp_vanilla={is_vanilla}).",
        ]

    def _hidden(self, setting: Setting) -> Tensor:
        """Returns what the head reads of the target, [T, n * D]."""
        if self.captures:
            layers = self.head.layers_to_capture if setting.layers is None else setting.layers
            states = self.states[:, list(layers)]
            if setting.norms_last:
                last = [i for i, layer in enumerate(layers) if layer == self.states.shape[1] - 1]
                states[:, last] = self.target.norm(states[:, last])
            return states.flatten(1)
        return self.states[:, 0] if setting.before_norm else self.target.norm(self.states[:, 0])

    def read_states(self) -> Tensor:
        return self.states

    def coverage(self) -> tuple[int, int] | None:
        if self.d2t is None:
            return None
        choices = self.teacher.choices[self.sequences.rows_of_step(0) + 1]
        drafted = torch.arange(len(self.d2t), device=choices.device) + self.d2t
        return int(torch.isin(choices, drafted).sum()), len(choices)

    @torch.no_grad()
    def refitted(self) -> tuple[int, int] | None:
        if self.head.shares_lm_head:
            return None
        hidden, keys = self._hidden(self.setting), self.teacher.keys
        step = next(iter(unroll(self.head, self.sequences, hidden, 1, keys, self.setting)))
        rows = step.rows[step.counted]
        proposals = proposals_of(self.head, step, rows).tolist()
        choices = self.teacher.choices[step.teacher_rows[step.counted]].tolist()
        drafted_from = step.drafted_from[step.counted]
        names = (drafted_from // self.sequences.input_ids.shape[1]).tolist()
        right = 0
        for half in (0, 1):
            counts = defaultdict[int, Counter[int]](Counter)
            for name, proposal, choice in zip(names, proposals, choices, strict=True):
                if name % 2 == half:
                    counts[proposal][choice] += 1
            meaning = {proposal: found.most_common(1)[0][0] for proposal, found in counts.items()}
            right += sum(
                meaning.get(proposal) == choice
                for name, proposal, choice in zip(names, proposals, choices, strict=True)
                if name % 2 != half
            )
        return right, len(choices)

    def trials(self) -> list[Trial]:
        found = trials_of(self.patient)
        if self.all_layers is not None:
            found.append(self._other_layers())
        return [trial for trial in found if not self._only_adds_drafts(trial)]

    def _only_adds_drafts(self, trial: Trial) -> bool:
        """Whether a trial makes a block longer that an earlier change has left too few drafts:
        those alone would be gained."""
        now, length = self.setting.block, trial.sets.get("block")
        if now is None or length is None or length <= now:
            return False
        return now - (not self.head.config.samples_from_anchor) < self.num_steps

    def scores(self, setting: Setting) -> list[StepScore]:
        teacher = replace(self.teacher, hidden=self._hidden(setting))
        steps = unroll(
            self.head, self.sequences, teacher.hidden, self.num_steps, teacher.keys, setting
        )
        found = list[StepScore]()
        for step in steps:  # a draft behind a wrong one counts for nothing
            self.see(step)
            kept = step.counted
            if found:
                kept = kept & found[-1].is_right[step.drafted_from]
            found.append(score(self.head, _rows_of(step, kept), teacher, with_loss=False))
        return found


def _rows_of(step: DraftStep, kept: Tensor) -> DraftStep:
    """Returns a step of fewer rows. kept: [R] bool."""
    return replace(
        step,
        rows=step.rows[kept],
        counted=step.counted[kept],
        teacher_rows=step.teacher_rows[kept],
        drafted_from=step.drafted_from[kept],
    )


def examine(exam: Exam, diagnosis: Diagnosis, tell: Callable[[str], None]) -> None:
    """Tries every setting alone, applies the one that gains most, and tries again: up to two
    changes."""
    best, made = exam.evaluate(None), set[str]()
    diagnosis.as_loaded, diagnosis.coverage = best.result, exam.coverage()
    diagnosis.num_texts = len(best.sequences.unique())
    diagnosis.overflow = _overflow(exam, diagnosis.drafter)
    if diagnosis.is_short or diagnosis.overflow is not None:
        return

    def evaluate(trials: list[Trial]) -> list[tuple[Trial, Outcome]]:
        found, before = [], "".join(f"{name}, and: " for name in made)
        for trial in trials:
            tell(f"trying: {before}{trial.name}")
            found.append((trial, exam.evaluate(trial)))
            diagnosis.tried.append(Finding(before + trial.name, trial.cure, found[-1][1].result))
        return found

    while len(made) < 2:  # a second mistake may hide behind the first
        trials = [trial for trial in exam.trials() if trial.name not in made]
        found = evaluate(trials)
        choice, is_pair = best_explanation(found, best), False
        is_poor = best.result.conditional[0] <= MAP_MAY_BE_WRONG
        if choice is None and not made and is_poor and exam.d2t is not None:
            # A wrong map hides every other mistake, and every other mistake hides it.
            choice, is_pair = best_explanation(evaluate(pairs(trials, exam.d2t)), best), True
        if choice is None:
            if not made:
                diagnosis.likely = likely_explanation(found, best)
                diagnosis.refitted = exam.refitted() if is_poor else None
            return
        trial, best = choice
        made.add(trial.name)
        diagnosis.changes.append(Finding(trial.name, trial.cure, best.result))
        exam.keep(trial)
        if is_pair:
            return


def _overflow(exam: Exam, drafter: str) -> str | None:
    """Says whose values are NaN or infinite, after an evaluation; None if they are finite.

    Args:
        drafter: "head" or "draft model".
    """
    states = exam.read_states()
    if not bool(states.isfinite().all()):
        drafter = "target"
    elif not exam.overflows:
        return None
    cure = f"The {drafter} has wrong weights: copy it again from its source."
    if states.dtype == torch.float16:
        cure = "Values above 65504 overflow in float16: give bfloat16 or float32 as the dtype."
    name = str(states.dtype).removeprefix("torch.")
    return (
        f"Values that the {drafter} computes are NaN or infinite in {name}, so drafts are "
        f"accidents. {cure}"
    )


def best_explanation(
    found: Sequence[tuple[Trial, Outcome]], old: Outcome
) -> tuple[Trial, Outcome] | None:
    """Returns the best of the changes that explain the lost acceptance.

    An earlier change is preferred if the best surpasses it by no more than chance. (Of RoPE's bases
    the target's is the first.)
    """
    telling = [(trial, outcome) for trial, outcome in found if _explains(trial, outcome, old)]
    if not telling:
        return None
    _, best = max(telling, key=lambda pair: float(pair[1].accepted.mean()))

    def is_as_good(outcome: Outcome) -> bool:
        gain, error = best.gain_over(outcome)
        return outcome is best or gain <= UNCERTAIN * error

    return next((trial, outcome) for trial, outcome in telling if is_as_good(outcome))


def likely_explanation(found: Sequence[tuple[Trial, Outcome]], old: Outcome) -> Finding | None:
    """Returns the best of the changes that would explain the lost acceptance, but for chance."""
    likely = []
    for trial, outcome in found:
        gain, error = outcome.gain_over(old)
        if gain >= LEAST_GAIN and gain > UNCERTAIN * error:
            likely.append((gain, Finding(trial.name, trial.cure, outcome.result)))
    return max(likely, key=lambda pair: pair[0], default=(0.0, None))[1]


def _explains(trial: Trial, new: Outcome, old: Outcome) -> bool:
    gain, error = new.gain_over(old)
    if not trial.is_usual:
        return gain >= max(LEAST_GAIN, CERTAIN * error)
    # It is likely beforehand. A wrong RoPE base costs some sequences much, others nothing.
    return gain >= max(LEAST_GAIN_OF_USUAL, CERTAIN * new.error_by_position(old))


@contextmanager
def _capturing(head: DraftHead, layers: tuple[int, ...]) -> Iterator[None]:
    config = head.config
    head.config = replace(config, layers_to_capture=layers)
    try:
        yield
    finally:
        head.config = config


@contextmanager
def unchanged_after(drafter: nn.Module) -> Iterator[None]:
    """Restores every module's attributes, and the tensor that each parameter holds."""
    before = [
        (module, {k: copy(v) if k in _REGISTERED else v for k, v in vars(module).items()})
        for module in drafter.modules()
    ]
    weights = [(parameter, parameter.data) for parameter in drafter.parameters()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        for parameter, data in weights:
            parameter.data = data
