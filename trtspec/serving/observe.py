"""`add_observability`: `/metrics` for Prometheus, and a page at `/` with its figures at `/live`."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated, Any, Protocol, runtime_checkable

from fastapi import FastAPI, Query
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client import generate_latest as as_text

from ..llm import LLM
from .exposition import EngineCollector
from .live import live_state, speed_of
from .metrics import StepMetrics

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


@runtime_checkable
class HasLLM(Protocol):
    """What is needed of an `AsyncLLM`."""

    @property
    def llm(self) -> LLM: ...


class Observation(Protocol):
    """An engine's figures, wherever it runs."""

    async def metrics(self) -> bytes:
        """Returns `/metrics`, in Prometheus' text format."""

    async def live(self, since: int) -> dict[str, Any]:
        """Returns the page's figures, of the seconds from `since` on."""


class EngineObservation:
    """Counts what an engine does, from its first request on. Any thread may ask.

    Args:
        model_name: value of the label of that name, and of the page's requests.
        plain_step_seconds: {requests at a time: seconds} of a step without speculation, measured
            elsewhere. The page estimates the speed-up with it where no plain step was timed.
    """

    def __init__(self, llm: LLM, model_name: str, plain_step_seconds: Mapping[int, float]):
        self.counts = StepMetrics(llm.max_draft_len)
        llm.executor.observer = self.counts
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(EngineCollector(llm.executor, self.counts, model_name))
        ProcessCollector(registry=self.registry)
        self._llm, self._model_name, self._plain = llm, model_name, dict(plain_step_seconds)
        self._started = time.time()  # another value is another run of the server

    def metrics(self) -> bytes:
        return as_text(self.registry)

    def live(self, since: int) -> dict[str, Any]:
        return {
            "model": self._model_name,
            "started": self._started,
            "speed": speed_of(self.counts, self._plain),
            **live_state(self._llm, self.counts, since),
        }


class InThread:
    """Asks an engine of this process, in a thread: the event loop goes on."""

    def __init__(self, observation: EngineObservation):
        self._observation = observation

    async def metrics(self) -> bytes:
        return await asyncio.to_thread(self._observation.metrics)

    async def live(self, since: int) -> dict[str, Any]:
        return await asyncio.to_thread(self._observation.live, since)


def add_observability(
    app: FastAPI,
    engine: HasLLM | LLM,
    model_name: str | None = None,
    *,
    plain_step_seconds: Mapping[int, float] | None = None,
) -> StepMetrics:
    """Mounts `GET /metrics`, `GET /live` and `GET /` of an engine, and begins to count.

    Call it before the first request.

    Args:
        engine: an `AsyncLLM`, or an `LLM`.
        model_name: as for `EngineObservation`, like `plain_step_seconds`. None: the directory's.

    Returns:
        What is counted.
    """
    llm = engine.llm if isinstance(engine, HasLLM) else engine
    observation = EngineObservation(llm, model_name or llm.model_dir.name, plain_step_seconds or {})
    mount(app, InThread(observation))
    return observation.counts


def mount(app: FastAPI, observation: Observation) -> None:
    """Mounts `GET /metrics`, `GET /live` and `GET /`."""
    page, headers = read_page()

    @app.get("/metrics", include_in_schema=False)
    async def prometheus() -> Response:
        # Always this form: as OpenMetrics the client library may turn `vllm:` into `vllm_`.
        return Response(await observation.metrics(), headers={"Content-Type": TEXT_FORMAT})

    @app.get("/live", include_in_schema=False)
    async def live(since: Annotated[int, Query(ge=0, le=1 << 53)] = 0) -> JSONResponse:
        return JSONResponse(await observation.live(since), headers={"Cache-Control": "no-store"})

    @app.get("/", include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)


def read_page() -> tuple[str, dict[str, str]]:
    """Returns the page and its headers. They allow its own script and style, and nothing else."""
    page = files(__package__).joinpath("page.html").read_text("utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(page, 'script')}",
            f"style-src {_hashes(page, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    headers: dict[str, Any] = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return page, headers


def _hashes(page: str, tag: str) -> str:
    """Returns the CSP sources of the page's inline elements of one kind."""
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
