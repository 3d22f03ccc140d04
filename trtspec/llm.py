"""`LLM`: text in, text out, in the manner of TensorRT-LLM's LLM API."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Never

from .api.embeds_prompt import EmbedsPrompt
from .api.outputs import EngineStats, RequestOutput
from .api.sampling_params import SamplingParams
from .checkpoints.tokenizer import load_tokenizer
from .checkpoints.zoo import resolve_model
from .config import EngineConfig, takes_fields_of
from .errors import RequestError, shown
from .executor.admission import check_salt
from .executor.build import build_executor
from .executor.request import Request
from .frontend.heap import HeapAside
from .frontend.inputs import Inputs, Messages, Prompt, checked_id, plain
from .frontend.outputs import Acceptance, OutputReader, RequestTexts, join
from .metadata.mode import SpeculativeDecodingMode
from .other_names import NamesAttributes, names_arguments

CacheSalt = str | Sequence[str | None] | None


class LLM(NamesAttributes):
    """A model with an optional drafter, ready to generate.

    Any number of threads may call it: a lock is held for each step, and while an output is built.
    As a context manager it shuts down at the end.

    Args: those of `EngineConfig` (`trtspec/config/engine.py`), by the same names.

    Raises:
        ConfigError, CheckpointError: the message says what was passed, what is allowed and what to
            do.
    """

    OTHER_ATTRIBUTES: ClassVar[Mapping[str, str]] = {
        "flush_cache": "reset_prefix_cache()",
        "generate_async": "AsyncLLM, or generate_stream()",
        "get_metrics": "stats()",
        "get_stats": "stats()",
        "get_tokenizer": "tokenizer",
        "llm_engine": "executor",
    }

    @takes_fields_of(EngineConfig)
    def __init__(self, engine: EngineConfig):
        self.model_dir = resolve_model(engine.model)
        """HF-format directory in use; `AutoModelForCausalLM.from_pretrained` loads it."""
        self.executor = build_executor(replace(engine, model=self.model_dir))
        self.inputs = Inputs(self.model_dir, load_tokenizer(self.model_dir))
        self._texts = RequestTexts(self.tokenizer)
        self.executor.set_tokenizer(self.tokenizer)
        self.executor.stop_string_check = self._texts.hit_stop_string
        self.acceptance_of_drafts = Acceptance.of(self.executor)
        self.device = self.executor.device
        self.dtype = self.executor.target.norm.weight.dtype
        self.lock = threading.RLock()

    def shutdown(self) -> None:
        """Cancels all requests and frees the memory at once, the GPU's too.

        Outputs can be read afterwards. New requests raise RequestError. A second call does nothing,
        but for hidden states that the first one could not write.
        """
        with self.lock:
            self.executor.shutdown()

    def __enter__(self) -> LLM:
        _ = self.executor.admission  # raises where the engine is shut down
        return self

    def __reduce__(self) -> Never:
        raise TypeError("An LLM holds a device's memory and threads: make another, not a copy.")

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None. Another may be set while no request runs."""
        return self.inputs.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self.inputs.tokenizer = self._texts.tokenizer = tokenizer
        self.executor.set_tokenizer(tokenizer)

    @property
    def mode(self) -> SpeculativeDecodingMode:
        """Where drafts come from; NONE without speculation."""
        return self.executor.mode

    @property
    def max_draft_len(self) -> int:
        """K, draft tokens per request and step; 0 without speculation."""
        return self.executor.max_draft_len

    @property
    def chooses_draft_len(self) -> bool:
        """Whether K is the most, and what a step drafts or verifies is chosen while serving."""
        config = self.executor.worker.config
        if config is None:
            return False
        is_forced = self.executor.forced_acceptance is not None
        shares_out = config.max_verified_drafts == "auto" and not is_forced
        return config.draft_len_schedule == "auto" or shares_out

    @property
    def acceptance(self) -> str | None:
        """The acceptance rule for drafts of sampled requests; None without speculation."""
        config = self.executor.worker.config
        return None if config is None else config.acceptance

    # -- generating ----------------------------------------------------------------------------
    @names_arguments
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: CacheSalt = None,
    ) -> Any:
        """Completes prompts of text or token ids.

        Args:
            prompts: one prompt (text, a list of ids, either as {"prompt": …} or
                {"prompt_token_ids": …}, or an `EmbedsPrompt`) or a list of prompts.
            sampling_params: for all prompts, or one per prompt.
            cache_salt: text, for all prompts or one per prompt: only requests of the same salt
                share the prefix cache.

        Returns:
            A `RequestOutput` for one prompt, a list of them (in order) for a list. A request
            that failed while running has finish_reason "error" and the reason in `.error`.

        Raises:
            RequestError: a prompt or parameter is not allowed; then nothing was started.
        """
        if isinstance(prompts, Mapping):
            return self._run([prompts], sampling_params, cache_salt)[0]
        prompts = plain(prompts)
        if isinstance(prompts, str | EmbedsPrompt) or _is_token_list(prompts):
            return self._run([prompts], sampling_params, cache_salt)[0]  # type: ignore[list-item]
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
            raise RequestError(
                f"prompts={shown(prompts)}: give text, token ids, or a list of prompts."
            )
        return self._run(list(prompts), sampling_params, cache_salt)  # type: ignore[arg-type]

    @names_arguments
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: CacheSalt = None,
    ) -> Any:
        """`generate` on conversations: `[{"role": "user", "content": "…"}]`, or a list of such."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError(
                f"messages={messages!r}: give a list like [{{'role': 'user', 'content': '…'}}]."
            )
        is_one = isinstance(messages[0], dict)
        conversations = [messages] if is_one else list(messages)
        prompts = [self.apply_chat_template(m) for m in conversations]  # type: ignore[arg-type]
        outputs = self._run(prompts, sampling_params, cache_salt)  # type: ignore[arg-type]
        return outputs[0] if is_one else outputs

    @names_arguments
    def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Returns an iterator of snapshots, one after each step with new tokens, the last finished.

        Several streams may be open; advancing one advances the others. Closing or dropping the
        iterator early cancels its request. The request is checked and queued at once, not at
        the first `next()`.
        """
        if isinstance(prompt, list | tuple) and prompt and all(isinstance(p, str) for p in prompt):
            raise RequestError(
                f"generate_stream takes one prompt, not a list of {len(prompt)}: give the text "
                "itself, and open a stream for each."
            )
        (params,) = _params_per_prompt(sampling_params, 1)
        text, ids = self.inputs.tokenize(prompt)
        params = self.inputs.with_token_ids(params)
        with self.lock:
            request = self.executor.enqueue(ids, params, cache_salt=cache_salt)
            return RequestStream(self, request, text)

    def abort(self, request_id: int) -> bool:
        """Cancels a running request (finish_reason "cancelled"); False if there is none.

        From another thread it takes effect at the next step.

        Raises:
            RequestError: the id is not an int.
        """
        request_id = checked_id(request_id)
        if self.lock.acquire(blocking=False):
            try:
                return self.executor.cancel(request_id, report=False)
            finally:
                self.lock.release()
        running = self.executor.is_running(request_id)
        if running:
            self.executor.cancel_at_next_step(request_id, report=False)
        return running

    # -- tokens and text -----------------------------------------------------------------------
    def apply_chat_template(self, messages: Messages) -> list[int]:
        """Returns the token ids of a conversation, up to where the assistant answers.

        Raises:
            RequestError: the messages do not fit the template, or the model has none.
        """
        return self.inputs.encode_rendered(self.inputs.render_chat(messages))

    def stats(self) -> EngineStats:
        """Returns totals since the engine started or `reset_stats`."""
        with self.lock:
            return self.executor.stats()

    def reset_stats(self) -> None:
        """Begins the totals of `stats` anew."""
        with self.lock:
            self.executor.reset_stats()

    def reset_prefix_cache(self) -> None:
        """Forgets the keys and values of earlier prompts, as after a change of the weights."""
        with self.lock:
            self.executor.reset_prefix_cache()

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        cache_salt: CacheSalt,
    ) -> list[RequestOutput]:
        params = _params_per_prompt(sampling_params, len(prompts))
        salts = _salt_per_prompt(cache_salt, len(prompts))
        tokenized = []
        for number, prompt in enumerate(prompts):
            with _saying_which(number, len(prompts)):
                tokenized.append(self.inputs.tokenize(prompt))
        groups: list[list[Request]] = []
        requests: list[Request] = []
        aside = HeapAside()
        try:
            with self.lock:
                for number, ((_, ids), p) in enumerate(zip(tokenized, params, strict=True)):
                    with _saying_which(number, len(prompts)):  # before any is queued
                        self.executor.check_prompt(ids, p.max_tokens)
                        self.executor.check_params(self.inputs.with_token_ids(p.each()[0]))
                make = self.executor.make_request
                for (_, ids), p, salt in zip(tokenized, params, salts, strict=True):
                    each = [self.inputs.with_token_ids(one) for one in p.each()]
                    groups.append([make(ids, p, cache_salt=salt) for p in each])
                requests += [request for group in groups for request in group]
                for request in requests:
                    self.executor.add(request)
            aside.begin()
            left = list(requests)
            while left:
                if left[-1].is_finished:
                    left.pop()
                else:
                    self.advance()
        finally:  # an interrupt must not leave half a batch queued or running
            aside.end()
            with self.lock:
                for request in requests:
                    self.executor.cancel(request.request_id, report=False)
        outputs = []
        for group, (text, _) in zip(groups, tokenized, strict=True):
            completions = [self._final(request, text) for request in group]
            outputs.append(join(completions, group, self.acceptance_of_drafts))
        return outputs

    def _final(self, request: Request, prompt: str | None) -> RequestOutput:
        reader = OutputReader(request, prompt, self.tokenizer)
        piece = reader.take(len(request.output_token_ids), is_finished=True)
        return reader.snapshot(piece, self.acceptance_of_drafts)

    def advance(self) -> None:
        """Runs one step of the executor. The lock is held for a step, not for a generation."""
        with self.lock:
            self.executor.step()


class RequestStream(Iterator[RequestOutput]):
    """Snapshots of one request while it runs. Made by `LLM.generate_stream`."""

    def __init__(self, llm: LLM, request: Request, prompt: str | None):
        self._llm, self._request = llm, request
        self._reader, self._is_done = OutputReader(request, prompt, llm.tokenizer), False

    @property
    def request_id(self) -> int:
        return self._request.request_id

    def __next__(self) -> RequestOutput:
        request, reader = self._request, self._reader
        while True:
            with self._llm.lock:  # another thread may read this stream too
                if self._is_done:
                    raise StopIteration
                count, self._is_done = len(request.output_token_ids), request.is_finished
                if self._is_done or count > reader.num_seen:
                    piece = reader.take(count, is_finished=self._is_done)
                    return reader.snapshot(piece, self._llm.acceptance_of_drafts)
            self._llm.advance()

    def close(self) -> None:
        """Cancels the request unless it has finished."""
        self._is_done = True
        self._llm.abort(self._request.request_id)

    def __del__(self) -> None:
        # The collector may run inside a step, so the request is only marked.
        request = getattr(self, "_request", None)
        if request is not None and not request.is_finished:
            self._llm.executor.cancel_at_next_step(request.request_id, report=False)


@contextmanager
def _saying_which(number: int, count: int) -> Iterator[None]:
    """Adds the prompt's number, from 1 on, to a RequestError, if there are several prompts."""
    try:
        yield
    except RequestError as error:
        which = f"prompt {number + 1} of {count}: " if count > 1 else ""
        raise RequestError(f"{which}{error}") from None


def _is_token_list(prompts: object) -> bool:
    if not isinstance(prompts, Sequence) or not prompts:
        return False
    try:
        operator.index(prompts[0])
    except TypeError:
        return False
    return True


def _params_per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    params = list(sampling_params) if isinstance(sampling_params, list | tuple) else []
    are_right = all(isinstance(p, SamplingParams) for p in params)
    if len(params) != count or not are_right:
        is_list = are_right and bool(params)
        given = f"{len(params)} SamplingParams" if is_list else shown(sampling_params)
        raise RequestError(
            f"sampling_params: {given} for {count} prompt(s). Give one SamplingParams for all, or "
            "a list with one for each."
        )
    return params


def _salt_per_prompt(cache_salt: CacheSalt, count: int) -> list[str | None]:
    if cache_salt is None or isinstance(cache_salt, str):
        salts: list[str | None] = [cache_salt] * count
    else:
        salts = list(cache_salt) if isinstance(cache_salt, list | tuple) else []
    if len(salts) != count:
        raise RequestError(
            f"cache_salt={shown(cache_salt)} for {count} prompt(s): give one text for all, or a "
            "list with one for each."
        )
    for salt in salts:
        check_salt(salt)
    return salts
