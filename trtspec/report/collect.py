"""Runs prompts through an engine and records every generation step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from ..api.sampling_params import SamplingParams
from ..data.acceptance_prompts import AcceptancePrompt
from ..errors import ConfigError, RequestError
from ..executor.request import Request, StepRecord
from .contexts import Encode, encoded

if TYPE_CHECKING:
    from ..llm import LLM

Progress = Callable[[str, float, float], object]
"""Called with (what is being done, requests done, requests in all)."""


@dataclass(frozen=True)
class Sample:
    """One answer and its generation steps."""

    prompt_id: str
    category: str
    temperature: float
    context: int | None  # the length that the prompt was padded to; None: not padded
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: str
    steps: tuple[StepRecord, ...]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "steps": [list(step) for step in self.steps]}


class Interrupted(KeyboardInterrupt):
    """An interrupt while prompts ran; `samples` are the answers that had ended."""

    def __init__(self, samples: list[Sample]):
        super().__init__()
        self.samples = samples


def collect_samples(
    llm: LLM,
    prompts: Sequence[AcceptancePrompt],
    *,
    temperatures: Sequence[float] = (0.0,),
    contexts: Sequence[int] = (),
    max_tokens: int = 128,
    seed: int = 0,
    encode: Encode | None = None,
    progress: Progress | None = None,
) -> list[Sample]:
    """Runs every prompt at every temperature, unpadded and padded to each context length.

    All are queued at once; the engine runs at most `max_batch_size` together. Prompt number i is
    sampled with seed `seed + i`.

    Args:
        encode: messages to token ids; default: the model's chat template.

    Raises:
        ConfigError: a temperature or context length is out of range.
        RequestError: a prompt is too long, or a request failed or was cancelled.
        Interrupted: for a KeyboardInterrupt while they ran.
    """
    encode = encode or llm.apply_chat_template
    executor = llm.executor
    _check_contexts(contexts, max_tokens, executor.config.max_seq_len)
    inputs: list[tuple[int, AcceptancePrompt, int | None, list[int]]] = []
    for (number, prompt), context in product(enumerate(prompts), (None, *contexts)):
        ids = encoded(prompt, context, prompts, number, encode)
        inputs.append((number, prompt, context, _checked(llm, prompt, ids)))
    queued: list[tuple[AcceptancePrompt, int | None, float, Request]] = []
    before, executor.record_steps = executor.record_steps, True
    try:
        for temperature in temperatures:
            for number, prompt, context, ids in inputs:
                params = _params(temperature, max_tokens, seed + number)
                queued.append((prompt, context, temperature, executor.enqueue(ids, params)))
        executor.record_steps = before
        done = 0
        while done < len(queued):
            executor.step()  # what it returns may be another caller's, and others step, too
            done = sum(request.is_finished for *_, request in queued)
            if progress is not None:
                progress(f"decoding {len(queued)} prompts", done, len(queued))
    except KeyboardInterrupt as interrupt:
        whole = [entry for entry in queued if entry[3].finish_reason in ("stop", "length")]
        raise Interrupted([_sample(*entry) for entry in whole]) from interrupt
    finally:  # an interrupt must not leave half a batch running
        executor.record_steps = before
        for *_, request in queued:
            executor.cancel(request.request_id, report=False)
    return [_sample(*entry) for entry in queued]


def _params(temperature: float, max_tokens: int, seed: int) -> SamplingParams:
    try:
        return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    except RequestError as error:  # the caller's mistake, not one request's
        raise ConfigError(str(error)) from error


def _check_contexts(contexts: Sequence[int], max_tokens: int, max_seq_len: int) -> None:
    for context in contexts:
        if context < 1:
            raise ConfigError(f"A context of {context} tokens cannot be: give at least 1.")
        if context + max_tokens > max_seq_len:
            raise ConfigError(
                f"A context of {context} tokens and max_tokens={max_tokens} are more than the "
                f"engine's max_seq_len={max_seq_len}. Give shorter contexts or fewer tokens."
            )


def _checked(llm: LLM, prompt: AcceptancePrompt, ids: list[int]) -> list[int]:
    try:
        return llm.executor.check_prompt(ids)
    except RequestError as error:
        raise RequestError(f"prompt {prompt.id!r}: {error}") from None


def _sample(
    prompt: AcceptancePrompt, context: int | None, temperature: float, request: Request
) -> Sample:
    if request.finish_reason == "error":
        raise RequestError(f"prompt {prompt.id!r} failed: {request.error}")
    if request.finish_reason == "cancelled":
        raise RequestError(f"prompt {prompt.id!r} was cancelled: its steps are not all there.")
    assert request.finish_reason is not None and request.steps is not None
    return Sample(
        prompt_id=prompt.id,
        category=prompt.category,
        temperature=temperature,
        context=context,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=len(request.output_token_ids),
        finish_reason=request.finish_reason,
        steps=tuple(request.steps),
    )
