"""Starts the ranks of a world, or finds them started."""

from __future__ import annotations

import atexit
import os
import subprocess
import threading

import torch
import torch.distributed as dist

from ..errors import ConfigError
from ..utils import module_command
from .peer import forced_way
from .world import START_TIMEOUT, Launched, World, leave_groups, step_timeout

FOLLOWER = "trtspec.executor.follower"

_worlds: list[World] = []
opening = threading.RLock()
"""Held while a thread opens a world and builds an engine on it: another one waits its turn."""


class RankProcess(subprocess.Popen[bytes]):
    """A rank that is a process of this machine."""

    def ending(self) -> str:
        return f"with exit code {self.poll()}."


def open_world(size: int, backend: str, device: torch.device) -> World:
    """Returns the world of `size` ranks, starting the others where that is ours to do.

    One process has one world at a time; engines of the same size share it.

    Args:
        backend: "mp" starts them as processes of this machine, "ray" as actors of a cluster,
            "torchrun" finds them started.

    Raises:
        ConfigError: there are too few GPUs, or another world has engines.
        RankError: a rank did not start.
    """
    _worlds[:] = [world for world in _worlds if not world.is_closed]
    if _worlds:
        world = _worlds[0]
        asked = size, device.type, backend
        if world.failure is None and (world.size, world.device.type, world.backend) == asked:
            return world
        if world.failure is None and world.num_engines:
            raise ConfigError(
                f"tensor_parallel_size={size}, backend={backend!r}: this process has an engine "
                f"over {world.size} ranks of {world.backend!r}. Shut it down first, or use the "
                "same."
            )
        world.close()
        if backend == "torchrun":
            raise ConfigError(
                "The ranks that torchrun started have ended, and only torchrun can start others. "
                "Start the script again."
            )
    step_timeout(), forced_way()  # wrong variables are refused before ranks start
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is initialised already, which the ranks of an engine need to do "
            "themselves. Make the engine before your own process group."
        )
    if backend == "torchrun":
        return join_world(device)
    if backend == "ray":
        from .ray_ranks import start_ray_ranks

        return _register(start_ray_ranks(size, device))
    return _register(_start_followers(size, device))


def join_world(device: torch.device) -> World:
    """Returns the world that this process was started for, by torchrun's variables."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank))
        torch.cuda.set_device(local)
        device = torch.device("cuda", local)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    uses_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        host, port, size, is_master=rank == 0 and not uses_agent, timeout=START_TIMEOUT
    )
    return _register(World(dist.PrefixStore("trtspec", store), rank, size, device))


def _start_followers(size: int, device: torch.device) -> World:
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if size > count:
            raise ConfigError(
                f"tensor_parallel_size={size}, but this machine has {count} GPUs. Use as many at "
                "most, or several machines with torchrun or backend='ray'."
            )
        device = torch.device("cuda", torch.cuda.current_device())
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    command, environment = module_command(FOLLOWER, device.type)
    environment |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = str(store.port)
    followers = []
    for rank in range(1, size):
        local = 0 if device.index is None else (device.index + rank) % torch.cuda.device_count()
        own = {"RANK": str(rank), "LOCAL_RANK": str(local), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        followers.append(RankProcess(command, env=environment | own, stdin=subprocess.DEVNULL))
    try:
        prefixed = dist.PrefixStore("trtspec", store)
        return World(prefixed, 0, size, device, Launched("mp", followers))
    except BaseException:
        for follower in followers:
            follower.kill()
        leave_groups()
        raise


def _register(world: World) -> World:
    _worlds.append(world)
    if world.is_leader:
        atexit.register(world.close)
    return world
