"""The n-gram search in Python lists."""

from __future__ import annotations


def ngram_search(tokens: list[int], k: int, longest: int, shortest: int, oldest: bool) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        if n >= len(tokens):
            continue
        ends = [
            e for e in range(n - 1, len(tokens) - 1) if tokens[e - n + 1 : e + 1] == tokens[-n:]
        ]
        if ends:
            end = ends[0] if oldest else ends[-1]
            text = list(tokens)
            for i in range(k):
                text.append(text[end + 1 + i])
            return text[len(tokens) :]
    return [-1] * k
