"""`DeviceStep`: one step on the device.

    inputs ──assemble──▶ tensors ──forward_step──▶ outputs ──draft_passes──▶ drafts in the slots
                                                            (modes that draft in passes)

`runner.py` runs it eagerly, `graphs.py` captures it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..models.decoder import Decoder
from ..state.kv_cache import KVCacheManager
from ..state.slots import SlotState
from ..workers.base import SpecWorkerBase
from ..workers.protocols import DraftModel, LanguageModel
from .draft_passes import draft_in_passes
from .forward_step import StepOutputs, forward_step
from .inputs import EngineShape, StepInputs, assemble


@dataclass(eq=False, kw_only=True)
class DeviceStep:
    """Runs steps on one device's models, cache and slots. Neither method waits for the device."""

    target: Decoder
    worker: SpecWorkerBase
    draft_model: DraftModel | LanguageModel | None
    kv_cache: KVCacheManager
    state: SlotState
    shape: EngineShape

    @torch.inference_mode()
    def run(self, inputs: StepInputs, draft_len: int) -> StepOutputs:
        """Verifies, accepts and drafts. Writes the next step's inputs to the slots.

        Args:
            draft_len: drafts to propose for the next step.
        """
        tensors = assemble(inputs, self.state, self.kv_cache, self.shape, draft_len)
        outputs = forward_step(
            self.target,
            self.worker,
            self.draft_model,
            tensors,
            state=self.state,
            mode=self.shape.mode,
            num_logprobs=inputs.num_logprobs,
        )
        if outputs.draft_inputs is None:
            self.worker.forget_step()
        return outputs

    @torch.inference_mode()
    def draft_passes(self, outputs: StepOutputs) -> Iterator[None]:
        """Runs the passes that follow the step in modes EAGLE3 and MTP_EAGLE, one per item."""
        if outputs.draft_inputs is not None:
            yield from draft_in_passes(self.worker, outputs.draft_inputs, self.state)
            self.worker.forget_step()

    def release_memory(self) -> None:
        """Frees models and slots, for good. Nothing may be in flight."""
        self.kv_cache.release_memory()
        self.worker.draft_memory = None
        for name in ("target", "draft_model", "state"):
            vars(self).pop(name, None)
