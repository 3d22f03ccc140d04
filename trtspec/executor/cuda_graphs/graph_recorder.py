"""A step as CUDA graphs: one, or several with the host's part between them.

The host's part belongs to steps with grammars (`metadata/guided.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ...metadata.guided import DraftPoint, Point

HostPart = Callable[[Point], None]


class GraphPart(NamedTuple):
    """A graph, and what the host does after it."""

    graph: torch.cuda.CUDAGraph
    point: Point | None


def launch_parts(parts: list[GraphPart], host_part: HostPart | None) -> Iterator[None]:
    """Launches graphs, with the host's part between them. It yields before the host would wait."""
    for graph, point in parts:
        graph.replay()
        if point is not None and host_part is not None:
            if isinstance(point, DraftPoint):
                yield
            host_part(point)


class GraphRecorder:
    """Captures a function as one graph, or as several where it is cut."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream):
        self._pool, self._stream = pool, stream
        self.parts: list[GraphPart] = []
        self._open: tuple[torch.cuda.CUDAGraph, torch.cuda.graph] | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Captures what is launched inside."""
        self._begin()
        try:
            yield
        except BaseException as error:
            if self._open is not None:
                self._open[1].__exit__(type(error), error, error.__traceback__)
            raise
        self._end(None)

    def cut(self, point: Point) -> None:
        """Ends a graph where the host does its part, and begins the next one."""
        self._end(point)
        self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream)
        capture.__enter__()
        self._open = graph, capture

    def _end(self, point: Point | None) -> None:
        assert self._open is not None
        graph, capture = self._open
        self._open = None
        capture.__exit__(None, None, None)
        self.parts.append(GraphPart(graph, point))
