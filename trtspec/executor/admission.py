"""`Admission`: refuses what this engine cannot serve, and makes requests of what it can."""

from __future__ import annotations

import itertools
import operator
import secrets
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..api.embeds_prompt import EmbedsPrompt
from ..api.sampling_params import SamplingParams
from ..config import ExecutorConfig
from ..errors import RequestError, shown
from ..metadata.logits import MAX_ENDS
from ..metadata.mode import SpeculativeDecodingMode
from ..models.config import DecoderConfig
from ..models.decoder import Decoder
from .embeds import check_embeds, kept_embeds
from .logprobs import PromptLogprobs
from .request import Request


def end_ids(params: SamplingParams, model: DecoderConfig) -> frozenset[int]:
    """Returns the tokens that end a request's output."""
    return params.ends(model.eos_token_ids)


def held_back(params: SamplingParams, model: DecoderConfig) -> frozenset[int]:
    """Returns the tokens that `min_tokens` holds back: those that end an output, and as in vLLM the
    model's end tokens with `ignore_eos`, too."""
    return end_ids(params, model) | frozenset(model.eos_token_ids)


def check_salt(cache_salt: object) -> None:
    """Raises RequestError unless it is text or None."""
    if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
        raise RequestError(f"cache_salt={shown(cache_salt)}: give non-empty text, or None.")


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What an engine can serve: the model's vocabulary and positions, the executor's limits."""

    target: Decoder
    config: ExecutorConfig
    mode: SpeculativeDecodingMode
    max_draft_len: int

    ids: Iterator[int] = field(default_factory=itertools.count)

    def make_request(
        self,
        prompt: Sequence[int] | EmbedsPrompt,
        params: SamplingParams,
        cache_salt: str | None = None,
    ) -> Request:
        """Makes a waiting request. Raises RequestError as the checks do."""
        check_salt(cache_salt)
        token_ids = self.check_prompt(prompt, params.max_tokens)
        self.check_params(params)
        embeds = kept_embeds(prompt, self.target) if isinstance(prompt, EmbedsPrompt) else None
        reads_images_whole = self.target.config.reads_images_whole
        return Request(
            request_id=next(self.ids),
            prompt_token_ids=token_ids,
            sampling_params=params,
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            max_total_tokens=min(len(token_ids) + params.max_tokens, self.config.max_seq_len),
            end_ids=end_ids(params, self.target.config),
            embeds=embeds,
            cache_salt=cache_salt,
            images=embeds.images if embeds is not None and reads_images_whole else (),
            logprobs=None if params.logprobs is None else [],
            prompt_logprobs=None if params.prompt_logprobs is None else PromptLogprobs(),
        )

    def check_params(self, params: SamplingParams) -> None:
        """Raises RequestError for parameters that this engine cannot serve.

        These are token ids that are not the model's, more banned end tokens than `min_tokens`
        allows, and several completions in one request.
        """
        if params.n > 1:
            raise RequestError(
                f"SamplingParams.n={params.n}: one request has one completion here. LLM.generate "
                "and LLM.chat take n; for streams and executors queue n requests."
            )
        vocab, words = self.target.config.vocab_size, params.bad_words or ()
        if any(isinstance(word, str) for word in words):
            raise RequestError(
                f"SamplingParams.bad_words={shown(words)}: an executor has no tokenizer. Give "
                "token ids, or text to LLM.generate."
            )
        for name, ids in (
            ("logit_bias", [token for token, _ in params.logit_bias_items]),
            ("bad_token_ids", params.bad_token_ids or ()),
            ("bad_words", [int(token) for word in words for token in word]),
        ):
            largest = max(ids, default=0)
            if largest >= vocab:
                raise RequestError(
                    f"SamplingParams.{name} has token {shown(largest)}: ids must be in 0 … "
                    f"{vocab - 1}."
                )
        if params.bad_token_ids and len(params.bad_token_ids) == vocab:
            raise RequestError(
                f"SamplingParams.bad_token_ids has all {vocab} tokens: nothing could come out."
            )
        count = sum(token < vocab for token in held_back(params, self.target.config))
        if params.min_tokens and count > MAX_ENDS:
            raise RequestError(
                f"SamplingParams.min_tokens={params.min_tokens} with {count} end tokens: at most "
                f"{MAX_ENDS} can be held back. Give fewer stop_token_ids."
            )

    def check_prompt(self, prompt: Sequence[int] | EmbedsPrompt, max_tokens: int = 1) -> list[int]:
        """Returns the prompt's tokens as ints.

        Raises:
            RequestError: it is empty, too long, or holds an id outside the vocabulary; its
                embeddings do not fit the model or the mode.
        """
        vocab = self.target.config.vocab_size
        if isinstance(prompt, EmbedsPrompt):
            embeds, ids = prompt, prompt.prompt_token_ids
        else:
            embeds, ids = None, prompt
        if embeds is not None and self.mode.is_save_hidden_states():
            raise RequestError(
                f"Mode {self.mode.name} saves a prompt's tokens and not its embeddings, without "
                "which a head cannot be trained on it: an EmbedsPrompt needs another mode."
            )
        tokens = _checked_ids(ids, vocab)
        if not tokens:
            raise RequestError("The prompt is empty: give at least one token.")
        if len(tokens) >= self.config.max_seq_len:
            cure = "Shorten it, or raise max_seq_len / KvCacheConfig.max_tokens."
            if self.config.max_seq_len >= self.target.config.max_position_embeddings:
                cure = "Shorten it: the model has no more positions."
            raise RequestError(
                f"The prompt has {len(tokens)} tokens; max_seq_len={self.config.max_seq_len} "
                f"leaves room for fewer, so that one can be generated. {cure}"
            )
        if len(tokens) > self.config.max_num_tokens and not self.config.enable_chunked_prefill:
            raise RequestError(
                f"The prompt has {len(tokens)} tokens, a pass takes "
                f"max_num_tokens={self.config.max_num_tokens}. Set enable_chunked_prefill=True or "
                "raise max_num_tokens."
            )
        if embeds is not None:
            total = min(len(tokens) + max_tokens, self.config.max_seq_len)
            check_embeds(
                embeds, self.target, total, self.config.max_num_tokens - self.max_draft_len - 1
            )
        return tokens


def _checked_ids(ids: Sequence[int], vocab: int) -> list[int]:
    """Returns token ids as ints. Raises RequestError for the first one outside 0 … V - 1."""
    tokens = list(ids)
    try:  # a prompt may have many, and each of a loop's steps costs
        packed = array("q", tokens)
    except (TypeError, OverflowError):
        packed = array("q")
    values = np.frombuffer(packed, dtype=np.int64)
    is_inside = 0 < len(values) == len(tokens) and values.min() >= 0 and values.max() < vocab
    if is_inside and not any(isinstance(tokens[i], bool) for i in np.flatnonzero(values <= 1)):
        return packed.tolist()
    for position, token in enumerate(tokens):
        try:
            if isinstance(token, bool):
                raise TypeError
            tokens[position] = operator.index(token)
        except TypeError:
            raise RequestError(f"Prompt token {position} is {shown(token)}, not an int.") from None
        if not 0 <= tokens[position] < vocab:
            raise RequestError(
                f"Prompt token {position} is {shown(token)}: ids must be in 0 … {vocab - 1}."
            )
    return tokens
