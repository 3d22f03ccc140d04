"""`DeviceStep`: one step on the device.

    inputs ──assemble──▶ tensors ──forward_step──▶ outputs ──draft_passes──▶ drafts in the slots
                                                            (modes EAGLE3 and MTP_EAGLE)

`runner.py` runs it eagerly, `graphs.py` captures it. Both return a `PartialLaunch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ..metadata.attention import AttentionMetadata
from ..models.decoder import Decoder
from ..ops.step.missed import take_missed
from ..state.kv_cache import KVCacheManager
from ..state.slots import SlotState
from ..utils import renamed
from ..workers.base import SpecWorkerBase
from ..workers.eagle3 import Eagle3OneModelWorker
from ..workers.protocols import DraftModel, KvWriter, LanguageModel
from .forward_step import StepOutputs, forward_step
from .inputs import EngineShape, StepInputs, assemble


@dataclass(eq=False)
class PartialLaunch:
    """A launched step. With grammars a part of it may be left to launch.

    A launch stops where the host would wait for the masks of drafts, which need what the step
    itself accepts. Before it waits, the host reads the step before, and schedules the next one.
    """

    outputs: StepOutputs  # of the whole step: valid once `finish` has returned
    is_replay: bool = False  # whether a graph ran it
    rows: list[int] | None = None
    """The requests' rows of tokens, lengths and marks, where others are padding; None: all are."""
    rest: Iterator[None] | None = None
    """Launches the rest, part by part. The host waits for the device in each."""

    def finish(self) -> StepOutputs:
        """Launches what is left. No other step may have been launched since."""
        for _ in self.rest or ():
            pass
        self.rest = None
        return self.outputs


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
        outputs = forward_step(self.target, self.worker, self.draft_model, tensors, self.state)
        if outputs.draft_inputs is None:
            self.worker.forget_step()
        return outputs

    @torch.inference_mode()
    def read_missed(self, slot_ids: Tensor, block_tables: Sequence[Tensor]) -> None:
        """Lets the head read what earlier steps left of these requests.

        Args:
            slot_ids: [B] int64. block_tables: per KV group [B, M] int32.
        """
        state, cache = self.state, self.kv_cache
        assert state.missed is not None
        head = cast(KvWriter, self.draft_model)
        taken = take_missed(
            slot_ids, state.missed, state.rope_deltas, tuple(block_tables), cache.page_size
        )
        if slot_ids.device.type == "cpu":  # elsewhere a graph computes them all
            taken = taken.rows_alone()
        # Each row stands for itself: it attends to nothing.
        meta = AttentionMetadata(
            context_lens=(),
            num_generations=taken.tokens.shape[0],
            rows_per_generation=1,
            position_ids=taken.positions,
            rope_position_ids=None if state.rope_deltas is None else taken.rotary,
            kv_lens=taken.kv_lens,
            max_kv_len=self.shape.max_seq_len,
            kv_groups=cache.groups,
            block_tables=(),
            slot_mappings=taken.slot_mappings,
            max_seq_len=self.shape.max_seq_len,
        )
        head.write_kv(taken.tokens, taken.positions, taken.hidden, meta)

    @torch.inference_mode()
    def draft_passes(self, outputs: StepOutputs) -> Iterator[None]:
        """Runs the passes that follow the step in modes EAGLE3 and MTP_EAGLE, one per item.

        The last one writes the proposals to the slots.
        """
        inputs, worker, state = outputs.draft_inputs, self.worker, self.state
        if inputs is None:
            return
        assert isinstance(worker, Eagle3OneModelWorker)
        step = inputs.step
        if step.draft_len == 0:
            worker.skip_passes(inputs)
            state.next_tokens[:, 1:].index_fill_(0, step.slot_ids, -1)
        else:
            chain = worker.first_pass(inputs)
            for _ in range(1, step.draft_len):
                yield
                chain = worker.next_pass(chain)
            state.next_tokens[step.slot_ids, 1:] = chain.draft_tokens(worker.max_draft_len)
            worker.save_chances(step.slot_ids, state.chances)
        yield
        worker.forget_step()

    def release_memory(self) -> None:
        """Frees models and slots, for good. Nothing may be in flight."""
        self.kv_cache.release_memory()
        self.worker.draft_memory = None
        for name in ("target", "draft_model", "state"):
            vars(self).pop(name, None)


__getattr__ = renamed(__name__, {"StepLaunch": "PartialLaunch"})
