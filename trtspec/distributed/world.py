"""`World`: the ranks of an engine, one process each, and the channel on which rank 0 leads them.

    rank 0     the process of the caller: `LLM`, scheduler, results
    rank 1 …   followers: they receive what rank 0 does (`tell`, `listen`) and do the same

All ranks live and die together. A follower that fails says why in the store that they share. A
thread of rank 0 watches the followers and that store; it ends all ranks with the first error. A
thread of each follower watches rank 0.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..errors import ConfigError, RankError, described
from .background import in_background, keep_threads_ready
from .comm import Communicator, GroupCommunicator
from .interrupts import interrupts_wait
from .peer import gpu_communicator

logger = logging.getLogger(__name__)

TIMEOUT_ENV_VAR = "TRTSPEC_RANK_TIMEOUT"
DEFAULT_TIMEOUT = 600.0  # seconds that a step may take, graph captures and kernel builds included
START_TIMEOUT = timedelta(minutes=5)
FOREVER = timedelta(days=365)  # followers wait for the next message, however long no request comes
GRACE = 5.0  # seconds until a rank that does not return by itself is ended
_POLL = 0.1
_INLINE = 4096  # bytes of a message that are sent with its length


class RankHandle(Protocol):
    """A rank that this process started, as its watch sees it."""

    def poll(self) -> int | None:
        """Returns its exit code; None while it runs."""

    def ending(self) -> str:
        """Says how it ended, once it did."""

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Returns its exit code when it ends. Raises subprocess.TimeoutExpired."""


@dataclass(frozen=True)
class Launched:
    """The ranks that this process started.

    Args:
        release: gives back what they run on, which others may want; such a world ends with its last
            engine. None keeps it for the next engine.
    """

    backend: str = "torchrun"  # which starts none from here
    followers: Sequence[RankHandle] = ()
    release: Callable[[], None] | None = None


NOT_FROM_HERE = Launched()


class World:
    """The ranks, seen from one of them."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        launched: Launched = NOT_FROM_HERE,
    ):
        self.rank, self.size, self.device = rank, size, device
        self.backend, self._release = launched.backend, launched.release
        self.followers = list(launched.followers)
        self.failure: str | None = None
        self.shared_error: BaseException | None = None
        """The last error of a build that all ranks know of, and outlive."""
        self.num_engines = 0
        self.runners: weakref.WeakSet[Any] = weakref.WeakSet()  # whose graphs hold NCCL's group
        self.dropped: deque[int] = deque()  # engines without a holder
        self._store, self._lock = store, threading.RLock()
        self._busy: list[float] = []  # since when calls of this rank wait for others
        self.is_closed = False
        self.timeout = step_timeout()
        self._meet()
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        # Ours is to end first, for it says why.
        limit = max(START_TIMEOUT, timedelta(seconds=2 * self.timeout))
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=limit, **options
        )
        self.control = dist.new_group(backend="gloo", timeout=FOREVER)
        self.comm: Communicator = GroupCommunicator(dist.group.WORLD)
        if device.type == "cuda":
            self.comm = gpu_communicator(dist.group.WORLD, device, self.all_of)
        self.num_messages = 0
        keep_threads_ready()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="trtspec-ranks")
        self._watcher.start()

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def _meet(self) -> None:
        """Waits for the followers that this rank started: one that ends now says why.

        Raises:
            RankError: it ended, or did not come.
        """
        joined = self._store.add("joined", int(not self.is_leader))
        deadline = time.monotonic() + START_TIMEOUT.total_seconds()
        while joined < len(self.followers):
            for rank, follower in enumerate(self.followers, start=1):
                if follower.poll() is not None:
                    raise RankError(f"Rank {rank} is gone, {follower.ending()}")
            if time.monotonic() > deadline:
                raise RankError(
                    f"{len(self.followers) - joined} ranks did not join in {START_TIMEOUT}. Can "
                    "their hosts reach this one, at any port?"
                )
            time.sleep(_POLL)
            joined = self._store.add("joined", 0)

    # -- the channel ---------------------------------------------------------------------------
    def tell(self, *message: Any) -> None:
        """Sends a message from rank 0 to all others. Raises RankError if one is gone."""
        with self._lock, interrupts_wait(), self._timed():  # half a message would be the end
            self.check()
            while self.dropped:
                self._send((self.dropped.popleft(), "release_memory", ()))
            self._send(message)

    def _send(self, message: Any) -> None:
        payload = pickle.dumps(message)
        first = torch.zeros(_INLINE, dtype=torch.uint8)
        head = len(payload).to_bytes(8, "little") + payload[: _INLINE - 8]
        first[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        try:
            dist.broadcast(first, 0, group=self.control)
            if len(payload) > _INLINE - 8:
                rest = torch.frombuffer(bytearray(payload[_INLINE - 8 :]), dtype=torch.uint8)
                dist.broadcast(rest, 0, group=self.control)
        except RuntimeError as error:
            self.wait_for_reason(error)
        self.num_messages += 1

    def listen(self) -> bytes:
        """Returns the next message of rank 0, pickled. Raises RuntimeError if rank 0 is gone."""
        first = torch.zeros(_INLINE, dtype=torch.uint8)
        dist.broadcast(first, 0, group=self.control)
        head = first.numpy().tobytes()
        size = int.from_bytes(head[:8], "little")
        payload = head[8 : 8 + size]
        if size > len(payload):
            rest = torch.zeros(size - len(payload), dtype=torch.uint8)
            dist.broadcast(rest, 0, group=self.control)
            payload += rest.numpy().tobytes()
        self.num_messages += 1
        return payload

    def all_of(self, value: Any) -> list[Any]:
        """Returns every rank's value, in the order of ranks; host objects, outside of steps."""
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.control)
        except RuntimeError as error:
            self.wait_for_reason(error)
        return values

    # -- together ------------------------------------------------------------------------------
    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs what all ranks do at once. An interrupt waits for its end; an error ends them all.

        Raises:
            RankError: this rank or another failed.
        """
        # Threads take turns: all ranks must launch in one order.
        with self._lock, interrupts_wait(), self._timed():
            self.check()
            try:
                yield
            except RankError:
                raise
            except BaseException as error:  # noqa: BLE001 - raised again, as RankError
                if self.failure is None and not _lost_a_peer(error):
                    self.fail(_text_of(error))
                self.wait_for_reason(error)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lets no other thread launch or tell anything inside: it waits, without a limit."""
        with self._lock:
            yield

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Counts as waiting for the other ranks inside."""
        started = time.monotonic()
        self._busy.append(started)
        try:
            yield
        finally:
            self._busy.remove(started)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Waits for the device inside; a failure of a rank ends the wait.

        Raises:
            RankError: a rank failed meanwhile.
        """
        with self._timed():
            try:
                yield
            except RuntimeError as error:
                if self.failure is not None or _lost_a_peer(error):
                    self.wait_for_reason(error)
                raise
        self.check()

    def check(self) -> None:
        """Raises RankError once a rank has failed or the world is closed."""
        if self.failure is not None:
            raise RankError(self.failure)
        if self.is_closed:
            raise RankError("The ranks of this engine are shut down: make a new one.")

    def wait_for_reason(self, error: BaseException) -> None:
        """Raises RankError with the first rank's reason, once it is known; else with `error`, which
        then ends all ranks."""
        deadline = time.monotonic() + GRACE
        while self.failure is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        if self.failure is None:
            self.fail(_text_of(error))
        raise RankError(self.failure or f"Rank {self.rank}: {_text_of(error)}") from error

    def fail(self, reason: str) -> None:
        """Says that this rank failed; the first to say so is shown. All ranks end."""
        first = self._say(f"Rank {self.rank} failed: {reason}")
        if self.is_leader:
            self._end(first)

    def fail_by(self, error: BaseException) -> None:
        """Says that this rank failed by `error`. If a rank is gone, that one's end is the reason,
        which rank 0 has time to see first."""
        if _lost_a_peer(error):
            time.sleep(GRACE / 2)
        self.fail(described(error))

    def _say(self, reason: str) -> str:
        try:
            return self._store.compare_set("failure", "", reason).decode()
        except (RuntimeError, OSError):
            return reason

    # -- watching ------------------------------------------------------------------------------
    def _watch(self) -> None:
        if self.is_leader:
            self._watch_followers()
            return
        parent, polls = os.getppid(), 0
        while not self.is_closed:
            time.sleep(_POLL)
            polls += 1
            # Perhaps inside a collective, which would never end.
            if os.getppid() != parent or (polls % 10 == 0 and self._said()):
                time.sleep(GRACE)  # to say more, if it can
                os._exit(1)

    def _watch_followers(self) -> None:
        polls = 0
        while not self.is_closed and self.failure is None:
            time.sleep(_POLL)
            polls += 1
            gone = next((f for f in self.followers if f.poll() is not None), None)
            if gone is not None and not self.is_closed:
                rank = self.followers.index(gone) + 1
                self._end(self._say(f"Rank {rank} is gone, {gone.ending()}"))
            elif polls % 10 == 0 and (said := self._said()):
                self._end(said)
            if time.monotonic() - min(self._busy, default=math.inf) > self.timeout:
                self._end(
                    f"The ranks did not finish a step in {self.timeout:g} s; a collective may wait "
                    f"for a rank that does something else. Set {TIMEOUT_ENV_VAR} if steps may take "
                    "longer, or TRTSPEC_CHECK_RANKS=1 to find where they part."
                )

    def _said(self) -> str:
        try:
            return self._store.get("failure").decode() if self._store.check(["failure"]) else ""
        except (RuntimeError, OSError):
            return ""

    def _end(self, reason: str) -> None:
        """Ends all ranks. The call that rank 0 is in raises RankError; if it cannot, it exits."""
        if self.failure is not None:
            return
        self.failure = reason
        logger.error("%s", reason)
        for follower in self.followers:
            with suppress(OSError):
                follower.kill()
        watch = threading.Timer(GRACE + 3, self._exit_if_stuck)
        watch.daemon = True
        watch.start()
        if self.device.type == "cuda":  # frees a host that waits for NCCL on the device
            in_background(dist.distributed_c10d._abort_process_group)

    def _exit_if_stuck(self) -> None:
        """Ends this process if it still waits for the device: peers that are gone never answer."""
        if self._busy:
            sys.stderr.write(f"error: {self.failure}\n")
            sys.stderr.flush()
            os._exit(1)

    def close(self) -> None:
        """Ends the followers, and waits for them. A second call does nothing."""
        if self.is_closed:
            return
        if self.is_leader and self.failure is None:
            # In the background: a follower that does not listen would hold it up for good.
            in_background(partial(self.tell, None, "exit", ())).wait(GRACE)
        self.is_closed = True
        deadline = time.monotonic() + GRACE
        for follower in self.followers:
            with suppress(subprocess.TimeoutExpired):
                follower.wait(max(0.1, deadline - time.monotonic()))
            if follower.poll() is None:
                follower.kill()
                follower.wait()
        for runner in list(self.runners):
            runner.drop_graphs()
        # A thread that is in the store's code when Python ends would abort the process.
        if threading.current_thread() is not self._watcher:
            self._watcher.join(GRACE)
        leave_groups()
        if self._release is not None:
            self._release()

    def close_if_idle(self) -> None:
        """Ends a world without engines, if others may want what it runs on."""
        if self._release is not None and not self.num_engines:
            self.close()


def leave_groups() -> None:
    """Leaves torch's groups. NCCL would wait there for graphs that are still held, so with GPUs it
    is given some seconds."""
    if not dist.is_initialized():
        return
    gc.collect()
    if torch.cuda.is_available():
        in_background(dist.destroy_process_group).wait(GRACE)
    else:
        with suppress(Exception):
            dist.destroy_process_group()


def step_timeout() -> float:
    """Returns the seconds that a step may take. Raises ConfigError if the variable is no number."""
    text = os.environ.get(TIMEOUT_ENV_VAR)
    try:
        value = DEFAULT_TIMEOUT if text is None else float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise ConfigError(f"{TIMEOUT_ENV_VAR}={text!r}: give a number of seconds above 0.")
    return value


def _lost_a_peer(error: BaseException) -> bool:
    """Whether a collective broke because another rank is gone, which will say more."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        part in text for part in ("gloo", "Connection", "peer", "NCCL", "ncclComm", "aborted")
    )


def _text_of(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({os.path.basename(last[0].filename)}:{last[0].lineno})" if last else ""
    return f"{described(error)}{where}"
