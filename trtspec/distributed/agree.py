"""What all ranks do together while an engine is built: it fails on all of them, or on none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..errors import RankError, described
from .world import World


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
        world.all_of(described(error))
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
            world.fail(described(error))
        raise
