"""Tiny random draft heads in their public formats, and what they compute, written out naively.

`NaiveHead.chain` recomputes a request's whole draft from its text alone, in float64, without a
cache: the oracle of every worker that drafts with a head.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import DEFAULTS, tiny_model_dir
from torch import Tensor

VOCAB, SIZE = DEFAULTS["vocab_size"], DEFAULTS["hidden_size"]
HEADS, KV_HEADS, INNER = 6, 2, DEFAULTS["intermediate_size"]
HEAD_DIM = SIZE // HEADS


def _weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            noise = 1 + 0.2 * noise
        elif len(shape) == 1 or "embed_tokens" in name:
            noise *= 0.5
        else:
            noise *= shape[1] ** -0.5 * (3 if "head" in name else 1.2)
        tensors[name] = noise
    return tensors


def _layer_shapes(prefix: str, size: int, width: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
        f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{prefix}self_attn.o_proj.weight": (size, HEADS * HEAD_DIM),
        f"{prefix}mlp.gate_proj.weight": (INNER, size),
        f"{prefix}mlp.up_proj.weight": (INNER, size),
        f"{prefix}mlp.down_proj.weight": (size, INNER),
        f"{prefix}post_attention_layernorm.weight": (size,),
    }
    if bias:
        for part, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{prefix}self_attn.{part}_proj.bias"] = (rows * HEAD_DIM,)
    return shapes


def _latent_shapes(prefix: str, raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of DeepSeek-V3's attention, by the sizes in its config."""
    rank, nope, rope = raw["kv_lora_rank"], raw["qk_nope_head_dim"], raw["qk_rope_head_dim"]
    q_rank, v = raw["q_lora_rank"], raw["v_head_dim"]
    shapes = {
        "q_proj": (HEADS * (nope + rope), SIZE),
        "q_a_proj": (q_rank, SIZE),
        "q_a_layernorm": (q_rank,),
        "q_b_proj": (HEADS * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (rank + rope, SIZE),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (HEADS * (nope + v), rank),
        "o_proj": (SIZE, HEADS * v),
    }
    unused = ("q_a_proj", "q_a_layernorm", "q_b_proj") if q_rank is None else ("q_proj",)
    return {f"{prefix}{n}.weight": shape for n, shape in shapes.items() if n not in unused}


def eagle3_dir(
    tmp_path: Path, *, seed: int = 7, size: int = SIZE, target_size: int = SIZE,
    draft_vocab: int | None = 40, captured: int = 3, own_embedding: bool = False,
    attention_bias: bool = False, pickle: bool = False, prefix: str = "midlayer.",
    norm_before_fc: bool = False, fc_norm: bool = False, config: dict[str, Any] | None = None,
    **flags: Any,
) -> Path:  # fmt: skip
    """A raw EAGLE-3 head directory. `draft_vocab=None` shares the target's lm_head."""
    shapes = _layer_shapes(prefix, size, 2 * size, attention_bias)
    shapes |= {
        "fc.weight": (size, captured * target_size),
        f"{prefix}input_layernorm.weight": (size,),
        f"{prefix}hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    if norm_before_fc:
        shapes["input_norm.weight"] = (captured * target_size,)
    if fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (target_size,) for i in range(captured)}
    if own_embedding:
        shapes["embed_tokens.weight"] = (VOCAB, size)
    if draft_vocab is not None:
        shapes["lm_head.weight"] = (draft_vocab, size)
    tensors = _weights(shapes, seed)
    if draft_vocab is not None and draft_vocab != VOCAB:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).scatter(0, ids, True)
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": size,
        "target_hidden_size": target_size,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 64,  # fewer than the target's, on purpose
        "rms_norm_eps": 1e-5,
        "draft_vocab_size": draft_vocab,
        "attention_bias": attention_bias,
        **({"norm_before_fc": True} if norm_before_fc else {}),
        **({"fc_norm": True} if fc_norm else {}),
        **flags,
        **(config or {}),
    }
    return _save(tmp_path, "eagle3", tensors, raw, pickle)


MASK_TOKEN = 93


def p_eagle_dir(
    tmp_path: Path, *, num_layers: int = 2, captured: int = 3, config: dict[str, Any] | None = None,
    **options: Any,
) -> Path:  # fmt: skip
    """A P-EAGLE head in the raw format: an EAGLE-3 head with a mask and more layers."""
    names = {"ptd_token_id": MASK_TOKEN, "num_hidden_layers": num_layers, **(config or {})}
    path = eagle3_dir(tmp_path, captured=captured, prefix="layers.0.", config=names, **options)
    shapes: dict[str, tuple[int, ...]] = {"mask_hidden": (1, captured * SIZE)}
    for i in range(1, num_layers):
        shapes |= _layer_shapes(f"layers.{i}.", SIZE, SIZE, bias=False)
        shapes[f"layers.{i}.input_layernorm.weight"] = (SIZE,)
    tensors = load_file(path / "model.safetensors") | _weights(shapes, seed=9)
    tensors["mask_hidden"] *= (captured * SIZE) ** 0.5
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def pard_dir(tmp_path: Path, **overrides: Any) -> Path:
    """A PARD draft model: any language model whose config.json names a mask token."""
    path = tiny_model_dir(tmp_path, **{"seed": 2, **overrides})
    raw = json.loads((path / "config.json").read_text())
    raw |= {"pard_token": MASK_TOKEN, "spd_type": "pard"}
    (path / "config.json").write_text(json.dumps(raw))
    return path


def eagle1_dir(tmp_path: Path, *, seed: int = 8, fc_bias: bool = False) -> Path:
    """An EAGLE-1 head: it carries an embedding, and its lm_head is the target's."""
    shapes = _layer_shapes("layers.0.", SIZE, SIZE, bias=False)
    shapes |= {"fc.weight": (SIZE, 2 * SIZE), "embed_tokens.weight": (VOCAB, SIZE)}
    if fc_bias:
        shapes["fc.bias"] = (SIZE,)
    raw = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": SIZE,
        "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    tensors = _weights(shapes, seed)
    for name in tensors:  # no final norm keeps its logits small
        if name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")):
            tensors[name] *= 0.25
    return _save(tmp_path, "eagle1", tensors, raw, pickle=False)


def mtp_model_dir(
    tmp_path: Path, *, layout: str = "deepseek", num_mtp_layers: int = 3, seed: int = 1,
    own_ends: bool = False, family: str = "llama", **overrides: Any,
) -> Path:  # fmt: skip
    """A tiny target whose checkpoint carries MTP layers in a public layout.

    Args:
        layout: "deepseek" is its names over a Llama, "deepseek_v3" a DeepSeek-V3 all through, as
            "glm4_moe_lite" is a GLM. "qwen3_next" is its names over a Qwen3 or over `family`.
        own_ends: DeepSeek's form with embedding and head of their own (different ones here).
    """
    if layout not in ("deepseek", "qwen3_next") or family == "llama":
        family = _FAMILY_OF_LAYOUT.get(layout, family)
    if layout == "glm":
        overrides = {"head_dim": HEAD_DIM, "num_attention_heads": HEADS, **overrides}
    if layout == "qwen3_next":
        overrides = {"head_dim": HEAD_DIM, **overrides}
    path = tiny_model_dir(tmp_path, family, seed=seed, **overrides)
    raw = json.loads((path / "config.json").read_text())
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(num_mtp_layers):
        prefix, names = mtp_prefix_and_names(layout, raw["num_hidden_layers"] + i, i)
        layer = _layer_shapes(prefix, SIZE, SIZE, bias=layout in ("mimo", "glm"))
        if layout in ("glm", "qwen3_next"):
            layer |= {f"{prefix}self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
        if family in GATED:  # queries and gates of a head together
            layer[f"{prefix}self_attn.q_proj.weight"] = (2 * HEADS * HEAD_DIM, SIZE)
        if "shared_expert_intermediate_size" in raw:
            layer = {name: shape for name, shape in layer.items() if f"{prefix}mlp" not in name}
            layer |= _qwen_moe_shapes(f"{prefix}mlp.", raw)
        if layout in ("glm", *_LATENT):
            layer = {name: shape for name, shape in layer.items() if f"{prefix}mlp" not in name}
            layer |= _moe_shapes(f"{prefix}mlp.", raw)
        if layout in _LATENT:
            layer = {name: shape for name, shape in layer.items() if ".self_attn." not in name}
            layer |= _latent_shapes(f"{prefix}self_attn.", raw)
        shapes |= layer
        shapes |= {
            f"{prefix}input_layernorm.weight": (SIZE,),
            f"{names[0]}.weight": (SIZE,),
            f"{names[1]}.weight": (SIZE,),
            f"{names[2]}.weight": (SIZE, 2 * SIZE),
            f"{names[3]}.weight": (SIZE,),
        }
        if own_ends:
            shapes[f"{prefix}embed_tokens.weight"] = (VOCAB, SIZE)
            shapes[f"{prefix}shared_head.head.weight"] = (VOCAB, SIZE)
    weights = _weights(shapes, seed + 50)
    if layout == "qwen3_next":  # its norms are written around 0
        weights = {name: w - 1 if "norm" in name else w for name, w in weights.items()}
    tensors = load_file(path / "model.safetensors") | weights
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    count = "mtp_num_hidden_layers" if layout == "qwen3_next" else "num_nextn_predict_layers"
    raw[count] = num_mtp_layers
    if layout == "mimo":
        raw |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    (path / "config.json").write_text(json.dumps(raw))
    return path


GATED = "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"
_LATENT = "deepseek_v3", "glm4_moe_lite"
_FAMILY_OF_LAYOUT = {
    "mimo": "qwen2", "deepseek_v3": "deepseek_v3", "glm": "glm4_moe", "qwen3_next": "qwen3",
    "glm4_moe_lite": "glm4_moe_lite",
}  # fmt: skip


def mtp_prefix_and_names(layout: str, absolute: int, index: int) -> tuple[str, tuple[str, ...]]:
    """A layer's prefix, and the names of its norms of embedding and hidden state, its projection
    and its final norm."""
    if layout == "qwen3_next":
        own = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        return f"mtp.layers.{index}.", tuple(f"mtp.{name}" for name in own)
    if layout == "mimo":
        prefix = f"model.mtp_layers.{index}."
        own = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    else:
        prefix = f"model.layers.{absolute}."
        own = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    return prefix, tuple(prefix + name for name in own)


def _qwen_moe_shapes(prefix: str, raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    inner, shared = raw["moe_intermediate_size"], raw["shared_expert_intermediate_size"]
    widths = {f"experts.{e}": inner for e in range(raw["num_experts"])} | {"shared_expert": shared}
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}gate.weight": (raw["num_experts"], SIZE),
        f"{prefix}shared_expert_gate.weight": (1, SIZE),
    }
    for name, width in widths.items():
        for part, shape in (
            ("gate", (width, SIZE)),
            ("up", (width, SIZE)),
            ("down", (SIZE, width)),
        ):
            shapes[f"{prefix}{name}.{part}_proj.weight"] = shape
    return shapes


def _moe_shapes(prefix: str, raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    inner = raw["moe_intermediate_size"]
    widths = {f"experts.{e}": inner for e in range(raw["n_routed_experts"])}
    widths["shared_experts"] = inner * raw["n_shared_experts"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}gate.weight": (raw["n_routed_experts"], SIZE),
        f"{prefix}gate.e_score_correction_bias": (raw["n_routed_experts"],),
    }
    for name, width in widths.items():
        shapes |= {
            f"{prefix}{name}.gate_proj.weight": (width, SIZE),
            f"{prefix}{name}.up_proj.weight": (width, SIZE),
            f"{prefix}{name}.down_proj.weight": (SIZE, width),
        }
    return shapes


def _save(
    tmp_path: Path, kind: str, tensors: dict[str, Tensor], raw: dict[str, Any], pickle: bool
) -> Path:
    path = tmp_path / f"{kind}-{len(list(tmp_path.glob(f'{kind}-*')))}"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(raw))
    if pickle:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


# -- naive drafting ----------------------------------------------------------------------------
class NaiveHead:
    """A head's formula over whole sequences, in float64, from the checkpoint's tensors.

    Rows are kept as lists of K and V per layer, so that a chain is extended row by row; every
    chain starts from nothing.
    """

    def __init__(self, head_dir: Path, target_dir: Path, kind: str, **flags: Any):
        self.kind, self.flags = kind, flags
        raw = self.raw = json.loads((head_dir / "config.json").read_text())
        self.theta = flags.get("theta", 10000.0)
        self.eps = raw["rms_norm_eps"]
        file = head_dir / "model.safetensors"
        own = load_file(file) if file.exists() else torch.load(head_dir / "pytorch_model.bin")
        target = load_file(target_dir / "model.safetensors")
        self.t = {name: t.double() if t.is_floating_point() else t for name, t in own.items()}
        self.embedding = self.t.get("embed_tokens.weight", target["model.embed_tokens.weight"])
        lm_head = target.get("lm_head.weight", target["model.embed_tokens.weight"])
        self.lm_head = self.t.get("lm_head.weight", lm_head).double()
        self.embedding = self.embedding.double()
        self.d2t = self.t.get("d2t")

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + (self.eps if eps is None else eps))
        weight = self.t[f"{name}.weight"]
        return x * scale * (weight + 1 if self.flags.get("layout") == "qwen3_next" else weight)

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.t[f"{name}.weight"].T
        return y + self.t[f"{name}.bias"] if f"{name}.bias" in self.t else y

    def attention(self, x: Tensor, positions: Tensor, cache: dict[str, Any], name: str) -> Tensor:
        """x [n, width] at positions [n] -> [n, size]; `cache` holds the rows before."""
        if f"{name}.kv_b_proj.weight" in self.t:
            return self.latent_attention(x, positions, cache, name)
        q, k = (self.linear(x, f"{name}.{part}_proj").view(len(x), -1, HEAD_DIM) for part in "qk")
        gate: Tensor | None = None
        if q.shape[1] == 2 * HEADS:  # a head's queries, then its gates
            q, gate = q[:, ::2], q[:, 1::2]
        if f"{name}.q_norm.weight" in self.t:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        rotated = self.flags.get("rotary_dim", HEAD_DIM)
        q, k = (
            torch.cat([_rotate(y[..., :rotated], positions, self.theta), y[..., rotated:]], -1)
            for y in (q, k)
        )
        v = self.linear(x, f"{name}.v_proj").view(len(x), -1, HEAD_DIM)
        old = cache.get(name)
        if old is not None:
            k, v, positions_k = (
                torch.cat(pair) for pair in zip(old, (k, v, positions), strict=True)
            )
        else:
            positions_k = positions
        cache[name] = (k, v, positions_k)
        group = q.shape[1] // k.shape[1]
        k, v = (y.repeat_interleave(group, 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_DIM)
        distance = positions[None, :, None] - positions_k[None, None]
        unseen = (distance < 0) | (distance >= self.flags.get("window", math.inf))
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -math.inf).softmax(-1), v)
        out = (out if gate is None else out * gate.sigmoid()).flatten(1)
        return self.linear(out, f"{name}.o_proj")

    def latent_attention(
        self, x: Tensor, positions: Tensor, cache: dict[str, Any], name: str
    ) -> Tensor:
        """DeepSeek-V2's equations 37 to 47 as they stand: keys and values unfolded per head."""
        nope, rope = self.raw["qk_nope_head_dim"], self.raw["qk_rope_head_dim"]
        rank = self.raw["kv_lora_rank"]
        q = x
        if self.raw["q_lora_rank"] is None:
            q = self.linear(x, f"{name}.q_proj")
        else:
            q = self.norm(self.linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", 1e-6)
            q = self.linear(q, f"{name}.q_b_proj")
        q = q.view(len(x), HEADS, nope + rope)
        latent = self.linear(x, f"{name}.kv_a_proj_with_mqa")
        c = self.norm(latent[:, :rank], f"{name}.kv_a_layernorm", 1e-6)
        kv = self.linear(c, f"{name}.kv_b_proj").view(len(x), HEADS, -1)
        turned = _rotate_pairs(latent[:, None, rank:], positions, self.theta)
        k = torch.cat([kv[..., :nope], turned.expand(-1, HEADS, -1)], -1)
        q = torch.cat([q[..., :nope], _rotate_pairs(q[..., nope:], positions, self.theta)], -1)
        new = k, kv[..., nope:], positions
        if name in cache:
            new = tuple(torch.cat(pair) for pair in zip(cache[name], new, strict=True))
        k, v, positions_k = cache[name] = new
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(nope + rope)
        scores = scores.masked_fill(positions_k[None, None] > positions[None, :, None], -math.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        return self.linear(out, f"{name}.o_proj")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        if f"{name}.gate.weight" in self.t:
            return self.moe(x, name)
        gate = self.linear(x, f"{name}.gate_proj")
        return self.linear(
            torch.nn.functional.silu(gate) * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj"
        )

    def moe(self, x: Tensor, name: str) -> Tensor:
        """Row by row, in Python numbers where it chooses."""
        raw, out = self.raw, []
        if "shared_expert_intermediate_size" in raw:
            return self.qwen_moe(x, name)
        scores = torch.sigmoid(x @ self.t[f"{name}.gate.weight"].T)
        choice = scores + self.t[f"{name}.gate.e_score_correction_bias"]
        size = raw["n_routed_experts"] // raw["n_group"]
        for row, own, wanted in zip(x, scores.tolist(), choice.tolist(), strict=True):
            groups = [range(i, i + size) for i in range(0, len(own), size)]
            groups.sort(key=lambda g: -sum(sorted((wanted[e] for e in g), reverse=True)[:2]))
            open_to = [e for g in groups[: raw["topk_group"]] for e in g]
            chosen = sorted(open_to, key=lambda e: -wanted[e])[: raw["num_experts_per_tok"]]
            total = sum(own[e] for e in chosen) if raw["norm_topk_prob"] else 1.0
            y = self.mlp(row[None], f"{name}.shared_experts")
            for e in chosen:
                weight = own[e] / total * raw["routed_scaling_factor"]
                y = y + weight * self.mlp(row[None], f"{name}.experts.{e}")
            out.append(y)
        return torch.cat(out)

    def qwen_moe(self, x: Tensor, name: str) -> Tensor:
        """Qwen3-Next's: softmax, and a gate on what the shared expert says."""
        out = []
        for row, scores in zip(x, (x @ self.t[f"{name}.gate.weight"].T).softmax(-1), strict=True):
            best = scores.topk(self.raw["num_experts_per_tok"])
            gate = self.linear(row[None], f"{name}.shared_expert_gate").sigmoid()
            y = gate * self.mlp(row[None], f"{name}.shared_expert")
            for weight, e in zip(best.values / best.values.sum(), best.indices, strict=True):
                y = y + weight * self.mlp(row[None], f"{name}.experts.{e}")
            out.append(y)
        return torch.cat(out)

    def project(self, captured: Tensor) -> Tensor:
        if self.kind != "eagle3":
            return captured
        if self.flags.get("norm_before_fc"):
            captured = self.norm(captured, "input_norm")
        if self.flags.get("fc_norm"):
            count = self.flags.get("captured", 3)
            parts = captured.chunk(count, -1)
            captured = torch.cat([self.norm(p, f"fc_norm.{i}") for i, p in enumerate(parts)], -1)
        return self.linear(captured, "fc")

    def rows(
        self, ids: Tensor, positions: Tensor, h: Tensor, cache: dict[str, Any], step: int
    ) -> tuple[Tensor, Tensor]:
        """-> (logits, what is fed on)."""
        e = self.embedding[ids]
        if self.kind == "eagle3":
            p = self.flags.get("prefix", "midlayer.")
            n = self.norm(h, f"{p}hidden_norm")
            x = torch.cat([self.norm(e, f"{p}input_layernorm"), n], -1)
            r = n if self.flags.get("norm_before_residual") else h
            r = r + self.attention(x, positions, cache, f"{p}self_attn")
            out = r + self.mlp(self.norm(r, f"{p}post_attention_layernorm"), f"{p}mlp")
            normed = self.norm(out, "norm")
            return normed @ self.lm_head.T, normed if self.flags.get("norm_output") else out
        if self.kind == "eagle1":
            p, x = "layers.0.", self.linear(torch.cat([e, h], -1), "fc")
            r = x + self.attention(x, positions, cache, f"{p}self_attn")
            out = r + self.mlp(self.norm(r, f"{p}post_attention_layernorm"), f"{p}mlp")
            return out @ self.lm_head.T, out
        return self._mtp_rows(e, ids, positions, h, cache, step)

    def _mtp_rows(
        self, e: Tensor, ids: Tensor, positions: Tensor, h: Tensor, cache: dict[str, Any], step: int
    ) -> tuple[Tensor, Tensor]:
        layer = step if self.flags.get("vanilla") else 0
        layout = self.flags.get("layout", "deepseek")
        p, names = mtp_prefix_and_names(layout, self.flags.get("first", 0) + layer, layer)
        e = self.t.get(f"{p}embed_tokens.weight", self.embedding)[ids]
        lm_head = self.t.get(f"{p}shared_head.head.weight", self.lm_head)
        e, h = self.norm(e, names[0]), self.norm(h, names[1])
        x = self.linear(torch.cat([h, e] if layout == "mimo" else [e, h], -1), names[2])
        attended = self.attention(self.norm(x, f"{p}input_layernorm"), positions, cache,
                                  f"{p}self_attn")  # fmt: skip
        r = x + attended
        out = r + self.mlp(self.norm(r, f"{p}post_attention_layernorm"), f"{p}mlp")
        normed = self.norm(out, names[3])
        return normed @ lm_head.T, out if self.flags.get("pre_norm") else normed

    def chain(self, text: list[int], hidden: Tensor, proposals: list[int]) -> list[Tensor]:
        """The draft logits after `text` [n tokens], one [Vd] per proposal.

        Args:
            hidden: [n-1 or more, …] what the head reads of the target, per token of the text.
            proposals: what was proposed at each step (target ids); fed on as it was.
        """
        n = len(text)
        ids, positions = torch.tensor(text[1:]), torch.arange(n - 1)
        h = self.project(hidden[: n - 1].double())
        logits = []
        if self.flags.get("vanilla"):
            for step, proposal in enumerate(proposals):
                out, h = self.rows(ids, positions, h, {}, step)
                logits.append(out[-1])
                ids = torch.cat([ids[1:], torch.tensor([proposal])])
            return logits
        cache: dict[str, Any] = {}
        for step, proposal in enumerate(proposals):
            out, h = self.rows(ids, positions, h, cache, step)
            logits.append(out[-1])
            ids, positions, h = torch.tensor([proposal]), positions[-1:] + 1, h[-1:]
        return logits


def _rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [n, heads, d], pairs (j, j + d/2)."""
    half = x.shape[-1] // 2
    freqs = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.double()[:, None, None] * freqs
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def _rotate_pairs(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [n, heads, d], pairs (2j, 2j + 1)."""
    half = x.shape[-1] // 2
    freqs = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.double()[:, None, None] * freqs
    turned = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(-2)
