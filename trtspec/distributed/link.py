"""`EngineLink`: one engine of a world, and how rank 0 speaks of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from .world import World

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
