"""A rank other than the first: it builds the engines that rank 0 builds, and follows their steps.

    python -m trtspec.executor.follower cpu|cuda

with the variables that torchrun sets. `backend="mp"` starts it; under torchrun and Ray `serve` is
called.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
from typing import Any, NoReturn

import torch

from ..distributed.start import join_world
from ..distributed.world import World
from .build import build_follower
from .ranks import Follower, free_memory, set_variables

logger = logging.getLogger(__name__)


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
