"""The share of drafts accepted at each position, as it runs. Kept on disk between runs."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from ...utils import replace_text
from ..request import ScheduledBatch
from ..results import Outcomes

logger = logging.getLogger(__name__)

KEEP, MEMORY = 0.9, 400  # of earlier acceptance at each decision; in results at most
PRIOR, PRIOR_STEPS = 0.6, 4.0  # acceptance of the first draft before anything is seen
KEPT = 16.0  # results that an earlier engine's shares count as
NAMES = {"greedy": True, "sampled": False}


class RunningAcceptance:
    """Shares of accepted drafts by position, where all before were accepted. It forgets slowly.

    Each position forgets by its own results. With many requests one that is not asked for would
    else be unknown again, and be tried, every few dozen steps.

    Args:
        kept: the shares of an earlier engine, of the first positions. They count as few results.
    """

    def __init__(self, max_draft_len: int, kept: Sequence[float] = ()):
        self._seen: Counter[tuple[int, int]] = Counter()  # (asked, accepted) -> results
        self._reached = [0.0] * max_draft_len
        self._accepted = [0.0] * max_draft_len
        # What is assumed at first is forgotten as what is seen.
        self._reached[0], self._accepted[0] = PRIOR_STEPS, PRIOR_STEPS * PRIOR
        for position, rate in enumerate(kept[:max_draft_len]):
            self._reached[position], self._accepted[position] = KEPT, KEPT * rate

    def add(self, num_asked: int, num_accepted: int, count: int = 1) -> None:
        """Adds results: drafts asked for, found or not, and how many were accepted."""
        self._seen[num_asked, num_accepted] += count

    def fold(self) -> None:
        """Takes in what was added since; earlier results count less from now on."""
        if not any(asked for asked, _ in self._seen):  # nothing was drafted
            self._seen.clear()
            return
        for position, reached in enumerate(self._reached):
            kept = min(KEEP, MEMORY / max(1.0, reached))
            self._reached[position] *= kept
            self._accepted[position] *= kept
        for (asked, accepted), results in self._seen.items():
            for position in range(min(asked, len(self._reached))):
                if accepted >= position:
                    self._reached[position] += results
                    self._accepted[position] += results * (accepted > position)
        self._seen.clear()

    @property
    def rates(self) -> list[float]:
        """Shares accepted by position, as they are estimated."""
        rates = [rate := self._accepted[0] / self._reached[0]]
        for reached, accepted in zip(self._reached[1:], self._accepted[1:], strict=True):
            rate = (accepted + PRIOR_STEPS * rate) / (reached + PRIOR_STEPS)
            rates.append(rate)
        return rates

    @property
    def seen(self) -> list[float]:
        """Shares of the first positions, as far as enough results reached them."""
        pairs = zip(self.rates, self._reached, strict=True)
        return [rate for rate, _ in takewhile(lambda pair: pair[1] >= KEPT, pairs)]

    def expected_tokens(self) -> list[float]:
        """Returns the tokens of a request's step for K = 0, 1, …

        A position that was seldom reached is taken to be like the one before it.
        """
        tokens, product = [1.0], 1.0
        for rate in self.rates:
            product *= rate
            tokens.append(tokens[-1] + product)
        return tokens


class AcceptanceByKind:
    """The acceptance of greedy requests and of sampled ones.

    Args:
        path: the file that keeps both for the next engine; None keeps nothing.
    """

    def __init__(self, max_draft_len: int, path: Path | None):
        self._path, kept = path, load_rates(path)
        self.kinds = {  # by whether a request is greedy
            kind: RunningAcceptance(max_draft_len, kept.get(kind, ())) for kind in (True, False)
        }

    def add(self, outcomes: Outcomes, batch: ScheduledBatch) -> None:
        """Adds what became of the drafts of a step, whose batch this is."""
        requests, asked, accepted = outcomes
        if 0 < batch.num_sampled < len(batch.generations) or len(set(asked)) > 1:
            kinds = [request.sampling_params.is_greedy for request in requests]
            seen = Counter(zip(kinds, asked, accepted, strict=True))
        else:  # mostly all are alike, and one count takes a quarter of the time
            kind = batch.num_sampled == 0
            seen = Counter({(kind, asked[0], n): m for n, m in Counter(accepted).items()})
        for (is_greedy, num_asked, num_accepted), count in seen.items():
            if num_asked:  # others say nothing of drafts
                self.kinds[is_greedy].add(num_asked, num_accepted, count)

    def fold(self) -> None:
        """Takes in what was added since, as `RunningAcceptance.fold` does."""
        for acceptance in self.kinds.values():
            acceptance.fold()

    def expected_tokens(self, share_sampled: float) -> list[float]:
        """Returns the mean tokens of a request's step for K = 0, 1, …"""
        greedy, sampled = (self.kinds[kind].expected_tokens() for kind in (True, False))
        pairs = zip(greedy, sampled, strict=True)
        return [(1 - share_sampled) * a + share_sampled * b for a, b in pairs]

    def save(self) -> None:
        save_rates(self._path, {kind: acceptance.seen for kind, acceptance in self.kinds.items()})


def load_rates(path: Path | None) -> dict[bool, list[float]]:
    """Returns a file's shares, of greedy requests (True) and of sampled ones; none where it is
    missing or broken."""
    try:
        kept = {} if path is None else json.loads(path.read_text())
        rates = {NAMES[name]: [float(rate) for rate in of] for name, of in kept.items()}
        if not all(0 <= rate <= 1 for of in rates.values() for rate in of):
            raise ValueError("a share is outside of 0 … 1")
    except FileNotFoundError:
        return {}
    except (
        OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError,
        RecursionError,
    ) as error:  # fmt: skip
        logger.warning("%s holds no shares of accepted drafts and is ignored: %s", path, error)
        return {}
    return rates


def save_rates(path: Path | None, seen: Mapping[bool, Sequence[float]]) -> None:
    """Writes the file, at once as a whole. A folder that cannot be written is no error.

    Where nothing was seen of a kind of requests, the file's shares stay.
    """
    if path is None or not any(seen.values()):
        return
    rates = load_rates(path) | {kind: of for kind, of in seen.items() if of}
    text = json.dumps({name: rates[kind] for name, kind in NAMES.items() if kind in rates})
    try:
        replace_text(path, text)
    except OSError as error:
        logger.info("Shares of accepted drafts are not kept: %s", error)
