"""`Grammar`: what one request's grammar allows next, after its output and after each draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

OPEN = -1
"""A word of a mask that allows its 32 tokens."""
MAX_WHITE_SPACE = 40
"""Characters of it in a row, between JSON's values."""
Masks = NDArray[np.int32]
"""Rows [R, W] on the host: bit t % 32 of word t // 32 allows token t."""


class Without(NamedTuple):
    """Tokens that are taken out of a mask."""

    words: tuple[int, ...]
    kept: tuple[np.int32, ...]  # of each such word, the bits that stay

    @staticmethod
    def of(tokens: Iterable[int]) -> Without:
        bits: dict[int, int] = {}
        for token in tokens:
            bits[token // 32] = bits.get(token // 32, 0) | 1 << (token % 32)
        kept = np.array([~value & 0xFFFFFFFF for value in bits.values()], dtype=np.uint32)
        return Without(tuple(bits), tuple(kept.view(np.int32)))

    def narrow(self, masks: Masks, row: int) -> None:
        for word, kept in zip(self.words, self.kept, strict=True):
            masks[row, word] &= kept


@dataclass(frozen=True)
class WhiteSpace:
    """Tokens of white space alone, of which a model may write more and more between JSON's values.

    XGrammar can limit it in the grammar. Then a mask takes 110 us in place of 1.
    """

    lengths: dict[int, int]  # characters of each such token
    line_break: int  # the token of one
    others: Without

    def has_enough(self, tokens: Sequence[int]) -> bool:
        """Whether a text ends with as much of it as may stand in a row."""
        count = 0
        for token in reversed(tokens):
            length = self.lengths.get(token)
            if length is None:
                return False
            count += length
            if count >= MAX_WHITE_SPACE:
                return True
        return False


class Grammar:
    """Follows one request's output.

    Args:
        matcher: XGrammar's, at its start.
        marker: tokens of the output after which the grammar holds; () is from the start.
        end_ids: tokens that end the output. None may come before the marker.
        never: tokens that no state allows.
        white_space: of JSON, limited outside of its texts; None is not.
    """

    def __init__(
        self,
        matcher: Any,
        *,
        marker: tuple[int, ...] = (),
        end_ids: frozenset[int] = frozenset(),
        never: Without = Without((), ()),  # noqa: B008 - it cannot change
        white_space: WhiteSpace | None = None,
    ):
        self.matcher, self.marker, self.never = matcher, marker, never
        self.white_space = white_space
        self.end_ids, self._ends = end_ids, Without.of(end_ids)
        self.tokens: list[int] = []  # of the output, followed so far
        self.num_free = 0 if not marker else -1  # tokens before the grammar; -1: not known yet
        self.is_broken = False  # a token came that it does not allow
        self.skips_wrong_tokens = False  # where acceptance is forced
        self._num_ahead = 0  # drafts read after the output
        self._is_off = False  # a draft came that is not allowed: later ones do not count

    @property
    def is_complete(self) -> bool:
        """Whether it has ended: nothing may follow."""
        return self.num_free >= 0 and self.matcher.is_terminated()

    def follow(self, tokens: Sequence[int]) -> int:
        """Reads the output's next tokens, until its end or one that it does not allow.

        Returns:
            how many there are up to the end; all if it does not end.
        """
        self.come_back()
        for count, token in enumerate(tokens):
            if self.is_broken or self.is_complete:
                return count
            self.is_broken = not self._step(token) and not self.skips_wrong_tokens
        return len(tokens)

    def restart(self, tokens: Sequence[int]) -> None:
        """Begins again after this output. It relies on nothing that an exception may have left half
        done."""
        self.matcher.reset()
        self.tokens, self.num_free = [], -1 if self.marker else 0
        self.is_broken, self._num_ahead, self._is_off = False, 0, False
        self.follow(tokens)

    def fill(self, masks: Masks, first: int, drafts: Sequence[int]) -> None:
        """Writes what is allowed after the output, and after each draft.

        After a draft that is not allowed, and after -1, rows repeat the last valid mask. So
        no later draft can be accepted.

        Args:
            masks: [R, W] int32 on the host; rows first … first + len(drafts) are written.
        """
        self.come_back()
        end = first + 1 + len(drafts)
        if self.is_broken or self.is_complete:
            masks[first:end] = OPEN  # the request has ended: nothing of it is read
            return
        row = first
        self.fill_row(masks, row)
        for draft in drafts:
            if draft < 0 or not self._step(draft):
                break
            row += 1
            if self.is_complete:
                masks[row] = masks[row - 1]
                break
            self.fill_row(masks, row)
        for _ in range(row - first):
            self._step_back()
        masks[row + 1 : end] = masks[row]

    def go_ahead(self, draft: int) -> None:
        """Reads a draft after the output, and those that were read before. One that is not allowed,
        or is the end, leaves the state as it is, and later ones too."""
        if self._is_off or self.is_broken or self.is_complete:
            return
        self._is_off = not self._step(draft)
        if not self._is_off and self.is_complete:
            self._step_back()
            self._is_off = True
        self._num_ahead += not self._is_off

    def come_back(self) -> None:
        """Forgets the drafts that were read ahead."""
        for _ in range(self._num_ahead):
            self._step_back()
        self._num_ahead, self._is_off = 0, False

    def is_stuck(self, num_words: int) -> bool:
        """Whether it allows no token at all."""
        masks = np.zeros((1, num_words), dtype=np.int32)
        self.fill(masks, 0, [])
        return not masks.any()

    def fill_row(self, masks: Masks, row: int) -> None:
        """Writes what may come next, after the drafts that were read ahead too."""
        if self.num_free < 0:
            masks[row] = OPEN
            self._ends.narrow(masks, row)
            return
        self.matcher.fill_next_token_bitmask(masks, row)
        self.narrow(masks, row)

    def narrow(self, masks: Masks, row: int) -> None:
        """Takes tokens of no text, and too much white space, from a row of the matcher's."""
        self.never.narrow(masks, row)
        space = self.white_space
        if space is not None and space.has_enough(self.tokens) and self._is_between_values(space):
            space.others.narrow(masks, row)

    def _is_between_values(self, space: WhiteSpace) -> bool:
        """Whether the state is in JSON, outside of its texts: those hold no line break."""
        is_between = bool(self.matcher.accept_token(space.line_break))
        if is_between:
            self.matcher.rollback(1)
        return is_between

    def _step(self, token: int) -> bool:
        """Reads one token. False: it is not allowed, and nothing changed."""
        if self.num_free < 0:
            if token in self.end_ids:
                return False
            self.tokens.append(token)
            if tuple(self.tokens[-len(self.marker) :]) == self.marker:
                self.num_free = len(self.tokens)
            return True
        if not self.matcher.accept_token(token):
            return False
        self.tokens.append(token)
        return True

    def _step_back(self) -> None:
        if self.num_free >= 0 and len(self.tokens) > self.num_free:
            self.matcher.rollback(1)
        elif self.marker:
            self.num_free = -1
        self.tokens.pop()
