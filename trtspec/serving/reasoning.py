"""Splits a model's reasoning from its answer, as the text streams.

Supported are models that mark it in one of these ways, by their chat template or vocabulary:

    <think> … </think>             Qwen3, DeepSeek-R1 and V3.1, GLM-4.5 and later, MiMo,
                                   Step-3.5, MiniMax-M2
    [THINK] … [/THINK]             Magistral and other reasoning models of Mistral
    <|channel>thought … <channel|>  Gemma 4

gpt-oss's channels are split by `channels.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .markers import held_length


class ReasoningMarkers(NamedTuple):
    """The text before and after reasoning. gpt-oss's have other text between: `channels.py`."""

    start: str
    end: str


class Part(NamedTuple):
    """Text that is all reasoning, or all answer."""

    text: str
    is_reasoning: bool


THINK = ReasoningMarkers("<think>", "</think>")
MISTRAL = ReasoningMarkers("[THINK]", "[/THINK]")
GEMMA = ReasoningMarkers("<|channel>thought", "<channel|>")
GPT_OSS = ReasoningMarkers("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")


def split_for(tokenizer: Any) -> ReasoningMarkers | None:
    """Returns the markers of a tokenizer of transformers; None if it has none that are known.

    The chat template says it. Without one in it, both markers of a pair in the vocabulary do.
    """
    template = getattr(tokenizer, "chat_template", None)
    templates = template.values() if isinstance(template, dict) else [template]
    text = "\n".join(t for t in templates if isinstance(t, str))
    for markers in (GPT_OSS, THINK, MISTRAL, GEMMA):
        if markers.end in text:
            return markers
    vocabulary = tokenizer.get_vocab()
    for markers in (THINK, MISTRAL):
        if markers.start in vocabulary and markers.end in vocabulary:
            return markers
    return None


def starts_inside(prompt: str, markers: ReasoningMarkers) -> bool:
    """Returns whether a rendered prompt ends with the start marker: its template began reasoning.

    Elsewhere the marker may be a user's text.
    """
    return prompt.rstrip().endswith(markers.start)


class Splitter:
    """Splits one answer as its text streams."""

    def __init__(self) -> None:
        self._held = ""  # not taken yet

    def feed(self, text: str) -> list[Part]:
        """Returns what is sure now of the text so far."""
        self._held += text
        return self._take(is_last=False)

    def finish(self) -> list[Part]:
        """Returns the rest, when the output is complete."""
        return self._take(is_last=True)

    def _take(self, *, is_last: bool) -> list[Part]:
        raise NotImplementedError


class ReasoningSplitter(Splitter):
    """Splits one answer, which has one stretch of reasoning at most, at its beginning.

    A marker later in the answer is text: the model writes about it. Blank space around the markers
    belongs to neither part.

    Args:
        starts_inside: the prompt ends with the start marker, so that the output has only the end.
    """

    def __init__(self, markers: ReasoningMarkers, starts_inside: bool):
        super().__init__()
        self.markers = markers
        self._place = "inside" if starts_inside else "before"  # then "inside", "after", "answer"
        self._has_begun = False  # reasoning has text

    def _take(self, *, is_last: bool) -> list[Part]:
        parts: list[Part] = []
        if self._place == "before":
            self._look_for_start(is_last)
        if self._place == "inside":
            parts += self._reasoning(is_last)
        if self._place == "after":
            self._held = self._held.lstrip()
            if self._held:
                self._place = "answer"
        if self._place == "answer" and self._held:
            parts.append(Part(self._held, is_reasoning=False))
            self._held = ""
        return parts

    def _look_for_start(self, is_last: bool) -> None:
        text, start = self._held.lstrip(), self.markers.start
        if text.startswith(start):
            self._place, self._held = "inside", text[len(start) :]
        elif is_last or not start.startswith(text):
            self._place = "answer"

    def _reasoning(self, is_last: bool) -> list[Part]:
        end = self._held.find(self.markers.end)
        if end >= 0:
            text, self._held = self._held[:end].rstrip(), self._held[end + len(self.markers.end) :]
            self._place = "after"
        elif is_last:
            text, self._held = self._held.rstrip(), ""
        else:
            sure = self._held[: len(self._held) - held_length(self._held, [self.markers.end])]
            text = sure.rstrip()
            self._held = self._held[len(text) :]
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        return [Part(text, is_reasoning=True)] if text else []
