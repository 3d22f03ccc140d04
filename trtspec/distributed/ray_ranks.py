"""Ranks that Ray places over the hosts of a cluster, in one placement group.

    rank 0     the process of the caller; an actor holds its bundle, and with it its GPU
    rank 1 …   actors, one in each of the other bundles; they serve as followers do

When the caller's process ends in whatever way, Ray ends its actors.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import ConfigError, RankError
from .start import FOLLOWER, join_world
from .world import START_TIMEOUT, Launched, World

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT = START_TIMEOUT.total_seconds()
"""Seconds that Ray may take to find the bundles; a cluster that grows by itself needs some."""
SOON = 10.0  # seconds after which a wait is mentioned
OUR_VARIABLES = "TRTSPEC_"
"""Prefix of the variables that actors take over; those of NCCL and gloo are each host's own."""
_ON_OUR_NODE = 0.001  # of the resource that each node has one of
_POLL = 0.05
_LONGEST_REASON = 600


def start_ray_ranks(size: int, device: torch.device) -> World:
    """Returns the world of `size` ranks, of which this process is the first.

    Raises:
        ConfigError: Ray is not installed, or its cluster has no room.
        RankError: an actor did not start, and why.
    """
    places = _Places(*_ray())
    try:
        places.reserve(size, device.type)
        spots = places.fill(size, device.type)
        if device.type == "cuda":
            device = torch.device("cuda", _gpu_of_this_process(spots[0].gpu_ids))
            torch.cuda.set_device(device)
        address = places.ray.util.get_node_ip_address()
        # The store listens on all interfaces, and clients of other hosts find it by this address.
        store = dist.TCPStore(address, 0, size, is_master=True, wait_for_workers=False)
        environment = {k: v for k, v in os.environ.items() if k.startswith(OUR_VARIABLES)}
        environment |= {"WORLD_SIZE": str(size), "MASTER_ADDR": address}
        environment["MASTER_PORT"] = str(store.port)
        followers = [
            RayFollower(
                places.ray,
                actor,
                spots[rank],
                actor.serve.remote(
                    environment | {"RANK": str(rank)}, device.type, torch.get_num_threads()
                ),
            )
            for rank, actor in enumerate(places.actors)
            if rank > 0
        ]
        launched = Launched("ray", followers, release=places.release)
        return World(dist.PrefixStore("trtspec", store), 0, size, device, launched)
    except BaseException:
        places.release()
        raise


class Spot(NamedTuple):
    """Where an actor runs."""

    host: str
    pid: int
    gpu_ids: Sequence[int | str]


class RankActor:
    """Runs in the bundle of one rank: that of rank 0 only holds it, the others serve."""

    def spot(self) -> Spot:
        """Returns where this is."""
        import ray

        return Spot(ray.util.get_node_ip_address(), os.getpid(), ray.get_gpu_ids())

    def serve(self, environment: dict[str, str], device: str, num_threads: int) -> None:
        """Joins the world and follows rank 0 to its end. An error is Ray's to report."""
        os.environ.update(environment)
        if device == "cuda":
            # 0, as Ray hides all GPUs but its own; it may be told not to.
            gpu_ids = self.spot().gpu_ids
            os.environ["LOCAL_RANK"] = str(_gpu_of_this_process(gpu_ids))
        torch.set_num_threads(num_threads)  # sums over threads round alike on all ranks
        importlib.import_module(FOLLOWER).serve(join_world(torch.device(device)))


class RayFollower:
    """A rank that is an actor; what `RankHandle` asks for."""

    def __init__(self, ray: Any, actor: Any, spot: Spot, served: Any):
        self.actor, self.spot = actor, spot
        self._ray, self._served = ray, served  # the reference is held: Ray forgets results without
        self._end: Future[None] = served.future()  # asks nothing of Ray, which may be shut down

    @property
    def pid(self) -> int:
        return self.spot.pid

    def poll(self) -> int | None:
        """Returns 0 once it has served to the end, 1 if it failed or is dead, else None."""
        if self._end.done():
            return 0 if self._end.exception() is None else 1
        return None if self._ray.is_initialized() else 1

    def ending(self) -> str:
        """Says how it ended, by Ray's words where it has some."""
        where = f"pid {self.spot.pid} on {self.spot.host}"
        if not self._end.done():
            return f"{where}: Ray was shut down in this process."
        error = self._end.exception()
        return f"{where}: {'it returned.' if error is None else _short(error)}"

    def kill(self) -> None:
        if self._ray.is_initialized():  # else Ray would start anew to obey
            with suppress(Exception):
                self._ray.kill(self.actor)

    def wait(self, timeout: float | None = None) -> int:
        """Returns what `poll` does at the end. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a Ray actor", timeout)
            time.sleep(_POLL)
        return code


@dataclass
class _Places:
    """What the ranks hold of a cluster: a placement group, and an actor in each of its bundles."""

    ray: Any
    is_ours: bool  # Ray was initialised here, not by the caller
    group: Any = None
    actors: list[Any] = field(default_factory=list)

    def reserve(self, size: int, device_type: str) -> None:
        """Waits for a bundle for each rank, the first on the node of this process."""
        here = f"node:{self.ray.util.get_node_ip_address()}"
        if here not in self.ray.cluster_resources():
            raise ConfigError(
                f"backend='ray': this process is on {here[5:]}, which is no node of the Ray "
                f"cluster ({self._nodes()}). Rank 0 is the process that makes the engine: run it "
                "on a node, for example with `ray job submit`."
            )
        bundle: dict[str, float] = {"GPU" if device_type == "cuda" else "CPU": 1}
        bundles = [bundle | {here: _ON_OUR_NODE}, *[dict(bundle) for _ in range(1, size)]]
        self.group = self.ray.util.placement_group(bundles, strategy="PACK")
        if self._is_ready(min(SOON, PLACEMENT_TIMEOUT)):
            return
        logger.warning("%s Still waiting.", self._shortage(size, bundle))
        if not self._is_ready(PLACEMENT_TIMEOUT - SOON):
            raise ConfigError(
                f"{self._shortage(size, bundle)} Use a smaller tensor_parallel_size, or wait "
                f"until they are free; this waited for {PLACEMENT_TIMEOUT:g} s."
            )

    def _is_ready(self, timeout: float) -> bool:
        """Waits; Ray's own `wait` takes whole seconds."""
        ready, _ = self.ray.wait([self.group.ready()], timeout=max(0.0, timeout))
        return bool(ready)

    def _shortage(self, size: int, bundle: dict[str, float]) -> str:
        (kind,) = bundle
        all_of, free = self.ray.cluster_resources(), self.ray.available_resources()
        return (
            f"backend='ray': tensor_parallel_size={size} needs {size} {kind}s, one of them on "
            f"{self.ray.util.get_node_ip_address()}, where rank 0 is. The Ray cluster has "
            f"{all_of.get(kind, 0):g}, of which {free.get(kind, 0):g} are free ({self._nodes()})."
        )

    def _nodes(self) -> str:
        return ", ".join(
            f"{node['NodeManagerAddress']}: {node['Resources'].get('CPU', 0):g} CPUs, "
            f"{node['Resources'].get('GPU', 0):g} GPUs"
            for node in self.ray.nodes()
            if node["Alive"]
        )

    def fill(self, size: int, device_type: str) -> list[Spot]:
        """Starts an actor in each bundle, in the order of ranks, and returns where they are."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = {"num_cpus": 0, "num_gpus": 1} if device_type == "cuda" else {"num_cpus": 1}
        remote = self.ray.remote(RankActor)
        nodes = self.ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        # Neighbours share a host: our own first.
        for bundle in sorted(range(size), key=lambda i: (nodes[i] != nodes[0], nodes[i], i)):
            strategy = PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=bundle
            )
            self.actors.append(remote.options(**needs, scheduling_strategy=strategy).remote())
        deadline = time.monotonic() + START_TIMEOUT.total_seconds()
        spots, asked = [], [actor.spot.remote() for actor in self.actors]
        for rank, reference in enumerate(asked):
            try:
                spot = self.ray.get(reference, timeout=max(0.1, deadline - time.monotonic()))
            except Exception as error:
                raise RankError(
                    f"Rank {rank} did not start as a Ray actor. Each node needs trtspec in the "
                    f"Python that runs Ray. {_short(error)}"
                ) from error
            logger.debug("Rank %d: %s", rank, spot)
            spots.append(spot)
        return spots

    def release(self) -> None:
        """Ends the actors and gives their bundles back. A Ray of the caller goes on."""
        if not self.ray.is_initialized():
            return
        for actor in self.actors:
            with suppress(Exception):
                self.ray.kill(actor)
        if self.group is not None:
            with suppress(Exception):
                self.ray.util.remove_placement_group(self.group)
        if self.is_ours:
            self.ray.shutdown()


def _ray() -> tuple[Any, bool]:
    """Returns the module, initialised, and whether that was done here.

    The cluster is the one of RAY_ADDRESS, else that which `ray start` made this host a node of,
    else a local one for this process.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "backend='ray' needs Ray, which is not installed: pip install 'trtspec[ray]'."
        ) from error
    if ray.is_initialized():
        return ray, False
    try:
        ray.init(include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        address = os.environ.get("RAY_ADDRESS")
        raise ConfigError(
            f"backend='ray': Ray did not start or connect (RAY_ADDRESS={address}): {_short(error)}"
        ) from error
    total = ray.cluster_resources()
    logger.info(
        "Ray at %s: %d nodes, %g CPUs, %g GPUs.",
        ray.get_runtime_context().gcs_address,
        len(ray.nodes()),
        total.get("CPU", 0),
        total.get("GPU", 0),
    )
    return ray, True


def _gpu_of_this_process(gpu_ids: Sequence[int | str]) -> int:
    """Returns the number under which this process sees the GPU that Ray assigned.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES hides it.
    """
    (gpu,) = map(str, gpu_ids)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return int(gpu)
    names = [name.strip() for name in visible.split(",")]
    if gpu not in names:
        raise ConfigError(
            f"backend='ray': Ray assigned GPU {gpu} to this process, which CUDA_VISIBLE_DEVICES="
            f"{visible!r} hides from it. Unset it, and let Ray choose; in a Ray task or actor, ask "
            "for no GPU."
        )
    return names.index(gpu)


def _short(error: BaseException) -> str:
    """Returns what Ray says of an error, on one line."""
    cause = getattr(error, "cause", None) or error
    text = " ".join(f"{type(cause).__name__}: {cause}".split())
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 2] + " …"
