"""What a draft head to be trained is: its options, and the config that they make for a target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..checkpoints.families.long_rope import rope_of_other_layers
from ..checkpoints.heads.dflash_config import default_target_layers, widened
from ..checkpoints.heads.eagle_config import default_layers_to_capture
from ..checks import MAX_SIZE
from ..config import MAX_DRAFT_LEN, require_int
from ..errors import ConfigError
from ..models.config import DecoderConfig
from ..models.drafters.base import HeadConfig
from ..models.drafters.mtp import mtp_decoder_config
from ..utils import renamed

BLOCK_NAMES = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}
BLOCK_KINDS = tuple(BLOCK_NAMES)
KINDS = (*BLOCK_KINDS, "eagle3", "mtp")
MOST_RANK, LEAST_RANK = 256, 16
CONVOLUTION = 2, 16
"""Of DFlash2, taps and channels of a group."""
CANDIDATES = 16
FEWEST_LAYERS = 4
"""Of a target, where --capture-layers is not given."""


@dataclass(frozen=True)
class NewHead:
    """What is to be trained.

    Raises:
        ConfigError: a field is not what it can be.
    """

    kind: str = "eagle3"  # "mtp": DeepSeek-style layers
    num_layers: int = 1  # for MTP more than one is "vanilla", a layer per draft token
    layers_to_capture: tuple[int, ...] | None = None  # not of MTP; None is the kind's default
    intermediate_size: int | None = None  # None is the target's
    block_size: int = 8  # of block heads, rows: the last token's, of DFlash proposing nothing
    mask_token_id: int | None = None  # of block heads: read in place of drafts; not one of texts
    markov_rank: int | None = None  # DSpark, of its bias; None is `default_rank`'s
    selector_rank: int | None = None  # DFlash2, of its choice; None is `default_rank`'s
    context_embeddings: bool = False  # of block heads: context rows read the token after them
    sliding_window: int | None = None  # not of MTP: rows that a layer sees; None is all. A block's
    # rows see each other, and as many rows before the last token's
    draft_window: int = 0  # for serving, `HeadDecodingConfig.draft_window`
    like: DecoderConfig | None = None  # not of MTP: whose RoPE and norms' epsilon; None: target's

    def __post_init__(self) -> None:
        check_kind(self.kind)
        require_int(self, "num_layers", 1, MAX_DRAFT_LEN)
        require_int(self, "block_size", 2, MAX_DRAFT_LEN)
        if self.mask_token_id is not None:
            require_int(self, "mask_token_id", 0, None)
        for name, kind, called in (
            ("markov_rank", "dspark", "DSpark"),
            ("selector_rank", "dflash2", "DFlash2"),
        ):
            if getattr(self, name) is not None:
                require_int(self, name, 1, None)
                if self.kind != kind:
                    raise ConfigError(f"{name} is of {called} heads, not of {self.kind}.")
        if self.context_embeddings and self.kind not in BLOCK_KINDS:
            raise ConfigError(f"context_embeddings is of block heads, not of {self.kind}.")
        if self.sliding_window is not None:
            require_int(self, "sliding_window", 1, MAX_SIZE)
        if self.draft_window:
            require_int(self, "draft_window", MAX_DRAFT_LEN + 1, MAX_SIZE)
        not_of_mtp = self.layers_to_capture, self.intermediate_size, self.sliding_window
        if self.kind == "mtp" and any(not_of_mtp):
            raise ConfigError(
                "MTP layers are the target's own kind and read its last hidden states: "
                "layers_to_capture, intermediate_size and sliding_window are for the other kinds."
            )

    @property
    def drafts_of_block(self) -> int | None:
        """How many drafts a block has; None of heads that draft one after the other."""
        if self.kind not in BLOCK_KINDS:
            return None
        return self.block_size - (self.kind != "dspark")  # others' first row proposes nothing


def head_config(spec: NewHead, target: DecoderConfig, draft_vocab_size: int | None) -> HeadConfig:
    """Returns the config of the head that `create_head` makes.

    Args:
        draft_vocab_size: of EAGLE-3, how many tokens it drafts among.

    Raises:
        ConfigError: it cannot be made.
    """
    check_target(target, spec.kind)
    if spec.kind == "eagle3":
        made = _eagle3_config(spec, target, draft_vocab_size)
    elif spec.kind in BLOCK_KINDS:
        made = _block_config(spec, target)
    else:
        made = _mtp_config(spec, target)
    return replace(made, draft_window=spec.draft_window)


def check_target(target: DecoderConfig, kind: str) -> None:
    """Raises ConfigError for a target whose layers are not like those of the heads made here.

    Layers of MTP are the target's own; others take its sizes.

    Args:
        kind: one of `KINDS`.
    """
    of_types = {name for fields in target.type_fields.values() for name in fields}
    differs = {
        "layer_types": not of_types <= {"rope_parameters", "linear_attention"},
        "embedding_scale": target.embedding_scale is not None,
        "sandwich_norms": target.sandwich_norms,
        "activation": target.activation != "silu",
    }
    if kind == "mtp":
        differs["layer_types"] = bool(target.layer_types)
        differs["post_norms"] = target.post_norms
        differs["norms_all_heads"] = target.norms_all_heads
        differs["norm_offset"] = target.norm_offset != 0
    found = [name for name, value in differs.items() if value]
    if found:
        raise ConfigError(
            f"Heads are trained for targets whose layers are Llama's; this target's differ in "
            f"{', '.join(found)}. Use another target, or a head made for it elsewhere."
        )


def check_kind(kind: str) -> None:
    """Raises ConfigError for a kind of head that is not trained here."""
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r}; allowed are {', '.join(KINDS)}.")


def _eagle3_config(
    spec: NewHead, target: DecoderConfig, draft_vocab_size: int | None
) -> HeadConfig:
    if draft_vocab_size is None:
        raise ConfigError("An EAGLE-3 head needs the tokens it drafts among: give draft_ids.")
    return HeadConfig(
        kind="eagle3",
        format="EAGLE-3, raw",
        decoder=_plain_layers(spec, target),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocab_size,
        own_lm_head=True,
        layers_to_capture=_eagle3_layers(spec, target),
    )


def _eagle3_layers(spec: NewHead, target: DecoderConfig) -> tuple[int, ...]:
    layers = spec.layers_to_capture
    if layers is None:
        count = target.num_layers
        if count < FEWEST_LAYERS:
            raise ConfigError(
                f"The default capture of three layers needs a target of {FEWEST_LAYERS} layers; "
                f"it has {count}. Give layers_to_capture (--capture-layers)."
            )
        layers = default_layers_to_capture(count)
        if len(set(layers)) < len(layers):  # of a small target
            layers = count // 4, count // 2, 3 * count // 4
    return _checked_layers(layers, target)


def _block_config(spec: NewHead, target: DecoderConfig) -> HeadConfig:
    layers = spec.layers_to_capture
    if layers is None:
        if target.num_layers < spec.num_layers + 3:
            raise ConfigError(
                f"The default capture (evenly from 1 to L-3) of {spec.num_layers} draft layers "
                f"needs a target of {spec.num_layers + 3} layers; it has {target.num_layers}. Give "
                "layers_to_capture (--capture-layers)."
            )
        layers = default_target_layers(spec.num_layers, target.num_layers)
    mask = spec.mask_token_id
    if mask is None or mask >= target.vocab_size:
        raise ConfigError(
            f"mask_token_id={mask} is not in the target's vocabulary 0 … {target.vocab_size - 1}: "
            "give a token that texts do not have, a reserved one at best."
        )
    is_dspark, is_dflash2 = spec.kind == "dspark", spec.kind == "dflash2"
    sees_ahead = (True,) * spec.num_layers
    rank = default_rank(target.hidden_size)
    if is_dflash2 and target.hidden_size % CONVOLUTION[1]:
        raise ConfigError(
            f"A DFlash2 head's convolutions have groups of {CONVOLUTION[1]} channels, which do not "
            f"divide the target's {target.hidden_size}. Train a head of kind 'dflash' or 'dspark'."
        )
    layers_of_head = replace(_plain_layers(spec, target), qk_norm=True)
    return HeadConfig(
        kind="dspark" if is_dspark else "dflash",
        format=f"{BLOCK_NAMES[spec.kind]}, z-lab's format",
        decoder=widened(layers_of_head, sees_ahead, spec.block_size),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        layers_to_capture=_checked_layers(layers, target),
        mask_token_id=spec.mask_token_id,
        trained_draft_len=spec.drafts_of_block,
        sees_ahead=sees_ahead,
        samples_from_anchor=is_dspark,
        markov_rank=(spec.markov_rank or rank) if is_dspark else 0,
        block_convolution=CONVOLUTION if is_dflash2 else (0, 0),
        selector_rank=(spec.selector_rank or rank) if is_dflash2 else 0,
        selector_candidates=min(CANDIDATES, target.vocab_size) if is_dflash2 else 0,
        context_embeddings=spec.context_embeddings,
    )


def default_rank(hidden_size: int) -> int:
    """Returns the largest power of two in an eighth of the size, 16 … 256."""
    eighth = max(LEAST_RANK, hidden_size // 8)
    return min(MOST_RANK, 1 << (eighth.bit_length() - 1))


def _checked_layers(layers: tuple[int, ...], target: DecoderConfig) -> tuple[int, ...]:
    if not layers or not all(0 <= i < target.num_layers for i in layers):
        raise ConfigError(
            f"layers_to_capture={list(layers)}: give layers in 0 … {target.num_layers - 1}."
        )
    if len(set(layers)) < len(layers):
        raise ConfigError(f"layers_to_capture={list(layers)} has a layer twice: give each once.")
    return layers


def _plain_layers(spec: NewHead, target: DecoderConfig) -> DecoderConfig:
    """Returns a Llama's layers of the target's sizes, whatever the target's have.

    Raises:
        ConfigError: the target's attention is latent.
    """
    if target.mla is not None:
        raise ConfigError(
            f"A head of kind {spec.kind!r} takes over its target's attention, and this target's is "
            "latent attention, which such heads have not. Train MTP layers (kind 'mtp')."
        )
    like = spec.like or target
    return DecoderConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=spec.intermediate_size or target.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_position_embeddings=like.max_position_embeddings,  # some RoPE types depend on it
        rms_norm_eps=like.rms_norm_eps,
        rope_parameters=rope_of_other_layers(
            _readable_rope(spec.kind, like.rope_parameters), target.head_dim
        ),
        layer_windows=(spec.sliding_window,) * spec.num_layers,
        dtype=target.dtype,
        raw=target.raw,
    )


def _readable_rope(kind: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Returns a target's RoPE without what the loader refuses in a head of this kind: heads rotate
    whole, and those of blocks at one position a row."""
    left_out = set()
    if rope.get("partial_rotary_factor") not in (None, 1):
        left_out.add("partial_rotary_factor")
    if kind in BLOCK_KINDS:
        left_out.add("mrope_section")
    return {name: value for name, value in rope.items() if name not in left_out}


def _mtp_config(spec: NewHead, target: DecoderConfig) -> HeadConfig:
    decoder = mtp_decoder_config(target, spec.num_layers)
    if any(decoder.moe_of_layer(i) is not None for i in range(spec.num_layers)):
        raise ConfigError(
            "kind='mtp' makes layers of the target's own kind, and training a mixture of experts "
            "is not supported. Train kind='eagle3', or MTP layers for a dense target."
        )
    return HeadConfig(
        kind="mtp",
        format="DeepSeek-style MTP layers",
        decoder=decoder,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        norm_output=target.mtp_feeds_post_norm is not False,
    )


def kind_of_head(config: HeadConfig) -> str:
    """Returns the head's kind, as `NewHead` calls it."""
    is_dflash2 = config.kind == "dflash" and any(config.block_convolution)
    return "dflash2" if is_dflash2 else config.kind


def block_rows(config: HeadConfig) -> int:
    """Returns how many rows a block has at most, the last token's with them."""
    assert config.trained_draft_len is not None
    return config.trained_draft_len + (not config.samples_from_anchor)


def windows_of(config: HeadConfig) -> tuple[int | None, ...]:
    """Returns by layer the window that config.json says, None where all rows are seen."""
    found = []
    for i in range(config.decoder.num_layers):
        window = config.decoder.window(i)
        sees_ahead = bool(config.sees_ahead) and config.sees_ahead[i]
        if window is not None and sees_ahead and not config.windows_by_row:  # the loader widens it
            window -= block_rows(config)
        found.append(window)
    return tuple(found)


__getattr__ = renamed(
    __name__,
    {
        name: f"trtspec.train.{home}.{name}"
        for home, names in {
            "create_head": ("create_head", "fit_to_states", "lm_head_weight", "trainable"),
            "earlier_head": ("begin_with", "check_alike", "other_windows"),
            "save_head": ("FORMATS", "HEAD_FILES", "check_format", "save_head"),
        }.items()
        for name in names
    },
)
