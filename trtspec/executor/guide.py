"""The host's part of steps with grammars: it follows their outputs and writes their masks.

    launch n:  target ─► [VerifyPoint: read step n-1, write masks] ─► accept
                      ─► [DraftPoint: what was accepted, write masks] ─► draft

While the target of step n runs, the host reads step n-1: what was accepted, and the drafts that
step n verifies. Only then are the masks of step n known. So a request's grammar may be ahead of its
output, by a step in flight.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..api.sampling_params import SamplingParams
from ..errors import ConfigError, RequestError
from ..guided.compiler import Compilation, GrammarCompiler
from ..guided.grammar import OPEN
from ..metadata.guided import DraftPoint, Point, VerifyPoint
from ..models.config import DecoderConfig
from .admission import end_ids
from .guided_masks import GuidedMasks
from .request import Request, ScheduledBatch

if TYPE_CHECKING:
    from .results import RequestResult

logger = logging.getLogger(__name__)
COMPILE_SECONDS = 60.0
"""A grammar that takes longer ends its request with an error."""
POLL_SECONDS = 0.05
MASK_SECONDS = 1.0
"""A grammar that takes longer for a step's masks ends its request with an error: others wait."""


class Tokens(NamedTuple):
    """What a step read back of its requests, on the host."""

    tokens: list[list[int]]  # [B, K+1], -1 past the length
    lens: list[int]
    drafts: list[list[int]]  # [B, K] for the next step


class Guide:
    """Compiles grammars of requests.

    Args:
        model: says how large the vocabulary is, and which tokens end an output.
        skips_wrong_tokens: of forced acceptance, whose output follows no grammar.
    """

    def __init__(self, model: DecoderConfig, skips_wrong_tokens: bool):
        self.model, self.skips_wrong_tokens = model, skips_wrong_tokens
        self.compiling: dict[int, tuple[Request, Compilation]] = {}
        self._tokenizer: Any = None
        self._compiler: GrammarCompiler | None = None

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Sets what grammars are compiled for: a tokenizer of transformers, or None."""
        self._tokenizer, self._compiler = tokenizer, None

    @property
    def compiler(self) -> GrammarCompiler:
        """Raises RequestError without a tokenizer, ConfigError without XGrammar."""
        if self._tokenizer is None:
            raise RequestError(
                "SamplingParams.guided_decoding needs the model's tokenizer: use LLM with a model "
                "directory that has one, or executor.set_tokenizer(tokenizer)."
            )
        if self._compiler is None:
            self._compiler = GrammarCompiler(
                self._tokenizer, self.model.vocab_size, self.model.eos_token_ids
            )
        return self._compiler

    def check(self, params: SamplingParams) -> None:
        """Raises RequestError where no grammar can be served."""
        if params.guided_decoding is not None:
            try:
                self.compiler.marker(params.guided_decoding)
            except ConfigError as error:
                raise RequestError(str(error)) from error

    def start(self, request: Request) -> None:
        """Starts to compile a request's grammar."""
        params = request.sampling_params
        assert params.guided_decoding is not None
        ends = self.compiler.ends_of(end_ids(params, self.model))
        compilation = self.compiler.compile(
            params.guided_decoding, sorted(ends), request.prompt_token_ids
        )
        self.compiling[request.request_id] = request, compilation

    def compiled(self, waits: bool) -> Iterable[tuple[Request, str | None]]:
        """Yields requests whose grammar is compiled, and why it failed if it did.

        Args:
            waits: there is nothing else to do.
        """
        for request_id, (request, compilation) in list(self.compiling.items()):
            if request.is_finished:  # cancelled meanwhile
                compilation.future.cancel()
                del self.compiling[request_id]
        if waits and self.compiling:
            futures = [compilation.future for _, compilation in self.compiling.values()]
            wait(futures, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        for request_id, (request, compilation) in list(self.compiling.items()):
            error, future = None, compilation.future
            if not future.done():
                if compilation.seconds < COMPILE_SECONDS:
                    continue
                compilation.give_up()
                error = f"its grammar took more than {COMPILE_SECONDS:.0f} s to compile"
            elif (raised := future.exception()) is not None:
                error = str(raised)
            else:
                request.grammar = future.result()
                request.grammar.skips_wrong_tokens = self.skips_wrong_tokens
            yield request, error
            self.compiling.pop(request_id, None)

    def close(self) -> None:
        """Forgets tokenizer and grammars."""
        self.set_tokenizer(None)
        self.compiling.clear()


@dataclass(eq=False)
class GuidedBatch:
    """The host's part of one step.

    Args:
        read_before: reads the steps launched before this one, if they are not read yet.
        waiting: the context in which the host waits for the device.
    """

    batch: ScheduledBatch
    num_drafts: int  # K'
    masks: GuidedMasks
    read_before: Callable[[], None]
    waiting: Callable[[], AbstractContextManager[None]]
    is_complete: dict[int, bool] = field(default_factory=dict)
    """By request id: whether the grammar ended with this step's tokens."""
    error: dict[int, str] = field(default_factory=dict)
    """By request id: why its grammar failed in this step."""
    num_taken: dict[int, int] = field(default_factory=dict)
    """By request id: this step's tokens up to the grammar's end."""
    is_read: bool = False
    _is_followed: bool = False

    def __post_init__(self) -> None:
        # Rows of contexts whose next token this step chooses, not the prompt.
        self.chooses = [chunk.next_prompt_token < 0 for chunk in self.batch.contexts]
        self.chooses += [True] * len(self.batch.generations)

    def reach(self, point: Point) -> None:
        """Does the host's part at a point of the step."""
        if isinstance(point, VerifyPoint):
            self.read_before()
            self._write_verify_masks()
        else:
            self._write_draft_masks(point)

    def read(self, read_back: Tokens) -> None:
        """Follows what the step accepted, and keeps the drafts of the next one."""
        self.is_read = True
        self._follow(read_back.tokens, read_back.lens)
        for request, drafts in zip(self.batch.requests, read_back.drafts, strict=True):
            request.next_drafts = drafts

    def cut(self, result: RequestResult) -> RequestResult:
        """Returns a result without tokens after the grammar's end."""
        count = self.num_taken.get(result.request.request_id, len(result.tokens))
        if count >= len(result.tokens):
            return result
        logprobs = None if result.logprobs is None else result.logprobs[:count]
        return result._replace(tokens=result.tokens[:count], logprobs=logprobs)

    def _follow(self, tokens: Sequence[Sequence[int]], lens: Sequence[int]) -> None:
        if self._is_followed:
            return
        self._is_followed = True
        for row, request in enumerate(self.batch.requests):
            grammar = request.grammar
            if grammar is None or not self.chooses[row]:
                continue
            with self._blaming(request):
                self.num_taken[request.request_id] = grammar.follow(tokens[row][: lens[row]])
            self.is_complete[request.request_id] = grammar.is_complete
            if grammar.is_broken:
                new = list(tokens[row][: lens[row]])
                reason = f"its grammar does not allow one of the tokens {new}"
                self.error.setdefault(request.request_id, reason)

    def _write_verify_masks(self) -> None:
        with self.waiting():
            masks = self.masks.verify.to_write()
        row = 0
        for number, request in enumerate(self.batch.requests):
            is_context = number < len(self.batch.contexts)
            drafts = [] if is_context else request.next_drafts[: self.num_drafts]
            end = row + 1 + (0 if is_context else self.num_drafts)
            masks[row:end] = OPEN
            if request.grammar is not None and self.chooses[number]:
                with self._blaming(request):
                    request.grammar.fill(masks[:end], row, drafts)
            row = end
        self.masks.verify.send(row)

    def _write_draft_masks(self, point: DraftPoint) -> None:
        with self.waiting():
            tokens, lens = _read_back(point)
            masks = self.masks.draft.to_write()
        requests = self.batch.requests
        if lens is not None:
            self._follow(tokens, lens)
            for request in requests:  # of prompts read in parts nothing is followed
                if request.grammar is not None:
                    request.grammar.come_back()
        else:
            for request, draft in zip(requests, tokens, strict=False):  # a graph may have more rows
                if request.grammar is not None:
                    with self._blaming(request):
                        request.grammar.go_ahead(draft)
        for row, request in enumerate(requests):
            grammar = request.grammar
            if grammar is None or grammar.is_broken or grammar.is_complete:
                masks[row] = OPEN
                continue
            with self._blaming(request):
                grammar.fill_row(masks, row)
        self.masks.draft.send(len(requests))

    def _blaming(self, request: Request) -> AbstractContextManager[None]:
        return _Blame(self, request)


class _Blame(AbstractContextManager[None]):
    """Ends one request where its grammar raises, or takes too long; the others go on."""

    def __init__(self, batch: GuidedBatch, request: Request):
        self.batch, self.request = batch, request
        self.started = time.monotonic()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        seconds = time.monotonic() - self.started
        if isinstance(error, Exception):
            logger.exception("The grammar of request %d raised.", self.request.request_id)
            reason = f"its grammar raised {type(error).__name__}: {error}"
        elif error is None and seconds > MASK_SECONDS:
            reason = (
                f"its grammar took {seconds:.1f} s for the masks of a step, while others wait: "
                "write it with fewer alternatives that begin alike"
            )
        else:
            return False
        assert self.request.grammar is not None
        self.request.grammar.is_broken = True
        self.batch.error[self.request.request_id] = reason
        return True


def _read_back(point: DraftPoint) -> tuple[Any, list[int] | None]:
    """Returns a point's tokens and lengths on the host, once they are there."""
    given = [point.tokens] if point.lens is None else [point.tokens, point.lens]
    values = [value.to("cpu", non_blocking=True) for value in given]
    if point.tokens.is_cuda:
        torch.cuda.current_stream(point.tokens.device).synchronize()
    return values[0].tolist(), None if point.lens is None else values[1].tolist()


def tokens_of(tokens: Tensor, lens: Tensor, drafts: Tensor) -> Tokens:
    """Returns what was read back, of tensors on the host."""
    return Tokens(tokens.tolist(), lens.tolist(), drafts.tolist())
