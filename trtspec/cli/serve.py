"""`trtspec serve`: an OpenAI server over one engine."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, EngineError
from ..serving.config import ServerConfig
from .engine import load_llm
from .errors import EXIT_FAILED, show_error
from .options import API_KEY_VARIABLE, EngineOptions, ServeOptions
from .render import make_console
from .status import Progress

if TYPE_CHECKING:
    from ..llm import LLM


def default_batch_size(device: str) -> int:
    """Returns how many requests a server decodes together if it is not told.

    A GPU takes less than twice as long for a step of 64 as for one of 8 (docs/performance.md). On a
    CPU it is what other commands take.
    """
    from ..executor.device import resolve_device

    return 8 if resolve_device(device).type == "cpu" else 64


def run_serve(options: EngineOptions, given: ServeOptions) -> int:
    """Serves until a signal comes. Returns the exit code.

    Raises:
        ConfigError: the extra is not installed, an option is wrong, or the address is taken.
    """
    _require_extra()
    from ..serving.processes import HttpProcess, serve
    from ..serving.run import listen, url_of

    if given.served_model_name == "":
        raise ConfigError(
            "--served-model-name is empty: give the name that clients send, or leave it out."
        )
    if given.api_key is None and os.environ.get(API_KEY_VARIABLE) == "":
        raise ConfigError(
            f"{API_KEY_VARIABLE} is empty: set it to the key that clients must send, or unset it "
            "to ask for none."
        )
    config = ServerConfig(
        host=given.host,
        port=given.port,
        api_key=given.api_key,
        served_model_name=given.served_model_name or Path(os.path.abspath(options.model)).name,
        max_body_bytes=given.max_body_bytes,
        max_n=given.max_n,
        shutdown_timeout=given.shutdown_timeout,
    )
    listener = listen(config)  # before the model is loaded, which takes long
    with listener, HttpProcess(listener) as http:
        with redirect_stdout(sys.stderr), Progress() as progress:
            llm, plain_step_seconds = _load(options, given, progress)
        config = replace(config, plain_step_seconds=plain_step_seconds)
        console = make_console(stderr=True)
        if config.api_key is None and not config.is_loopback:
            console.print("No API key is asked for: anyone who reaches this address can use it.")

        def on_start() -> None:
            console.print(f"Serving {config.served_model_name} at {url}")

        url = url_of(listener)
        listener.close()  # the process of HTTP has it
        try:
            serve(llm, config, http, given.max_num_requests_in_queue, on_start)
        except EngineError as error:
            show_error(str(error))
            return EXIT_FAILED
    return 0


def _require_extra() -> None:
    """Raises ConfigError where the extra `serve` is not installed."""
    try:
        import fastapi
        import uvicorn

        assert fastapi and uvicorn
    except ImportError as error:
        raise ConfigError(
            f"trtspec serve needs {error.name}: pip install 'trtspec[serve]'."
        ) from error


def _load(
    options: EngineOptions, given: ServeOptions, progress: Progress
) -> tuple[LLM, dict[int, float]]:
    """Returns the engine, warmed up, and how long a step without drafts takes by batch size."""
    from ..report.step_times import step_seconds_without_drafts
    from ..serving.warm_up import warm_up

    size = given.max_batch_size
    if size is None:
        size = default_batch_size(options.device)
    at_once = options.prefill_batch_size or "1"  # someone waits for each first token
    options = replace(options, max_batch_size=size, prefill_batch_size=at_once)
    llm = load_llm(options, progress, max_seq_len=given.max_seq_len)
    if not given.no_warm_up:
        warm_up(llm, progress)
    progress("timing a step without drafts")
    seconds = step_seconds_without_drafts(llm)
    return llm, {} if seconds is None else {1: seconds}
