"""The half of a worker that chooses the target's tokens and accepts drafts.

    logits -> (grammar's mask) -> (penalties …) -> rule -> (cut before empty rows) -> tokens, lens

The rule (`rules.py`) does the last part, by a kernel where one serves. A subclass may override
`sample_target_tokens`, `accept` or `apply_forced_acceptance`. These three are then called one by
one in place of the rule's parts, and no kernel is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..config import DecodingBaseConfig
from ..distributed.logits import ShardedLogits
from ..errors import ConfigError
from ..metadata.draft_memory import DraftMemory
from ..metadata.guided import GuidedDecoder
from ..metadata.logits import LogitsState
from ..metadata.spec import SpecMetadata
from ..metadata.step import StepContext, StepSizes, no_sampling
from ..ops.tokens.greedy import Accepted, accept_greedy
from ..ops.tokens.penalties import count_output, shape_logits
from .empty_rows import cut, fill_empty_rows
from .forced import Forced, forced_lens, get_force_num_accepted_tokens
from .guided import mask_target
from .rule import Candidates, Judged
from .rules import rule_of
from .target import sample_target_tokens


def rows_of_drafts(
    draft_tokens: Tensor | None, generations: int, max_draft_len: int, device: torch.device
) -> Tensor:
    """Returns draft tokens [G, K'] or [G * K'] as [G, K']; None is K' = 0.

    Without generations it is [0, K], whatever a preallocated buffer holds.

    Raises:
        ConfigError: another shape, or no token ids.
    """
    if generations == 0:
        return torch.empty((0, max_draft_len), dtype=torch.int32, device=device)
    if draft_tokens is None:
        return torch.empty((generations, 0), dtype=torch.int32, device=device)
    if not isinstance(draft_tokens, Tensor):
        given = type(draft_tokens).__name__
        raise ConfigError(f"draft_tokens is a {given}: give a tensor [G, K] or [G*K] of token ids.")
    dtype = draft_tokens.dtype
    if draft_tokens.numel() and (dtype.is_floating_point or dtype == torch.bool):
        raise ConfigError(f"draft_tokens are {dtype}: give token ids, in int32 or int64.")
    shape = tuple(draft_tokens.shape)
    is_whole = len(shape) == 1 and shape[0] % generations == 0
    if not is_whole and not (len(shape) == 2 and shape[0] == generations):
        raise ConfigError(
            f"draft_tokens of shape {shape} are not those of {generations} generation requests: "
            "give [G, K] or [G*K]."
        )
    return draft_tokens.reshape(generations, -1)


class Verification(nn.Module):
    """Acceptance of drafts by the rule of the config.

    Args:
        config: the decoding config; `None` for plain decoding.
    """

    judges_itself: ClassVar[bool] = False
    """Whether a subclass overrides `sample_target_tokens` or `accept`, which then decide in the
    rule's place. Subclassing sets it; set it by hand if they are put on an instance."""
    forces_itself: ClassVar[bool] = False
    """The same for `apply_forced_acceptance`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        base = Verification
        if cls.sample_target_tokens is not base.sample_target_tokens:
            cls.judges_itself = True
        if cls.accept is not base.accept:
            cls.judges_itself = True
        if cls.apply_forced_acceptance is not base.apply_forced_acceptance:
            cls.forces_itself = True

    def __init__(self, config: DecodingBaseConfig | None = None):
        super().__init__()
        self.config = config
        self.rule = rule_of(config)
        self.draft_memory: DraftMemory | None = None
        self.guided_decoder: GuidedDecoder | None = None
        self.force_num_accepted_tokens = get_force_num_accepted_tokens()

    @property
    def max_draft_len(self) -> int:
        """K."""
        return self.config.max_draft_len if self.config is not None else 0

    def set_guided_decoder(self, guided_decoder: GuidedDecoder) -> bool:
        """Makes every step mask its logits by `guided_decoder` first. Returns True: it can."""
        self.guided_decoder = guided_decoder
        return True

    def execute_guided_decoder(self, logits: Tensor) -> None:
        """Masks logits [R, V] in place; nothing without a guided decoder."""
        if self.guided_decoder is not None:
            self.guided_decoder.execute(logits)

    def sample_and_accept_draft_tokens(
        self,
        logits: Tensor | ShardedLogits,
        draft_tokens: Tensor | None,
        num_contexts: int,
        batch_size: int,
        spec_metadata: SpecMetadata,
        is_guided: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Chooses the target's token at every row and accepts the drafts that agree.

        Args:
            logits: [C + G*(K'+1), V]; 1-D logits are one row. Where each rank has a part of them,
                the ranks compare their best tokens if that is enough, else they gather.
            draft_tokens: [G, K'] or flat [G*K'], -1 is "no draft here". K' <= K. None: K' is 0.
            num_contexts, batch_size: C and B; G = B - C.
            is_guided: the guided decoder has masked these logits already.

        Returns:
            accepted_tokens [B, K+1] int32 (-1 past the length) and num_accepted_tokens [B] int32
            in 1 … K'+1. Contexts take the sampled token only.

        Raises:
            ConfigError: the sizes do not fit each other.
        """
        sharded, guided = None, spec_metadata.guided
        if isinstance(logits, ShardedLogits):
            if guided is not None:
                guided.comm = logits.comm
            if self._needs_best_tokens_alone(spec_metadata):
                sharded, logits = logits, logits.part
            else:
                logits = logits.gathered()
        logits = logits.unsqueeze(0) if logits.dim() == 1 else logits
        drafts = self._check_shapes(logits, draft_tokens, num_contexts, batch_size)
        if self.guided_decoder is not None and not is_guided:
            logits = logits.clone()  # the caller's stay raw
            self.execute_guided_decoder(logits)
        if guided is not None:
            logits = mask_target(guided, logits)
        with self._candidates(logits, drafts, num_contexts, spec_metadata) as candidates:
            self.require_slots(candidates.step)
            if sharded is None:
                accepted = self._judge_shaped(candidates, spec_metadata)
            else:
                accepted = self._judge_best(candidates, sharded)
            tokens, lens = accepted.tokens, accepted.lens
            verified = tokens[:, : drafts.shape[1] + 1]
            self.after_acceptance(verified, lens, num_contexts, spec_metadata)
        step = candidates.step
        if step.logits_state is not None:
            count_output(step.logits_state, step.slot_ids, tokens, step.output_lens(lens))
        spec_metadata.bad_requests = accepted.bad_requests
        spec_metadata.num_accepted_draft_tokens = accepted.num_accepted_drafts
        return tokens, lens

    def require_slots(self, step: StepContext) -> None:
        """Raises ConfigError where a loop has left out what accepting reads by slot."""
        step.require(self.rule.state_names, self.draft_memory is not None)

    @contextmanager
    def _candidates(
        self, logits: Tensor, drafts: Tensor, num_contexts: int, spec: SpecMetadata
    ) -> Iterator[Candidates]:
        sizes = StepSizes(num_contexts, *drafts.shape)
        with spec.step(sizes, self.max_draft_len, logits.device) as step:
            yield Candidates(
                logits=logits,
                drafts=drafts,
                max_draft_len=self.max_draft_len,
                memory=self.draft_memory,
                step=step,
            )

    def _judge_shaped(self, candidates: Candidates, spec: SpecMetadata) -> Accepted:
        """Applies penalties, biases and bans, where a request has some, then `_judge`.

        They or a grammar may leave no token of a row.
        """
        state = candidates.step.logits_state
        if state is not None:
            candidates = replace(candidates, logits=_shaped(candidates, state))
        elif spec.guided is None:
            return self._judge(candidates, spec)
        if not (candidates.drafts.numel() or candidates.num_contexts):
            return self._judge(candidates, spec)
        limit = fill_empty_rows(candidates)
        return cut(self._judge(candidates, spec), limit, candidates.num_contexts)

    def _judge(self, candidates: Candidates, spec: SpecMetadata) -> Accepted:
        """Applies the rule, or a subclass's overrides of its parts."""
        rule, forced = self.rule, self.force_num_accepted_tokens
        if not self.judges_itself and not self.forces_itself:
            return (Forced(rule, forced) if forced > 0 else rule).apply(candidates)
        contexts, num_drafts = candidates.num_contexts, candidates.num_drafts
        if self.judges_itself:
            target, bad_rows = self.sample_target_tokens(candidates.logits, spec)
            judged = Judged(
                *self.accept(candidates.logits, target, candidates.drafts, contexts, spec), bad_rows
            )
        else:
            judged = rule.judge(candidates)
        lens = self.apply_forced_acceptance(judged.lens, contexts, num_drafts, spec)
        return rule.finish(candidates, replace(judged, lens=lens))

    def _needs_best_tokens_alone(self, spec: SpecMetadata) -> bool:
        """Whether nothing but the target's best tokens matters to this step."""
        changes = self.guided_decoder, spec.guided, spec.logits_state
        is_changed = any(change is not None for change in changes)
        is_greedy = spec.sampling is None or spec.sampling.all_greedy
        decides = not self.judges_itself and not self.forces_itself
        return is_greedy and not is_changed and decides and self.rule.needs_best_tokens_alone

    def _judge_best(self, candidates: Candidates, logits: ShardedLogits) -> Accepted:
        """Applies the rule to greedy requests of which best tokens alone matter, on every rank."""
        forced = self.force_num_accepted_tokens
        if forced == int(forced):
            accepted = accept_greedy(
                logits,
                candidates.drafts,
                candidates.num_contexts,
                candidates.max_draft_len,
                min(int(forced), candidates.num_drafts) + 1 if forced else 0,
            )
            if accepted is not None:
                return accepted
        tokens, bad_rows = logits.best()
        output, lens = self.rule.accept(candidates, tokens)
        if forced > 0:
            lens = forced_lens(
                lens,
                forced,
                candidates.num_contexts,
                candidates.num_drafts,
                candidates.sampling,
            )
        return self.rule.finish(candidates, Judged(output, lens, bad_rows))

    # -- what a subclass may override ----------------------------------------------------------
    def accept(
        self,
        logits: Tensor,
        tokens: Tensor,
        drafts: Tensor,
        num_contexts: int,
        spec_metadata: SpecMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Accepts drafts by the target's tokens, as the rule does.

        Args:
            logits: [C + G*(K'+1), V]. tokens: [C + G*(K'+1)] int32, the target's choice at each.
            drafts: [G, K'] int32.

        Returns:
            (tokens [B, K'+1] int32, the output at each position, valid up to lens; lens [B] int32).
        """
        with self._candidates(logits, drafts, num_contexts, spec_metadata) as candidates:
            return self.rule.accept(candidates, tokens)

    def after_acceptance(
        self, accepted: Tensor, lens: Tensor, num_contexts: int, spec_metadata: SpecMetadata
    ) -> None:
        """Updates state that follows the output: accepted [B, K'+1] int32, lens [B].

        The base does nothing. The rule's state is up to date by then.
        """

    def sample_target_tokens(
        self, logits: Tensor, spec_metadata: SpecMetadata
    ) -> tuple[Tensor, Tensor]:
        """Samples by each request's parameters: logits [R, V] -> (tokens [R] int32, rows with NaN
        [R] bool)."""
        return sample_target_tokens(logits, spec_metadata.sampling_rows(logits.shape[0]))

    def apply_forced_acceptance(
        self, lens: Tensor, num_contexts: int, num_drafts: int, spec_metadata: SpecMetadata | None
    ) -> Tensor:
        """Returns lens [B], replaced for generations when forced acceptance is on."""
        forced = self.force_num_accepted_tokens
        if forced <= 0:
            return lens
        num_rows = num_contexts + (lens.shape[0] - num_contexts) * (num_drafts + 1)
        sampling = None if spec_metadata is None else spec_metadata.sampling_rows(num_rows)
        if sampling is None:
            sampling = no_sampling(lens.device)
        return forced_lens(lens, forced, num_contexts, num_drafts, sampling)

    def _check_shapes(
        self, logits: Tensor, draft_tokens: Tensor | None, num_contexts: int, batch_size: int
    ) -> Tensor:
        generations = batch_size - num_contexts
        if not 0 <= num_contexts <= batch_size:
            raise ConfigError(f"num_contexts={num_contexts} is not in 0 … batch_size={batch_size}.")
        drafts = rows_of_drafts(draft_tokens, generations, self.max_draft_len, logits.device)
        if drafts.shape[1] > self.max_draft_len:
            raise ConfigError(
                f"{drafts.shape[1]} draft tokens per request, max_draft_len={self.max_draft_len}."
            )
        expected = num_contexts + generations * (drafts.shape[1] + 1)
        if logits.shape[0] != expected:
            raise ConfigError(
                f"logits have {logits.shape[0]} rows; {num_contexts} contexts and {generations} "
                f"generations with {drafts.shape[1]} drafts need {expected}: one row per context, "
                "K+1 per generation."
            )
        return drafts


def _shaped(candidates: Candidates, shaping: LogitsState) -> Tensor:
    """Returns the logits [C + G*(K'+1), V] with penalties, biases and bans applied."""
    rows = candidates.sampling
    return shape_logits(
        shaping,
        candidates.logits,
        candidates.step.slot_ids,
        candidates.drafts,
        rows.positions,
        rows.temperatures,
    )
