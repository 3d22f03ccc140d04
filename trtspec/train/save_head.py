"""Writes a trained draft head in the public formats."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoints.families.llama import FULL, SLIDING
from ..checkpoints.heads.dflash_config import WINDOWS_SEE
from ..checkpoints.weights import placements
from ..errors import ConfigError
from ..models.config import DecoderConfig
from ..models.drafters.base import DraftHead, HeadConfig
from ..utils import set_usual_mode
from .create_head import trainable
from .new_head import BLOCK_KINDS, BLOCK_NAMES, block_rows, windows_of

FORMATS = ("raw", "speculators")
HEAD_FILES = ("model.safetensors", "config.json")


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


def _raw_json(head: DraftHead, target: DecoderConfig) -> dict[str, Any]:
    config = head.config
    if config.kind == "mtp":
        of_target = "_name_or_path", "training", "quantization_config"  # the head's is bf16
        raw = {k: v for k, v in target.raw.items() if k not in of_target}
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
    kind = "dflash2" if config.selector_rank else config.kind
    name, more = BLOCK_NAMES[kind], _fields_of_kind(config)
    nested: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.layers_to_capture),
    }
    if config.context_embeddings:
        (more if format == "speculators" else nested)["context_embeddings"] = True
    if any(windows_of(config)):
        layers |= {"use_sliding_window": True, "max_window_layers": 0}
        more[WINDOWS_SEE] = True
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
            **more,
            "dtype": "bfloat16",
        }
    return {
        "architectures": [f"{name}DraftModel"],
        **layers,
        "block_size": block_rows(config),
        "num_target_layers": target.num_layers,
        "dflash_config": nested,
        **more,
        "dtype": "bfloat16",
    }


def _fields_of_kind(config: HeadConfig) -> dict[str, Any]:
    """Returns what a DFlash2 or DSpark head has more than a DFlash head."""
    if config.selector_rank:
        taps, group = config.block_convolution
        return {
            "conv_kernel_size": taps,
            "conv_group_size": group,
            "selector_rank": config.selector_rank,
            "selector_top_k": config.selector_candidates,
            "sample_from_anchor": config.samples_from_anchor,
        }
    if config.markov_rank:
        return {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_kind,
            "enable_confidence_head": False,
            "sample_from_anchor": config.samples_from_anchor,
        }
    return {}


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


def _architecture(config: HeadConfig) -> dict[str, Any]:
    decoder, windows = config.decoder, windows_of(config)
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
