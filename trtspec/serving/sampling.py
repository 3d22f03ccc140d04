"""From a request to `SamplingParams`. What is out of range names its field."""

from __future__ import annotations

from typing import Any

from ..api.guided_decoding import GuidedDecodingParams
from ..api.sampling_params import MAX_SEED, MAX_TOKENS, SamplingParams
from ..errors import RequestError, shown
from .config import ServerConfig
from .errors import ApiError, in_fields, of_library, refused
from .other_fields import refusal
from .protocol import ChatRequest, GenerationRequest, ResponseFormat

MAX_STOP_CHARACTERS = 1024
"""Of one stop string. After each step all its beginnings are compared with the text's end."""
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
}


def make_params(
    request: GenerationRequest,
    config: ServerConfig,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    reasoning_end: str | None = None,
    tag: dict[str, Any] | None = None,
) -> SamplingParams:
    """Returns a request's parameters.

    Args:
        max_tokens: None: as many as fit.
        logprobs: alternatives per token; None: no log probabilities. prompt_logprobs: the same of
            the prompt.
        reasoning_end: a grammar holds after this text.
        tag: a structural tag that `tool_choice` asks for.

    Raises:
        ApiError: a field is wrong.
    """
    _check_limits(request, config, logprobs, prompt_logprobs)
    try:
        return SamplingParams(
            max_tokens=MAX_TOKENS if max_tokens is None else max_tokens,
            n=request.n,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=max(request.top_k, 0),  # -1 is off, too
            min_p=request.min_p,
            seed=_seed(request.seed),
            stop=request.stop,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            min_tokens=request.min_tokens,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=_logit_bias(request),
            bad_words=request.bad_words,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            guided_decoding=_guided(request, tag, reasoning_end),
        )
    except RequestError as error:
        raise of_library(error) from None


def _seed(given: int | None) -> int | None:
    """Returns a seed >= 0. OpenAI's API takes negative ones, too: 2**63 is added to them."""
    if given is None or given == -1:  # what vLLM's clients send for none
        return None
    return given + MAX_SEED + 1 if -MAX_SEED - 1 <= given < 0 else given


def _check_limits(
    request: GenerationRequest,
    config: ServerConfig,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> None:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    alternatives = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
    for name, count, most in (
        ("n", request.n, config.max_n),
        ("stop", len(stop), config.max_stop),
        ("stop_token_ids", len(request.stop_token_ids or []), config.max_stop),
        (alternatives, logprobs or 0, config.max_logprobs),
        ("prompt_logprobs", prompt_logprobs or 0, config.max_logprobs),
    ):
        if count > most:
            raise refused(name, f"{name!r} asks for {count}: this server allows {most}.")
    if request.n < 1:
        raise refused("n", f"'n' is {request.n}: it must be in 1 … {config.max_n}.")
    if logprobs is not None and logprobs < 0:
        raise refused(alternatives, f"{alternatives!r} is {logprobs}: it must be >= 0.")
    longest = max(map(len, stop), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise refused(
            "stop",
            f"'stop' has a text of {longest} characters: this server allows {MAX_STOP_CHARACTERS}.",
        )
    if request.top_k < -1:
        raise refused("top_k", f"'top_k' is {shown(request.top_k)}: it must be >= -1.")
    if request.stream_options is not None and not request.stream:
        raise refused("stream_options", "'stream_options' is only allowed with stream=true.")
    if request.stream and prompt_logprobs is not None:
        raise refused(
            "stream", "Log probabilities of the prompt are not streamed: leave 'stream' out."
        )
    if request.best_of not in (None, request.n):
        raise refused(
            "best_of",
            f"'best_of' is {shown(request.best_of)}: all completions that are made are returned, "
            f"so it must be 'n', {request.n}. Leave it out.",
        )
    if request.cache_salt == "":
        raise refused("cache_salt", "'cache_salt' is empty: give text, or leave it out.")


def _logit_bias(request: GenerationRequest) -> dict[int, float] | None:
    bias: dict[int, float] = {}
    for token, value in (request.logit_bias or {}).items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise refused("logit_bias", f"'logit_bias' has {shown(token)}, which is no token id.")
        if int(token) in bias:
            raise refused("logit_bias", f"'logit_bias' has token {int(token)} twice: give it once.")
        bias[int(token)] = value
    return bias or None


def grammar_field(request: GenerationRequest) -> str | None:
    """Returns the field that asks for a grammar, the last of several; None if there is none."""
    fields = _grammar_fields(request)
    return fields[-1] if fields else None


def _grammar_fields(request: GenerationRequest) -> list[str]:
    fields = [field for field in _GUIDED if getattr(request, field) is not None]
    if request.structured_outputs is not None:
        fields.append("structured_outputs")
    if request.response_format is not None and request.response_format.type != "text":
        fields.append("response_format")
    if isinstance(request, ChatRequest) and request.forces_calls:
        fields.append("tool_choice")
    return fields


def _guided(
    request: GenerationRequest, tag: dict[str, Any] | None, reasoning_end: str | None
) -> GuidedDecodingParams | None:
    form = request.response_format
    if form is not None:
        _check_format(form)
    fields = _grammar_fields(request)
    if not fields:
        return None
    name = fields[-1]
    if len(fields) > 1:
        raise refused(name, f"A request has one grammar; this has {', '.join(sorted(fields))}.")
    if name == "tool_choice":
        given: dict[str, Any] = {"structural_tag": tag}
    elif name == "response_format" and form is not None:
        given = _of_format(form)
    elif name == "structured_outputs" and request.structured_outputs is not None:
        asked = request.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        given = {field: value for field, value in asked.items() if value is not False}
    else:
        given = {_GUIDED[name]: getattr(request, name)}
    try:
        return GuidedDecodingParams(**given, reasoning_end=reasoning_end)
    except RequestError as error:
        raise ApiError(400, in_fields(str(error)), param=name) from None


def _of_format(form: ResponseFormat) -> dict[str, Any]:
    if form.type == "structural_tag":
        return {"structural_tag": form.model_dump(exclude_none=True)}
    if form.type == "json_object":
        return {"json_object": True}
    if form.json_schema is None:
        raise refused("response_format.json_schema", "'json_schema' is missing: give it.")
    schema = form.json_schema.schema_
    return {"json": {} if schema is True else schema}


def _check_format(form: ResponseFormat) -> None:
    unknown = sorted(form.model_extra or {})
    if unknown and form.type != "structural_tag":
        name = f"response_format.{unknown[0]}"
        message = refusal(name, (form.model_extra or {})[unknown[0]])
        raise ApiError(400, message, name, "unknown_parameter")
    if form.json_schema is not None and form.type != "json_schema":
        raise refused(
            "response_format.json_schema",
            f"'json_schema' is only allowed with type 'json_schema', not {form.type!r}: change "
            "the type, or leave the schema out.",
        )
