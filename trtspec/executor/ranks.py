"""Rank 0 of several: it tells the others what it launches, and they launch it too (`follower.py`).

    rank 0    PyExecutor ─► LeadingRunner ─┬─ tell ─► Follower ─► StepRunner    rank 1, 2, …
                                           └────────────────────► StepRunner    (itself)

Scheduling, the ledger of KV blocks and the reading of results are rank 0's alone. A message about a
step says who is in it, how far each request is, and which block tables changed. So all ranks run
the same batch through the same graph.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

from ..acceptance.forced import FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR
from ..config import ExecutorConfig
from ..distributed.link import EngineLink
from ..distributed.world import World
from ..errors import RankError
from ..workers.protocols import EndedText
from .device_step import PartialLaunch
from .forward_step import StepOutputs
from .linked_cache import CopiedTables, LinkedKVCache
from .request import Request, StepPlan
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
            self.drop_memory()
        self.world.close_if_idle()


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
