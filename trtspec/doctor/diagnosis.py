"""What an examination found, and its verdict in words."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..train.trainer import Evaluation

SIGNIFICANT_GAIN = 0.10
"""How far acceptance of the first draft may lie below training's on texts of another kind."""
FEWEST_JUDGED = 50
"""Fewer judged places than this show nothing."""
LOST_AT_MASKS = 0.5
"""Of drafts from one pass, the second's share of the first's acceptance below which something is
wrong with the masks: the first draft reads none."""
_ORDINALS = ("first", "second", "third")


@dataclass(frozen=True)
class Finding:
    """One setting tried."""

    name: str
    cure: str  # what to change, exactly
    result: Evaluation


@dataclass
class Diagnosis:
    """What the doctor found.

    `changes` are the settings to be changed together, the most telling first; none of them means
    that nothing is known to be wrong.
    """

    problems: list[str] = field(default_factory=list)  # the drafter cannot even be loaded
    as_loaded: Evaluation | None = None
    tried: list[Finding] = field(default_factory=list)
    changes: list[Finding] = field(default_factory=list)
    trained: list[float] | None = None  # conditional acceptance at the end of training
    notes: list[str] = field(default_factory=list)  # what was not examined
    suspicion: str | None = None  # what is seen to be wrong and cannot be undone
    drafter: str = "head"  # or "draft model"
    reads_masks: bool = False

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.problems:
            return f"The {self.drafter} does not fit its target: {self.problems[0]}"
        assert self.as_loaded is not None
        if self.as_loaded.judged[0] < FEWEST_JUDGED:
            return (
                f"The texts are too short to judge by: {self.as_loaded.judged[0]} places, "
                f"{FEWEST_JUDGED} are the least. Give more prompts, or more tokens of each."
            )
        if self.changes:
            return self._what_changes()
        if self.suspicion:
            rates = ", ".join(f"{rate:.2f}" for rate in self.as_loaded.conditional)
            return f"{self.suspicion} As it is, drafts are accepted {rates} of the time."
        if self._fails_at_masks():
            first, second = self.as_loaded.conditional[:2]
            return (
                f"Something is wrong at the masks: the first draft, which reads none, is accepted "
                f"{first:.2f} of the time, and after a right one the second {second:.2f}. None of "
                "the mask tokens and states tried does better: copy the weights and the mask "
                "token again from their source, or train it longer with masks."
            )
        return self._nothing_found()

    def _what_changes(self) -> str:
        """Names the changes, with the draft that gains most."""
        assert self.as_loaded is not None
        old, new = self.as_loaded, self.changes[-1].result
        gains = [b - a for a, b in zip(old.conditional, new.conditional, strict=True)]
        # A later draft is judged where those before were right: hardly anywhere if none was.
        judged = [min(pair) >= FEWEST_JUDGED for pair in zip(old.judged, new.judged, strict=True)]
        telling = (i for i, gain in enumerate(gains) if judged[i] and gain >= SIGNIFICANT_GAIN)
        place = next(telling, 0)
        return (
            f"{' and '.join(f.name for f in self.changes)}: acceptance of the {_ORDINALS[place]} "
            f"draft is {old.conditional[place]:.2f} as it is and {new.conditional[place]:.2f} with "
            f"the change (length {old.acceptance_length:.2f} and {new.acceptance_length:.2f})."
        )

    def _fails_at_masks(self) -> bool:
        result = self.as_loaded
        if not self.reads_masks or result is None or len(result.conditional) < 2:
            return False
        first, second = result.conditional[:2]
        return result.judged[1] >= FEWEST_JUDGED and second < LOST_AT_MASKS * first

    def _nothing_found(self) -> str:
        assert self.as_loaded is not None
        before = self.as_loaded.conditional[0]
        if self.trained and self.trained[0] < SIGNIFICANT_GAIN:
            return (
                "The head had learned next to nothing when its training ended: the first draft "
                f"was accepted {self.trained[0]:.2f} of the time. Train it longer, on more text."
            )
        if self.trained:
            kept = f"when it was trained it was {self.trained[0]:.2f}"
            if before >= self.trained[0] - SIGNIFICANT_GAIN:
                return (
                    f"Nothing is wrong: the first draft is accepted {before:.2f} of the time, "
                    f"{kept}. If that is too little, the head is weak for these texts: train it "
                    "on text of this kind."
                )
            return (
                f"No known mistake explains it: the first draft is accepted {before:.2f} of the "
                f"time, {kept}. Is this the target that it was trained for, and text of that kind?"
            )
        return (
            f"No known mistake was found: the first draft is accepted {before:.2f} of the time "
            f"(length {self.as_loaded.acceptance_length:.2f} with "
            f"{len(self.as_loaded.conditional)} drafts). How it did in training it does not say; "
            "if this is too little, it is weak for these texts."
        )

    @property
    def is_well(self) -> bool:
        """The drafter does what it can: no mistake found, none hidden by too little text."""
        return self.verdict.startswith(("Nothing is wrong", "No known mistake was found"))
