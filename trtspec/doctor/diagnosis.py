"""`Diagnosis`: the findings of an examination, and the verdict in words."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..executor.dead_drafter import is_dead
from ..train.evaluation import Evaluation

CERTAIN = 3.0
"""Standard errors that chance does not make."""
FEWEST_JUDGED, FEWEST_TEXTS = 200, 2
"""Fewer judged positions, or positions of fewer sequences, show nothing."""
TELLING_GAIN = 0.10
"""The verdict tells of the first draft whose acceptance a change raises by this much."""
SHORT_OF_TRAINING = 0.10
"""How far acceptance may lie below training's on texts of another kind."""
LEARNED_NOTHING = 0.10
"""A head whose first draft was accepted less often when its training ended has learned nothing."""
LOST_AT_MASKS = 0.5
"""Of drafts from one pass, the second's share of the first's acceptance below which something is
wrong with the masks: the first draft reads none."""
LEAST_BEFORE_MASKS = 0.1
"""The masks are blamed only if the first draft is accepted so often."""
MUCH_OUT_OF_VOCABULARY = 0.15
"""The share of the target's tokens out of the draft vocabulary that a verdict may name."""
WELL_COVERED = 0.9
"""A draft vocabulary that holds less of the target's tokens is remarked upon."""
_ORDINALS = "first", "second", "third"


def _upper_bound_of(right: int, judged: int) -> float:
    """Returns an upper confidence bound of a share."""
    likely = (right + 1) / (judged + 2)  # also 0 of n has an error
    return right / max(1, judged) + CERTAIN * math.sqrt(likely * (1 - likely) / (judged + 2))


def _ordinal(index: int) -> str:
    """Returns the word for draft number 0, 1, … of a step."""
    if index < len(_ORDINALS):
        return _ORDINALS[index]
    number = index + 1
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number > 20 else "th"
    return f"{number}{ending}"


@dataclass(frozen=True)
class Finding:
    """One setting tried."""

    name: str
    cure: str  # what to change, exactly
    result: Evaluation


@dataclass
class Diagnosis:
    """The doctor's findings.

    `changes` are the settings to be changed together, the one that gains most first. If there are
    none, no mistake was found.
    """

    problems: list[str] = field(default_factory=list)  # the drafter cannot even be loaded
    as_loaded: Evaluation | None = None
    tried: list[Finding] = field(default_factory=list)
    changes: list[Finding] = field(default_factory=list)
    likely: Finding | None = None  # a change that may gain by chance alone; if no other is found
    trained: list[float] | None = None  # conditional acceptance at the end of training
    notes: list[str] = field(default_factory=list)  # what was not examined
    suspicion: str | None = None  # what is seen to be wrong and cannot be undone
    defect: str | None = None  # what is certainly wrong, and cannot be undone
    partly_filled: str | None = None  # tensors with many zeros
    overflow: str | None = None  # whose values are not finite; then nothing is tried
    coverage: tuple[int, int] | None = None  # of the target's tokens: in the draft vocabulary, all
    refitted: tuple[int, int] | None = None  # first drafts right with other meanings, all of them
    made_for: str | None = None  # the target that the drafter's config.json names
    drafter: str = "head"  # or "draft model"
    reads_masks: bool = False
    num_texts: int = FEWEST_TEXTS

    @property
    def verdict(self) -> str:
        """One sentence."""
        return self._judge()[0]

    @property
    def is_well(self) -> bool:
        """Whether no mistake was found, and there was enough text to find one."""
        return self._judge()[1]

    @property
    def remarks(self) -> list[str]:
        """Returns remarks beside the verdict."""
        found = [t for t in (self.suspicion, self.defect, self.partly_filled) if t is not None]
        if self.coverage is not None and self.coverage[0] < WELL_COVERED * self.coverage[1]:
            found.append(f"Of the draft vocabulary: {self._share_drafted()}.")
        return [*self.notes, *(text for text in found if text not in self.verdict)]

    @property
    def is_short(self) -> bool:
        """Whether there is too little text to judge by."""
        assert self.as_loaded is not None
        return self.as_loaded.judged[0] < FEWEST_JUDGED or self.num_texts < FEWEST_TEXTS

    def _judge(self) -> tuple[str, bool]:
        """Returns (the verdict, whether the drafter is well)."""
        if self.problems:
            return f"The {self.drafter} does not fit its target: {self.problems[0]}", False
        result = self.as_loaded
        assert result is not None
        if self.is_short:
            return (
                f"The texts are too short to judge by: {result.judged[0]} places of "
                f"{self.num_texts}, {FEWEST_JUDGED} of {FEWEST_TEXTS} are the least. Give more "
                "prompts, or more tokens of each."
            ), False
        if self.overflow is not None:
            return self.overflow, False
        if self.changes:
            return self._what_changes(), False
        if self._means_other_tokens():
            return self._what_tokens_mean(), False
        if self._is_out_of_vocabulary():
            return self._what_vocabulary_costs(), False
        if self._fails_at_masks():
            return self._what_fails_at_masks(), False
        if self.defect is not None:
            return f"Something is wrong: {self.defect}", False
        if self.partly_filled is not None and not self._is_as_trained():
            return f"Something is wrong: {self.partly_filled}", False
        if self.likely is not None and not self._is_as_trained():
            return self._what_is_likely(self.likely), False
        return self._nothing_found()

    def _what_changes(self) -> str:
        """Names the changes, with the draft that gains most."""
        assert self.as_loaded is not None
        old, new = self.as_loaded, self.changes[-1].result
        gains = [b - a for a, b in zip(old.conditional, new.conditional, strict=True)]
        # A later draft is judged where those before were right: hardly anywhere if none was.
        judged = [min(pair) >= FEWEST_JUDGED for pair in zip(old.judged, new.judged, strict=True)]
        telling = (i for i, gain in enumerate(gains) if judged[i] and gain >= TELLING_GAIN)
        index = next(telling, 0)
        return (
            f"{' and '.join(f.name for f in self.changes)}: acceptance of the {_ordinal(index)} "
            f"draft is {old.conditional[index]:.2f} as it is and {new.conditional[index]:.2f} with "
            f"the change (length {old.acceptance_length:.2f} and {new.acceptance_length:.2f})."
            f"{self._what_is_left(new)}"
        )

    def _what_is_likely(self, found: Finding) -> str:
        assert self.as_loaded is not None
        return (
            f"No mistake is certain, but one is likely: {found.name} (length "
            f"{self.as_loaded.acceptance_length:.2f} as it is and "
            f"{found.result.acceptance_length:.2f} with the change). On so few texts that may be "
            f"chance: give more prompts, or try the change: {found.cure}."
            f"{self._what_is_left(found.result)}"
        )

    def _what_is_left(self, result: Evaluation) -> str:
        """Says so where acceptance is poor with the changes too: they are not the cause, or not the
        only one."""
        short = self._short_of_training(result)
        if short is None:
            short = self._hardly_regained(result)
        if short is not None:
            assert self.trained is not None
            what = (
                f"when it was trained the {_ordinal(short)} draft was accepted "
                f"{self.trained[short]:.2f} of the time, and with the change it is "
                f"{result.conditional[short]:.2f}"
            )
        elif is_dead(result.judged[0], result.right[0]):
            what = "the first draft is accepted hardly ever with the change, too"
        else:
            return ""
        return (
            f" That is not all of it: {what}. The cause may be another one, which this change "
            f"covers in part. Copy the {self.drafter} again from its source."
        )

    def _hardly_regained(self, result: Evaluation) -> int | None:
        """Returns the first draft far below training's that regains less than half of its loss."""
        assert self.as_loaded is not None
        old, new = self.as_loaded, result
        for index, rate in enumerate((self.trained or [])[: len(new.judged)]):
            if min(old.judged[index], new.judged[index]) < FEWEST_JUDGED:
                break
            left, lost = rate - new.conditional[index], rate - old.conditional[index]
            if left > SHORT_OF_TRAINING and left > lost / 2:
                return index
        return None

    def _is_as_trained(self) -> bool:
        """Whether the head says how it was trained, and is accepted about as often."""
        result = self.as_loaded
        if result is None or not self.trained or result.judged[0] < FEWEST_JUDGED:
            return False
        return self._short_of_training(result, with_certainty=False) is None

    def _short_of_training(self, result: Evaluation, with_certainty: bool = True) -> int | None:
        """Returns the first draft that is accepted far less often than at the end of training."""
        for index, rate in enumerate((self.trained or [])[: len(result.judged)]):
            if result.judged[index] < FEWEST_JUDGED:
                break
            most = self._upper_bound(index, result) if with_certainty else result.conditional[index]
            if most < rate - SHORT_OF_TRAINING:
                return index
        return None

    def _upper_bound(self, index: int, result: Evaluation) -> float:
        """Returns an upper confidence bound of a draft's conditional acceptance."""
        most = _upper_bound_of(result.right[index], result.judged[index])
        if result.errors:  # positions of one text are alike
            most = max(most, result.conditional[index] + CERTAIN * result.errors[index])
        return most

    def _means_other_tokens(self) -> bool:
        """Whether drafts are surely better where the head's tokens mean what they do elsewhere."""
        if self.refitted is None:
            return False
        assert self.as_loaded is not None
        right, judged = self.refitted
        least = 1 - _upper_bound_of(judged - right, judged)
        return least >= self.as_loaded.conditional[0] + TELLING_GAIN

    def _what_tokens_mean(self) -> str:
        assert self.refitted is not None and self.as_loaded is not None
        right, judged = self.refitted
        return (
            "The head's tokens mean other ones: with the meanings that fit half of the texts best, "
            f"its first draft is right {right / judged:.2f} of the time in the other half, as it "
            f"is {self.as_loaded.conditional[0]:.2f}. d2t, or the order of the rows of lm_head, is "
            "another head's: copy d2t, t2d and lm_head.weight again from one source."
        )

    def _is_out_of_vocabulary(self) -> bool:
        """Whether the draft vocabulary alone explains half of the first drafts that are lost."""
        if self.coverage is None or self._is_as_trained():
            return False
        assert self.as_loaded is not None
        missing, lost = 1 - _upper_bound_of(*self.coverage), 1 - self.as_loaded.conditional[0]
        return missing >= MUCH_OUT_OF_VOCABULARY and missing >= lost / 2

    def _what_vocabulary_costs(self) -> str:
        assert self.coverage is not None and self.as_loaded is not None
        return (
            f"The draft vocabulary is too small for these texts: {self._share_drafted()}, and the "
            f"first draft is accepted {self.as_loaded.conditional[0]:.2f} of the time. If the head "
            "is for such texts, d2t is another head's: copy d2t and t2d again. Else use a head "
            "whose vocabulary holds them."
        )

    def _share_drafted(self) -> str:
        assert self.coverage is not None
        held, written = self.coverage
        return f"it holds {held / max(1, written):.2f} of the tokens that the target wrote"

    def _fails_at_masks(self) -> bool:
        result = self.as_loaded
        if not self.reads_masks or result is None or len(result.conditional) < 2:
            return False
        first = result.conditional[0]
        return (
            result.judged[1] >= FEWEST_JUDGED
            and first >= LEAST_BEFORE_MASKS
            and self._upper_bound(1, result) < LOST_AT_MASKS * first
        )

    def _what_fails_at_masks(self) -> str:
        assert self.as_loaded is not None
        first, second = self.as_loaded.conditional[:2]
        why = self.suspicion or (
            f"None of the mask tokens and states tried does better: the {self.drafter} was trained "
            "too little with masks, or the weights it has for them or the mask token are wrong "
            "ones. Copy both again from their source."
        )
        return (
            f"Something is wrong at the masks: the first draft, which reads none, is accepted "
            f"{first:.2f} of the time, and after a right one the second {second:.2f}. {why}"
        )

    def _what_to_ask(self, question: str) -> str:
        """What may be behind bad acceptance that nothing explains."""
        suspicion = "" if self.suspicion is None else f"{self.suspicion} "
        named = "" if self.made_for is None else f" (Its config.json names {self.made_for}.)"
        copy = f"If so, copy the {self.drafter} again from its source."
        return f"{suspicion}{question}{named} {copy}"

    def _nothing_found(self) -> tuple[str, bool]:
        result, trained = self.as_loaded, self.trained or []
        assert result is not None
        first = f"the first draft is accepted {result.conditional[0]:.2f} of the time"
        if trained and trained[0] < LEARNED_NOTHING:
            return (
                "The head had learned next to nothing when its training ended: the first draft "
                f"was accepted {trained[0]:.2f} of the time. Train it longer, on more text."
            ), False
        if is_dead(result.judged[0], result.right[0]):
            return (
                f"No known mistake explains it: {first}, hardly ever. "
                f"{self._what_to_ask(f'Is this the target that the {self.drafter} is for?')}"
            ), False
        index = self._short_of_training(result)
        if index is not None:
            after = ", after right ones" if index else ""
            question = "Is this the target that it was trained for, and text of that kind?"
            return (
                f"No known mistake explains it: the {_ordinal(index)} draft is accepted "
                f"{result.conditional[index]:.2f} of the time{after}, when it was trained it "
                f"was {trained[index]:.2f}. {self._what_to_ask(question)}"
            ), False
        index = self._short_of_training(result, with_certainty=False)
        if index is not None:
            return (
                f"No known mistake was found, but the {_ordinal(index)} draft is accepted "
                f"{result.conditional[index]:.2f} of the time, when it was trained it was "
                f"{trained[index]:.2f}. On so few texts that may be chance: give more prompts."
            ), True
        if trained:
            return (
                f"Nothing is wrong: {first}, when it was trained it was {trained[0]:.2f}. If that "
                "is too little, the head is weak for these texts: train it on text of this kind."
            ), True
        weak = (
            "If this is too little, it guesses this target badly: use another of its family."
            if self.drafter == "draft model"
            else "How it did in training it does not say; if this is too little, it is weak for "
            "these texts."
        )
        return (
            f"No known mistake was found: {first} (length {result.acceptance_length:.2f} with "
            f"{len(result.conditional)} drafts). {weak}"
        ), True
