"""A draft head to be trained: made for a target, and written in the public formats."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ..attention.torch_sdpa import TorchAttention
from ..checkpoints.families.llama import FULL, MAX_WINDOW, SLIDING
from ..checkpoints.heads.config import MIN_LAYERS_FOR_DEFAULT, default_layers_to_capture
from ..checkpoints.heads.dflash import WINDOWS_SEE, default_target_layers, widened
from ..checkpoints.weights import placements
from ..config import MAX_DRAFT_LEN, require_int
from ..errors import ConfigError, shown
from ..models.config import DecoderConfig
from ..models.decoder import Decoder
from ..models.drafters.base import DraftHead, HeadConfig
from ..models.drafters.convolved import BlockConvolution
from ..models.drafters.dflash import DFlashHead
from ..models.drafters.eagle import Eagle3Head
from ..models.drafters.mtp import MTPHead, mtp_decoder_config
from ..utils import set_usual_mode
from .data import d2t_offsets

BLOCK_NAMES = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}
BLOCK_KINDS = tuple(BLOCK_NAMES)
KINDS = (*BLOCK_KINDS, "eagle3", "mtp")
MOST_RANK, LEAST_RANK = 256, 16
CONVOLUTION = 2, 16
"""Of DFlash2, taps and channels of a group."""
CANDIDATES = 16
CODEBOOK_DEVIATION = 0.02
FORMATS = ("raw", "speculators")
HEAD_FILES = ("model.safetensors", "config.json")
OF_FILES = {
    "format", "captured_by", "suggested_draft_len", "trained_draft_len", "num_mtp_layers",
    "decoder", "draft_window", "value_scale",
}  # fmt: skip
"""Fields of a head's config in which an earlier head may differ from one that begins with it."""
OF_LAYERS = (
    "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps",
    "norm_offset", "rope_parameters", "rotary_dim", "activation", "swiglu_limit", "qkv_bias",
    "o_bias", "mlp_bias", "qk_norm", "head_gate", "attention_scale", "attention_softcap",
)  # fmt: skip
"""Fields of a head's layers in which it may not."""


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
            require_int(self, "sliding_window", 1, MAX_WINDOW)
        if self.draft_window:
            require_int(self, "draft_window", MAX_DRAFT_LEN + 1, MAX_WINDOW)
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


def create_head(
    spec: NewHead, target: Decoder, draft_ids: Tensor | None, dtype: torch.dtype, seed: int
) -> DraftHead:
    """A head with fresh weights on the target's device, all of its parameters trainable.

    Matrices are normal with a deviation of 1/sqrt(inputs), but for what is known already: final
    norms and an EAGLE-3 head's lm_head begin as the target's. DSpark's bias begins as none.
    DFlash2's convolutions begin as the rows themselves, its choice nearly as the logits alone.

    Args:
        draft_ids: EAGLE-3: [Vd] int64, ascending: the target's tokens it drafts among. None where
            a head has the target's lm_head.

    Raises:
        ConfigError: as `check_target`, or a size does not fit.
    """
    config, device = target.config, target.embed_tokens.weight.device
    made = head_config(spec, config, None if draft_ids is None else len(draft_ids))
    network: Any = {"eagle3": Eagle3Head, "mtp": MTPHead}.get(spec.kind, DFlashHead)
    with torch.device("meta"):
        head: DraftHead = network(
            made, config.max_position_embeddings, TorchAttention(), kv_group=1
        )
    generator = torch.Generator().manual_seed(seed)
    for module in list(head.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.ones(parameter.shape) - getattr(module, "offset", 0.0)
            if name == "bias":
                value.zero_()
            elif parameter.dim() > 1:
                value.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
            setattr(module, name, nn.Parameter(value.to(device, dtype), requires_grad=True))
    head.rope_tables.to(device)
    if isinstance(head, Eagle3Head):
        assert draft_ids is not None and head.lm_head is not None
        ids = draft_ids.to(device)
        head.d2t = d2t_offsets(ids)
        weight = lm_head_weight(target)
        head.lm_head.weight.data.copy_(weight[ids])  # type: ignore[union-attr]
        head.norm.weight.data.copy_(target.norm.weight + target.norm.offset)
    elif isinstance(head, DFlashHead):
        head.norm.weight.data.copy_(target.norm.weight + target.norm.offset)
        if head.markov_head is not None:
            bias = head.markov_head.markov_w2.weight
            assert bias is not None
            bias.data.zero_()
        _begin_as_dflash(head)
    else:
        for layer in head.layers:  # type: ignore[union-attr]
            layer.norm.weight.data.copy_(target.norm.weight)
    head.share(target)
    return head


def _begin_as_dflash(head: DFlashHead) -> None:
    """Gives what a DFlash2 head has more than DFlash values with which it computes the same."""
    for module in head.modules():
        if isinstance(module, BlockConvolution):
            assert module.kernel_projection.weight is not None
            module.kernel_projection.weight.data.zero_()
            module.base_kernel.data.zero_()
            module.base_kernel.data[:, 0] = 1
    if head.candidate_selector is not None:
        for book in head.candidate_selector.books:
            book.data.mul_(CODEBOOK_DEVIATION * book.shape[1] ** 0.5)


@torch.no_grad()
def fit_to_states(head: DFlashHead, hidden: Tensor) -> None:
    """Divides what fc makes of each captured layer by the size of that layer's states.

    Late layers' states are many times larger than early ones', and would be all that a new head
    hears.

    Args:
        hidden: [T, n * Ht], captured states of some text.
    """
    parts = hidden.float().unflatten(-1, (-1, head.config.target_hidden_size))
    sizes = parts.pow(2).mean((0, 2)).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    weight = head.fc.weight
    assert weight is not None, "a head to be trained is not packed"
    scale = sizes.repeat_interleave(head.config.target_hidden_size)
    weight.copy_(weight / scale.to(weight.dtype))


def begin_with(head: DraftHead, earlier: DraftHead) -> None:
    """Gives a new head the weights of an earlier one of its kind.

    An EAGLE-3 head may draft among more tokens than the earlier one (`_grown`).

    Raises:
        ConfigError: the heads' kinds, flags or sizes differ, or a token that the earlier head
            drafts is missing here.
    """
    rows, known = _rows_of_earlier(head, earlier), earlier.config
    if rows is not None:
        known = replace(known, draft_vocab_size=head.config.draft_vocab_size)
    check_alike(known, head.config)
    differs = []
    given, wanted = dict(earlier.named_parameters(remove_duplicate=False)), trainable(head)
    for name, parameter in wanted.items():
        weight = given.get(name)
        shape = list(parameter.shape)
        if name == "lm_head.weight" and rows is not None:
            shape[0] = len(rows)
        if weight is None or list(weight.shape) != shape:
            found = "missing" if weight is None else list(weight.shape)
            differs.append(f"{name}: {found} there, {shape} here")
    _refuse(differs)
    for name, parameter in wanted.items():
        if name == "lm_head.weight" and rows is not None:
            parameter.data.copy_(_grown(parameter.data, given[name].data, rows))
        else:
            parameter.data.copy_(given[name])


def check_alike(earlier: HeadConfig, here: HeadConfig) -> None:
    """Raises ConfigError where a head cannot begin with an earlier one, as far as configs say."""
    kinds = [kind_of_head(config) for config in (earlier, here)]
    if kinds[0] != kinds[1]:
        _refuse([f"kind: {kinds[0]} there, {kinds[1]} here"])
    counts = [config.decoder.num_layers for config in (earlier, here)]
    if counts[0] != counts[1]:
        _refuse([f"num_layers: {counts[0]} there, {counts[1]} here"])
    names = [field.name for field in fields(HeadConfig) if field.name not in OF_FILES]
    pairs = [(name, getattr(earlier, name), getattr(here, name)) for name in names]
    pairs += [(name, _of_layers(earlier, name), _of_layers(here, name)) for name in OF_LAYERS]
    differs = [
        f"{name}: {shown(there)} there, {shown(value)} here"
        for name, there, value in pairs
        if there != value
    ]
    differs += other_windows(earlier, _windows(here))
    if earlier.decoder.attention_sinks != here.decoder.attention_sinks:
        differs.append("attention_sink_bias: sinks there, none here")
    _refuse(differs)


def _refuse(differs: list[str]) -> None:
    """Raises ConfigError where there is a difference."""
    if differs:
        raise ConfigError(
            f"The earlier head is another kind of network ({'; '.join(differs)}). Give options "
            "that make a head like it, or another head."
        )


def _of_layers(config: HeadConfig, name: str) -> Any:
    """Returns a field of the head's layers: one value where they are all alike."""
    decoder = config.decoder
    values = [getattr(decoder.of_layer(i), name) for i in range(decoder.num_layers)]
    return values if any(value != values[0] for value in values) else values[0]


def _rows_of_earlier(head: DraftHead, earlier: DraftHead) -> Tensor | None:
    """Returns which rows of the lm_head are of tokens that the earlier head drafts, in its order.

    None where one of these tokens has no row, or a head drafts among all of the target's.
    """
    if head.d2t is None or earlier.d2t is None:
        return None
    here = head.d2t + torch.arange(len(head.d2t), device=head.d2t.device)
    there = earlier.d2t + torch.arange(len(earlier.d2t), device=earlier.d2t.device)
    rows = torch.searchsorted(here, there.to(here.device)).clamp_max(len(here) - 1)
    return rows if torch.equal(here[rows], there.to(here.device)) else None


def _grown(fresh: Tensor, trained: Tensor, rows: Tensor) -> Tensor:
    """Returns an lm_head [Vd, D] whose `rows` are trained ones, and whose others fit these.

    Training has turned the states that the lm_head reads. So the other rows are what the best
    linear map from fresh to trained rows makes of their fresh ones.

    Args:
        fresh: [Vd, D], the target's rows. trained: [len(rows), D].
    """
    fresh, trained = fresh.double(), trained.double()
    known = fresh[rows]
    squares = known.T @ known
    squares.diagonal().add_(1e-6 * squares.diagonal().mean())  # few rows do not say everything
    grown = fresh @ torch.linalg.solve(squares, known.T @ trained)
    grown[rows] = trained
    return grown


def other_windows(earlier: HeadConfig, here: tuple[int | None, ...]) -> list[str]:
    """Returns how an earlier head's sliding windows, by layer, differ from a new one's, if so."""
    there = _windows(earlier)
    if there == here:
        return []
    cure = f"give --sliding-window {there[0]}" if there[0] else "leave --sliding-window out"
    cure = f" ({cure})" if len(set(there)) == 1 else ""
    return [f"sliding windows of layers: {list(there)} there, {list(here)} here{cure}"]


def trainable(head: DraftHead) -> dict[str, nn.Parameter]:
    """The head's own parameters by name, without the target's ends."""
    return {n: p for n, p in head.named_parameters(remove_duplicate=False) if p.requires_grad}


def lm_head_weight(target: Decoder) -> Tensor:
    """[V, D]. Raises ConfigError where the weights are packed (load with pack=False)."""
    weight = target.embed_tokens.weight if target.config.tie_word_embeddings else None
    weight = target.lm_head.weight if weight is None else weight
    if weight is None:
        raise ConfigError("The target's weights are packed: load it with pack=False to train.")
    return weight.data


def check_target(target: DecoderConfig) -> None:
    """Raises ConfigError for a target whose layers are not like those of the heads made here."""
    differs = {
        "layer_types": bool(target.layer_types),
        "norm_offset": target.norm_offset != 0,
        "sandwich_norms": target.sandwich_norms,
        "activation": target.activation != "silu",
    }
    found = [name for name, value in differs.items() if value]
    if found:
        raise ConfigError(
            f"Heads are trained for targets whose layers are Llama's; this target's differ in "
            f"{', '.join(found)}. Use another target, or a head made for it elsewhere."
        )


def head_config(spec: NewHead, target: DecoderConfig, draft_vocab_size: int | None) -> HeadConfig:
    """Returns the config of the head that `create_head` makes.

    Args:
        draft_vocab_size: of EAGLE-3, how many tokens it drafts among.

    Raises:
        ConfigError: it cannot be made.
    """
    check_target(target)
    if spec.kind == "eagle3":
        made = _eagle3_config(spec, target, draft_vocab_size)
    elif spec.kind in BLOCK_KINDS:
        made = _block_config(spec, target)
    else:
        made = _mtp_config(spec, target)
    return replace(made, draft_window=spec.draft_window)


def kind_of_head(config: HeadConfig) -> str:
    """Returns the head's kind, as `NewHead` calls it."""
    is_dflash2 = config.kind == "dflash" and any(config.block_convolution)
    return "dflash2" if is_dflash2 else config.kind


def check_kind(kind: str) -> None:
    """Raises ConfigError for a kind of head that is not trained here."""
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r}; allowed are {', '.join(KINDS)}.")


def check_format(format: str, kind: str) -> None:
    """Raises ConfigError for a format in which a head of this kind is not written."""
    allowed = FORMATS[:1] if kind == "mtp" else FORMATS
    if format not in allowed:
        raise ConfigError(f"format={format!r} for {kind}; allowed: {', '.join(allowed)}.")


def save_head(
    head: DraftHead,
    target: DecoderConfig,
    out: Path,
    *,
    format: str = "raw",
    weights: Mapping[str, Tensor] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Writes config.json and model.safetensors (bf16), each under another name first.

    Args:
        format: "raw" or, but for MTP, "speculators".
        weights: in place of the parameters, e.g. masters in fp32, by `trainable`'s names.
        notes: kept in config.json under "training".

    Raises:
        ConfigError: an unknown format. OSError: the directory cannot be written.
    """
    check_format(format, head.config.kind)
    tensors = _tensors(head, target, format, weights)
    if head.config.kind in BLOCK_KINDS:
        raw = _block_json(head.config, target, format)
    else:
        raw = _speculators_json(head) if format == "speculators" else _raw_json(head, target)
    if head.config.draft_window:
        raw["draft_window"] = head.config.draft_window
    raw["training"] = dict(notes or {})
    out.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, out / "model.safetensors.tmp", metadata={"format": "pt"})
        set_usual_mode(out / "model.safetensors.tmp")
        (out / "config.json.tmp").write_text(json.dumps(raw, indent=2) + "\n")
        for name in HEAD_FILES:
            os.replace(out / f"{name}.tmp", out / name)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        for name in HEAD_FILES:
            (out / f"{name}.tmp").unlink(missing_ok=True)


def _tensors(
    head: DraftHead, target: DecoderConfig, format: str, weights: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    own = trainable(head)
    values = {name: p.data for name, p in own.items()} if weights is None else dict(weights)
    tensors: dict[str, Tensor] = {}
    for name, placement in placements(head).items():
        key = f"{placement.module}.{placement.leaf}"
        if key not in own:
            continue  # the target's
        part = values[key].narrow(0, placement.start, placement.shape[0])
        if placement.order is not None:  # back to the checkpoint's
            part = part[placement.order.argsort()]
        tensors[_public_name(name, head, target, format)] = (
            part.to("cpu", torch.bfloat16).contiguous().clone()
        )
    if head.d2t is not None:
        d2t = head.d2t.cpu()
        t2d = torch.zeros(target.vocab_size, dtype=torch.bool)
        t2d[torch.arange(len(d2t)) + d2t] = True
        tensors |= {"d2t": d2t, "t2d": t2d}
    return tensors


def _public_name(name: str, head: DraftHead, target: DecoderConfig, format: str) -> str:
    if head.config.kind == "mtp":  # DeepSeek's: numbered after the target's layers
        _, index, rest = name.split(".", 2)
        rest = f"shared_head.{rest}" if rest == "norm.weight" else rest
        return f"model.layers.{target.num_layers + int(index)}.{rest}"
    if format == "raw" and head.config.kind == "eagle3" and name.startswith("layers.0."):
        return f"midlayer.{name.removeprefix('layers.0.')}"
    return name


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
        if target.num_layers < MIN_LAYERS_FOR_DEFAULT:
            raise ConfigError(
                f"The default capture (1, L/2-1, L-4) needs a target of {MIN_LAYERS_FOR_DEFAULT} "
                f"layers; it has {target.num_layers}. Give layers_to_capture (--capture-layers)."
            )
        layers = default_layers_to_capture(target.num_layers)
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


def block_rows(config: HeadConfig) -> int:
    """Returns how many rows a block has at most, the last token's with them."""
    assert config.trained_draft_len is not None
    return config.trained_draft_len + (not config.samples_from_anchor)


def _windows(config: HeadConfig) -> tuple[int | None, ...]:
    """Returns by layer the window that config.json says, None where all rows are seen."""
    found = []
    for i in range(config.decoder.num_layers):
        window = config.decoder.window(i)
        sees_ahead = bool(config.sees_ahead) and config.sees_ahead[i]
        if window is not None and sees_ahead and not config.windows_by_row:  # the loader widens it
            window -= block_rows(config)
        found.append(window)
    return tuple(found)


def _checked_layers(layers: tuple[int, ...], target: DecoderConfig) -> tuple[int, ...]:
    if not layers or not all(0 <= i < target.num_layers for i in layers):
        raise ConfigError(
            f"layers_to_capture={list(layers)}: give layers in 0 … {target.num_layers - 1}."
        )
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
        rope_parameters=like.rope_parameters,
        layer_windows=(spec.sliding_window,) * spec.num_layers,
        dtype=target.dtype,
        raw=target.raw,
    )


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


def _architecture(config: HeadConfig) -> dict[str, Any]:
    decoder, windows = config.decoder, _windows(config)
    sliding: dict[str, Any] = {}
    if any(windows):
        sliding = {
            "layer_types": [FULL if window is None else SLIDING for window in windows],
            "sliding_window": next(filter(None, windows)),
        }
    return {
        "model_type": "llama",
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "vocab_size": decoder.vocab_size,
        "max_position_embeddings": decoder.max_position_embeddings,
        "rms_norm_eps": decoder.rms_norm_eps,
        "rope_parameters": decoder.rope_parameters,
        "rope_theta": decoder.rope_parameters["rope_theta"],
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **sliding,
    }


def _raw_json(head: DraftHead, target: DecoderConfig) -> dict[str, Any]:
    config = head.config
    if config.kind == "mtp":
        raw = {k: v for k, v in target.raw.items() if k not in ("_name_or_path", "training")}
        if raw.get("first_k_dense_replace") is not None:  # these layers are dense too
            raw["first_k_dense_replace"] = target.num_layers + config.decoder.num_layers
        return {
            **raw,
            "num_hidden_layers": target.num_layers,
            "num_nextn_predict_layers": config.decoder.num_layers,
            "dtype": "bfloat16",
        }
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_architecture(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.layers_to_capture),
            "use_aux_hidden_state": True,
        },
        "dtype": "bfloat16",
    }


def _block_json(config: HeadConfig, target: DecoderConfig, format: str) -> dict[str, Any]:
    layers = {**_architecture(config), "model_type": "qwen3"}
    sees: dict[str, Any] = {}
    if any(_windows(config)):
        layers |= {"use_sliding_window": True, "max_window_layers": 0}
        sees = {WINDOWS_SEE: True}
    kind = "dflash2" if config.selector_rank else config.kind
    name = BLOCK_NAMES[kind]
    own: dict[str, Any] = {}
    if config.selector_rank:
        taps, group = config.block_convolution
        own = {
            "conv_kernel_size": taps,
            "conv_group_size": group,
            "selector_rank": config.selector_rank,
            "selector_top_k": config.selector_candidates,
            "sample_from_anchor": config.samples_from_anchor,
        }
    if config.markov_rank:
        own = {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_kind,
            "enable_confidence_head": False,
            "sample_from_anchor": config.samples_from_anchor,
        }
    nested: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.layers_to_capture),
    }
    if config.context_embeddings:
        (own if format == "speculators" else nested)["context_embeddings"] = True
    if format == "speculators":
        return {
            "architectures": [f"{name}Speculator"],
            "speculators_model_type": kind,
            "transformer_layer_config": layers,
            "draft_vocab_size": config.draft_vocab_size,
            "block_size": block_rows(config),
            "mask_token_id": config.mask_token_id,
            # Counted as inputs.
            "aux_hidden_state_layer_ids": [i + 1 for i in config.layers_to_capture],
            **own,
            **sees,
            "dtype": "bfloat16",
        }
    return {
        "architectures": [f"{name}DraftModel"],
        **layers,
        "block_size": block_rows(config),
        "num_target_layers": target.num_layers,
        "dflash_config": nested,
        **own,
        **sees,
        "dtype": "bfloat16",
    }


def _speculators_json(head: DraftHead) -> dict[str, Any]:
    config = head.config
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": _architecture(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": False,
        # Written for engines that capture at the *input* of layer i.
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in config.layers_to_capture],
        "dtype": "bfloat16",
    }
