"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..api.sampling_params import SamplingParams
from ..errors import EngineError, RequestError, shown
from ..frontend.async_front import AsyncFront
from ..frontend.inputs import TokenizedPrompt, check_variables
from ..frontend.output_stream import OutputStream
from ..frontend.outputs import Piece
from . import channels
from .answers import (
    Json,
    TokenTexts,
    chat_logprobs,
    event_of,
    prompt_logprobs_of,
    text_of,
)
from .config import ServerConfig
from .endpoint import Answer, Endpoint
from .errors import of_library, refused
from .forced_calls import tag_of_calls
from .protocol import ChatRequest, Message, NamedTool, Tool
from .reasoning import GPT_OSS, ReasoningSplitter, Splitter, split_for, starts_inside
from .sampling import make_params
from .tool_calls import Content, Event, ToolCallDelta, ToolCallParser
from .tool_formats import Format, format_of


def conversation_of(messages: list[Message]) -> list[dict[str, Any]]:
    """Returns messages as chat templates read them."""
    return [_template_message(number, message) for number, message in enumerate(messages)]


def _template_message(number: int, message: Message) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True)
    if message.role == "developer":  # OpenAI's newer name, which templates do not know
        fields["role"] = "system"
    fields.setdefault("content", "")
    reasoning = fields.pop("reasoning", None)
    if reasoning is not None:
        fields.setdefault("reasoning_content", reasoning)
    for i, call in enumerate(fields.get("tool_calls", [])):
        function = call["function"]
        if isinstance(function["arguments"], str):  # templates write a dict as JSON
            param = f"messages.{number}.tool_calls.{i}.function.arguments"
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                raise refused(param, f"{param!r} is not JSON.") from None
    return fields


def tools_of(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Returns tools as chat templates read them."""
    return None if tools is None else [tool.model_dump(exclude_none=True) for tool in tools]


class ChatEndpoint(Endpoint):
    """Answers conversations."""

    PROMPT_FIELD = "messages"

    def __init__(self, llm: AsyncFront, config: ServerConfig, model_name: str):
        super().__init__(llm, config, model_name)
        self.tokenizer = llm.tokenizer
        template = getattr(self.tokenizer, "chat_template", None)
        if isinstance(template, dict):  # by name: with tools transformers takes the one for them
            template = template.get("tool_use", template.get("default", ""))
        self.template = template if isinstance(template, str) else ""
        self.reasoning = split_for(self.tokenizer) if template else None
        self.has_channels = self.reasoning is GPT_OSS

    async def open(self, request: ChatRequest, arrived: float) -> ChatAnswer:
        """Queues a request. Raises ApiError if it is refused.

        Args:
            arrived: when the request was there, of time.perf_counter().
        """
        if request.top_logprobs and not request.logprobs:
            raise refused(
                "top_logprobs",
                f"'top_logprobs' is {shown(request.top_logprobs)}: it needs logprobs=true.",
            )
        form, tools = self._format(request), tools_of(request.tools)
        tokens = await self._tokenize(request, tools)
        markers = self.reasoning
        is_inside = markers is not None and starts_inside(tokens.text or "", markers)
        has_end = is_inside or self.has_channels
        params = self._params(request, form, markers.end if markers and has_end else None)

        async def given() -> TokenizedPrompt:
            return tokens

        stream = self.llm.open(given, params, request.cache_salt, request.include_token_sources)
        stream.arrived = arrived
        # Without parallel calls an answer ends after its first call, which the engine cannot know.
        stream.is_whole = not request.stream and request.parallel_tool_calls
        stream.keep_counts = not request.parallel_tool_calls
        stream.markers = (*(form.markers if form else ()), *(markers or ()))
        if self.has_channels:
            stream.markers += channels.MARKERS
        await self.start([stream])
        choices = [
            Choice(
                self._splitter(is_inside),
                None if form is None else ToolCallParser(form, tools or ()),
                TokenTexts(self.tokenizer) if request.include_token_sources else None,
                is_named=isinstance(request.tool_choice, NamedTool),
                ends_at_call=not (request.parallel_tool_calls or request.forces_calls),
            )
            for _ in range(request.n)
        ]
        return ChatAnswer(self, request, stream, choices)

    def _splitter(self, is_inside: bool) -> Splitter | None:
        if self.has_channels:
            return channels.ChannelSplitter()
        return None if self.reasoning is None else ReasoningSplitter(self.reasoning, is_inside)

    async def _tokenize(
        self, request: ChatRequest, tools: list[dict[str, Any]] | None
    ) -> TokenizedPrompt:
        """Returns the rendered conversation. Raises ApiError, which names the field."""
        messages, variables = conversation_of(request.messages), request.chat_template_kwargs or {}
        if self.has_channels:
            channels.name_thinking(messages)
        try:
            check_variables(variables)
        except RequestError as error:
            raise refused("chat_template_kwargs", str(error)) from None
        try:
            return await self.llm.tokenize_chat(messages, tools, variables)
        except (RequestError, EngineError) as error:
            raised = of_library(error)
            raised.param = raised.param or "messages"
            raise raised from None

    def _params(
        self, request: ChatRequest, form: Format | None, reasoning_end: str | None
    ) -> SamplingParams:
        max_tokens, tag = _max_tokens(request), None
        if form is not None and request.forces_calls:
            tag = tag_of_calls(form, self.template, request)
            if self.has_channels:  # the call is the first message
                reasoning_end = None
        return make_params(
            request,
            self.config,
            max_tokens=max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
            reasoning_end=reasoning_end,
            tag=tag,
        )

    def _format(self, request: ChatRequest) -> Format | None:
        """Returns how tool calls are written, where they are asked for."""
        if not request.tools:
            if request.tool_choice not in (None, "none"):
                raise refused(
                    "tool_choice", "'tool_choice' needs 'tools': give some, or leave it out."
                )
            return None
        if request.tool_choice == "none":
            return None
        found = format_of(self.template)
        if found is None:
            raise refused(
                "tools",
                "The model's chat template defines no form of tool calls that is known here. "
                "tool_choice='none' gives the tools to the template and parses nothing.",
            )
        return found


def _max_tokens(request: ChatRequest) -> int | None:
    """Returns the most tokens of an answer, whichever of its two names is used."""
    old, new = request.max_tokens, request.max_completion_tokens
    if new is None:
        return old
    if old not in (None, new):
        raise refused(
            "max_tokens",
            f"'max_tokens' is {old} and 'max_completion_tokens' {new}, which is its newer name: "
            "send one of them.",
        )
    if new < 1:
        raise refused(
            "max_completion_tokens", f"'max_completion_tokens' is {new}: it must be >= 1."
        )
    return new


@dataclass
class Delta:
    """What is new of one choice."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)  # of tokens, where they are asked for
    tokens: list[Json] = field(default_factory=list)  # with sources, where they are asked for
    finish_reason: str | None = None

    def add(self, new: Delta) -> None:
        """Appends what is new behind this."""
        self.content += new.content
        self.reasoning += new.reasoning
        self.calls += new.calls
        self.logprobs += new.logprobs
        self.tokens += new.tokens
        self.finish_reason = new.finish_reason

    def fields(self) -> Json:
        fields: Json = {}
        if self.reasoning:
            fields["reasoning_content"] = self.reasoning
        if self.content:
            fields["content"] = self.content
        if self.calls:
            fields["tool_calls"] = [{"index": c.index, **tool_call(c)} for c in self.calls]
        return fields


def tool_call(call: ToolCallDelta) -> Json:
    return {
        "id": call.id or f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


class Choice:
    """One completion as it streams: reasoning, content and tool calls apart.

    Args:
        is_named: the request named the function to call.
        ends_at_call: nothing after the first call is taken.
    """

    def __init__(
        self,
        splitter: Splitter | None,
        parser: ToolCallParser | None,
        texts: TokenTexts | None,
        *,
        is_named: bool,
        ends_at_call: bool,
    ):
        self._is_named, self._ends_at_call = is_named, ends_at_call
        self._splitter, self._parser, self.texts = splitter, parser, texts
        self.num_tokens, self.has_calls = 0, False
        self.is_plain = splitter is None and parser is None and texts is None

    @property
    def is_cut(self) -> bool:
        """Whether it ends here, whatever the model still writes."""
        return self._ends_at_call and self.has_calls

    def take(self, piece: Piece) -> Delta:
        """Returns what is new."""
        self.num_tokens += len(piece.token_ids)
        delta, is_last = Delta(), piece.finish_reason is not None
        if self._splitter is None:
            self._content(delta, piece.text)
        else:
            parts = self._splitter.feed(piece.text)
            for part in [*parts, *(self._splitter.finish() if is_last else ())]:
                if not part.is_reasoning:
                    self._content(delta, part.text)
                elif not self.is_cut:
                    delta.reasoning += part.text
        if is_last and self._parser is not None:
            self._take_events(delta, self._parser.finish(piece.finish_reason == "length"))
        if self.texts is not None:
            delta.tokens = self.texts.of(piece)
        delta.finish_reason = self._finish_reason(piece)
        return delta

    def _content(self, delta: Delta, text: str) -> None:
        if self._parser is None:
            delta.content += text
        elif text:
            self._take_events(delta, self._parser.feed(text))

    def _take_events(self, delta: Delta, events: Sequence[Event]) -> None:
        for event in events:
            if self.is_cut:
                return
            if isinstance(event, Content):
                delta.content += event.text
            else:
                delta.calls.append(event)
                self.has_calls = True

    def _finish_reason(self, piece: Piece) -> str | None:
        """OpenAI's is "stop" where the request named the function."""
        if self.is_cut:
            return "tool_calls"
        if piece.finish_reason == "stop" and self.has_calls and not self._is_named:
            return "tool_calls"
        return piece.finish_reason


class ChatAnswer(Answer):
    ID_PREFIX, KIND, CHUNK_KIND = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        endpoint: ChatEndpoint,
        request: ChatRequest,
        stream: OutputStream,
        choices: Sequence[Choice],
    ):
        super().__init__(endpoint, request, [stream])
        self._request, self._stream = request, stream
        self._choices: Sequence[Choice] = choices
        self._is_plain = not (request.logprobs or self._has_usage_always)

    async def whole(self) -> Json:
        wholes = [Delta() for _ in self._choices]
        while pieces := await self._next(self._stream):
            for index, piece in pieces:
                wholes[index].add(self._take(index, piece))
        choices = [self._whole_choice(index, whole) for index, whole in enumerate(wholes)]
        answer: Json = self._header | {"choices": choices} | self._totals()
        if (count := self._request.prompt_logprobs) is not None:
            prompt = self._stream.requests[0]
            answer["prompt_logprobs"] = await asyncio.to_thread(
                prompt_logprobs_of, self._names, prompt, count
            )
        return answer

    def _whole_choice(self, index: int, whole: Delta) -> Json:
        message: Json = {"role": "assistant", "content": whole.content, "refusal": None}
        if whole.calls:
            message["content"] = whole.content or None
            message["tool_calls"] = [tool_call(call) for call in whole.calls]
        if whole.reasoning:
            message["reasoning_content"] = whole.reasoning
        choice = {
            "index": index,
            "message": message,
            "logprobs": {"content": whole.logprobs} if self._request.logprobs else None,
            "finish_reason": whole.finish_reason,
        }
        return choice | ({"trtspec": {"tokens": whole.tokens}} if whole.tokens else {})

    def _take(self, index: int, piece: Piece) -> Delta:
        """Returns what is new of a choice, and ends its request where the choice ends earlier."""
        choice, request = self._choices[index], self._request
        delta = choice.take(piece)
        if request.logprobs:
            delta.logprobs = chat_logprobs(self._names, piece, request.top_logprobs or 0)
        if choice.is_cut:
            self._stream.end(index)
        return delta

    # -- streamed --------------------------------------------------------------------------------
    def _beginning(self) -> list[bytes]:
        more = {"usage": self._usage()} if self._has_usage_always else {}
        delta = {"role": "assistant", "content": ""}
        return [
            event_of(self._chunk_header | {"choices": [_entry(index, delta)]} | more)
            for index in range(len(self._choices))
        ]

    def _event(self, index: int, piece: Piece) -> bytes:
        choice, request = self._choices[index], self._request
        if choice.is_plain and self._is_plain and piece.finish_reason is None:
            choice.num_tokens += len(piece.token_ids)
            return self._text(index, piece.text) if piece.text else b""
        delta = self._take(index, piece)
        has_more = delta.calls or delta.reasoning or request.logprobs or choice.texts is not None
        if not (has_more or delta.finish_reason):
            if not delta.content:
                return b""
            if not self._has_usage_always:
                return self._text(index, delta.content)
        entry = _entry(index, delta.fields())
        if request.logprobs:
            entry["logprobs"] = {"content": delta.logprobs}
        entry["finish_reason"] = delta.finish_reason
        self._num_open -= delta.finish_reason is not None
        more: Json = {"choices": [entry]}
        if choice.texts is not None:
            more["trtspec"] = {"tokens": delta.tokens}
        self._add_figures(more)
        return event_of(self._chunk_header | more)

    def _text(self, index: int, text: str) -> bytes:
        """Returns the event of text alone, as `_event` would write it."""
        return (
            f'{self._head},"choices":[{{"index":{index},"delta":{{"content":{text_of(text)}}},'
            '"logprobs":null,"finish_reason":null}]}\n\n'
        ).encode("utf-8", "replace")


def _entry(index: int, delta: Json) -> Json:
    """Returns an entry of a chunk's `choices`."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
