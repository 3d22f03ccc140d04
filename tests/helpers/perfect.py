"""Heads that are their target's own layer, so that every draft is accepted."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir

WINDOW = 6


def one_layer_target(tmp_path: Path) -> Path:
    """A Mistral of one layer that sees the last 6 tokens; embedding rows of unit RMS."""
    path = tiny_model_dir(
        tmp_path, "mistral", seed=3, num_hidden_layers=1, sliding_window=WINDOW, head_dim=8
    )
    tensors = load_file(path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding /= embedding.pow(2).mean(-1, keepdim=True).sqrt()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def add_perfect_mtp(path: Path, count: int) -> None:
    """MTP layers that ignore the hidden state and are the target's one layer: at the row of the
    token before, RoPE and the window see the same tokens at the same distances."""
    tensors = load_file(path / "model.safetensors")
    size = tensors["model.norm.weight"].shape[0]
    for i in range(1, count + 1):
        prefix = f"model.layers.{i}."
        for name in [n for n in tensors if n.startswith("model.layers.0.")]:
            tensors[name.replace("model.layers.0.", prefix)] = tensors[name].clone()
        ones = torch.ones(size)
        tensors |= {f"{prefix}enorm.weight": ones, f"{prefix}hnorm.weight": ones.clone()}
        tensors[f"{prefix}eh_proj.weight"] = torch.cat(
            [torch.eye(size), torch.zeros(size, size)], 1
        )
        tensors[f"{prefix}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "num_nextn_predict_layers": count}))


def perfect_eagle3(tmp_path: Path, target: Path) -> Path:
    """An EAGLE-3 head that is the target's layer.

    Its residual would be the hidden state, not the embedding: hidden_norm of zero removes that
    one, and extra attention heads bring the embedding in. Those see their own row alone: their
    queries and keys are one constant (a bias), whose rotated product peaks at distance 0.
    """
    t = load_file(target / "model.safetensors")
    size, dim, kv, group = 48, 8, 2, 3
    extra = size // dim  # KV heads that carry the embedding
    p = "model.layers.0."
    q, k, v, o = (t[f"{p}self_attn.{n}_proj.weight"] for n in "qkvo")
    wide = {
        "q": torch.cat([q, torch.zeros(extra * group * dim, size)]),
        "k": torch.cat([k, torch.zeros(extra * dim, size)]),
        # input_layernorm scales the embedding; what is carried must be the embedding itself
        "v": torch.cat([v, torch.diag(1 / t[f"{p}input_layernorm.weight"])]),
    }
    bias = {
        "q": torch.cat([torch.zeros(len(q)), torch.full((extra * group * dim,), 60.0)]),
        "k": torch.cat([torch.zeros(len(k)), torch.full((extra * dim,), 60.0)]),
        "v": torch.zeros(len(v) + size),
    }
    back = torch.zeros(size, extra * group * dim)
    for head in range(extra):  # of the `group` copies of each extra head take the first
        for j in range(dim):
            back[head * dim + j, head * group * dim + j] = 1.0
    tensors = {
        "fc.weight": torch.randn(size, size),
        "midlayer.input_layernorm.weight": t[f"{p}input_layernorm.weight"],
        "midlayer.hidden_norm.weight": torch.zeros(size),
        "midlayer.self_attn.o_proj.weight": torch.cat([o, back], 1),
        "midlayer.post_attention_layernorm.weight": t[f"{p}post_attention_layernorm.weight"],
        "norm.weight": t["model.norm.weight"],
        "lm_head.weight": t["lm_head.weight"],
    }
    for name, weight in wide.items():
        both = torch.cat([weight, torch.zeros_like(weight)], 1)
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = both
        tensors[f"midlayer.self_attn.{name}_proj.bias"] = bias[name]
    for name in ("gate", "up", "down"):
        tensors[f"midlayer.mlp.{name}_proj.weight"] = t[f"{p}mlp.{name}_proj.weight"]
    raw = json.loads((target / "config.json").read_text())
    raw |= {
        "model_type": "mistral", "draft_vocab_size": None, "norm_before_residual": True,
        "num_attention_heads": (kv + extra) * group, "num_key_value_heads": kv + extra,
        "head_dim": dim, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0]},
        "attention_bias": True,
    }  # fmt: skip
    path = tmp_path / "perfect"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    save_file({n: x.contiguous() for n, x in tensors.items()}, path / "model.safetensors")
    return path
