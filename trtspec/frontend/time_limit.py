"""`TimeLimit`: runs code of a model directory, a chat template, in threads that it can stop."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from ..errors import EngineError, RequestError

T = TypeVar("T")
MAX_THREADS = 8
POLL_SECONDS = 0.02
"""Between looks for a free thread. Those that wait may be of several event loops."""


class _TimeIsUp(BaseException):
    """Raised inside the thread, so that a template cannot catch it."""


class TimeLimit:
    """Runs functions in threads, each for a limited time.

    A thread that takes longer is stopped between two Python operations. A single operation that
    takes for ever, in C, cannot be stopped: its caller gets the error all the same, and the thread
    counts as taken until it returns.

    Args:
        what: names the functions in messages.
        seconds: for one function.
    """

    def __init__(self, what: str, seconds: float):
        self.what, self.seconds = what, seconds
        self._free = threading.Semaphore(MAX_THREADS)

    async def run(self, function: Callable[[], T]) -> T:
        """Returns what the function returns; raises what it raises.

        Raises:
            RequestError: it took too long.
            EngineError: all threads are taken by others that do not end.
        """
        loop = asyncio.get_running_loop()
        await self._take_thread(loop.time() + self.seconds)
        future: asyncio.Future[Any] = loop.create_future()
        lock, is_over = threading.Lock(), [False]

        def finish(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def work() -> None:
            result: Any = None
            error: BaseException | None = None
            try:
                try:
                    result = function()
                finally:
                    with lock:  # from here on nothing is raised in this thread
                        is_over[0] = True
            except _TimeIsUp:
                error = RequestError(f"{self.what} took too long.")
            except Exception as raised:  # noqa: BLE001 - it is the caller's
                error = raised
            self._free.release()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish, result, error)

        thread = threading.Thread(target=work, name="trtspec-template", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._free.release()
            raise
        try:
            return await asyncio.wait_for(asyncio.shield(future), self.seconds)
        except TimeoutError:
            raise RequestError(
                f"{self.what} took more than {self.seconds:g} s: make the request smaller."
            ) from None
        finally:
            if not future.done():  # too late, or the caller is gone
                future.cancel()
                with lock:
                    if not is_over[0] and thread.ident is not None:
                        _raise_in(thread.ident)

    async def _take_thread(self, until: float) -> None:
        """Waits for a free thread, up to a time of the event loop."""
        while not self._free.acquire(blocking=False):
            if asyncio.get_running_loop().time() >= until:
                raise EngineError(f"{self.what}: all threads for it are taken.")
            await asyncio.sleep(POLL_SECONDS)


def _raise_in(ident: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_TimeIsUp))
