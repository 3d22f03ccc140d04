"""Reading a Gemma-4 assistant's checkpoint: its config, its tensors, and whether it fits a target.

Source: transformers' `gemma4_assistant`. The network is in `models/drafters/gemma_assistant.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ...checks import MAX_SIZE, checked_int
from ...errors import CheckpointError
from ...models.config import DecoderConfig
from ...models.drafters.base import DraftHead, HeadConfig
from ...models.drafters.clustered_head import ORDERING, ClusteredHead
from ...models.drafters.gemma_assistant import KIND, MODEL_TYPES, GemmaAssistant, layer_read
from ...models.rope import build_cos_sin, rotation_order
from ..hf_config import parse_config
from ..tensors import TensorSource
from .records import HeadFiles, HeadKind, HeadReport, HeadRequest


def read_assistant(
    raw: dict[str, Any], sources: dict[str, TensorSource], where: Path
) -> tuple[HeadConfig, dict[str, TensorSource]]:
    """Returns the config in `where`, and the tensors under the names of `GemmaAssistant`.

    Raises:
        CheckpointError: a field is missing, or asks for what is not computed here.
    """
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(
            f"{where}: text_config={text!r}; an assistant keeps its architecture there, as an "
            "object. Copy the file again from the model's source."
        )
    shared, layers = text.get("num_kv_shared_layers"), text.get("num_hidden_layers")
    if shared not in (None, 0, layers):
        raise CheckpointError(
            f"{where}: num_kv_shared_layers={shared!r}; all {layers} layers of an assistant read "
            "the target's keys and values. Correct it."
        )
    for name in ("hidden_size_per_layer_input", "use_double_wide_mlp", "enable_moe_block"):
        if text.get(name):
            raise CheckpointError(
                f"{where}: {name}={text[name]!r} in text_config; an assistant has none. Correct it."
            )
    inner = {"hidden_size_per_layer_input": 0, **text, "num_kv_shared_layers": 0}
    decoder = parse_config(inner | {"model_type": "gemma4_text"}, where)
    size, sizes = raw.get("backbone_hidden_size"), range(1, MAX_SIZE + 1)
    size = checked_int(where, "backbone_hidden_size", size, sizes, ", the target's hidden_size")
    tensors = {re.sub(r"^model\.", "", name): source for name, source in sources.items()}
    lm_head, tied = tensors.get("lm_head.weight"), tensors.get("embed_tokens.weight")
    if tied is not None and (lm_head is None or _are_equal(lm_head, tied)):
        tensors["lm_head.weight"] = tensors.pop("embed_tokens.weight")
    config = HeadConfig(
        kind=KIND,
        format="Gemma-4 assistant",
        decoder=decoder,
        target_hidden_size=size,
        draft_vocab_size=decoder.vocab_size,
        own_lm_head=True,
        norm_output=True,
        lm_head_clusters=cluster_counts(raw, decoder.vocab_size, where),
    )
    return config, tensors


def _are_equal(one: TensorSource, other: TensorSource) -> bool:
    return one.shape == other.shape and torch.equal(one.read(), other.read())


def assistant_problems(config: HeadConfig, target: DecoderConfig) -> list[str]:
    """Returns why the assistant cannot draft for this target, each with a cure."""
    decoder, cure = config.decoder, "Use the assistant made for this target."
    problems = []
    if config.target_hidden_size != target.hidden_size:
        problems.append(
            f"The assistant reads hidden states of width {config.target_hidden_size} "
            f"(backbone_hidden_size), the target's are {target.hidden_size} wide. {cure}"
        )
    if decoder.vocab_size != target.vocab_size:
        problems.append(
            f"The assistant's vocab_size is {decoder.vocab_size}, the target's "
            f"{target.vocab_size}. {cure}"
        )
    for i in range(decoder.num_layers):
        source = layer_read(decoder, i, target)
        kind = "full" if decoder.window(i) is None else "sliding"
        if source is None:
            problems.append(
                f"Layer {i} reads the keys of the target's last {kind}-attention layer, but the "
                f"target has none. {cure}"
            )
            continue
        layer, target_layer = decoder.of_layer(i), target.of_layer(source)
        for name in ("head_dim", "num_kv_heads"):
            if getattr(layer, name) != getattr(target_layer, name):
                problems.append(
                    f"Layer {i} has {name}={getattr(layer, name)}, the target's layer {source}, "
                    f"whose keys it reads, has {getattr(target_layer, name)}. {cure}"
                )
        if decoder.window(i) != target.window(source):
            problems.append(
                f"Layer {i} has sliding_window={decoder.window(i)}, the target's layer {source}, "
                f"whose keys it reads, has {target.window(source)}. {cure}"
            )
        if not _rotate_alike(layer, target_layer):
            problems.append(
                f"Layer {i} rotates its queries by {layer.rope_parameters}, the target's layer "
                f"{source} its keys by {target_layer.rope_parameters}. {cure}"
            )
    return list(dict.fromkeys(problems))


def _rotate_alike(layer: DecoderConfig, target_layer: DecoderConfig) -> bool:
    """Whether queries and keys of two layers are rotated, and laid out, the same way."""
    tables = build_cos_sin(layer, 64), build_cos_sin(target_layer, 64)
    if tables[0].shape != tables[1].shape:
        return True  # another problem says so
    is_plain = rotation_order(layer) is None and rotation_order(target_layer) is None
    return is_plain and torch.allclose(*tables, atol=1e-5)


def cluster_counts(raw: dict[str, Any], vocab_size: int, where: Path) -> tuple[int, int]:
    """Returns (clusters, those of which logits are computed), (0, 0) without clusters.

    Raises:
        CheckpointError: they are not numbers that fit the vocabulary.
    """
    if not raw.get("use_ordered_embeddings"):
        return 0, 0
    count, active = raw.get("num_centroids", 2048), raw.get("centroid_intermediate_top_k", 32)
    count = checked_int(where, "num_centroids", count, range(1, vocab_size + 1))
    active = checked_int(where, "centroid_intermediate_top_k", active, range(1, count + 1))
    if vocab_size % count:
        raise CheckpointError(
            f"{where}: num_centroids={count} does not divide vocab_size={vocab_size}: clusters are "
            "of one size. Copy the file again from the assistant's source."
        )
    return count, active


def _read_clusters(report: HeadReport, config: HeadConfig) -> None:
    """Takes `token_ordering` from the tensors, or says what is wrong with it."""
    vocab, cure = config.decoder.vocab_size, "Copy the assistant again from its source."
    source = report.tensors.pop(ORDERING, None)
    if source is None:
        report.problems.append(f"{ORDERING} is missing. {cure}")
    elif source.shape != (vocab,) or source.dtype not in ("I64", "I32"):
        report.problems.append(
            f"{source.name} has shape {list(source.shape)} and dtype {source.dtype}; it must be "
            f"[{vocab}] (vocab_size) of I64. {cure}"
        )
    else:
        ordering = source.read().to(torch.int64)
        if not torch.equal(ordering.sort().values, torch.arange(vocab)):
            report.problems.append(
                f"{source.name} does not hold each token of 0 … {vocab - 1} once. {cure}"
            )
        report.clusters = ordering.view(config.lm_head_clusters[0], -1)


def _read(
    report: HeadReport, files: HeadFiles, request: HeadRequest, target: DecoderConfig | None
) -> HeadConfig:
    config, report.tensors = read_assistant(files.raw, files.sources, files.config_path)
    report.config = config
    if config.lm_head_clusters[0]:
        _read_clusters(report, config)
    if target is not None:
        report.problems += assistant_problems(config, target)
    return config


def _attach(head: DraftHead, report: HeadReport, device: torch.device, dtype: torch.dtype) -> None:
    if isinstance(head.lm_head, ClusteredHead):
        assert report.clusters is not None
        head.lm_head.clusters = report.clusters.to(device)


GEMMA_ASSISTANT = HeadKind(
    asked_as="mtp",
    description="is a Gemma-4 assistant",
    how_to_give="MTPDecodingConfig(speculative_model=…)",
    recognizes=lambda files, asked: files.raw.get("model_type") in MODEL_TYPES,
    read=_read,
    network=GemmaAssistant,
    attach=_attach,
    surplus_hint=lambda config: "use_ordered_embeddings (it has masked_embedding.…), or ",
)
