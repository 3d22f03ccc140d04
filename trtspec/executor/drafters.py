"""Loads drafters: a table from the class of a decoding config to a loader.

Loaders are constructed before the target is loaded, so that what cannot work fails early. Heads
need no row in the table: `HeadLoader` loads any `HeadDecodingConfig` by what its class says.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from torch import Tensor

from ..acceptance.forced import get_force_num_accepted_tokens
from ..checkpoints.heads.eagle_config import MIN_LAYERS_FOR_DEFAULT, default_layers_to_capture
from ..checkpoints.heads.load import load_head
from ..checkpoints.heads.masked import pard_token
from ..checkpoints.heads.records import HeadRequest
from ..checkpoints.hf_config import load_config
from ..checkpoints.place import LoadOptions, lm_head_for_drafts, weight_form
from ..checkpoints.tokenizer import load_tokenizer, token_problem
from ..checkpoints.weights import finish, load_decoder
from ..checkpoints.zoo import is_of_package, resolve_model
from ..config import (
    DecodingBaseConfig,
    DraftTargetDecodingConfig,
    HeadDecodingConfig,
    MTPDecodingConfig,
    SADecodingConfig,
    SaveHiddenStatesDecodingConfig,
)
from ..data.hidden_states import HiddenStatesWriter
from ..distributed.parallel import ONE_RANK, Parallel
from ..errors import ConfigError
from ..metadata.mode import SpeculativeDecodingMode
from ..models.config import DecoderConfig
from ..models.cut import check_cut
from ..models.decoder import Decoder, keep_kv_finite
from ..models.drafters.base import DraftHead
from .saving import HiddenStatesSaver

logger = logging.getLogger(__name__)

DEFAULT_DRAFT_LEN = 4

Spec = TypeVar("Spec", bound=DecodingBaseConfig | None)
HeadSpec = TypeVar("HeadSpec", bound=HeadDecodingConfig)


@dataclass(frozen=True, kw_only=True)
class LoadedTarget:
    """The target, and how it was loaded."""

    model: Decoder
    directory: Path
    options: LoadOptions

    @property
    def config(self) -> DecoderConfig:
        return self.model.config

    def options_of_drafter(self, quant: str | None, pack: bool = True) -> LoadOptions:
        """Returns how a drafter is loaded: as the target, but for its KV groups and quantisation.

        Args:
            quant: as in the drafter's config.
        """
        return replace(
            self.options,
            kv_group=len(self.model.kv_group_specs(self.options.dtype)),  # after the target's
            pack=pack,
            form=weight_form(quant, self.options.device),
        )


@dataclass(frozen=True, kw_only=True)
class LoadedDrafter:
    """A drafter, and what the executor must know of it."""

    config: DecodingBaseConfig | None  # with K settled; None is plain decoding
    vocab_size: int  # of its logits
    d2t: Tensor | None = None  # [vocab_size] int64 offsets, target id = draft id + d2t[draft id]
    model: Decoder | DraftHead | None = None  # None: no network drafts
    layers_to_capture: tuple[int, ...] = ()  # target layers whose outputs are captured
    mask_token_id: int | None = None  # of a masked drafter
    chooses_by_default: bool = False  # its lengths choose themselves, though K was left open

    @property
    def mode(self) -> SpeculativeDecodingMode:
        if self.config is None:
            return SpeculativeDecodingMode.NONE
        return self.config.spec_dec_mode


class DrafterLoader(Generic[Spec]):
    """Loads a drafter without a network. Subclasses load the others."""

    def __init__(self, spec: Spec):
        self.spec = spec

    @property
    def position_limits(self) -> list[DecoderConfig]:
        """Returns configs of further models whose positions limit the sequence length."""
        return []

    def load(self, target: LoadedTarget) -> LoadedDrafter:
        """Returns the drafter.

        Raises:
            ConfigError, CheckpointError: it does not fit the target, or cannot do what is asked.
        """
        return LoadedDrafter(config=self.spec, vocab_size=target.config.vocab_size)

    def saver(self, target: LoadedTarget) -> HiddenStatesSaver | None:
        """Returns what writes the target's hidden states to disk, if this config does."""
        return None


class HeadLoader(DrafterLoader[HeadSpec]):
    """Loads a head, perhaps from the target's checkpoint."""

    def load(self, target: LoadedTarget) -> LoadedDrafter:
        directory = Path(self.spec.speculative_model or target.directory)
        head = load_head(
            directory,
            target.model,
            HeadRequest(
                kind=self.spec.head_kind,
                draft_window=self.spec.draft_window,
                draft_tokens=self.spec.draft_token_ids,
                **self.spec.head_options,
            ),
            target.options_of_drafter(self.spec.quant),
        )
        spec = self.settle(head, directory)
        _check_draft_len(spec, head)
        chooses = self.spec.max_draft_len == 0 and may_choose(spec, directory, target)
        if chooses:
            spec = replace(spec, draft_len_schedule="auto")
        return LoadedDrafter(
            config=spec,
            vocab_size=min(head.config.draft_vocab_size, target.config.vocab_size),
            d2t=head.d2t,
            model=head,
            layers_to_capture=head.layers_to_capture,
            mask_token_id=head.config.mask_token_id,
            chooses_by_default=chooses,
        )

    def settle(self, head: DraftHead, directory: Path) -> HeadSpec:
        """Returns the config with the fields filled in that it left to the head."""
        if self.spec.max_draft_len:
            return self.spec
        return replace(
            self.spec, max_draft_len=head.config.suggested_draft_len or DEFAULT_DRAFT_LEN
        )


class MTPLoader(HeadLoader[MTPDecodingConfig]):
    """Loads MTP layers, or a Gemma assistant."""

    def load(self, target: LoadedTarget) -> LoadedDrafter:
        spec, vocab_size = self.spec, target.config.vocab_size
        for name in ("begin_thinking_phase_token", "end_thinking_phase_token"):
            if spec.use_relaxed_acceptance_for_thinking and getattr(spec, name) >= vocab_size:
                raise ConfigError(
                    f"MTPDecodingConfig.{name}={getattr(spec, name)} is not in the model's "
                    f"vocabulary 0 … {vocab_size - 1}: give the model's own thinking tokens."
                )
        return super().load(target)

    def settle(self, head: DraftHead, directory: Path) -> MTPDecodingConfig:
        """Returns the config with `use_mtp_vanilla` settled. Warns of layers that do not draft."""
        spec, used, available = self.spec, head.num_layers, head.config.num_mtp_layers
        if not head.advances_positions:
            self._refuse_layer_options(head, directory)
        if not available:  # an assistant, all of whose layers make every draft
            return spec
        if used > 1 and spec.use_mtp_vanilla is None:
            spec = replace(spec, use_mtp_vanilla=True)
        if used < available:
            logger.warning(
                "All drafts come from the first %s of the checkpoint's %d MTP layers. To have each "
                "draft a token: MTPDecodingConfig(num_nextn_predict_layers=%d, "
                "use_mtp_vanilla=True). `trtspec doctor` compares that with the first layer alone.",
                "layer" if used == 1 else f"{used} layers",
                available,
                available,
            )
        return spec

    def _refuse_layer_options(self, head: DraftHead, directory: Path) -> None:
        for name, defaults in (
            ("use_mtp_vanilla", (None, False)),
            ("mtp_feeds_post_norm", (None,)),
        ):
            value = getattr(self.spec, name)
            if value not in defaults:
                raise ConfigError(
                    f"MTPDecodingConfig.{name}={value!r} is about MTP layers; {directory} is a "
                    f"{head.config.format}, which drafts every token alike. Leave it out."
                )


class SuffixLoader(DrafterLoader[SADecodingConfig]):
    """Loads a suffix lookup. On one device its default K is a limit: lengths choose themselves."""

    def load(self, target: LoadedTarget) -> LoadedDrafter:
        is_open = self.spec.max_draft_len == SADecodingConfig.max_draft_len
        chooses, drafter = is_open and times_lengths(self.spec, target), super().load(target)
        if not chooses:
            return drafter
        config = replace(self.spec, draft_len_schedule="auto")
        return replace(drafter, config=config, chooses_by_default=True)


class DraftTargetLoader(DrafterLoader[DraftTargetDecodingConfig]):
    """Loads a second language model after checking that its tokens are the target's."""

    def __init__(self, spec: DraftTargetDecodingConfig):
        super().__init__(spec)
        assert spec.speculative_model is not None  # the config requires it
        self.directory = resolve_model(spec.speculative_model)
        self.draft_config = load_config(self.directory)
        if self.draft_config.linear_layers:
            raise ConfigError(
                f"speculative_model={str(self.directory)!r} has linear attention, which takes in "
                "each draft for good: such a model cannot draft. Use its MTP layers over a target "
                "of its own kind, or a draft model without linear attention."
            )

    @property
    def position_limits(self) -> list[DecoderConfig]:
        return [self.draft_config]

    def load(self, target: LoadedTarget) -> LoadedDrafter:
        vocab_size = target.config.vocab_size
        tokenizers = load_tokenizer(self.directory), load_tokenizer(target.directory)
        problem = token_problem(self.draft_config.vocab_size, vocab_size, *tokenizers)
        if problem:
            raise ConfigError(problem)
        options = target.options_of_drafter(self.spec.quant, pack=False)
        draft = load_decoder(self.directory, options, self._parallel(target.config.parallel))
        draft.keep_logits(vocab_size)
        draft.lm_head = lm_head_for_drafts(draft.lm_head, options.form)
        finish(draft, target.options.device)
        keep_kv_finite(draft)
        return LoadedDrafter(
            config=self.spec,
            vocab_size=min(draft.config.vocab_size, vocab_size),
            model=draft,
            mask_token_id=self._mask_token(),
        )

    def _parallel(self, of_target: Parallel) -> Parallel:
        """Returns the ranks that the draft model is cut over: the target's, or one."""
        asked, where = self.spec.draft_tensor_parallel_size, str(self.directory)
        if asked is not None and asked not in (1, of_target.size):
            raise ConfigError(
                f"DraftTargetDecodingConfig.draft_tensor_parallel_size={asked}: it must be 1 or "
                f"the target's {of_target.size}."
            )
        if of_target.attention_dp and asked == 1:
            raise ConfigError(
                "DraftTargetDecodingConfig.draft_tensor_parallel_size=1 needs every request's keys "
                "on every rank, which enable_attention_dp does not keep. Leave one of them out."
            )
        if asked == 1:
            return ONE_RANK
        try:
            check_cut(replace(self.draft_config, parallel=of_target), where)
        except ConfigError as error:
            if asked is not None or of_target.attention_dp:
                raise
            logger.info("Every rank has all of the draft model: %s", error)
            return ONE_RANK
        return of_target

    def _mask_token(self) -> int | None:
        """Returns a PARD model's mask token. None: the model drafts one token per pass."""
        if self.spec.parallel_drafting is False:
            return None
        config, where = self.draft_config, self.directory / "config.json"
        token = pard_token(config.raw, where, config.vocab_size)
        if token is None and self.spec.parallel_drafting:
            raise ConfigError(
                f"DraftTargetDecodingConfig.parallel_drafting=True, but {where} has no pard_token, "
                "the token that such a draft model reads at the positions to be drafted. "
                "Use a PARD model, or leave parallel_drafting out."
            )
        return token


class SaveHiddenStatesLoader(DrafterLoader[SaveHiddenStatesDecodingConfig]):
    """Captures the target's hidden states, and opens their output directory."""

    def __init__(self, spec: SaveHiddenStatesDecodingConfig):
        super().__init__(spec)
        assert spec.output_directory is not None  # the config requires it
        self.directory = Path(spec.output_directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise ConfigError(
                f"output_directory={str(self.directory)!r} is a file: give a directory."
            )

    def load(self, target: LoadedTarget) -> LoadedDrafter:
        return LoadedDrafter(
            config=self.spec,
            vocab_size=target.config.vocab_size,
            layers_to_capture=self._layers(target.config.num_layers),
        )

    def saver(self, target: LoadedTarget) -> HiddenStatesSaver:
        writer = HiddenStatesWriter(
            self.directory,
            self._layers(target.config.num_layers),
            target.config.hidden_size,
            target.options.dtype,
            rows_per_file=self.spec.tokens_per_file,
            target=_fingerprint(target.model),
        )
        return HiddenStatesSaver(writer, target.config.hidden_size)

    def _layers(self, num_layers: int) -> tuple[int, ...]:
        asked = self.spec.eagle3_layers_to_capture
        if asked is None and num_layers < MIN_LAYERS_FOR_DEFAULT:
            raise ConfigError(
                f"The default capture (layers 1, L/2-1, L-4) needs {MIN_LAYERS_FOR_DEFAULT} "
                f"layers; the model has {num_layers}. Give eagle3_layers_to_capture."
            )
        layers = default_layers_to_capture(num_layers) if asked is None else tuple(asked)
        if not all(0 <= layer < num_layers for layer in layers):
            raise ConfigError(
                f"Layers {list(layers)} cannot be captured of a model of {num_layers}: give "
                f"eagle3_layers_to_capture in 0 … {num_layers - 1}."
            )
        return layers


LOADERS: dict[type, type[DrafterLoader]] = {
    type(None): DrafterLoader,
    DecodingBaseConfig: DrafterLoader,
    HeadDecodingConfig: HeadLoader,
    MTPDecodingConfig: MTPLoader,
    SADecodingConfig: SuffixLoader,
    DraftTargetDecodingConfig: DraftTargetLoader,
    SaveHiddenStatesDecodingConfig: SaveHiddenStatesLoader,
}
"""The class of a config, or the nearest of its bases, to how its drafter is loaded."""


def drafter_loader(spec: DecodingBaseConfig | None) -> DrafterLoader:
    """Returns the loader of a config.

    Raises:
        ConfigError, CheckpointError: the drafter cannot be found.
    """
    return next(LOADERS[base] for base in type(spec).__mro__ if base in LOADERS)(spec)


def may_choose(spec: HeadDecodingConfig, directory: Path, target: LoadedTarget) -> bool:
    """Whether a head's draft lengths choose themselves where K was left open (decision 019).

    That is for heads of the package, which were measured.
    """
    return times_lengths(spec, target) and is_of_package(directory)


def times_lengths(spec: DecodingBaseConfig, target: LoadedTarget) -> bool:
    """Whether draft lengths may choose themselves: on one device.

    Other settings of lengths, forced acceptance and passes outside of the step keep K.
    """
    settings = spec.draft_len_schedule, spec.max_concurrency, spec.max_verified_drafts
    is_open = all(setting is None for setting in settings)
    is_inside = not spec.spec_dec_mode.drafts_in_passes()
    if not (is_open and target.config.parallel.size == 1 and is_inside):
        return False
    return get_force_num_accepted_tokens() == 0  # asked last: it warns of a wrong value


def _check_draft_len(spec: HeadDecodingConfig, head: DraftHead) -> None:
    """Raises ConfigError if a masked head is asked for more drafts than it was trained for."""
    asked, trained = spec.max_draft_len, head.config.trained_draft_len
    if head.config.mask_token_id is not None and trained is not None and asked > trained:
        raise ConfigError(
            f"{type(spec).__name__}.max_draft_len={asked}: the head was trained to propose "
            f"{trained} tokens in one pass, says its config.json. Give at most {trained}."
        )


def _fingerprint(target: Decoder) -> str:
    """Returns a hash of the target's sizes and some of its embedding."""
    rows = target.embed_tokens.weight[:64].float().cpu().numpy().tobytes()
    sizes = f"{target.config.num_layers} {target.config.vocab_size} {target.config.hidden_size}"
    return hashlib.sha256(sizes.encode() + rows).hexdigest()[:16]
