"""Log probabilities on the host: entries by token, and those of a prompt, whose parts are computed
one after another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from ..api.outputs import Logprob
from ..ops.tokens.logprobs import TokenLogprobs


def logprob_entry(
    token: int, own: float, rank: int, likeliest: Iterable[tuple[int, float]], count: int
) -> dict[int, Logprob]:
    """Returns a token's log probability, then those of the `count` likeliest, by token."""
    entry = {token: Logprob(own, rank)}
    for number, (other, logprob) in enumerate(islice(likeliest, count), start=1):
        entry.setdefault(other, Logprob(logprob, number))
    return entry


class LogprobRows(NamedTuple):
    """A `TokenLogprobs` in arrays of numpy, which are quick to send to another process."""

    own: np.ndarray
    ranks: np.ndarray  # 0: an embedding stands there, and no token
    top_ids: np.ndarray
    top: np.ndarray

    @staticmethod
    def of(known: TokenLogprobs, start: int, end: int, count: int) -> LogprobRows:
        """Returns rows [start, end) of what is on the CPU, with `count` alternatives."""
        rows, columns = slice(start, end), slice(count)
        return LogprobRows(
            known.own[rows].numpy(),
            known.ranks[rows].numpy(),
            known.top_ids[rows, columns].numpy(),
            known.top[rows, columns].numpy(),
        )

    @property
    def has_nan(self) -> bool:
        return bool(np.isnan(self.own).any())


class PromptLogprobs:
    """Those of one prompt's tokens, as its parts are read. Who wants entries makes them: a prompt
    may have 100,000, which would hold up the engine."""

    def __init__(self) -> None:
        self.parts: list[LogprobRows] = []

    @property
    def num_known(self) -> int:
        """Tokens whose log probability is known, and the first one, which has none."""
        return 1 + sum(len(part.own) for part in self.parts)

    def add(self, first: int, rows: LogprobRows) -> None:
        """Adds those of the tokens from position `first` on, without what it has: after a
        preemption they are computed again."""
        known = self.num_known - first
        assert known >= 0
        if known < len(rows.own):
            self.parts.append(LogprobRows(*(array[known:] for array in rows)))

    def entries(self, tokens: Sequence[int], count: int) -> list[dict[int, Logprob] | None]:
        """Returns an entry for each token of the prompt, with `count` alternatives.

        None stands for the first token, and for embeddings.
        """
        entries: list[dict[int, Logprob] | None] = [None]
        following = iter(tokens[1:])
        for part in self.parts:
            columns = [array.tolist() for array in part]
            for own, rank, ids, top, token in zip(*columns, following, strict=False):
                pairs = zip(ids, top, strict=True)
                entries.append(logprob_entry(token, own, rank, pairs, count) if rank else None)
        return entries
