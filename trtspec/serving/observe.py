"""`add_observability`: `/metrics` for Prometheus, and a page at `/` with its figures at `/live`."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Query
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client import generate_latest as as_text

from ..llm import LLM
from .exposition import EngineCollector
from .live import LiveSource, live_state
from .metrics import StepMetrics

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


class HasLLM(Protocol):
    """What is needed of an `AsyncLLM`."""

    @property
    def llm(self) -> LLM: ...


def add_observability(
    app: FastAPI,
    engine: HasLLM,
    model_name: str | None = None,
    *,
    plain_step_seconds: Mapping[int, float] | None = None,
) -> StepMetrics:
    """Mounts `GET /metrics`, `GET /live` and `GET /`, and begins to count.

    Call it before the first request.

    Args:
        model_name: of the label `model_name` and of the page's requests. None: the directory's.
        plain_step_seconds: {requests at a time: seconds} of a step without speculation, measured
            elsewhere. The page estimates the speed-up with it where no plain step was timed.

    Returns:
        What is counted.
    """
    llm, name = engine.llm, model_name or engine.llm.model_dir.name
    metrics = StepMetrics(llm.max_draft_len)
    llm.executor.observer = metrics
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(llm.executor, metrics, name))
    ProcessCollector(registry=registry)
    source = LiveSource(llm, metrics, name, time.time(), dict(plain_step_seconds or {}))
    page, headers = read_page()

    # Plain functions, so that FastAPI runs them in a thread: the event loop goes on.
    @app.get("/metrics", include_in_schema=False)
    def prometheus() -> Response:
        # Always this form: as OpenMetrics the client library may turn `vllm:` into `vllm_`.
        return Response(as_text(registry), headers={"Content-Type": TEXT_FORMAT})

    @app.get("/live", include_in_schema=False)
    def live(since: Annotated[int, Query(ge=0, le=1 << 53)] = 0) -> JSONResponse:
        return JSONResponse(live_state(source, since), headers={"Cache-Control": "no-store"})

    @app.get("/", include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    return metrics


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
