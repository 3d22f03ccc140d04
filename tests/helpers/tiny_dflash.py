"""Tiny random DFlash heads in their public formats."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from oracle import VOCAB
from safetensors.torch import load_file, save_file
from tiny_heads import (
    HEAD_DIM,
    HEADS,
    INNER,
    KV_HEADS,
    MASK_TOKEN,
    SIZE,
    _layer_shapes,
    _save,
    _weights,
)

LAYERS = (1, 3, 4)  # of the target, 0-based outputs
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12, "selector_top_k": 16}


def dflash_dir(
    tmp_path: Path, *, block: int = 9, num_layers: int = 2, seed: int = 17, bias: bool = False,
    draft_vocab: int | None = None, markov: str | None = None, rank: int = 12,
    path: dict[str, int] | None = None, inner: dict[str, Any] | None = None,
    reads_next: bool = False, sinks: bool = False, own_embedding: bool = False,
    confidence: str | None = None,
    **dflash_config: Any,
) -> Path:  # fmt: skip
    """A head in z-lab's format. `draft_vocab=None` shares the target's lm_head.

    With `reads_next` its context rows read the token after them. With `path` it is a DFlash2 head:
    fields in place of those of `DFLASH2`. With `sinks` its layers have attention sinks. Its
    confidence head reads "markov", a row and the token before, or "hidden", a row alone.
    """
    if sinks:
        dflash_config["attention_sink_bias"] = True
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (SIZE, len(LAYERS) * SIZE),
        "hidden_norm.weight": (SIZE,),
        "norm.weight": (SIZE,),
    }
    if reads_next:
        dflash_config["context_embeddings"] = True
        shapes["context_embedding_norm.weight"] = (SIZE,)
        shapes["context_embedding_fc.weight"] = (SIZE, SIZE)
    for i in range(num_layers):
        p = f"layers.{i}."
        shapes |= _layer_shapes(p, SIZE, SIZE, bias)
        shapes |= {f"{p}input_layernorm.weight": (SIZE,)}
        shapes |= {f"{p}self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
        if sinks:
            shapes[f"{p}self_attn.attention_sink_bias"] = (HEADS,)
    if own_embedding:
        shapes["embed_tokens.weight"] = (VOCAB, SIZE)
    if draft_vocab is not None:
        shapes["lm_head.weight"] = (draft_vocab, SIZE)
    if markov is not None:
        shapes |= {
            "markov_head.markov_w1.weight": (VOCAB, rank),
            "markov_head.markov_w2.weight": (draft_vocab or VOCAB, rank),
        }
        name, columns, rows = "gate_proj", SIZE + rank, rank
        if markov == "rnn":
            name, columns, rows = "joint_proj", SIZE + 2 * rank, 3 * rank
        if markov != "vanilla":
            shapes[f"markov_head.{name}.weight"] = (rows, columns)
            shapes[f"markov_head.{name}.bias"] = (rows,)
    if confidence is not None:
        shapes["confidence_head.proj.weight"] = (1, SIZE + (rank if confidence == "markov" else 0))
        shapes["confidence_head.proj.bias"] = (1,)
        dflash_config["confidence_head_with_markov"] = confidence == "markov"
    if path is not None:
        path = DFLASH2 | path
        dflash_config |= path
        taps, groups = path["conv_kernel_size"], SIZE // path["conv_group_size"]
        for i, part in itertools.product(range(num_layers), ("attention", "mlp")):
            p = f"layers.{i}.{part}_conv."
            shapes[f"{p}base_kernel"] = (2, taps, SIZE)
            shapes[f"{p}kernel_projection.weight"] = (2 * taps * groups, SIZE)
        for name, rows in (("predecessor_codebook", VOCAB), ("successor_codebook", VOCAB)):
            shapes[f"candidate_selector.{name}"] = (rows, path["selector_rank"])
        name = "candidate_selector.hidden_projection.weight"
        shapes[name] = (path["selector_rank"], SIZE)
    tensors = _weights(shapes, seed)
    for name in [name for name in tensors if name.endswith("attention_sink_bias")]:
        tensors[name] = 2 + 4 * tensors[name]  # beside the scores of a few keys
    if confidence is not None:
        tensors["confidence_head.proj.weight"] *= 0.5  # so that chances are neither 0 nor 1
    if path is not None:
        for name in [name for name in tensors if "codebook" in name]:
            tensors[name] *= 1.5  # so that the token before matters
    if draft_vocab is not None:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).scatter(0, ids, True)
    raw = {
        "architectures": [f"{'DSpark' if markov else 'DFlash2' if path else 'DFlash'}DraftModel"],
        "model_type": "qwen3", "vocab_size": VOCAB,
        "hidden_size": SIZE, "intermediate_size": INNER, "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
        "attention_bias": bias, "block_size": block,
        "dflash_config": {
            "mask_token_id": MASK_TOKEN, "target_layer_ids": list(LAYERS), **dflash_config
        },
        **({} if draft_vocab is None else {"draft_vocab_size": draft_vocab}),
        **({"markov_rank": rank, "markov_head_type": markov} if markov else {}),
        **(inner or {}),
    }  # fmt: skip
    return _save(tmp_path, "dflash", tensors, raw, pickle=False)


def as_speculators(head: Path) -> Path:
    """The same head in the speculators format, in a directory beside it."""
    raw = json.loads((head / "config.json").read_text())
    nested, own = raw.pop("dflash_config"), ("block_size", "draft_vocab_size")
    inner = {name: value for name, value in raw.items() if name not in own}
    block, is_dflash2 = raw["block_size"], "selector_rank" in nested
    path = head.with_name(head.name + "-speculators")
    path.mkdir()
    tensors = load_file(head / "model.safetensors")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "speculators_model_type": "dflash2" if is_dflash2 else "dflash",
        "architectures": ["DFlash2DraftModel" if is_dflash2 else "DFlashSpeculator"],
        "transformer_layer_config": {**inner, "architectures": None},
        "block_size": block, "mask_token_id": nested["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in nested["target_layer_ids"]],
        "draft_vocab_size": raw.get("draft_vocab_size", VOCAB),
        "sample_from_anchor": nested.get("sample_from_anchor", False),
        **{name: nested[name] for name in DFLASH2 if is_dflash2},
        "speculators_config": {"proposal_methods": [{"speculative_tokens": block - 1}]},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path
