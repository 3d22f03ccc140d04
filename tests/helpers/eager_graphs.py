"""`CudaGraphs` without CUDA: its keys, sizes, inputs and rows, with steps that run eagerly.

A replay runs the captured function again, and leaves its results where the capture's are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from trtspec import CudaGraphConfig
from trtspec.executor.cuda_graphs import graphs
from trtspec.executor.cuda_graphs.graph_key import GraphKey
from trtspec.executor.cuda_graphs.graph_recorder import GraphPart
from trtspec.executor.device_step import PartialLaunch
from trtspec.executor.forward_step import StepOutputs
from trtspec.executor.py_executor import PyExecutor


class EagerGraphs(graphs.CudaGraphs):
    """Serves an executor on the CPU from now on."""

    def __init__(self, executor: PyExecutor, config: CudaGraphConfig | None = None):
        runner = executor.runner
        with (
            mock.patch.object(torch.cuda, "graph_pool_handle", lambda: None),
            mock.patch.object(graphs, "capture_stream", lambda device: None),
        ):
            super().__init__(
                runner.step, executor.config, config or CudaGraphConfig(), executor.device
            )
        runner.graphs, self.has_spare_memory = self, True

    def _capture(self, key: GraphKey) -> graphs._Captured:
        self.inputs.clear()
        outputs = self._whole(key)

        @torch.inference_mode()
        def again() -> None:
            found = self._whole(key)
            for name, tensor in _tensors(outputs):
                tensor.copy_(getattr(found, name))

        self.capture_seconds.append(graphs.SECONDS_OF_CAPTURE)
        return graphs._Captured(parts=[GraphPart(_Eager(again), None)], outputs=outputs, rows={})

    def _has_spare_memory(self) -> bool:
        return self.has_spare_memory

    def _whole(self, key: GraphKey) -> StepOutputs | None:
        outputs = self._run_step(key)
        for _ in self._draft_passes(outputs):
            pass
        state = self.step.state
        assert state.past_lens[-1] == 0, "rows that fill graphs up would attend to more"
        return outputs

    @torch.inference_mode()
    def _replay(self, *arguments: Any) -> PartialLaunch:
        """Its results stay as they are: on CUDA they are copied before another step runs."""
        launch = super()._replay(*arguments)
        launch.finish()
        copies = {name: tensor.clone() for name, tensor in _tensors(launch.outputs)}
        launch.outputs = replace(launch.outputs, **copies)
        return launch


class _Eager:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self, replay: Callable[[], None]):
        self.replay = replay


def _tensors(outputs: StepOutputs | None) -> list[tuple[str, Tensor]]:
    pairs = [] if outputs is None else [(f.name, getattr(outputs, f.name)) for f in fields(outputs)]
    return [(name, value) for name, value in pairs if isinstance(value, Tensor)]
