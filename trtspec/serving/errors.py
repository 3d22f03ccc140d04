"""Errors as OpenAI's API reports them: a status, and a JSON object that names the parameter."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from ..errors import EngineError, QueueFullError, RequestError, TrtspecError, shown
from .other_fields import refusal

RETRY_SECONDS = 1
_FIELD = re.compile(r"^(?:SamplingParams|GuidedDecodingParams)\.(\w+)")
_PROMPT = re.compile(r"^(?:The prompt |Prompt token )")
_LONG_PROMPT = re.compile(r"^The prompt has \d+ (?:tokens|characters); max_seq_len=")
_TYPE_NAME = re.compile(r"str|bool|int|float|(?:list|dict|literal)\[.*\]|NamedTool")
"""What pydantic adds to the path of a field that may be of several types."""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        param: the field of the request that is wrong.
        code: OpenAI's word for the kind of error.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Returns what is sent, in an answer or in a stream."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        headers = {}
        if self.status == 429:
            headers["Retry-After"] = str(RETRY_SECONDS)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (408, 413):  # the rest of the body is not read
            headers["Connection"] = "close"
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


def refused(param: str, message: str) -> ApiError:
    """Returns the error of a field that is wrong."""
    return ApiError(400, message, param=param)


def of_library(error: TrtspecError, prompt_field: str | None = None) -> ApiError:
    """Returns what an error of the library is to a client.

    Args:
        prompt_field: the request's field that holds the prompt.
    """
    message = in_fields(str(error))
    if isinstance(error, QueueFullError):
        return ApiError(429, message, code="queue_full")
    if isinstance(error, EngineError):
        return ApiError(503, message, code="engine_unavailable")
    if isinstance(error, RequestError):
        is_long = _LONG_PROMPT.match(message)
        return ApiError(
            400,
            message,
            param=_param_of(str(error), prompt_field),
            code="context_length_exceeded" if is_long else None,
        )
    return ApiError(500, message)


def in_fields(message: str) -> str:
    """Returns a message of the library that names a field of its classes by the request's field."""
    field = _FIELD.match(message)
    if field is None:
        return message.replace("GuidedDecodingParams has ", "The grammar has ", 1)
    name = f"{field[1]!r}" if message.startswith("SamplingParams") else f"The grammar ({field[1]})"
    rest = message[field.end() :]
    if not rest.startswith("="):
        return f"{name}{rest}"
    return f"{name} is {rest[1:]}".replace(" is not allowed: ", ": ", 1)


def _param_of(message: str, prompt_field: str | None) -> str | None:
    field = _FIELD.match(message)
    if field:
        return field[1]
    return prompt_field if _PROMPT.match(message) else None


def of_validation(error: ValidationError) -> ApiError:
    """Returns the first error of a request that does not fit its model.

    Where a field may be of several types, each has errors. The deepest is of the type that was
    meant: of a list, what is wrong in it, not that it is no text.
    """
    errors = error.errors(include_url=False, include_context=False)
    field = errors[0]["loc"][:-1]
    of_field = [e for e in errors if e["loc"][: len(field)] == field] if field else errors[:1]
    first = max(of_field, key=lambda e: len(e["loc"]))
    path = [str(part) for part in first["loc"] if not _TYPE_NAME.fullmatch(str(part))]
    param = ".".join(path) or None
    if first["type"] == "extra_forbidden":
        message = refusal(".".join(path), first["input"])
        return ApiError(400, message, param, "unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{param!r} is missing: give it.", param, "missing_required_parameter")
    said = [first["msg"]]
    if _TYPE_NAME.fullmatch(str(first["loc"][-1])):  # of a value that may be of several types
        of_value = [e["msg"] for e in of_field if e["loc"][:-1] == first["loc"][:-1]]
        said = list(dict.fromkeys(of_value))
    kinds = " or ".join([said[0], *(text.removeprefix("Input should be ") for text in said[1:])])
    message = f"{param!r} is wrong: {kinds} ({shown(first['input'])} was given)."
    return ApiError(400, message, param, "invalid_type")
