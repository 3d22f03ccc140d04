"""Trials of the target layers that a head reads."""

from __future__ import annotations

from itertools import combinations, permutations

from .trials import Trial

MOST_CAPTURED_TO_PERMUTE = 3


def capture_trials(
    now: tuple[int, ...],
    num_layers: int,
    field: str,
    usual: tuple[str, tuple[int, ...]] | None,
) -> list[Trial]:
    """Returns trials of other layers.

    Args:
        now: 0-based outputs. num_layers: of the target.
        field: of the config, in which a user gives them.
        usual: whose layers would be usual, and which those are.
    """
    candidates = [
        ("layers are captured one too early", tuple(i + 1 for i in now)),
        ("layers are captured one too late", tuple(i - 1 for i in now)),
        ("layers are captured two too early", tuple(i + 2 for i in now)),
        ("layers are captured two too late", tuple(i - 2 for i in now)),
        ("captured layers are in reverse order", tuple(reversed(now))),
    ]
    if usual is not None:
        candidates.append((f"captured layers are not {usual[0]}", usual[1]))
    if len(now) <= MOST_CAPTURED_TO_PERMUTE:
        candidates += [
            (f"captured layers should be in the order {list(order)}", order)
            for order in permutations(now)
        ]
    else:
        candidates += [
            (
                f"captured layers {now[a]} and {now[b]} are in each other's place",
                _swapped(now, a, b),
            )
            for a, b in combinations(range(len(now)), 2)
        ]
    trials, tried = [], {now, ()}
    for name, layers in candidates:
        if layers not in tried and all(0 <= i < num_layers for i in layers):
            cure = f"{field}={list(layers)} (0-based outputs), now {list(now)}"
            is_usual = usual is not None and layers == usual[1]
            trials.append(Trial(name, cure, sets={"layers": layers}, is_usual=is_usual))
            tried.add(layers)
    return trials


def notes_on_captures(now: tuple[int, ...]) -> list[str]:
    """Returns which orders of the captured layers are not tried."""
    if len(now) <= MOST_CAPTURED_TO_PERMUTE:
        return []
    return [
        f"Of the orders of its {len(now)} captured layers only the reverse and those with two "
        f"swapped are tried: up to {MOST_CAPTURED_TO_PERMUTE} are permuted."
    ]


def _swapped(layers: tuple[int, ...], a: int, b: int) -> tuple[int, ...]:
    order = list(layers)
    order[a], order[b] = order[b], order[a]
    return tuple(order)
