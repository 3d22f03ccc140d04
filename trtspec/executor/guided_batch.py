"""The host's part of steps with grammars: it follows their outputs and writes their masks.

    launch n:  target ─► [VerifyPoint: read step n-1, write masks] ─► accept ─► first pass
                      ─► [DraftPoint: what was accepted, write masks] ─► draft ─► next pass ─► …

While the target of step n runs, the host reads step n-1: what was accepted, and the drafts that
step n verifies. Only then are the masks of step n known. So a request's grammar may be ahead of its
output, by a step in flight.

While a pass of the drafter runs, the host reads what it starts from, and writes the masks of the
drafts that come out. This is the part that must be fast: one loop over the requests, without a
tensor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import described
from ..guided.grammar import OPEN, Grammar
from ..metadata.guided import DraftPoint, Point, VerifyPoint
from .guided_masks import GuidedMasks
from .request import Request, ScheduledBatch

logger = logging.getLogger(__name__)
MASK_SECONDS = 1.0
"""A grammar that takes longer for a step's masks ends its request with an error: others wait."""


class _Row(NamedTuple):
    """A request of a batch that has a grammar."""

    number: int
    request: Request
    grammar: Grammar


@dataclass(eq=False)
class GuidedBatch:
    """The host's part of one step.

    Args:
        read_before: reads the steps launched before this one, if they are not read yet.
        waiting: the context in which the host waits for the device.
    """

    batch: ScheduledBatch
    num_drafts: int  # K'
    masks: GuidedMasks
    read_before: Callable[[], None]
    waiting: Callable[[], AbstractContextManager[None]]
    is_complete: dict[int, bool] = field(default_factory=dict)
    """By request id: whether the grammar ended with this step's tokens."""
    error: dict[int, str] = field(default_factory=dict)
    """By request id: why its grammar failed in this step."""
    num_taken: dict[int, int] = field(default_factory=dict)
    """By request id: this step's tokens up to the grammar's end."""
    is_read: bool = False
    _is_followed: bool = False
    _going_on: list[_Row] = field(default_factory=list)
    """Those whose grammar has not ended with this step's tokens."""

    def __post_init__(self) -> None:
        # Rows of contexts whose next token this step chooses, not the prompt.
        chooses = [chunk.next_prompt_token < 0 for chunk in self.batch.contexts]
        chooses += [True] * len(self.batch.generations)
        self._rows = [
            _Row(number, request, request.grammar)
            for number, request in enumerate(self.batch.requests)
            if request.grammar is not None
        ]
        self._choosing = [row for row in self._rows if chooses[row.number]]

    def host_part(self, point: Point) -> None:
        """Does the host's part at a point of the step."""
        if isinstance(point, DraftPoint):
            self._write_draft_masks(point.depth)
        elif isinstance(point, VerifyPoint):
            self.read_before()
            self._write_verify_masks()
        else:
            self.masks.draft.note()

    def read(self, tokens: list[list[int]], lens: list[int], next_drafts: list[list[int]]) -> None:
        """Follows what the step accepted, and keeps the drafts of the next one.

        Args:
            tokens: [B, K+1], -1 past the length. next_drafts: [B, K].
        """
        self.is_read = True
        self._follow(tokens, lens)
        for request, drafts in zip(self.batch.requests, next_drafts, strict=True):
            request.next_drafts = drafts

    def _follow(self, tokens: Sequence[Sequence[int]], lens: Sequence[int]) -> None:
        if self._is_followed:
            return
        self._is_followed = True

        def follow(row: int, request: Request, grammar: Grammar) -> None:
            self.num_taken[request.request_id] = grammar.follow(tokens[row][: lens[row]])

        self._for_each(self._choosing, follow)
        for row, request, grammar in self._choosing:
            self.is_complete[request.request_id] = grammar.is_complete
            if grammar.is_broken:
                new = list(tokens[row][: lens[row]])
                reason = f"its grammar does not allow one of the tokens {new}"
                self.error.setdefault(request.request_id, reason)

    def _write_verify_masks(self) -> None:
        with self.waiting():
            masks = self.masks.verify.to_write()
        num_contexts = len(self.batch.contexts)

        def first_of(number: int) -> int:
            return self.batch.first_logits_row(number, self.num_drafts)

        def fill(number: int, request: Request, grammar: Grammar) -> None:
            drafts = [] if number < num_contexts else request.next_drafts[: self.num_drafts]
            first, end = first_of(number), first_of(number + 1)
            if len(drafts) < end - first - 1:
                masks[first:end] = OPEN
            grammar.fill(masks[:end], first, drafts)

        failed = self._for_each(self._choosing, fill)
        written = {row.number for row in self._choosing if row not in failed}
        for number in range(len(self.batch.requests)):
            if number not in written:
                masks[first_of(number) : first_of(number + 1)] = OPEN
        self.masks.verify.send(first_of(len(self.batch.requests)))

    def _write_draft_masks(self, depth: int) -> None:
        with self.waiting():
            self.masks.draft.wait()
        if depth == 0:
            self._write_first_draft_masks()
            return
        masks = self.masks.draft.rows
        drafts = self.masks.draft.drafts(len(self.batch.requests))

        def fill(row: int, request: Request, grammar: Grammar) -> None:
            if grammar.go_ahead(drafts[row]):
                grammar.fill_row(masks, row)

        for row in self._for_each(self._going_on, fill):
            self._going_on.remove(row)
            masks[row.number] = OPEN

    def _write_first_draft_masks(self) -> None:
        masks = self.masks.draft.rows
        tokens, lens = self.masks.draft.accepted(len(self.batch.requests))
        self._follow(tokens, lens)

        def fill(row: int, request: Request, grammar: Grammar) -> None:
            grammar.come_back()  # of prompts read in parts nothing is followed
            grammar.fill_row(masks, row)

        self._going_on = [
            row for row in self._rows if not (row.grammar.is_broken or row.grammar.is_complete)
        ]
        for row in self._for_each(self._going_on, fill):
            self._going_on.remove(row)
        guided = {row.number for row in self._going_on}
        for number in range(len(self.batch.requests)):
            if number not in guided:
                masks[number] = OPEN

    def _for_each(
        self, rows: Iterable[_Row], part: Callable[[int, Request, Grammar], None]
    ) -> list[_Row]:
        """Does a part for each request, and ends those whose grammar raises, or takes too long.

        Returns:
            those that raised.
        """
        failed: list[_Row] = []
        began = time.monotonic()
        for row in rows:
            try:
                part(*row)
            except Exception as error:
                logger.exception("The grammar of request %d raised.", row.request.request_id)
                self._end(row, f"its grammar raised {described(error)}")
                failed.append(row)
            now = time.monotonic()
            if now - began > MASK_SECONDS:
                row.request.has_wrong_grammar = True
                self._end(
                    row,
                    f"its grammar took {now - began:.1f} s for the masks of a step, while others "
                    "wait: write it with fewer alternatives that begin alike",
                )
            began = now
        return failed

    def _end(self, row: _Row, error: str) -> None:
        row.grammar.is_broken = True
        self.error.setdefault(row.request.request_id, error)
