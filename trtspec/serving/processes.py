"""`trtspec serve` is two processes: this one has the engine, and starts that of HTTP.

    this process      main thread: messages, signals      engine's thread: steps      (ranks)
    HTTP's process    event loop: clients, text           threads: templates, tokenizer

Neither takes Python's lock from the other. They end together: each sees the socket close.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Self

from prometheus_client import ProcessCollector

from ..async_llm import facts_of
from ..errors import EngineError
from ..frontend.async_front import STOP_SECONDS
from ..llm import LLM
from ..utils import module_command
from .channel import Settings
from .config import ServerConfig
from .engine_host import EngineHost
from .observe import EngineObservation

logger = logging.getLogger(__name__)
SWITCH_SECONDS = 0.0005
"""How long the engine's thread waits for the main thread: Python's 5 ms are several GPU steps."""
GRACE_SECONDS = 10.0
"""If the process of HTTP has not ended so long after the requests' time, it is killed."""


class HttpProcess:
    """The process of HTTP, as the engine's sees it. It is killed with the block.

    It starts at once, so that it is there when a model is loaded.

    Args:
        listener: where it is to listen.
    """

    def __init__(self, listener: socket.socket):
        self.connection, other_end = socket.socketpair()
        numbers = other_end.fileno(), listener.fileno()
        module = f"{__package__}.http_process"
        command, environment = module_command(module, *map(str, numbers))
        with other_end:
            self._process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which tells it
            )
        self.pid = self._process.pid

    def wait(self) -> int:
        """Returns the exit code, after the socket was closed."""
        try:
            return self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # it is closed
            self.connection.shutdown(socket.SHUT_RDWR)  # also where a thread reads
        self.connection.close()
        self.kill()
        self._process.wait()


class Ending:
    """What signals do: the first lets requests finish, the second ends both processes at once."""

    def __init__(self, host: EngineHost, http: HttpProcess, timeout: float):
        self._host, self._http, self._timeout = host, http, timeout
        self.is_asked = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            self._http.kill()
            os._exit(128 + number)
        self.is_asked = True
        # In threads: this one may hold any lock.
        threading.Thread(target=self._host.stop, daemon=True).start()
        timer = threading.Timer(self._timeout + GRACE_SECONDS, self._http.kill)
        timer.daemon = True
        timer.start()


def serve(
    llm: LLM,
    config: ServerConfig,
    http: HttpProcess,
    max_num_requests_in_queue: int,
    on_start: Callable[[], None],
) -> None:
    """Serves until a signal comes. In the main thread.

    Args:
        on_start: called once requests are taken.

    Raises:
        EngineError: the process of HTTP ended by itself.
    """
    name = config.served_model_name or llm.model_dir.name
    observation = EngineObservation(llm, name, config.plain_step_seconds)
    # Under names of its own; `process_…` is the engine's process.
    ProcessCollector("trtspec_http", lambda: http.pid, registry=observation.registry)
    host = EngineHost(llm, observation, http.connection, on_start)
    # The first message, so before a signal may send another.
    host.send(Settings(config, facts_of(llm), max_num_requests_in_queue))
    ending = Ending(host, http, config.shutdown_timeout)
    numbers = signal.SIGINT, signal.SIGTERM
    before = sys.getswitchinterval(), [signal.signal(n, ending.on_signal) for n in numbers]
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # a collection of all that a model is made of takes as long as 100 steps
    try:
        host.run()
        code = http.wait()
        if not host.close(STOP_SECONDS):
            logger.error("A step of the engine does not end.")
            os._exit(1)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before[0])
        for number, handler in zip(numbers, before[1], strict=True):
            signal.signal(number, handler)
    if not ending.is_asked:
        raise EngineError(f"The process of HTTP ended by itself, with exit code {code}.")
