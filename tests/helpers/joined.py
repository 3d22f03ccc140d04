"""Prompts and generations in one captured pass, wherever both are there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trtspec import LLM
from trtspec.executor.cuda_graphs.graph_key import GraphKey
from trtspec.executor.cuda_graphs.graphs import CudaGraphs
from trtspec.executor.cuda_graphs.joined_passes import JoinedPasses


def join_always(patch: pytest.MonkeyPatch) -> None:
    """Captures every such pass at once, whatever two passes or its padding cost."""

    def pays(self: CudaGraphs, key: GraphKey, seconds: float) -> bool:
        return key.num_beside > 0

    patch.setattr(CudaGraphs, "_add_cost", pays)
    patch.setattr(JoinedPasses, "seconds_saved", lambda *_: 1.0)


def joined_sizes(llm: LLM) -> Sequence[int]:
    """Returns of each such graph how many generations it has room for."""
    graphs = llm.executor.runner.graphs
    assert graphs is not None
    return [key.num_beside for key in graphs._graphs if key.num_beside]
