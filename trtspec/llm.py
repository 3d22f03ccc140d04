"""`LLM`: text in, text out, in the manner of TensorRT-LLM's LLM API."""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from .api.embeds_prompt import EmbedsPrompt
from .api.outputs import CompletionOutput, EngineStats, RequestOutput, acceptance_stats
from .api.sampling_params import SamplingParams
from .api.text_stream import TextStream
from .checkpoints.tokenizer import load_tokenizer
from .checkpoints.zoo import resolve_model
from .config import EngineConfig, takes_fields_of
from .errors import RequestError, shown
from .executor.admission import check_salt
from .executor.build import build_executor
from .executor.request import Request
from .metadata.logits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from .metadata.mode import SpeculativeDecodingMode

Prompt = str | Sequence[int] | EmbedsPrompt
Messages = Sequence[dict[str, Any]]
CacheSalt = str | Sequence[str | None] | None


class LLM:
    """A model with an optional drafter, ready to generate.

    Any number of threads may call it: a lock is held for each step, and while an output is built.
    As a context manager it shuts down at the end.

    Args: those of `EngineConfig` (`trtspec/config/engine.py`), by the same names.

    Raises:
        ConfigError, CheckpointError: the message says what was passed, what is allowed and what to
            do.
    """

    @takes_fields_of(EngineConfig)
    def __init__(self, engine: EngineConfig):
        self.model_dir = resolve_model(engine.model)
        """HF-format directory in use; `AutoModelForCausalLM.from_pretrained` loads it."""
        self.executor = build_executor(replace(engine, model=self.model_dir))
        self._texts = RequestTexts(load_tokenizer(self.model_dir))
        self.executor.set_tokenizer(self.tokenizer)
        self.executor.stop_check = self._texts.hit_stop_string
        self.device = self.executor.device
        self.dtype = self.executor.kv_cache.groups[0].k_cache.dtype
        self._lock = threading.RLock()

    def shutdown(self) -> None:
        """Cancels all requests and frees the memory at once, the GPU's too.

        Outputs can be read afterwards. New requests raise RequestError. A second call does nothing.
        """
        with self._lock:
            self.executor.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None. Another may be set while no request runs."""
        return self._texts.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._texts.tokenizer = tokenizer
        self.executor.set_tokenizer(tokenizer)

    @property
    def mode(self) -> SpeculativeDecodingMode:
        return self.executor.mode

    @property
    def max_draft_len(self) -> int:
        return self.executor.max_draft_len

    @property
    def acceptance(self) -> str | None:
        """The acceptance rule for drafts of sampled requests; None without speculation."""
        config = self.executor.worker.config
        return None if config is None else config.acceptance

    # -- generating ----------------------------------------------------------------------------
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: CacheSalt = None,
    ) -> Any:
        """Completes prompts of text or token ids.

        Args:
            prompts: one prompt (text, a list of ids or an `EmbedsPrompt`) or a list of prompts.
            sampling_params: for all prompts, or one per prompt.
            cache_salt: text, for all prompts or one per prompt: only requests of the same salt
                share the prefix cache.

        Returns:
            A `RequestOutput` for one prompt, a list of them (in order) for a list. A request
            that failed while running has finish_reason "error" and the reason in `.error`.

        Raises:
            RequestError: a prompt or parameter is not allowed; then nothing was started.
        """
        prompts = _plain(prompts)
        if isinstance(prompts, str | EmbedsPrompt) or _is_token_list(prompts):
            return self._run([prompts], sampling_params, cache_salt)[0]  # type: ignore[list-item]
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
            raise RequestError(f"prompts={prompts!r}: give text, token ids, or a list of prompts.")
        return self._run(list(prompts), sampling_params, cache_salt)  # type: ignore[arg-type]

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
        (params,) = _params_per_prompt(sampling_params, 1)
        text, ids = self._tokenize(_plain(prompt))
        with self._lock:
            return RequestStream(self, self._enqueue(ids, params, cache_salt), text)

    def abort(self, request_id: int) -> bool:
        """Cancels a running request (finish_reason "cancelled"); False if there is none.

        From another thread it takes effect at the next step.

        Raises:
            RequestError: the id is not an int.
        """
        try:
            request_id = operator.index(request_id)
        except TypeError:
            raise RequestError(
                f"request_id={shown(request_id)}: give an int, as a RequestOutput has it."
            ) from None
        if self._lock.acquire(blocking=False):
            try:
                return self.executor.cancel(request_id, report=False)
            finally:
                self._lock.release()
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
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise RequestError(f"{self.model_dir.name} has no chat template: use generate().")
        if not isinstance(messages, list | tuple) or not all(isinstance(m, dict) for m in messages):
            raise RequestError(
                f"messages={messages!r}: give a list like [{{'role': 'user', 'content': '…'}}]."
            )
        conversation = [_with_plain_text(message) for message in messages]
        try:
            return self.tokenizer.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template is code and may raise anything
            raise RequestError(
                f"The chat template cannot render {shown(messages)} ({type(error).__name__}: "
                f"{error}). Give a list of {{'role': …, 'content': …}}."
            ) from error

    def stats(self) -> EngineStats:
        with self._lock:
            return self.executor.stats()

    def reset_stats(self) -> None:
        with self._lock:
            self.executor.reset_stats()

    def reset_prefix_cache(self) -> None:
        """Forgets the keys and values of earlier prompts, as after a change of the weights."""
        with self._lock:
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
                tokenized.append(self._tokenize(_plain(prompt)))
        groups: list[list[Request]] = []
        with self._lock:
            for number, ((_, ids), p) in enumerate(zip(tokenized, params, strict=True)):
                with _saying_which(number, len(prompts)):  # before any is queued
                    self.executor.check_prompt(ids, p.max_tokens)
                    self.executor.check_params(self._with_token_ids(p.each()[0]))
            for (_, ids), p, salt in zip(tokenized, params, salts, strict=True):
                groups.append([self._enqueue(ids, one, salt) for one in p.each()])
        requests = [request for group in groups for request in group]
        try:
            while not all(request.is_finished for request in requests):
                self.advance()
        finally:  # an interrupt must not leave half a batch running
            with self._lock:
                for request in requests:
                    self.executor.cancel(request.request_id, report=False)
        texts = [text for text, _ in tokenized]
        return [
            self._join([self.snapshot(request, text) for request in group], group)
            for group, text in zip(groups, texts, strict=True)
        ]

    def _join(self, outputs: list[RequestOutput], requests: list[Request]) -> RequestOutput:
        """Joins the completions of one prompt to one output."""
        if len(outputs) == 1:
            return outputs[0]
        completions = [replace(o.outputs[0], index=i) for i, o in enumerate(outputs)]
        accepted: Counter[int] = sum((r.accepted_lens for r in requests), Counter())
        return replace(
            outputs[0],
            outputs=completions,
            error=next((output.error for output in outputs if output.error), None),
            spec_stats=acceptance_stats(
                accepted, self.max_draft_len, self.executor.forced_acceptance
            ),
        )

    def advance(self) -> None:
        """Runs one step of the executor. The lock is held for a step, not for a generation."""
        with self._lock:
            self.executor.step()

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int] | EmbedsPrompt]:
        if isinstance(prompt, EmbedsPrompt):
            return None, prompt
        if isinstance(prompt, bytes) or not isinstance(prompt, str | Sequence):
            raise RequestError(f"prompt={prompt!r}: give text or a list of token ids.")
        if not isinstance(prompt, str):
            return None, list(prompt)
        if self.tokenizer is None:
            raise RequestError(
                f"{self.model_dir} holds no tokenizer: give token ids instead of text."
            )
        if not prompt:
            raise RequestError("The prompt is empty: give at least one token.")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"The prompt is not valid Unicode text: {error}.") from None
        return prompt, self.tokenizer.encode(prompt, verbose=False)  # length is checked later

    def _with_token_ids(self, params: SamplingParams) -> SamplingParams:
        """Returns the same parameters with `bad_words` as token ids.

        Raises:
            RequestError: `stop` or `bad_words` hold text and there is no tokenizer, or a bad word
                has too many tokens.
        """
        words = params.bad_words or ()
        has_text = any(isinstance(word, str) for word in words)
        if self.tokenizer is None and (params.stop_strings or has_text):
            name = "stop" if params.stop_strings else "bad_words"
            raise RequestError(
                f"{name}={getattr(params, name)!r} needs a tokenizer; {self.model_dir} has none."
            )
        if not has_text or self.tokenizer is None:
            return params
        ids: list[Sequence[int]] = []
        for word in words:
            bare = word.removeprefix(" ") if isinstance(word, str) else ""
            forms = (bare, f" {bare}") if bare.strip() else (word,)
            for form in forms:
                tokens: Sequence[int] = form  # type: ignore[assignment]
                if isinstance(form, str):
                    tokens = self.tokenizer.encode(form, add_special_tokens=False)
                if not 0 < len(tokens) <= MAX_BAD_WORD_TOKENS:
                    raise RequestError(
                        f"SamplingParams.bad_words has {form!r}, which is {len(tokens)} tokens: "
                        f"a word may have 1 … {MAX_BAD_WORD_TOKENS}."
                    )
                ids.append(tokens)
        if len(ids) > MAX_BAD_WORDS:
            raise RequestError(
                f"SamplingParams.bad_words: {len(words)} words, {len(ids)} with and without space "
                f"before the texts among them; at most {MAX_BAD_WORDS} are possible."
            )
        return replace(params, bad_words=ids)

    def _enqueue(
        self, ids: list[int] | EmbedsPrompt, params: SamplingParams, cache_salt: str | None
    ) -> Request:
        return self.executor.enqueue(ids, self._with_token_ids(params), cache_salt=cache_salt)

    def snapshot(
        self, request: Request, prompt: str | None, seen_tokens: int = 0, seen_text: int = 0
    ) -> RequestOutput:
        """Returns a request's output so far. The `_diff` fields start after what was seen."""
        with self._lock:  # tokens, text and finish_reason belong to one step
            return self._snapshot(request, prompt, seen_tokens, seen_text)

    def _snapshot(
        self, request: Request, prompt: str | None, seen_tokens: int, seen_text: int
    ) -> RequestOutput:
        stream = self._texts.text_of(request)
        stream.extend(request.output_token_ids)
        full = stream.final() if request.is_finished else stream.safe_text()
        completion = CompletionOutput(
            token_ids=list(request.output_token_ids),
            text=full,
            finish_reason=request.finish_reason,
            token_ids_diff=request.output_token_ids[seen_tokens:],
            text_diff=full[seen_text:],
            logprobs=None if request.logprobs is None else list(request.logprobs),
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[completion],
            spec_stats=acceptance_stats(
                request.accepted_lens, self.max_draft_len, self.executor.forced_acceptance
            ),
            finished=request.is_finished,
            error=request.error,
            cached_tokens=request.cached_tokens or 0,
        )


class RequestTexts:
    """The text of each request's tokens, and stop strings in it.

    The executor calls it for stop strings. It holds no engine, so that there is no reference cycle.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def text_of(self, request: Request) -> TextStream:
        if request.text is None:
            request.text = TextStream(self.tokenizer, request.sampling_params.stop_strings)
        return request.text

    def hit_stop_string(self, request: Request) -> bool:
        """A `StopCheck`."""
        if not request.sampling_params.stop_strings:
            return False
        return self.text_of(request).extend(request.output_token_ids)


class RequestStream(Iterator[RequestOutput]):
    """Snapshots of one request while it runs. Made by `LLM.generate_stream`."""

    def __init__(self, llm: LLM, request: Request, prompt: str | None):
        self._llm, self._request, self._prompt = llm, request, prompt
        self._seen_tokens, self._seen_text, self._is_done = 0, 0, False

    @property
    def request_id(self) -> int:
        return self._request.request_id

    def __next__(self) -> RequestOutput:
        request = self._request
        while True:
            with self._llm._lock:  # another thread may read this stream too
                if self._is_done:
                    raise StopIteration
                if request.is_finished or len(request.output_token_ids) > self._seen_tokens:
                    return self._next_snapshot()
            self._llm.advance()

    def _next_snapshot(self) -> RequestOutput:
        output = self._llm.snapshot(self._request, self._prompt, self._seen_tokens, self._seen_text)
        self._seen_tokens = len(output.outputs[0].token_ids)
        self._seen_text += len(output.outputs[0].text_diff)
        self._is_done = output.finished
        return output

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
    """Adds the prompt's number to a RequestError, if there are several prompts."""
    try:
        yield
    except RequestError as error:
        which = f"prompt {number} of {count}: " if count > 1 else ""
        raise RequestError(f"{which}{error}") from None


def _with_plain_text(message: dict[str, Any]) -> dict[str, Any]:
    """Joins a message's parts of text (OpenAI's form) to one text."""
    parts = message.get("content")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return message
    other = [part.get("type") for part in parts if part.get("type") != "text"]
    if other:
        raise RequestError(
            f"The content has a part of type {other[0]!r}: a chat takes text. Of an image give "
            "generate() what the model's encoder makes, as an EmbedsPrompt."
        )
    return {**message, "content": "".join(str(part.get("text", "")) for part in parts)}


def _plain(prompt: Any) -> Any:
    """Converts numpy arrays and tensors to lists."""
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt


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
    if len(params) != count or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(
            f"sampling_params={sampling_params!r} for {count} prompt(s): give one SamplingParams "
            "for all, or a list with one for each."
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
