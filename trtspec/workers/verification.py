"""The half of a worker that chooses the target's tokens and accepts drafts.

    logits -> (guided mask) -> (penalties …) -> target tokens -> accept -> (forced) -> tokens, lens

Where kernels serve, one call stands for everything from the target's tokens on; the methods below
are then its twins, and a subclass that writes one of them anew gets its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..acceptance.forced import force_accepted_lens, get_force_num_accepted_tokens
from ..acceptance.rejection import (
    DraftDistributions,
    block_rejection,
    target_log_probs,
    token_rejection,
)
from ..acceptance.strict import finish_rows, strict_acceptance
from ..config import DecodingBaseConfig
from ..errors import ConfigError
from ..metadata.draft_memory import DraftMemory
from ..metadata.logits import LogitsState
from ..metadata.spec import SpecMetadata
from ..ops.launch.dispatch import sampling_kernels
from ..ops.tokens.greedy import MAX_ROWS_PER_REQUEST, Accepted, RelaxedRule, accept_greedy
from ..ops.tokens.penalties import count_output, shape_logits
from ..ops.tokens.sample import clean_logits, greedy_tokens
from ..sampling.target import sample_target_tokens
from .protocols import GuidedDecoder

_ACCEPTANCE_METHODS = (
    "sample_target_tokens", "accept", "apply_forced_acceptance", "after_acceptance",
)  # fmt: skip
Method = TypeVar("Method", bound=Callable[..., object])


def has_kernel(method: Method) -> Method:
    """Marks a method whose work `ops.choose.accept_greedy` can do in its place."""
    method.has_kernel = True  # type: ignore[attr-defined]
    return method


class Verification(nn.Module):
    """Acceptance of drafts, strict unless a subclass or the config says otherwise.

    Args:
        config: the decoding config; `None` for plain decoding.
    """

    def __init__(self, config: DecodingBaseConfig | None = None):
        super().__init__()
        self.config = config
        self.draft_memory: DraftMemory | None = None
        self.guided_decoder: GuidedDecoder | None = None
        self.force_num_accepted_tokens = get_force_num_accepted_tokens()

    @property
    def max_draft_len(self) -> int:
        """K."""
        return self.config.max_draft_len if self.config is not None else 0

    def set_guided_decoder(self, guided_decoder: GuidedDecoder) -> bool:
        """Applies `guided_decoder` to the target's logits before sampling. Always possible."""
        self.guided_decoder = guided_decoder
        return True

    def execute_guided_decoder(self, logits: Tensor) -> None:
        """Masks logits [R, V] in place; nothing without a guided decoder."""
        if self.guided_decoder is not None:
            self.guided_decoder.execute(logits)

    def sample_and_accept_draft_tokens(
        self,
        logits: Tensor,
        draft_tokens: Tensor,
        num_contexts: int,
        batch_size: int,
        spec_metadata: SpecMetadata,
        is_guided: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Chooses the target's token at every row and accepts the drafts that agree.

        Args:
            logits: [C + G*(K'+1), V]; 1-D logits are one row.
            draft_tokens: [G, K'] or flat [G*K'], -1 is "no draft here". K' <= K.
            num_contexts, batch_size: C and B; G = B - C.
            is_guided: the guided decoder has masked these logits already.

        Returns:
            accepted_tokens [B, K+1] int32 (-1 past the length) and num_accepted_tokens [B] int32
            in 1 … K'+1. Contexts take the sampled token only.

        Raises:
            ConfigError: the sizes do not fit each other.
        """
        logits = logits.unsqueeze(0) if logits.dim() == 1 else logits
        drafts = self._check_shapes(logits, draft_tokens, num_contexts, batch_size)
        with spec_metadata.rows_of_step(num_contexts, *drafts.shape):
            return self._sample_and_accept(
                logits, drafts, num_contexts, spec_metadata, is_guided=is_guided
            )

    def _sample_and_accept(
        self, logits: Tensor, drafts: Tensor, num_contexts: int, spec_metadata: SpecMetadata,
        *, is_guided: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if self.guided_decoder is not None and not is_guided:
            logits = logits.clone()  # the caller's stay raw
            self.execute_guided_decoder(logits)
        shaping = spec_metadata.logits_state
        if shaping is not None:
            logits = self._shaped(logits, drafts, spec_metadata, shaping)
        fused = self._accept_by_kernels(logits, drafts, num_contexts, spec_metadata)
        if fused is not None:
            spec_metadata.bad_requests = fused.bad_requests
            spec_metadata.num_accepted_draft_tokens = fused.num_accepted_drafts
            if shaping is not None:
                self._count_output(shaping, fused.tokens, fused.lens, num_contexts, spec_metadata)
            return fused.tokens, fused.lens
        if self._may_reject(logits, drafts, spec_metadata):
            accepted, lens, bad_rows = self._sample_and_reject(
                logits, drafts, num_contexts, spec_metadata
            )
        else:
            tokens, bad_rows = self.sample_target_tokens(logits, spec_metadata)
            accepted, lens = self.accept(logits, tokens, drafts, num_contexts, spec_metadata)
        lens = self.apply_forced_acceptance(lens, num_contexts, drafts.shape[1], spec_metadata)
        accepted = finish_rows(accepted, lens)
        self.after_acceptance(accepted, lens, num_contexts, spec_metadata)
        if shaping is not None:
            self._count_output(shaping, accepted, lens, num_contexts, spec_metadata)
        spec_metadata.bad_requests = per_request(bad_rows, num_contexts, drafts.shape[1])
        spec_metadata.num_accepted_draft_tokens = lens - 1
        unused = self.max_draft_len - drafts.shape[1]
        return nn.functional.pad(accepted, (0, unused), value=-1), lens

    @staticmethod
    def _shaped(logits: Tensor, drafts: Tensor, spec: SpecMetadata, shaping: LogitsState) -> Tensor:
        if spec.slot_ids is None or spec.sampling is None:
            raise ConfigError(
                "spec_metadata.logits_state needs slot_ids [B] and sampling: set both."
            )
        rows = spec.sampling
        return shape_logits(
            shaping, logits, spec.slot_ids, drafts, rows.positions, rows.temperatures
        )

    @staticmethod
    def _count_output(
        shaping: LogitsState, tokens: Tensor, lens: Tensor, num_contexts: int, spec: SpecMetadata
    ) -> None:
        assert spec.slot_ids is not None
        if spec.next_prompt_tokens is not None:  # a sample inside the prompt is no text
            inside = spec.next_prompt_tokens >= 0
            lens = torch.cat([lens[:num_contexts].masked_fill(inside, 0), lens[num_contexts:]])
        count_output(shaping, spec.slot_ids, tokens, lens)

    def _accept_by_kernels(
        self, logits: Tensor, drafts: Tensor, num_contexts: int, spec_metadata: SpecMetadata
    ) -> Accepted | None:
        """All of acceptance, where kernels serve; the methods they stand for are their twins. None
        if one of them is somebody's own, or does what the kernels do not."""
        hooks = (getattr(self, name) for name in _ACCEPTANCE_METHODS)
        sampling = spec_metadata.sampling_rows(logits.shape[0])
        forced = self.force_num_accepted_tokens
        if not all(getattr(hook, "has_kernel", False) for hook in hooks) or forced != int(forced):
            return None
        rule = self.relaxed_rule(spec_metadata)
        forced_len = min(int(forced), drafts.shape[1]) + 1 if forced else 0
        if sampling is None or sampling.all_greedy:
            if rule is not None and num_contexts:
                return None
            return accept_greedy(logits, drafts, num_contexts, self.max_draft_len, forced_len, rule)
        kernels, memory, slots = sampling_kernels(logits), self.draft_memory, spec_metadata.slot_ids
        fits = sampling.temperatures.shape[0] == logits.shape[0]
        fits &= drafts.shape[1] < MAX_ROWS_PER_REQUEST
        if (
            kernels is None
            or rule is not None
            or not fits
            or (memory is not None and slots is None)
        ):
            return None
        is_block = self.config is not None and self.config.acceptance == "block"
        return kernels.accept_sampled(
            logits, drafts, num_contexts, self.max_draft_len, sampling, forced_len=forced_len,
            memory=memory, slots=slots, is_block=is_block,
        )  # fmt: skip

    def _may_reject(self, logits: Tensor, drafts: Tensor, spec_metadata: SpecMetadata) -> bool:
        """Whether drafts of sampled requests are judged by what they were drawn from. A worker
        with its own way to choose the target's tokens, or to accept, keeps to that."""
        sampling = spec_metadata.sampling_rows(logits.shape[0])
        methods = self.sample_target_tokens, self.accept
        is_ours = all(getattr(method, "has_kernel", False) for method in methods)
        if self.draft_memory is None or sampling is None or sampling.all_greedy or not is_ours:
            return False
        return drafts.numel() > 0

    def _sample_and_reject(
        self, logits: Tensor, drafts: Tensor, num_contexts: int, spec_metadata: SpecMetadata
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`sample_target_tokens` and `accept` by rejection sampling, greedy requests as ever.

        Returns:
            (tokens [B, K'+1] int32 up to each length, lens [B] int32, rows with NaN [R] bool).
        """
        sampling = spec_metadata.sampling_rows(logits.shape[0])
        slots = spec_metadata.slot_ids
        assert sampling is not None and self.draft_memory is not None and self.config is not None
        if slots is None:
            raise ConfigError(
                f"acceptance={self.config.acceptance!r} looks up what drafts were drawn from: set "
                "spec_metadata.slot_ids [B]."
            )
        logits, bad = clean_logits(logits)
        rows, lens = self.accept(
            logits, greedy_tokens(logits), drafts, num_contexts, spec_metadata
        )  # right for greedy requests
        if num_contexts:
            own = sampling.select(slice(num_contexts))
            rows[:num_contexts, 0] = sample_target_tokens(logits[:num_contexts], own)[0]
        num_drafts, own = drafts.shape[1], sampling.select(slice(num_contexts, None))
        log_p = target_log_probs(logits[num_contexts:], own).view(len(drafts), num_drafts + 1, -1)
        judge = block_rejection if self.config.acceptance == "block" else token_rejection
        drawn_from = DraftDistributions.of(self.draft_memory, slots[num_contexts:], num_drafts)
        count, token = judge(log_p, drafts, drawn_from, own)
        places = torch.arange(num_drafts + 1, device=drafts.device)
        judged = torch.where(
            places < count[:, None], nn.functional.pad(drafts, (0, 1)), rows[num_contexts:]
        )
        judged = torch.where(places == count[:, None], token[:, None], judged)
        is_sampled = own.temperatures[:: num_drafts + 1] > 0
        generations = torch.where(is_sampled[:, None], judged, rows[num_contexts:])
        their_lens = torch.where(is_sampled, (count + 1).to(lens.dtype), lens[num_contexts:])
        return (
            torch.cat([rows[:num_contexts], generations]),
            torch.cat([lens[:num_contexts], their_lens]),
            bad,
        )

    def relaxed_rule(self, spec_metadata: SpecMetadata) -> RelaxedRule | None:
        """What relaxes acceptance in this step; None: it is strict."""
        return None

    @has_kernel
    def accept(
        self,
        logits: Tensor,
        tokens: Tensor,
        drafts: Tensor,
        num_contexts: int,
        spec_metadata: SpecMetadata,
    ) -> tuple[Tensor, Tensor]:
        """The acceptance rule, strict here.

        Args:
            logits: [C + G*(K'+1), V]. tokens: [C + G*(K'+1)] int32, the target's choice at each.
            drafts: [G, K'] int32.

        Returns:
            (tokens [B, K'+1] int32, what comes out at each place if it is reached; lens [B] int32).
        """
        return strict_acceptance(tokens, drafts, num_contexts)

    @has_kernel
    def after_acceptance(
        self, accepted: Tensor, lens: Tensor, num_contexts: int, spec_metadata: SpecMetadata
    ) -> None:
        """State that follows the text: accepted [B, K'+1] int32, lens [B]. Nothing by default."""

    @has_kernel
    def sample_target_tokens(
        self, logits: Tensor, spec_metadata: SpecMetadata
    ) -> tuple[Tensor, Tensor]:
        """logits [R, V] -> (tokens [R] int32, rows with NaN [R] bool), per-request parameters."""
        return sample_target_tokens(logits, spec_metadata.sampling_rows(logits.shape[0]))

    @has_kernel
    def apply_forced_acceptance(
        self, lens: Tensor, num_contexts: int, num_drafts: int, spec_metadata: SpecMetadata | None
    ) -> Tensor:
        """lens [B], overridden for generations when forced acceptance is on."""
        if self.force_num_accepted_tokens <= 0 or lens.shape[0] == num_contexts:
            return lens
        generations = lens[num_contexts:]
        num_rows = num_contexts + generations.shape[0] * (num_drafts + 1)
        sampling = None if spec_metadata is None else spec_metadata.sampling_rows(num_rows)
        if sampling is not None:  # one row per request is enough: its first
            seeds = sampling.seeds[num_contexts :: num_drafts + 1]
            positions = sampling.positions[num_contexts :: num_drafts + 1]
        else:
            seeds = torch.arange(generations.shape[0], device=lens.device)
            positions = torch.randint(2**62, seeds.shape, device=lens.device)
        forced = force_accepted_lens(
            generations, self.force_num_accepted_tokens, num_drafts, seeds, positions
        )
        return torch.cat([lens[:num_contexts], forced])

    def _check_shapes(
        self, logits: Tensor, draft_tokens: Tensor, num_contexts: int, batch_size: int
    ) -> Tensor:
        generations = batch_size - num_contexts
        if not 0 <= num_contexts <= batch_size:
            raise ConfigError(f"num_contexts={num_contexts} is not in 0 … batch_size={batch_size}.")
        if generations == 0:  # whatever a preallocated buffer holds
            drafts = torch.empty((0, self.max_draft_len), dtype=torch.int32, device=logits.device)
        elif draft_tokens.numel() % generations:
            raise ConfigError(
                f"draft_tokens of shape {tuple(draft_tokens.shape)} does not divide over "
                f"{generations} generation requests: give [G, K] or [G*K]."
            )
        else:
            drafts = draft_tokens.reshape(generations, -1)
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


def per_request(rows: Tensor, num_contexts: int, num_drafts: int) -> Tensor:
    """[C + G*(K+1)] bool -> [B] bool: any row of the request.

    Rows of rejected drafts count too: their NaN stands in the KV cache, where a masked read
    multiplies it by zero, which is NaN again.
    """
    generations = rows[num_contexts:].view(-1, num_drafts + 1).any(-1)
    return torch.cat([rows[:num_contexts], generations])
