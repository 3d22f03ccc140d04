"""`SpecWorkerBase`: the part of a step that follows the target's logits.

    logits -> (mask) -> target tokens -> accept -> (forced) -> draft -> next_new_tokens
              `--------- verify, by acceptance/verify.py ----'

A subclass writes `draft` and, if it keeps something per request, `allocate_state` and `admit`.
One written for TensorRT-LLM writes `forward` itself, with the names of `tensorrt_llm_names.py`.
Nothing here reads a device value on the host, so the same code runs eagerly and captured.
"""

from __future__ import annotations

import logging
from abc import ABC
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..acceptance.draw import DraftSampler
from ..acceptance.guided import hand_over_accepted, hand_over_drafts, mask_drafts
from ..acceptance.rule import Drawn
from ..acceptance.verify import Verification, rows_of_drafts
from ..config import DecodingBaseConfig
from ..distributed.logits import ShardedLogits, gather_logits
from ..errors import ConfigError
from ..metadata.attention import AttentionMetadata
from ..metadata.draft_memory import DraftMemory
from ..metadata.guided import GuidedStep
from ..metadata.spec import SpecMetadata
from ..metadata.step import StepSizes, batch_shape, first_axis, next_positions
from ..ops.step.packing import save_chances
from ..ops.step.rows import NextTokens, next_new_tokens, next_tokens, shift_contexts
from ..ops.tokens.greedy import choose_drafts
from ..ops.tokens.probability import best_probabilities
from ..utils import renamed, to_device
from .lookup import LookupBesideNetwork, SuffixLookup
from .protocols import DraftInputs, DraftModel, EndedText, LanguageModel
from .tensorrt_llm_names import TensorRTLLMNames
from .texts import SlotTexts

logger = logging.getLogger(__name__)


def _checked_inputs(input_ids: Any, logits: Any, spec_metadata: Any) -> Any:
    """Returns the ids as [T]; None stays None, for a drafter that does not read them.

    Raises:
        ConfigError: an argument is of another kind.
    """
    if not isinstance(spec_metadata, SpecMetadata):
        given = "None" if spec_metadata is None else f"a {type(spec_metadata).__name__}"
        raise ConfigError(f"spec_metadata is {given}: give a SpecMetadata.")
    if not isinstance(logits, Tensor | ShardedLogits):
        given = "None" if logits is None else f"a {type(logits).__name__}"
        raise ConfigError(f"logits are {given}: give the target's, [C + G*(K'+1), V].")
    if not isinstance(input_ids, Tensor) or input_ids.dim() == 1:
        return input_ids
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ConfigError(f"input_ids are of shape {tuple(input_ids.shape)}: give [T] or [1, T].")
    return input_ids[0]


class SpecWorkerBase(Verification, TensorRTLLMNames, ABC):
    """Verifies drafts and proposes new ones inside the target's step.

    Args:
        config: the decoding config; `None` for plain decoding.

    Raises:
        ConfigError: the subclass writes neither `draft` nor `forward`.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    """What `draft` reads of the tensors that `allocate_state` makes."""
    drafts_with_network: ClassVar[bool] = False
    """Whether proposals come from logits, so that they can be drawn from a distribution."""
    drafts_in_one_pass: ClassVar[bool] = False
    """Whether one pass makes the logits of all drafts."""
    reads_final_states: ClassVar[bool] = True
    """Whether `draft` may read the target's final hidden states of a prompt's rows. Where it does
    not, or reads captured layers in their place, a pass over prompts need not compute them all, and
    `DraftInputs.hidden_states` may be None."""
    can_read_late: ClassVar[bool] = False
    """Whether rows may wait in `StepContext.missed` where nothing is drafted."""
    _memory_sizes = 0, 0
    """(slots, the target's vocabulary) of the last step."""
    _guided: GuidedStep | None = None
    """Masks of this step's drafts, where a request has a grammar."""
    _probabilities: tuple[Tensor, ...] = ()
    """For each depth drafted so far, [B] float32: how likely the drafter finds its draft."""
    _finished: NextTokens | None = None
    """What `finish_drafts` made in this step."""
    lookup: SuffixLookup | None = None
    """Drafts from texts: all of them in mode SA, those of some requests where the config has an
    `sa_config`."""

    def __init__(self, config: DecodingBaseConfig | None = None):
        super().__init__(config)
        worker, base = type(self), SpecWorkerBase
        if worker.draft is base.draft and worker.forward is base.forward:
            raise ConfigError(
                f"{worker.__name__} cannot draft: write draft(inputs) -> [B, K] int32, -1 where "
                "there is no draft, or all of forward."
            )
        lookup_config = getattr(config, "sa_config", None)
        if lookup_config is not None:
            self.lookup = LookupBesideNetwork(lookup_config, self.max_draft_len)

    @property
    def num_extra_kv_tokens(self) -> int:
        """KV rows per request that drafting writes beyond the verified ones."""
        return 0

    @property
    def num_extra_kv_tokens_at_rest(self) -> int:
        """`num_extra_kv_tokens` of a step that drafts nothing."""
        return self.num_extra_kv_tokens

    @property
    def num_rewritten_tokens(self) -> int:
        """KV rows per request that drafting computes again, before the step's first one."""
        return 0

    @property
    def num_tokens_ahead(self) -> int:
        """How many tokens after a row the drafter reads for the row's keys and values.

        The prefix cache shares a block between texts that agree so far beyond it. An unknown
        drafter with a network may read as far as it drafts.
        """
        return self.max_draft_len if self.drafts_with_network else 0

    # -- per-slot state ------------------------------------------------------------------------
    def allocate_state(
        self,
        num_slots: int,
        max_seq_len: int,
        device: torch.device,
        *,
        hidden_size: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Tensor]:
        """Returns state by slot: tensors with a leading slot dimension, the last slot scratch.

        The base returns what the acceptance rule and the lookup keep. A worker adds its tensors.

        Args:
            hidden_size, dtype: the target's, for workers that keep hidden states.
        """
        state = self.rule.allocate_state(num_slots, device)
        if self.lookup is not None:
            state |= self.lookup.allocate_state(num_slots, max_seq_len, device)
        return state

    def admit(
        self,
        state: dict[str, Tensor],
        slot: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Writes the state of a request that enters `slot`. Its text may wait (`slot_texts`).

        Args:
            num_prompt_tokens: how many of its tokens are the prompt, None is all. The rest is the
                output of a preempted request.
        """
        split = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
        self.rule.admit(state, slot, token_ids[:split], token_ids[split:])
        if self.slot_texts is not None:
            self.slot_texts.admit(state, slot, token_ids)

    @property
    def slot_texts(self) -> SlotTexts | None:
        """The texts by slot, where drafts are found in them.

        The engine lets them wait, and writes those of a step together before it runs.
        """
        return None if self.lookup is None else self.lookup.texts

    @property
    def remembers_texts(self) -> bool:
        """Whether texts of requests that ended are drafted from."""
        return self.lookup is not None and self.lookup.remembers_texts

    def set_salt(self, state: dict[str, Tensor], slot: int, salt: str | None) -> None:
        """Writes whose texts the request in `slot` may be drafted from, after `admit`."""
        if self.slot_texts is not None:
            self.slot_texts.set_salt(state, slot, salt)

    def remember_text(self, state: dict[str, Tensor], text: EndedText) -> None:
        """Keeps a text for later requests of its salt. Called between steps; does not wait."""
        if self.lookup is not None:
            self.lookup.remember_texts(state, [text])

    def remember_texts(self, state: dict[str, Tensor], texts: Sequence[EndedText]) -> None:
        """Keeps the texts of requests that ended together, in their order, as `remember_text` does.

        A worker that writes `remember_text` alone gets one after another.
        """
        if type(self).remember_text is not SpecWorkerBase.remember_text:
            for text in texts:
                self.remember_text(state, text)
        elif self.lookup is not None:
            self.lookup.remember_texts(state, texts)

    def num_looked_up_drafts(self, state: dict[str, Tensor]) -> int:
        """Returns how many drafts came from texts beside a network's. Waits for the device."""
        lookup = self.lookup
        return lookup.num_looked_up(state) if isinstance(lookup, LookupBesideNetwork) else 0

    @property
    def remembers_drafts(self) -> bool:
        """Whether the acceptance rule reads what drafts were drawn from."""
        return self.drafts_with_network and self.rule.drawn is Drawn.REMEMBERED

    def remember_drafts(
        self,
        num_slots: int,
        vocab_size: int,
        target_vocab_size: int,
        d2t: Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Allocates the memory of what drafts are drawn from, if the acceptance rule reads it.

        Without this call it is allocated when the first draft is drawn, which no graph may capture.

        Args:
            vocab_size, d2t, dtype: of the drafter's logits, and its table of offsets if it has one.
        """
        if self.remembers_drafts:
            self.draft_memory = DraftMemory.allocate(
                num_slots, self.max_draft_len, vocab_size, target_vocab_size, d2t, device, dtype
            )

    # -- the step ------------------------------------------------------------------------------
    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor | None,
        logits: Tensor | ShardedLogits,
        attn_metadata: AttentionMetadata | None,
        spec_metadata: SpecMetadata,
        draft_model: DraftModel | LanguageModel | None = None,
    ) -> dict[str, Any]:
        """Verifies, accepts and drafts.

        Args:
            input_ids: [T] or [1, T], as the target read them.
            position_ids: the same: [T], or [1, T], or [3, T] whose first axis counts.
            hidden_states: [T, D] of the target after its final norm, for drafters that use them.
                Captured layers are in `spec_metadata.captured`.
            logits: [C + G*(K'+1), V] of the target, K' <= K drafts verified in this pass. With
                several ranks, this one's part.
            attn_metadata: of the target's pass; needed by drafters with a KV cache. Without a
                network another engine's serves too, which tells `num_contexts` and `num_seqs`.
            spec_metadata: `draft_tokens` [G, K'] and what the mode needs.
            draft_model: the drafting network, if the mode has one.

        Returns:
            `logits` unchanged; `new_tokens` [B, K+1] int32, accepted drafts then bonus, -1 past the
            length; `new_tokens_lens` [B] int32; `next_draft_tokens` [B, K] int32;
            `next_new_tokens` [B, K+1] int32, the last accepted token and the next drafts.
        """
        inputs = self.verify(
            input_ids,
            position_ids,
            hidden_states,
            logits,
            attn_metadata,
            spec_metadata,
            draft_model,
        )
        return self.outputs(logits, inputs, self.draft_or_look_up(inputs))

    def draft_or_look_up(self, inputs: DraftInputs) -> Tensor:
        """Returns `draft`'s drafts [B, K], or of some requests what was found in texts."""
        drafts = self.draft(inputs)
        if not isinstance(drafts, Tensor):
            raise ConfigError(
                f"{type(self).__name__}.draft returned {type(drafts).__name__}: return drafts "
                "[B, K] int32."
            )
        if isinstance(self.lookup, LookupBesideNetwork):
            drafts, is_found = self.lookup.override(inputs, drafts, self.draft_memory)
            if is_found is not None:  # it is verified first
                self._probabilities = tuple(
                    probability.masked_fill(is_found, 1.0) for probability in self._probabilities
                )
        return drafts

    def verify(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor | None,
        logits: Tensor | ShardedLogits,
        attn_metadata: AttentionMetadata | None,
        spec_metadata: SpecMetadata,
        draft_model: DraftModel | LanguageModel | None = None,
    ) -> DraftInputs:
        """Accepts drafts, the first half of `forward`. Returns what drafting starts from."""
        input_ids = _checked_inputs(input_ids, logits, spec_metadata)
        num_contexts, batch_size = batch_shape(attn_metadata, spec_metadata)
        generations, given_drafts = batch_size - num_contexts, spec_metadata.draft_tokens
        drafts = rows_of_drafts(given_drafts, generations, self.max_draft_len, logits.device)
        num_drafts = drafts.shape[1]
        sizes = StepSizes(num_contexts, generations, num_drafts)
        positions = next_positions(position_ids, attn_metadata, spec_metadata)
        self._memory_sizes = spec_metadata.slot_capacity, logits.shape[-1]
        self._probabilities = ()
        with spec_metadata.step(sizes, self.max_draft_len, logits.device, positions) as step:
            looked_up = () if self.lookup is None else self.lookup.state_names
            step.require((*self.state_names, *looked_up))
            accepted, lens = self.sample_and_accept_draft_tokens(
                logits, drafts, num_contexts, batch_size, spec_metadata
            )
        self.put_known_tokens(accepted, num_contexts, spec_metadata)
        self._guided = spec_metadata.guided
        if self._guided is not None:
            self._guided.accepted = accepted, lens
            if self.drafts_with_network:
                hand_over_accepted(self._guided, has_pass=True)
        return DraftInputs(
            input_ids=input_ids,
            position_ids=first_axis(position_ids),
            hidden_states=hidden_states,
            accepted_tokens=accepted,
            num_accepted_tokens=lens,
            attn_metadata=attn_metadata,
            spec_metadata=spec_metadata,
            draft_model=draft_model,
            step=step,
        )

    def forget_step(self) -> None:
        """Forgets what `verify` kept for the step's drafts."""
        self._guided, self._probabilities = None, ()

    def put_known_tokens(
        self, accepted: Tensor, num_contexts: int, spec_metadata: SpecMetadata
    ) -> None:
        """Replaces samples inside a prompt by the prompt's next token, in accepted [B, K+1]."""
        following = spec_metadata.next_prompt_tokens
        if num_contexts and following is not None:
            sampled = accepted[:num_contexts, 0]
            accepted[:num_contexts, 0] = torch.where(following >= 0, following, sampled)

    def outputs(
        self, logits: Tensor | ShardedLogits, inputs: DraftInputs, next_drafts: Tensor
    ) -> dict[str, Any]:
        """Builds the dictionary that `forward` returns; next_drafts [B, K], or those proposed."""
        accepted, lens = inputs.accepted_tokens, inputs.num_accepted_tokens
        finished, self._finished = self._finished, None
        whole = finished.tokens if finished and next_drafts is finished.drafts else None
        next_drafts = next_drafts[:, : inputs.step.draft_len]
        if type(self).build_next_new_tokens is not SpecWorkerBase.build_next_new_tokens:
            unused = self.max_draft_len - next_drafts.shape[1]  # it takes [B, K]
            next_drafts = nn.functional.pad(next_drafts, (0, unused), value=-1)
            following = self.build_next_new_tokens(accepted, lens, next_drafts)
        elif whole is not None:
            following = whole
        else:
            following = next_new_tokens(accepted, lens, next_drafts, self.max_draft_len)
        return {
            "logits": logits,
            "new_tokens": accepted,
            "new_tokens_lens": lens,
            "next_draft_tokens": following[:, 1:],
            "next_new_tokens": following,
        }

    def no_drafts(self, inputs: DraftInputs) -> Tensor:
        """Returns [B, K] int32 of -1."""
        lens = inputs.num_accepted_tokens
        return torch.full(
            (lens.shape[0], self.max_draft_len), -1, dtype=torch.int32, device=lens.device
        )

    def draft(self, inputs: DraftInputs) -> Tensor:
        """Proposes drafts for the next step, [B, K] int32, -1 where there is none.

        Each worker writes it. Where fewer are to be proposed (`StepContext.draft_len`), the others
        need not be there. `finish_drafts` makes them of proposals.
        """
        raise NotImplementedError(f"{type(self).__name__} writes forward in place of draft.")

    def skip_forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor | None,
        logits: Tensor | None,
        attn_metadata: AttentionMetadata | None,
        spec_metadata: SpecMetadata,
        draft_model: DraftModel | LanguageModel | None = None,
    ) -> dict[str, Tensor | None]:
        """Returns placeholders of the right shapes on a rank that has no logits; lengths are 1."""
        _, batch = batch_shape(attn_metadata, spec_metadata)
        device, k = input_ids.device, self.max_draft_len

        drafts = torch.full((batch, k), -1, dtype=torch.int32, device=device)
        tokens = nn.functional.pad(drafts, (1, 0), value=0)  # [B, K+1]: one token, no drafts
        return {
            "logits": logits,
            "new_tokens": tokens,
            "new_tokens_lens": torch.ones(batch, dtype=torch.int32, device=device),
            "next_draft_tokens": drafts,
            "next_new_tokens": tokens.clone(),
        }

    # -- building blocks of drafters -----------------------------------------------------------
    def finish_drafts(
        self,
        inputs: DraftInputs,
        proposals: Sequence[Tensor],
        last_positions: Tensor,
        max_seq_len: int,
    ) -> Tensor:
        """Returns proposals as drafts [B, K] int32, -1 past `draft_len` and the maximum length.

        One launch makes the next step's whole input with them, and `outputs` takes it where `draft`
        returns this very tensor.

        Args:
            proposals: each [B] int. last_positions: [B] int64, of the last accepted tokens.
        """
        proposals = proposals[: inputs.step.draft_len]
        ends = last_positions, max_seq_len, self.max_draft_len
        self._finished = next_tokens(inputs.path, proposals, *ends)
        return self._finished.drafts

    def draft_sampler(self, inputs: DraftInputs) -> DraftSampler | None:
        """Returns what draws this step's proposals. None: they are the drafter's best tokens."""
        step = inputs.step
        if self.rule.drawn is Drawn.BEST or step.sampling.all_greedy:
            return None
        self.require_slots(step)
        if self.draft_memory is not None:
            self.draft_memory.require_slots(step.slot_capacity)
        elif self.remembers_drafts and not step.has_slots:
            _warn_of_exact_match("" if self.config is None else self.config.acceptance)
        return DraftSampler.of(step, self.draft_memory)

    def propose(
        self,
        logits: Tensor | ShardedLogits,
        d2t: Tensor | None,
        sampler: DraftSampler | None,
        last_positions: Tensor,
        depth: int,
    ) -> Tensor:
        """Draws a draft per request, or takes the best: logits [B, Vd] -> target ids [B] int32.

        Args:
            last_positions: [B] int64, of the last accepted tokens. depth: 0 for the first draft.
        """
        logits = self.allowed(logits, d2t, depth)
        return self.propose_allowed(logits, d2t, sampler, last_positions, depth)

    def takes_best_alone(self, sampler: DraftSampler | None) -> bool:
        """Whether `propose` would do nothing with logits but to choose their best token."""
        names = "propose", "allowed", "propose_allowed", "note_logits", "_choose"
        for name in (*names, "draft_sampler_greedy"):
            if getattr(getattr(self, name), "__func__", None) is not getattr(SpecWorkerBase, name):
                return False  # a worker of its own
        return sampler is None and self._guided is None and not self.keeps_probabilities

    def allowed(
        self, logits: Tensor | ShardedLogits, d2t: Tensor | None, depth: int
    ) -> Tensor | ShardedLogits:
        """Returns logits [B, Vd], -inf where a grammar does not allow the token. Once per depth."""
        if self._guided is None:
            return logits
        return mask_drafts(self._guided, gather_logits(logits), d2t, depth)

    def propose_allowed(
        self,
        logits: Tensor | ShardedLogits,
        d2t: Tensor | None,
        sampler: DraftSampler | None,
        last_positions: Tensor,
        depth: int,
    ) -> Tensor:
        """Does what `propose` does with logits that `allowed` has returned."""
        self.note_logits(logits, last_positions.shape[0])
        drafts = self._choose(logits, d2t, sampler, last_positions, depth)
        if self._guided is not None:
            hand_over_drafts(self._guided, drafts, depth, has_pass=not self.drafts_in_one_pass)
        return drafts

    @property
    def keeps_probabilities(self) -> bool:
        """Whether verification is shared out by how likely the drafts are."""
        return self.config is not None and self.config.max_verified_drafts is not None

    def note_logits(self, logits: Tensor | ShardedLogits, batch: int) -> None:
        """Notes how likely drafts are by what they are chosen from, [n * B, Vd], by draft."""
        if self.keeps_probabilities:
            self.add_probabilities(best_probabilities(gather_logits(logits)), batch)

    def add_probabilities(self, probabilities: Tensor, batch: int) -> None:
        """Notes how likely the step's next drafts are, [n * B] float32, by draft.

        They may depend on the drafts before, not on which token is drawn.
        """
        self._probabilities += probabilities.split(batch)

    def save_chances(self, slot_ids: Tensor, chances: Tensor | None) -> None:
        """Keeps by slot how likely the step's drafts are, where the drafter has said so.

        Args:
            slot_ids: [B] int64. chances: [S+1, K] float32, of `SlotState`.
        """
        if chances is not None and self._probabilities:
            save_chances(slot_ids, self._probabilities, chances)

    def _choose(
        self,
        logits: Tensor | ShardedLogits,
        d2t: Tensor | None,
        sampler: DraftSampler | None,
        last_positions: Tensor,
        depth: int,
    ) -> Tensor:
        if sampler is None:
            return self.draft_sampler_greedy(logits, d2t)
        logits = gather_logits(logits)
        if sampler.memory is None and sampler.slots.shape[0] and self.remembers_drafts:
            if self.draft_memory is None:
                self._allocate_memory(logits, d2t)
            sampler = replace(sampler, memory=self.draft_memory)
        return sampler.draw(logits, d2t, last_positions, depth)

    def _allocate_memory(self, logits: Tensor, d2t: Tensor | None) -> None:
        """Calls `remember_drafts` in place of a loop that did not."""
        if logits.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "Room for what drafts are drawn from cannot be made while a graph is captured: "
                "run one step of a sampled request before, or call worker.remember_drafts."
            )
        num_slots, target_vocab_size = self._memory_sizes
        if logits.shape[-1] > target_vocab_size:
            raise ConfigError(
                f"The drafter has {logits.shape[-1]} logits, the target {target_vocab_size}: cut "
                "the drafter's to the target's tokens (Decoder.keep_logits)."
            )
        self.remember_drafts(
            num_slots, logits.shape[-1], target_vocab_size, d2t, logits.device, logits.dtype
        )

    def draft_sampler_greedy(
        self, logits: Tensor | ShardedLogits, d2t: Tensor | None = None
    ) -> Tensor:
        """Takes each row's best token: draft logits [R, Vd] -> target token ids [R] int32.

        Args:
            d2t: [Vd] int64 offsets, target_id = draft_id + d2t[draft_id] (EAGLE-3's table).
        """
        return choose_drafts(logits, d2t)

    def build_next_new_tokens(
        self, accepted_tokens: Tensor, num_accepted_tokens: Tensor, next_draft_tokens: Tensor
    ) -> Tensor:
        """Returns the next step's input: [last accepted, next drafts], [B, K+1] int32."""
        k = next_draft_tokens.shape[1]
        return next_new_tokens(accepted_tokens, num_accepted_tokens, next_draft_tokens, k)

    def prepare_context_input_ids(
        self,
        input_ids: Tensor,
        accepted_tokens: Tensor,
        context_lens: Sequence[int],
        next_prompt_tokens: Tensor | None = None,
        last_rows: Tensor | None = None,
    ) -> Tensor:
        """Shifts context ids left by one, for drafters that read the *next* token's embedding.

        Args:
            input_ids: [T_ctx], the contexts' rows of this pass.
            accepted_tokens: [C, ...] int32, column 0 is the sampled token.
            context_lens: rows per context.
            next_prompt_tokens: [C], the next prompt token where a chunk ends inside the prompt, -1
                at its end. It is used in place of the sample.
            last_rows: [C] int64, each context's last row, ascending; None follows from
                context_lens. A context without rows ends where the one before does.

        Returns:
            [T_ctx], e.g. `a1 a2 | b1` with next `a3 | b2` -> `a2 a3 | b2`.
        """
        if not context_lens:
            return input_ids
        following = accepted_tokens.reshape(accepted_tokens.shape[0], -1)[: len(context_lens), 0]
        if last_rows is None:
            lens = torch.tensor(context_lens)
            (some,) = lens.nonzero(as_tuple=True)  # a context without rows has no last row
            last_rows = to_device((lens.cumsum(0) - 1)[some], input_ids.device)
            if len(some) < len(lens):
                some = to_device(some, input_ids.device)
                following = following[some]
                if next_prompt_tokens is not None:
                    next_prompt_tokens = next_prompt_tokens[some]
        return shift_contexts(input_ids, following, next_prompt_tokens, last_rows)


@cache
def _warn_of_exact_match(rule: str) -> None:
    logger.warning(
        "acceptance=%r remembers by slot what drafts are drawn from, and spec_metadata.slot_ids is "
        "not set: drafts of sampled requests are judged by exact match, which is lossless and "
        "accepts fewer. Set slot_ids [B], or give requests a py_seq_slot.",
        rule,
    )


__getattr__ = renamed(
    __name__,
    {
        "certain_rows": "trtspec.metadata.accepted_path.certain_rows",
        "is_text": "trtspec.workers.heads.has_text_alone",
        "keep_first_rows_of_contexts": "trtspec.workers.heads.skip_kv_of_first_rows",
    },
)
