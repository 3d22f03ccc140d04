"""The runner over several ranks: rank 0 tells the others what it launches, and they launch it too.

    rank 0    PyExecutor ─► LeadingRunner ─┬─ tell ─► Follower ─► StepRunner    rank 1, 2, …
                                           └────────────────────► StepRunner    (itself)

Scheduling, the ledger of KV blocks and the reading of results are rank 0's alone. A message about a
step says who is in it, how far each request is, and which block tables changed. So all ranks run
the same batch through the same graph.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..acceptance.forced import FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR
from ..config import ExecutorConfig
from ..distributed.link import EngineLink
from ..distributed.world import World
from ..errors import RankError
from ..state.kv_cache import BlockCopy
from ..workers.protocols import EndedText
from .device_step import PartialLaunch
from .forward_step import StepOutputs
from .linked_cache import CopiedTables, LinkedKVCache
from .request import ContextChunk, Request, ScheduledBatch, StepPlan
from .runner import EngineParts, StepRunner

CHECK_ENV_VAR = "TRTSPEC_CHECK_RANKS"
_ENGINE_VARIABLES = CHECK_ENV_VAR, FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR


def engine_variables() -> dict[str, str | None]:
    """Returns the environment's variables by which a step differs, as rank 0 has them now."""
    return {name: os.environ.get(name) for name in _ENGINE_VARIABLES}


def set_variables(variables: dict[str, str | None]) -> None:
    """Makes this process's environment that of rank 0: else ranks would part."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@dataclass(frozen=True)
class StepMessage:
    """A `StepPlan` without its requests, which the followers have."""

    contexts: list[tuple[int, int, int]]  # slot, start, end of a part of a prompt
    generations: list[tuple[int, int]]  # slot, past_upper
    num_drafts: int
    draft_len: int
    reads_missed: bool
    tables: dict[int, CopiedTables]  # of requests whose tables changed


class LeadingRunner(StepRunner):
    """`StepRunner` of rank 0."""

    def __init__(self, parts: EngineParts, config: ExecutorConfig, link: EngineLink):
        self.link, self.world = link, link.world
        self._sent: dict[int, tuple[int, int]] = {}  # slot -> request and version of its tables
        self._checks = os.environ.get(CHECK_ENV_VAR) == "1"
        with self.world.together():
            super().__init__(parts, config)
        self.world.num_engines += 1
        self.world.runners.add(self)
        self._finalizer = weakref.finalize(self, _drop, link)
        self._finalizer.atexit = False

    def admit(self, request: Request) -> None:
        self._sent.pop(request.slot, None)
        with self.world.together():
            self.link.tell("admit", _without_host_state(request))
            super().admit(request)

    def remember(self, texts: list[EndedText]) -> None:
        with self.world.together():
            self.link.tell("remember", texts)
            super().remember(texts)

    def set_drafts(self, drafts: dict[int, list[int]]) -> None:
        with self.world.together():
            self.link.tell("set_drafts", drafts)
            super().set_drafts(drafts)

    def run(self, plan: StepPlan) -> PartialLaunch:
        with self.world.together():
            self.link.tell("run", self._message(plan))
            launch = super().run(plan)
            outputs = launch.finish()  # the other ranks wait for all of it
            if self._checks:
                compare_outputs(self.world, outputs)
            return launch

    def _message(self, plan: StepPlan) -> StepMessage:
        batch, cache, tables = plan.batch, self.kv_cache, {}
        assert isinstance(cache, LinkedKVCache)
        for request in batch.requests:
            version = cache.version(request.request_id)
            known = request.request_id, version
            if self._sent.get(request.slot) != known:
                self._sent[request.slot] = known
                tables[request.request_id] = cache.copy_of(request.request_id)
        return StepMessage(
            contexts=[(chunk.request.slot, chunk.start, chunk.end) for chunk in batch.contexts],
            generations=[(request.slot, request.past_upper) for request in batch.generations],
            num_drafts=plan.num_drafts,
            draft_len=plan.draft_len,
            reads_missed=plan.reads_missed,
            tables=tables,
        )

    def waiting(self) -> AbstractContextManager[None]:
        return self.world.watched()

    def start_over(self) -> None:
        self._sent.clear()
        if self.world.failure is None:
            with self.world.together():
                self.link.tell("start_over")
                super().start_over()

    def release_memory(self) -> None:
        if self._finalizer.detach() is not None:
            self.world.num_engines -= 1
            with suppress(RankError):
                self.link.tell("release_memory")
        if self.world.failure is None:
            super().release_memory()
        else:  # what is in flight never ends: no call waits for it
            self.step.release_memory()
            vars(self).pop("graphs", None)
        self.world.close_if_idle()


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
        contexts = []
        for slot, start, end in message.contexts:
            request = self._requests[slot]
            contexts.append(ContextChunk(request, request.token_ids[start:end], start, end))
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

    def start_over(self) -> None:
        self.runner.start_over()

    def release_memory(self) -> None:
        self.runner.release_memory()


def compare_outputs(world: World, outputs: StepOutputs) -> None:
    """Raises RankError if the ranks' outputs of a step differ. Waits for the device."""
    rows: Sequence[Any] = [
        tensor.tolist()
        for tensor in (outputs.new_tokens, outputs.new_tokens_lens, outputs.bad_requests)
    ]
    everyone = world.all_of(rows)
    for rank, others in enumerate(everyone):
        if others != everyone[0]:
            raise RankError(
                f"Ranks 0 and {rank} got different tokens in message {world.num_messages}: "
                f"{everyone[0][0]} and {others[0]}, of lengths {everyone[0][1]} and {others[1]}."
            )


def _without_host_state(request: Request) -> Request:
    """Returns a copy with what a runner reads of a request."""
    return replace(
        request, text=None, steps=None, logprobs=None, prompt_logprobs=None, grammar=None,
        prefix=None,
    )  # fmt: skip


def _drop(link: EngineLink) -> None:
    """An engine without a holder is released with the next message; this may run anywhere."""
    link.world.num_engines -= 1
    link.world.dropped.append(link.engine_id)


def minimum_of_ranks(world: World, values: Sequence[int]) -> list[int]:
    """Returns the least of every rank's, entry by entry."""
    return [min(column) for column in zip(*world.all_of(list(values)), strict=True)]


@contextmanager
def all_or_none(world: World) -> Iterator[None]:
    """Runs a stage that has no collectives on every rank; an error of one is an error of all.

    Raises:
        RankError: another rank failed.
    """
    try:
        yield
    except Exception as error:
        world.shared_error = error
        world.all_of(f"{type(error).__name__}: {error}")
        raise
    for rank, text in enumerate(world.all_of(None)):
        if text is not None:
            world.shared_error = RankError(f"Rank {rank}: {text}")
            raise world.shared_error


@contextmanager
def building(world: World) -> Iterator[None]:
    """Builds an engine on rank 0 inside. What not all ranks know of ends them: they would wait.

    That may be an interrupt, or memory that ends on one rank alone.
    """
    try:
        yield
    except BaseException as error:
        if world.shared_error is not error and world.failure is None:
            world.fail(f"{type(error).__name__}: {error}")
        raise


def free_memory(device: torch.device) -> None:
    """Gives the device back what nothing holds any more: another engine measures what is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
