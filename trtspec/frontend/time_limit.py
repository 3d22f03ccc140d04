"""`TimeLimit`: runs code of a model directory, a chat template, in threads that it can stop."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from ..errors import EngineError, RequestError

T = TypeVar("T")
MAX_THREADS = 8


class _TimeIsUp(BaseException):
    """Raised inside the thread, so that a template cannot catch it."""


class _Waiter(NamedTuple):
    loop: asyncio.AbstractEventLoop
    granted: asyncio.Future[None]


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
        self._gate, self._num_free = threading.Lock(), MAX_THREADS
        self._waiting: deque[_Waiter] = deque()

    async def run(self, function: Callable[[], T]) -> T:
        """Returns what the function returns; raises what it raises.

        Raises:
            RequestError: it took too long.
            EngineError: all threads are taken by others that do not end.
        """
        loop = asyncio.get_running_loop()
        await self._take_thread()
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
            self._give_thread_back()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish, result, error)

        thread = threading.Thread(target=work, name="trtspec-template", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._give_thread_back()
            raise
        try:
            # (Python 3.11's wait_for loses a cancellation that comes with the result.)
            async with asyncio.timeout(self.seconds):
                return await asyncio.shield(future)
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

    async def _take_thread(self) -> None:
        """Waits for a free thread: who came first gets it first."""
        loop = asyncio.get_running_loop()
        with self._gate:
            if self._num_free:
                self._num_free -= 1
                return
            waiter = _Waiter(loop, loop.create_future())
            self._waiting.append(waiter)
        try:
            async with asyncio.timeout(self.seconds):
                await asyncio.shield(waiter.granted)
        except BaseException as error:
            with self._gate, suppress(ValueError):  # it was granted meanwhile
                self._waiting.remove(waiter)
            if waiter.granted.done():
                self._give_thread_back()
            else:
                waiter.granted.cancel()
            if isinstance(error, TimeoutError):
                raise EngineError(f"{self.what}: all threads for it are taken.") from None
            raise

    def _give_thread_back(self) -> None:
        """Grants it to the one that has waited longest. Any thread may call it."""
        while True:
            with self._gate:
                if not self._waiting:
                    self._num_free += 1
                    return
                loop, granted = self._waiting.popleft()
            with suppress(RuntimeError):  # the waiter's loop is closed
                loop.call_soon_threadsafe(self._grant, granted)
                return

    def _grant(self, granted: asyncio.Future[None]) -> None:
        if granted.done():  # it waits no more
            self._give_thread_back()
        else:
            granted.set_result(None)


def _raise_in(ident: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_TimeIsUp))
