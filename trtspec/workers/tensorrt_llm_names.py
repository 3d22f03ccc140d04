"""TensorRT-LLM's names for what a worker's base offers, for workers written against that base.

Arguments are those of its `SpecWorkerBase`. Each docstring names the method of trtspec that does
the work. The table, and what else differs for such a worker, is in docs/modes.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from torch import Tensor

from ..acceptance.rule import per_request
from ..errors import ConfigError
from ..metadata.attention import AttentionMetadata
from ..metadata.spec import SpecMetadata

_REPLACED_BY = {  # TensorRT-LLM's name -> what trtspec's acceptance calls in its place
    "_sample_tokens_for_batch": "sample_target_tokens",
    "_apply_force_accepted_tokens": "apply_forced_acceptance",
}


class TensorRTLLMNames:
    """Mixed into `SpecWorkerBase`. trtspec's workers call none of these.

    Raises:
        ConfigError: a subclass overrides a name that acceptance does not call here.
    """

    _saved: tuple[tuple[Tensor, Tensor], ...] = ()  # tensors of the metadata, copies of them

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, replacement in _REPLACED_BY.items():
            if getattr(cls, name) is not getattr(TensorRTLLMNames, name):
                raise ConfigError(
                    f"{cls.__name__} overrides {name}, which trtspec's acceptance does not call: "
                    f"override {replacement} in its place."
                )

    def _sample_and_accept_draft_tokens_base(
        self: Any,
        logits: Tensor,
        draft_tokens: Tensor | None,
        num_contexts: int,
        batch_size: int,
        spec_metadata: SpecMetadata,
    ) -> tuple[Tensor, Tensor]:
        """`sample_and_accept_draft_tokens` without the guided decoder, which such a worker calls.

        Returns:
            (accepted [B, K+1] int32, -1 past the length; lens [B] int32). After a chunk inside the
            prompt the accepted token is the true next one.
        """
        accepted, lens = self.sample_and_accept_draft_tokens(
            logits, draft_tokens, num_contexts, batch_size, spec_metadata, is_guided=True
        )
        self.put_known_tokens(accepted, num_contexts, spec_metadata)
        return accepted, lens

    def _sample_tokens_for_batch(
        self: Any, logits: Tensor, spec_metadata: SpecMetadata, num_contexts: int, batch_size: int
    ) -> Tensor:
        """`sample_target_tokens`: logits [C + G*(K'+1), V] -> [C + G*(K'+1)] int32.

        Also marks requests with NaN, for a worker that accepts by itself.

        Raises:
            ConfigError: a request has penalties or banned words. These follow the accepted tokens,
                which such a worker does not report.
        """
        if spec_metadata.logits_state is not None:
            raise ConfigError(
                "_sample_tokens_for_batch knows no penalties or banned words, which a request asks "
                "for: accept by _sample_and_accept_draft_tokens_base, or refuse such requests."
            )
        generations = batch_size - num_contexts
        num_drafts = (logits.shape[0] - num_contexts) // generations - 1 if generations else 0
        with spec_metadata.rows_of_step(num_contexts, generations, num_drafts):
            tokens, bad_rows = self.sample_target_tokens(logits, spec_metadata)
        spec_metadata.bad_requests = per_request(bad_rows, num_contexts, num_drafts)
        return tokens

    def _apply_force_accepted_tokens(
        self: Any,
        num_accepted_tokens: Tensor,
        num_contexts: int,
        runtime_draft_len: int | None = None,
        spec_metadata: SpecMetadata | None = None,
    ) -> Tensor:
        """`apply_forced_acceptance`: lens [B] int32 -> [B] int32, a new tensor where it is on.

        Args:
            runtime_draft_len: K'; None is K.
            spec_metadata: keys the noise of a fraction; None draws it anew each time.
        """
        num_drafts = self.max_draft_len if runtime_draft_len is None else runtime_draft_len
        return self.apply_forced_acceptance(
            num_accepted_tokens, num_contexts, num_drafts, spec_metadata
        )

    def _draft_sampler_greedy(self: Any, logits: Tensor, d2t: Tensor | None = None) -> Tensor:
        """`draft_sampler_greedy`: logits [R, Vd], offsets [Vd] -> target ids [R] int32."""
        return self.draft_sampler_greedy(logits, d2t)

    def _execute_guided_decoder_if_present(self: Any, logits: Tensor) -> None:
        """`execute_guided_decoder`: masks logits [R, V] in place."""
        self.execute_guided_decoder(logits)

    def _prepare_next_new_tokens(
        self: Any,
        accepted_tokens: Tensor,
        next_draft_tokens: Tensor,
        batch_indices_cuda: Tensor | None,
        batch_size: int,
        num_accepted_tokens: Tensor,
    ) -> Tensor:
        """`build_next_new_tokens`: [B, K+1] int32.

        Args:
            batch_indices_cuda: [>= B] int, the row of accepted_tokens of each request; None is 0,
                1, ….
        """
        accepted = accepted_tokens[:batch_size]
        if batch_indices_cuda is not None:
            accepted = accepted_tokens[batch_indices_cuda[:batch_size]]
        return self.build_next_new_tokens(accepted, num_accepted_tokens, next_draft_tokens)

    def _prepare_context_input_ids(
        self: Any,
        input_ids: Tensor,
        num_ctx_tokens: int,
        gather_ids: Tensor,
        accepted_tokens: Tensor,
        num_contexts: int,
    ) -> Tensor:
        """`prepare_context_input_ids`: the contexts' ids shifted left by one.

        Args:
            input_ids: [T], contexts first. gather_ids: [>= C] int64, each context's last row first.
            accepted_tokens: [>= C, ...] int, column 0 is the token after the context.

        Returns:
            [num_ctx_tokens], of input_ids' dtype (TensorRT-LLM's is int32).
        """
        return self.prepare_context_input_ids(
            input_ids[:num_ctx_tokens],
            accepted_tokens,
            [0] * num_contexts,
            last_rows=gather_ids[:num_contexts],
        )

    def _prepare_attn_metadata_for_spec_dec(self, attn_metadata: Any) -> None:
        """Saves the metadata before drafting, for `_restore_attn_metadata_from_spec_dec`.

        An `AttentionMetadata` is frozen: a draft pass gets a new one (`for_rows`), so only tensors
        that were written in place are to be restored. A foreign loop's metadata is asked to do it,
        by TensorRT-LLM's methods.

        Args:
            attn_metadata: an `AttentionMetadata`, a foreign one, or None.
        """
        if isinstance(attn_metadata, AttentionMetadata):
            self._saved = tuple((tensor, tensor.clone()) for tensor in _tensors_of(attn_metadata))
        elif attn_metadata is not None:
            attn_metadata.prepare_for_spec_dec("_seq_lens", "_seq_lens_cuda")

    def _restore_attn_metadata_from_spec_dec(self, attn_metadata: Any) -> None:
        """Undoes what drafting wrote into the metadata."""
        if isinstance(attn_metadata, AttentionMetadata):
            for tensor, held in self._saved:
                tensor.copy_(held)
            self._saved = ()
        elif attn_metadata is not None:
            attn_metadata.restore_from_spec_dec()
            attn_metadata.on_update()


def _tensors_of(meta: AttentionMetadata) -> Iterator[Tensor]:
    for field in fields(meta):
        value = getattr(meta, field.name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Tensor):
                yield item
