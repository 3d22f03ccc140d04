"""Markers in streamed text: none is broken where it comes in parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def held_length(text: str, markers: Sequence[str]) -> int:
    """Returns how many last characters of `text` may begin a marker that is not complete."""
    firsts = {marker[0] for marker in markers}
    longest = max(map(len, markers), default=0)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if text[start] in firsts and any(marker.startswith(text[start:]) for marker in markers):
            return len(text) - start
    return 0


def first_marker(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """Returns position and text of the first marker, the longest of several there."""
    found = [(at, -len(m), m) for m in markers if (at := text.find(m)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker
