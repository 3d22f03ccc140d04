"""A rank other than the first: it builds the engines that rank 0 builds, and follows their steps.

    python -m trtspec.executor.follower cpu|cuda

with the variables that torchrun sets. `backend="mp"` starts it; under torchrun and Ray `serve` is
called.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Any, NoReturn

import torch

from ..distributed.world import World, join_world
from ..errors import TrtspecError
from .build import build_follower
from .ranks import Follower, set_variables

logger = logging.getLogger(__name__)


def serve(world: World) -> None:
    """Follows rank 0 until it says "exit" or is gone. Any error ends all ranks."""
    engines: dict[int, Follower] = {}
    while True:
        try:
            engine_id, name, arguments = world.listen()
        except RuntimeError:  # rank 0 is gone
            return
        if name == "exit":
            return
        try:
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
        except TrtspecError as error:  # rank 0 has it too, and raises it
            logger.debug("Rank %d could not build the engine: %s", world.rank, error)
        return
    if engine_id not in engines:
        return
    getattr(engines[engine_id], name)(*arguments)
    if name == "release_memory":
        del engines[engine_id]


def follow(world: World) -> NoReturn:
    """Serves as a rank that is not the first, and ends the process."""
    # Ctrl-C reaches the whole terminal: rank 0 decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(world)
    except BaseException as error:  # noqa: BLE001 - the process ends here
        sys.stderr.write(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # nothing to clean up, and no collective to wait for


if __name__ == "__main__":
    follow(join_world(torch.device(sys.argv[1])))
