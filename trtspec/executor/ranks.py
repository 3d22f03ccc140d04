"""The runner over several ranks: rank 0 tells the others what it launches, and they launch it too.

    rank 0    PyExecutor ─► LeadingRunner ─┬─ tell ─► Follower ─► StepRunner    rank 1, 2, …
                                           └────────────────────► StepRunner    (itself)

Scheduling, the ledger of KV blocks and the reading of results are rank 0's alone. A message about a
step says who is in it, how far each request is, and which block tables changed. So all ranks run
the same batch through the same graph.
"""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..acceptance.forced import FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR
from ..config import ExecutorConfig
from ..distributed.world import World
from ..errors import RankError
from ..metadata.attention import NULL_BLOCK
from ..state.blocks import BlockPool
from ..state.kv_cache import KVCacheManager
from .forward_step import StepOutputs
from .request import ContextChunk, Request, ScheduledBatch, StepPlan
from .runner import EngineParts, StepRunner

CHECK_ENV_VAR = "TRTSPEC_CHECK_RANKS"
_ENGINE_VARIABLES = CHECK_ENV_VAR, FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR
_ids = itertools.count()


@dataclass(frozen=True)
class EngineLink:
    """One engine of a world, as its ranks speak of it."""

    world: World
    engine_id: int

    @classmethod
    def new(cls, world: World) -> EngineLink:
        return cls(world, next(_ids))

    def tell(self, name: str, *arguments: Any) -> None:
        """Makes the followers' `Follower` of this engine run a method."""
        self.world.tell(self.engine_id, name, arguments)


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


class CopiedTables(NamedTuple):
    """A request's block tables as rank 0 has them."""

    tables: list[list[int]]  # one for each group
    version: int
    owner: int | None  # as `LinkedKVCache.owner_of`


class LinkedKVCache(KVCacheManager):
    """The ledger of rank 0, and its copy on the others. What is done to blocks, all ranks do."""

    def __init__(self, *arguments: Any, link: EngineLink):
        super().__init__(*arguments)
        self.link = link
        self.owner: int | None = None
        """The rank whose blocks are spoken of; None is all."""

    def zero(self, group: int, blocks: list[int]) -> None:
        world = self.link.world
        if world.is_leader and world.failure is None and blocks:
            self.link.tell("zero", group, blocks, self.owner)
        self.zero_own(group, blocks, self.owner)

    def zero_own(self, group: int, blocks: list[int], owner: int | None) -> None:
        """Zeroes blocks of this rank, if they are its own."""
        if owner in (None, self.link.world.rank):
            super().zero(group, blocks)

    def copy_of(self, request_id: int) -> CopiedTables:
        """Returns what the other ranks must know of a request's blocks."""
        version, owner = self.version(request_id), self.owner_of(request_id)
        return CopiedTables(self._tables[request_id], version, owner)

    def copy_tables(self, request_id: int, copy: CopiedTables) -> None:
        """Takes over the tables of rank 0, which alone hands out blocks."""
        self._tables[request_id], self._versions[request_id] = copy.tables, copy.version

    def forget(self, request_id: int) -> None:
        """Drops tables that were copied."""
        self._tables.pop(request_id, None)
        self._versions.pop(request_id, None)


class OwnedKVCache(LinkedKVCache):
    """The same for attention data parallelism: one rank has all of a request's keys and values.

    Each rank has blocks of its own, by the same numbers. To the others a request has null blocks
    alone: they write nothing, and what they attend to is zero. So the ranks' attention adds up to
    the owner's. A request goes to the rank with the most free blocks.
    """

    has_foreign_requests = True

    def __init__(self, *arguments: Any, link: EngineLink):
        super().__init__(*arguments, link=link)
        counts = [pool.num_blocks for pool in self._pools]
        self._pools_of = [[BlockPool(n) for n in counts] for _ in range(link.world.size)]
        self._owners: dict[int, int] = {}

    def owner_of(self, request_id: int) -> int | None:
        return self._owners.get(request_id)

    def _freest(self) -> int:
        free = [min(pool.num_free for pool in pools) for pools in self._pools_of]
        return free.index(max(free))

    def _turn_to(self, owner: int) -> None:
        self.owner, self._pools = owner, self._pools_of[owner]

    def _turn_to_owner_of(self, request_id: int) -> None:
        owner = self._owners.get(request_id)
        self._turn_to(self._freest() if owner is None else owner)

    @property
    def num_free_blocks(self) -> int:
        self._turn_to(self._freest())
        return super().num_free_blocks

    def has_room(self, request_id: int, num_tokens: int) -> bool:
        self._turn_to_owner_of(request_id)
        return super().has_room(request_id, num_tokens)

    def reserve(self, request_id: int, num_tokens: int) -> bool:
        self._turn_to_owner_of(request_id)
        assert self.owner is not None
        reserved = super().reserve(request_id, num_tokens)
        if reserved:
            self._owners[request_id] = self.owner
        return reserved

    def trim(self, request_id: int, num_tokens: int) -> None:
        self._turn_to_owner_of(request_id)
        super().trim(request_id, num_tokens)

    def release_behind(self, request_id: int, first: int, num_unseen: int = 0) -> None:
        self._turn_to_owner_of(request_id)
        super().release_behind(request_id, first, num_unseen)

    def scrub(self, request_id: int) -> None:
        self._turn_to_owner_of(request_id)
        super().scrub(request_id)

    def free(self, request_id: int) -> None:
        self._turn_to_owner_of(request_id)
        super().free(request_id)
        self._owners.pop(request_id, None)

    def start_over(self) -> None:
        for owner in range(len(self._pools_of)):
            self._turn_to(owner)
            super().start_over()
            self._pools_of[owner] = self._pools
        self._owners = {}

    def copy_tables(self, request_id: int, copy: CopiedTables) -> None:
        super().copy_tables(request_id, copy)
        assert copy.owner is not None
        self._owners[request_id] = copy.owner

    def forget(self, request_id: int) -> None:
        super().forget(request_id)
        self._owners.pop(request_id, None)

    def block_tables(self, request_ids: list[int]) -> list[Tensor]:
        tables = super().block_tables(request_ids)
        rank = self.link.world.rank
        others = [self._owners.get(request_id, rank) != rank for request_id in request_ids]
        return [table.masked_fill(torch.tensor(others)[:, None], NULL_BLOCK) for table in tables]

    def check_integrity(self) -> None:
        everything = self._tables
        for owner in range(len(self._pools_of)):
            self._turn_to(owner)
            self._tables = {r: t for r, t in everything.items() if self._owners[r] == owner}
            try:
                super().check_integrity()
            finally:
                self._tables = everything


@dataclass(frozen=True)
class StepMessage:
    """A `StepPlan` without its requests, which the followers have."""

    contexts: list[tuple[int, int, int]]  # slot, start, end of a part of a prompt
    generations: list[tuple[int, int]]  # slot, past_upper
    num_drafts: int
    draft_len: int
    tables: dict[int, CopiedTables]  # of requests whose tables changed


class LeadingRunner(StepRunner):
    """`StepRunner` of rank 0."""

    def __init__(self, parts: EngineParts, config: ExecutorConfig, link: EngineLink):
        self.link, self.world = link, link.world
        self._sent: dict[int, tuple[int, int]] = {}  # slot -> request and version of its tables
        self._checks = os.environ.get(CHECK_ENV_VAR) == "1"
        self.world.num_engines += 1
        with self.world.together():
            super().__init__(parts, config)
        self.world.runners.add(self)
        self._finalizer = weakref.finalize(self, _drop, link)
        self._finalizer.atexit = False

    def admit(self, request: Request) -> None:
        self._sent.pop(request.slot, None)
        with self.world.together():
            self.link.tell("admit", _without_host_state(request))
            super().admit(request)

    def set_drafts(self, drafts: dict[int, list[int]]) -> None:
        with self.world.together():
            self.link.tell("set_drafts", drafts)
            super().set_drafts(drafts)

    def run(self, plan: StepPlan) -> StepOutputs:
        with self.world.together():
            self.link.tell("run", self._message(plan))
            outputs = super().run(plan)
            if self._checks:
                compare_outputs(self.world, outputs)
            return outputs

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

    def set_drafts(self, drafts: dict[int, list[int]]) -> None:
        self.runner.set_drafts(drafts)

    def run(self, message: StepMessage) -> None:
        for request_id, copy in message.tables.items():
            self.kv_cache.copy_tables(request_id, copy)
        outputs = self.runner.run(self._plan(message))
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
        return StepPlan(batch, message.num_drafts, message.draft_len)

    def zero(self, group: int, blocks: list[int], owner: int | None) -> None:
        self.kv_cache.zero_own(group, blocks, owner)

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
    return replace(request, text=None, steps=None, logprobs=None)


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
