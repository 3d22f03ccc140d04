"""Requests of OpenAI's API, with the fields that vLLM's server adds. Others are refused."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from .errors import ApiError, of_validation
from .other_fields import NEUTRAL

M = TypeVar("M", bound=BaseModel)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Leaves out fields that are null. Clients send an answer's message back with such."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class StreamOptions(_Model):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(_Model):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None  # every schema is


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)  # a structural tag has its own fields

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Model):
    """A grammar in vLLM's form; the fields are those of `GuidedDecodingParams`."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    structural_tag: str | dict[str, Any] | None = None


class GenerationRequest(_Model):
    """Fields of both endpoints."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    best_of: int | None = None  # how many are made, of which n are returned
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] | None = Field(default=None, max_length=4096)
    bad_words: list[str] | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    include_token_sources: bool = False
    prompt_logprobs: int | None = None
    # Who asks, and for what. Nothing depends on it.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest):
    """Of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: Literal[True] = True  # the tokenizer adds its own


class TextPart(_Model):
    type: Literal["text"]
    text: str


class FunctionCall(_Model):
    name: str
    arguments: str | dict[str, Any]


class ToolCall(_Model):
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall


class Message(_Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # What clients add that says nothing: lm-eval the type, OpenAI's API an empty list.
    type: Literal["text"] | None = Field(default=None, exclude=True)
    annotations: list[Any] | None = Field(default=None, max_length=0, exclude=True)

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.role != "assistant" and self.content in (None, []):
            raise ValueError(f"a message of role {self.role!r} needs 'content'")
        return self


class Function(_Model):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # clients send it unasked; `tool_choice` says what is forced


class Tool(_Model):
    type: Literal["function"]
    function: Function


class FunctionName(_Model):
    name: str


class NamedTool(_Model):
    type: Literal["function"]
    function: FunctionName


class ChatRequest(GenerationRequest):
    """Of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, str | bool | int | float] | None = None
    add_special_tokens: Literal[False] = False  # the template writes them

    @property
    def forces_calls(self) -> bool:
        """Whether the answer must be tool calls."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)


class TokenizeRequest(_Model):
    """Of `/tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, str | bool | int | float] | None = None


class DetokenizeRequest(_Model):
    model: str | None = None
    tokens: list[int]


def _is_same(value: Any, neutral: Any) -> bool:
    """Whether they are equal. To Python 0 and false are, too."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def parse(model: type[M], body: bytes) -> M:
    """Returns a request. Fields that are null count as left out.

    Raises:
        ApiError: it is not JSON, or does not fit.
    """
    try:
        given = from_json(body, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not JSON: {str(error)[:200]}.") from None
    if not isinstance(given, dict):
        raise ApiError(400, "The body must be a JSON object.")
    fields = {
        name: value
        for name, value in given.items()
        if not any(_is_same(value, neutral) for neutral in NEUTRAL.get(name, ()))
    }
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise of_validation(error) from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.") from None
