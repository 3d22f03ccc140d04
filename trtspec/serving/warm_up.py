"""`warm_up`: does once what clients may ask for, so that the first of them waits for no compiler.

On a GPU a step of a new shape compiles kernels and captures graphs, which takes up to seconds. A
shape has a number of prompt tokens, a number of requests and a kind of sampling.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..api.guided_decoding import GuidedDecodingParams
from ..api.sampling_params import SamplingParams
from ..errors import RequestError
from ..executor.py_executor import PyExecutor
from ..executor.request import Request
from ..llm import LLM

logger = logging.getLogger(__name__)
SHORT = 8  # tokens of a prompt whose length does not matter
MOST_STEPS = 16
STEPS = 2  # generation steps of each request: the first may verify no drafts


class Kind(NamedTuple):
    """A kind of sampling."""

    name: str
    params: dict[str, Any]
    is_common: bool = False  # else it is done with few shapes
    may_fail: bool = False  # with a warning: clients are told, too
    is_long: bool = False  # also with the longest prompt, which takes memory of its own


class Shapes(NamedTuple):
    """Numbers of prompt tokens, and of requests at a time."""

    prompts: Sequence[int]
    batches: Sequence[int]


def warm_up(
    llm: LLM, progress: Callable[[str], None] = lambda _: None, shapes: Shapes | None = None
) -> None:
    """Runs requests of all kinds, and forgets them: of statistics and caches nothing is left.

    Call it before the first request. On a CPU nothing is compiled, so one request is run.

    Raises:
        RequestError: a request failed. What a step raises is raised, too.
    """
    executor = llm.executor
    with llm.lock:
        run = _Run(executor)
        kinds = kinds_of(llm)
        if shapes is None:
            shapes = shapes_of(executor, run.room)
            kinds = kinds if executor.device.type != "cpu" else kinds[:1]
        if executor.graphs is not None:
            executor.graphs.may_stand_in = False  # until `forget_requests`: capture them all
        # Random prompts would make every drafter look dead.
        executor.statistics.dead_drafter_watch = None
        try:
            for kind in kinds:
                progress(f"warming up: {kind.name} requests")
                _warm_up(run, kind, shapes)
        finally:
            executor.forget_requests()


def kinds_of(llm: LLM) -> list[Kind]:
    """Returns what is served and sampled otherwise: by other kernels, or in another graph."""
    grammar = GuidedDecodingParams(regex="[a-z ]*")
    kinds = [
        Kind("greedy", {"temperature": 0.0}, is_common=True),
        Kind("sampled", {"temperature": 1.0}, is_common=True),
        Kind("filtered", {"temperature": 1.0, "top_k": 40, "top_p": 0.9}, is_common=True),
        Kind("penalised", {"temperature": 1.0, "presence_penalty": 0.5}),
        Kind("logprobs", {"temperature": 1.0, "logprobs": 1}),
        Kind("prompt logprobs", {"temperature": 1.0, "prompt_logprobs": 1}, is_long=True),
        Kind("guided", {"guided_decoding": grammar}, may_fail=True),
    ]
    return [kind for kind in kinds if _is_served(llm.executor, kind)]


def _is_served(executor: PyExecutor, kind: Kind) -> bool:
    """Returns whether clients may ask for it. Grammars need a library, for example."""
    try:
        executor.check_params(SamplingParams(**kind.params))
    except RequestError:
        return False
    return True


def shapes_of(executor: PyExecutor, room: int) -> Shapes:
    """Returns the shapes that choose their own kernels or graphs.

    Args:
        room: tokens that a request needs beside its prompt.
    """
    config, graphs = executor.config, executor.graphs
    short = min(SHORT, config.max_num_tokens, max(1, config.max_seq_len - room))
    if executor.device.type == "cpu":
        return Shapes([short], [1])
    most = min(config.max_num_tokens, config.max_seq_len - room)
    captured = [] if graphs is None else [inputs.num_tokens for inputs in graphs.contexts]
    powers = [1 << n for n in range(4, 32)]
    longer = [n for n in powers if n > max(captured, default=0)]
    prompts = sorted({short, *(n for n in (*captured, *longer, most) if short <= n <= most)})
    sizes = {n for n in powers if n < config.max_batch_size} | {1, 2, 4, 8, config.max_batch_size}
    batches = sorted(n for n in sizes if n <= config.max_batch_size)
    return Shapes(prompts, batches if graphs is None else graphs.batch_sizes)


def _warm_up(run: _Run, kind: Kind, shapes: Shapes) -> None:
    few, most = shapes.prompts[0], shapes.prompts[-1]
    if not kind.is_common:
        for size in {shapes.batches[0], shapes.batches[-1]}:
            run.together(kind, [few] * size)
        if kind.is_long:
            run.together(kind, [most])
        return
    for size in reversed(shapes.batches):  # the largest first: smaller graphs fit into its memory
        run.together(kind, [few] * size)
    for length in reversed(shapes.prompts[1:]):
        run.together(kind, [length])
        if shapes.batches[-1] > 1:
            run.together(kind, [length], beside=[few])
    for size in shapes.batches:  # prompts beside others, which no graph holds if they are long
        if size > 1:
            run.together(kind, [most], beside=[few] * (size - 1))
    if shapes.batches[-1] > 1:
        _burst(run, kind, shapes)


def _burst(run: _Run, kind: Kind, shapes: Shapes) -> None:
    """Runs prompts of a full batch that come at once: together they may be too long for graphs.

    Triton compiles a kernel twice: for a number (of rows, of requests) that 16 divides, and for
    others.
    """
    few, size = shapes.prompts[0], shapes.batches[-1]
    length = max(few, shapes.prompts[-1] // size // 16 * 16)
    for fewer, more in itertools.product((0, 1), repeat=2):
        lengths = [length] * (size - fewer - 1) + [length + more]
        run.together(kind, lengths)
        half = size // 2 - fewer
        run.together(kind, lengths[-half:] or lengths, beside=[few] * half)


class _Run:
    """Runs requests for some steps, and cancels them: none ends by itself."""

    def __init__(self, executor: PyExecutor):
        self._executor, self._random = executor, random.Random(0)
        self._vocab = executor.target.config.vocab_size
        self._rows = executor.max_draft_len + 1  # of a generation
        self.room = (MOST_STEPS + 2) * self._rows

    def together(self, kind: Kind, lengths: Sequence[int], beside: Sequence[int] = ()) -> None:
        """Runs prompts of these lengths at once, beside others that generate already."""
        # Beside others there is less room in a step.
        room = self._executor.config.max_num_tokens - len(beside) * self._rows
        lengths = [min(length, room) for length in lengths if room > 0]
        requests: list[Request] = []
        try:
            for prompts in (beside, lengths):
                new = [self._add(kind, length) for length in prompts]
                requests += new
                for _ in range(MOST_STEPS // 2):
                    if all(r.num_steps >= STEPS or r.is_finished for r in new):
                        break
                    self._executor.step()
            failed = next((r for r in requests if r.error is not None), None)
            if failed is not None:
                message = f"A {kind.name} request failed in the warm-up: {failed.error}"
                if not kind.may_fail:
                    raise RequestError(f"{message} With --no-warm-up the server begins anyway.")
                logger.warning(message)
        finally:
            for request in requests:
                self._executor.cancel(request.request_id)
            self._executor.run_until_done()

    def _add(self, kind: Kind, length: int) -> Request:
        # No prompt may be found in the prefix cache.
        prompt = [self._random.randrange(self._vocab) for _ in range(length)]
        params = SamplingParams(max_tokens=self.room, ignore_eos=True, **kind.params)
        return self._executor.enqueue(prompt, params)
