"""`LLM`: text in, text out, in the manner of TensorRT-LLM's LLM API."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .config import DecodingBaseConfig, KvCacheConfig
from .errors import ConfigError, RequestError
from .executor.build import build_executor
from .executor.request import Request
from .metadata.mode import SpeculativeDecodingMode
from .models.tokenizer import load_tokenizer
from .models.zoo import resolve_model
from .outputs import CompletionOutput, EngineStats, RequestOutput, acceptance_stats
from .sampling.params import SamplingParams
from .text import TextStream

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]


class LLM:
    """A model with an optional drafter, ready to generate.

    Args:
        model: HF directory, .gguf file or a known name ("smollm2-135m").
        speculative_config: a decoding config, or None for plain decoding.
        device: "auto" (CUDA where there is one), "cpu" or "cuda".
        dtype: "auto" (the checkpoint's), "float32", "bfloat16", on CUDA also "float16".
        max_batch_size: requests that run at the same time.
        max_num_tokens: token rows in one pass; default: one full sequence, or a full batch.
        max_seq_len: prompt and output together; default: the model's, at most 8192.
        kv_cache_config: size of the KV cache.
        enable_chunked_prefill: prompts may be computed in pieces, beside generation.
        disable_overlap_scheduler: None overlaps the host's work with the device's on CUDA and not
            on CPU, where there is nothing to overlap; True and False decide.

    Raises:
        ConfigError, CheckpointError: with what was given, what is allowed and what to do.
        NotImplementedError: the mode has no worker in this release.
    """

    def __init__(
        self,
        model: str | Path,
        speculative_config: DecodingBaseConfig | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        *,
        max_batch_size: int = 16,
        max_num_tokens: int | None = None,
        max_seq_len: int | None = None,
        kv_cache_config: KvCacheConfig | None = None,
        enable_chunked_prefill: bool = False,
        disable_overlap_scheduler: bool | None = None,
    ):
        self.model_dir = resolve_model(model)
        """HF-format directory in use; `AutoModelForCausalLM.from_pretrained` loads it."""
        self.tokenizer = load_tokenizer(self.model_dir)
        self.executor = build_executor(
            self.model_dir,
            speculative_config,
            device=device,
            dtype=dtype,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            kv_cache_config=kv_cache_config,
            enable_chunked_prefill=enable_chunked_prefill,
            disable_overlap_scheduler=disable_overlap_scheduler,
        )
        self.executor.stop_check = self._hit_stop_string
        self.device = self.executor.device
        self.dtype = self.executor.kv_cache.groups[0].k_cache.dtype
        self._lock = threading.RLock()
        self._streams: dict[int, TextStream] = {}

    @property
    def mode(self) -> SpeculativeDecodingMode:
        return self.executor.mode

    @property
    def max_draft_len(self) -> int:
        return self.executor.max_draft_len

    # -- generating ----------------------------------------------------------------------------
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Any:
        """Completes text, or token ids as they are.

        Args:
            prompts: one prompt (text or a list of ids) or a list of prompts.
            sampling_params: for all prompts, or one per prompt.

        Returns:
            A `RequestOutput` for one prompt, a list of them (in order) for a list. A request
            that failed while running has finish_reason "error" and says why in `.error`.

        Raises:
            RequestError: a prompt or parameter is not allowed; then nothing was started.
        """
        if isinstance(prompts, str) or _is_token_list(prompts):
            return self._run([prompts], sampling_params)[0]  # type: ignore[list-item]
        return self._run(list(prompts), sampling_params)  # type: ignore[arg-type]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Any:
        """`generate` on conversations: `[{"role": "user", "content": "…"}]`, or a list of such."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError(
                f"messages={messages!r}: give a list like [{{'role': 'user', 'content': '…'}}]."
            )
        if isinstance(messages[0], dict):
            return self._run([self.apply_chat_template(messages)], sampling_params)[0]  # type: ignore[arg-type]
        return self._run([self.apply_chat_template(m) for m in messages], sampling_params)  # type: ignore[arg-type]

    def generate_stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yields a snapshot after every step that brought tokens, the last one finished.

        Several streams may be open; advancing one advances the others. Closing the iterator
        early cancels its request. The request is checked and queued at once, not at `next()`.
        """
        text, ids = self._tokenize(prompt)
        with self._lock:
            request = self._enqueue(ids, sampling_params or SamplingParams())
        return self._stream(request, text)

    def _stream(self, request: Request, text: str | None) -> Iterator[RequestOutput]:
        seen_tokens, seen_text = 0, 0
        try:
            while True:
                with self._lock:
                    ready = request.is_finished or len(request.output_token_ids) > seen_tokens
                    if not ready:
                        self.executor.step()
                        continue
                    output = self._output(request, text, seen_tokens, seen_text)
                seen_tokens = len(output.outputs[0].token_ids)
                seen_text += len(output.outputs[0].text_diff)
                yield output
                if output.finished:
                    return
        finally:
            self.abort(request.request_id)
            self._streams.pop(request.request_id, None)

    def abort(self, request_id: int) -> bool:
        """Cancels a running request (finish_reason "cancelled"); False if there is none."""
        with self._lock:
            return self.executor.cancel(request_id)

    # -- tokens and text -----------------------------------------------------------------------
    def apply_chat_template(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, up to where the assistant answers.

        Raises:
            RequestError: the messages do not fit the template, or the model has none.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise RequestError(f"{self.model_dir.name} has no chat template: use generate().")
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise RequestError(
                f"The chat template cannot render {messages!r}: {error}. Give a list of "
                "{'role': …, 'content': …}."
            ) from error

    def stats(self) -> EngineStats:
        return self.executor.stats()

    def reset_stats(self) -> None:
        self.executor.reset_stats()

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        params = _params_per_prompt(sampling_params, len(prompts))
        tokenized = [self._tokenize(prompt) for prompt in prompts]
        with self._lock:
            for _, ids in tokenized:  # all or nothing: check before the first is queued
                self.executor.check_prompt(ids)
            requests = [
                self._enqueue(ids, p) for (_, ids), p in zip(tokenized, params, strict=True)
            ]
            try:
                while not all(request.is_finished for request in requests):
                    self.executor.step()
            finally:  # an interrupt must not leave half a batch running
                for request in requests:
                    self.executor.cancel(request.request_id)
            outputs = [
                self._output(request, text)
                for request, (text, _) in zip(requests, tokenized, strict=True)
            ]
            for request in requests:
                self._streams.pop(request.request_id, None)
        return outputs

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if not isinstance(prompt, str | Sequence):
            raise RequestError(f"prompt={prompt!r}: give text or a list of token ids.")
        if not isinstance(prompt, str):
            return None, list(prompt)
        if self.tokenizer is None:
            raise RequestError(
                f"{self.model_dir} holds no tokenizer: give token ids instead of text."
            )
        if not prompt:
            raise RequestError("The prompt is empty: give at least one token.")
        return prompt, self.tokenizer.encode(prompt)

    def _enqueue(self, ids: list[int], params: SamplingParams) -> Request:
        if params.stop_strings and self.tokenizer is None:
            raise RequestError(
                f"stop={params.stop!r} needs a tokenizer; {self.model_dir} has none."
            )
        request = self.executor.enqueue(ids, params)
        self._streams[request.request_id] = TextStream(self.tokenizer, params.stop_strings)
        return request

    def _hit_stop_string(self, request: Request) -> bool:
        stream = self._streams.get(request.request_id)
        if stream is None or not request.sampling_params.stop_strings:
            return False
        return stream.extend(request.output_token_ids)

    def _output(
        self, request: Request, text: str | None, seen_tokens: int = 0, seen_text: int = 0
    ) -> RequestOutput:
        stream = self._streams[request.request_id]
        stream.extend(request.output_token_ids)
        full = stream.final() if request.is_finished else stream.safe_text()
        completion = CompletionOutput(
            token_ids=list(request.output_token_ids),
            text=full,
            finish_reason=request.finish_reason,
            token_ids_diff=request.output_token_ids[seen_tokens:],
            text_diff=full[seen_text:],
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[completion],
            spec_stats=acceptance_stats(request.accepted_lens, self.max_draft_len),
            finished=request.is_finished,
            error=request.error,
        )


def _is_token_list(prompts: object) -> bool:
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)


def _params_per_prompt(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    params = list(given)
    if len(params) != count or not all(isinstance(p, SamplingParams) for p in params):
        raise ConfigError(
            f"sampling_params: {len(params)} given for {count} prompts; give one SamplingParams "
            "for all, or a list with one for each."
        )
    return params
