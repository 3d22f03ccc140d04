"""`Grammar`: what one request's grammar allows next, after its output and after each draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

OPEN = -1
"""A word of a mask that allows its 32 tokens."""
MAX_SPAN = 512
"""Words, as special tokens often stand in a row."""
MAX_WHITE_SPACE = 40
"""Characters of it in a row, between JSON's values."""
Masks = NDArray[np.int32]
"""Rows [R, W] on the host: bit t % 32 of word t // 32 allows token t."""


class Without(NamedTuple):
    """Tokens that are taken out of a mask."""

    words: tuple[tuple[int, int], ...]  # with the bits of each that stay, as an int32
    span: NDArray[np.int32] | None = None  # the same, of all words from the first to the last

    @staticmethod
    def of(tokens: Iterable[int]) -> Without:
        bits: dict[int, int] = {}
        for token in tokens:
            bits[token // 32] = bits.get(token // 32, 0) | 1 << (token % 32)
        words = sorted(bits)
        left = np.array([~bits[word] & 0xFFFFFFFF for word in words], dtype=np.uint32)
        kept, span = left.view(np.int32), None
        if len(words) > 2 and words[-1] - words[0] < MAX_SPAN:  # then one operation is faster
            span = np.full(words[-1] - words[0] + 1, OPEN, dtype=np.int32)
            span[np.array(words) - words[0]] = kept
        return Without(tuple(zip(words, kept.tolist(), strict=True)), span)

    def narrow(self, masks: Masks, row: int) -> None:
        if self.span is not None:
            first = self.words[0][0]
            masks[row, first : first + len(self.span)] &= self.span
            return
        for word, kept in self.words:
            masks[row, word] = masks.item(row, word) & kept


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
        never: Without = Without(()),  # noqa: B008 - it cannot change
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
        self.is_complete = False  # it has ended: nothing may follow
        self._look_for_end()

    def follow(self, tokens: Sequence[int]) -> int:
        """Reads the output's next tokens, until its end or one that it does not allow.

        Returns:
            how many there are up to the end; all if it does not end.
        """
        if self.is_broken:
            self.come_back()
            return 0
        count = self._keep(tokens)
        while count < len(tokens):
            if self.is_broken or self.is_complete:
                return count
            self.is_broken = not self._step(tokens[count]) and not self.skips_wrong_tokens
            count += 1
        return count

    def restart(self, tokens: Sequence[int]) -> None:
        """Begins again after this output. It relies on nothing that an exception may have left half
        done."""
        self.matcher.reset()
        self.tokens, self.num_free = [], -1 if self.marker else 0
        self.is_broken, self._num_ahead, self._is_off = False, 0, False
        self.is_complete = False
        self._look_for_end()
        self.follow(tokens)

    def fill(self, masks: Masks, first: int, drafts: Sequence[int]) -> None:
        """Writes what is allowed after the output, and after each draft.

        After a draft that is not allowed, and after -1, rows repeat the last valid mask. So
        no later draft can be accepted. The drafts stay read ahead: those that come true need not be
        read again.

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
            self._num_ahead += 1
            row += 1
            if self.is_complete:
                masks[row] = masks[row - 1]
                break
            self.fill_row(masks, row)
        if row + 1 < end:
            masks[row + 1 : end] = masks[row]

    def go_ahead(self, draft: int) -> bool:
        """Reads a draft after the output, and those that were read before. One that is not allowed,
        or is the end, leaves the state as it is, and later ones too.

        Returns:
            whether the state, and so the next mask, is another one.
        """
        if self._is_off or self.is_broken or self.is_complete:
            return False
        if not self._step(draft):
            self._is_off = True
            return False
        self._num_ahead += 1
        if self.is_complete:
            self._go_back(1)
            self._num_ahead -= 1
            self._is_off = True
        return not self._is_off

    def come_back(self) -> None:
        """Forgets the drafts that were read ahead."""
        self._go_back(self._num_ahead)
        self._num_ahead, self._is_off = 0, False

    def _keep(self, tokens: Sequence[int]) -> int:
        """Keeps what was read ahead as far as these tokens are the same, and forgets the rest.

        Returns:
            how many were kept. They belong to the output now.
        """
        count, start = 0, len(self.tokens) - self._num_ahead
        most = min(self._num_ahead, len(tokens))
        while count < most and self.tokens[start + count] == tokens[count]:
            count += 1
        self._go_back(self._num_ahead - count)
        self._num_ahead, self._is_off = 0, False
        return count

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
        if self.never.words:  # tokens of no text
            self.never.narrow(masks, row)
        space = self.white_space
        if space is None or not self.tokens or self.tokens[-1] not in space.lengths:
            return
        if space.has_enough(self.tokens) and self._is_between_values(space):
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
                self._look_for_end()
            return True
        if not self.matcher.accept_token(token):
            return False
        self.tokens.append(token)
        if token in self.end_ids:
            self.is_complete = True
        elif not self.end_ids:
            self._look_for_end()
        return True

    def _look_for_end(self) -> None:
        """Asks the matcher whether a grammar that no token ends has ended."""
        if not self.end_ids and self.num_free >= 0:
            self.is_complete = self.matcher.is_terminated()

    def _go_back(self, count: int) -> None:
        """Forgets the last tokens."""
        if count == 0:
            return
        del self.tokens[-count:]
        self.is_complete = False
        if self.num_free < 0:
            return
        before = max(0, self.num_free - len(self.tokens))  # of them, those before the grammar
        if count > before:
            self.matcher.rollback(count - before)
        if before:
            self.num_free = -1
