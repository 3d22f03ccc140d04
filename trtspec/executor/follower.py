"""A rank other than the first: it builds the engines that rank 0 builds, and follows their steps.

    python -m trtspec.executor.follower cpu|cuda

with the variables that torchrun sets. `backend="mp"` starts it; under torchrun and Ray `serve` is
called.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ..config import EngineConfig
from ..distributed.link import EngineLink
from ..distributed.start import join_world
from ..distributed.world import World
from ..errors import described
from ..state.kv_cache import BlockCopy
from ..workers.protocols import EndedText
from .build import build_runner
from .linked_cache import LinkedKVCache
from .ranks import CHECK_ENV_VAR, StepMessage, compare_outputs, set_variables
from .request import ContextChunk, Request, ScheduledBatch, StepPlan
from .runner import StepRunner

logger = logging.getLogger(__name__)


class Follower:
    """What another rank has of an engine: a runner, and copies of the requests in its slots."""

    def __init__(self, runner: StepRunner, world: World):
        assert isinstance(runner.kv_cache, LinkedKVCache)
        self.runner, self.world, self.kv_cache = runner, world, runner.kv_cache
        self._requests: dict[int, Request] = {}  # by slot
        self._checks = os.environ.get(CHECK_ENV_VAR) == "1"

    def admit(self, request: Request) -> None:
        before = self._requests.get(request.slot)
        self._requests[request.slot] = request
        # A request that was preempted may have come back to another slot.
        if before is not None and not any(
            before.request_id == other.request_id for other in self._requests.values()
        ):
            self.kv_cache.forget(before.request_id)
        self.runner.admit(request)

    def remember(self, texts: list[EndedText]) -> None:
        self.runner.remember(texts)

    def set_drafts(self, drafts: dict[int, list[int]]) -> None:
        self.runner.set_drafts(drafts)

    def run(self, message: StepMessage) -> None:
        for request_id, copy in message.tables.items():
            self.kv_cache.copy_tables(request_id, copy)
        outputs = self.runner.run(self._plan(message)).finish()
        if self._checks:
            compare_outputs(self.world, outputs)

    def _plan(self, message: StepMessage) -> StepPlan:
        contexts = [
            ContextChunk(self._requests[slot], start, end) for slot, start, end in message.contexts
        ]
        generations = []
        for slot, past_upper in message.generations:
            self._requests[slot].past_upper = past_upper
            generations.append(self._requests[slot])
        batch = ScheduledBatch(contexts, generations)
        return StepPlan(
            batch, message.num_drafts, message.draft_len, reads_missed=message.reads_missed
        )

    def zero(self, group: int, blocks: list[int], owner: int | None) -> None:
        self.kv_cache.zero_own(group, blocks, owner)

    def copy(self, group: int, copies: Sequence[BlockCopy], owner: int | None) -> None:
        self.kv_cache.copy_own(group, copies, owner)

    def copy_state(self, source: int, target: int) -> None:
        self.kv_cache.copy_state(source, target)

    def start_over(self) -> None:
        self.runner.start_over()

    def release_memory(self) -> None:
        self.runner.release_memory()


def build_follower(engine: EngineConfig, world: World) -> Follower:
    """Builds what a rank other than the first has of an engine.

    Raises:
        TrtspecError: it cannot. `world.shared_error` says whether all ranks know.
    """
    runner, _, _ = build_runner(engine, world.device, EngineLink(world, -1))
    return Follower(runner, world)


def serve(world: World) -> None:
    """Follows rank 0 until it says "exit" or is gone. Any error ends all ranks."""
    engines: dict[int, Follower] = {}
    while True:
        try:
            message = world.listen()
        except RuntimeError:  # rank 0 is gone
            return
        try:
            engine_id, name, arguments = pickle.loads(message)
            if name == "exit":
                return
            _obey(world, engines, engine_id, name, arguments)
        except BaseException as error:
            world.fail_by(error)
            raise


def _obey(
    world: World, engines: dict[int, Follower], engine_id: int, name: str, arguments: Any
) -> None:
    if name == "build":
        engine, variables = arguments
        set_variables(variables)
        try:
            engines[engine_id] = build_follower(engine, world)
        except Exception as error:
            if world.shared_error is not error:
                raise
            logger.debug("Rank %d could not build the engine: %s", world.rank, error)
            free_memory(world.device)
        return
    if engine_id not in engines:
        return
    getattr(engines[engine_id], name)(*arguments)
    if name == "release_memory":
        del engines[engine_id]
        free_memory(world.device)


def free_memory(device: torch.device) -> None:
    """Gives the device back what nothing holds any more: another engine measures what is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def follow(world: World) -> NoReturn:
    """Serves as a rank that is not the first, and ends the process."""
    # Ctrl-C reaches the whole terminal: rank 0 decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(world)
    except BaseException as error:  # noqa: BLE001 - the process ends here
        sys.stderr.write(f"rank {os.environ['RANK']}: {described(error)}\n")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # nothing to clean up, and no collective to wait for


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a job's limit sends it to all processes
    follow(join_world(torch.device(sys.argv[1])))
