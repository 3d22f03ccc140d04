"""Tiny random Gemma models, and Gemma-4 assistants in their public format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir

S, F = "sliding_attention", "full_attention"
ROPES = {
    S: {"rope_type": "default", "rope_theta": 300.0},
    F: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
}
GEMMA: dict[str, dict[str, Any]] = {
    "gemma2": {
        "sliding_window": 6, "head_dim": 16, "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "sliding_window": 7, "head_dim": 16, "query_pre_attn_scalar": 9,
        "num_hidden_layers": 4, "layer_types": [S, S, F, S], "rope_parameters": ROPES,
        "final_logit_softcapping": 4.0,
    },
    "gemma4_text": {
        "sliding_window": 7, "head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 4,
        "num_global_key_value_heads": 3, "attention_k_eq_v": True, "layer_types": [S, F, S, F],
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": 4.0,
        "rope_parameters": {
            S: {"rope_type": "default", "rope_theta": 300.0},
            F: {"rope_type": "proportional", "rope_theta": 900.0, "partial_rotary_factor": 0.5},
        },
    },
}  # fmt: skip
GEMMA["gemma4_unified_text"] = GEMMA["gemma4_text"]
GEMMA["gemma4_small"] = {  # as E2B: three layers read the keys of layers 2 and 1
    **GEMMA["gemma4_text"], "num_hidden_layers": 6, "layer_types": [S, F, S, S, S, F],
    "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 97, "pad_token_id": 4,
}  # fmt: skip
MODEL_TYPES = {"gemma4_small": "gemma4_text"}


def gemma_dir(
    tmp_path: Path, family: str, seed: int = 0, layers_weigh: float = 1, **overrides: Any
) -> Path:
    """A tiny model with tied embeddings; of Gemma-4 the layers' scalars are random too.

    What layers add to the stream is `layers_weigh` times as much. With 1 the scaled, tied embedding
    outweighs it and greedy text is the prompt's last token for ever; with 4 it is a text, and
    rounding errors grow.
    """
    fields = {"tie_word_embeddings": True, **GEMMA[family], **overrides}
    path = tiny_model_dir(tmp_path, MODEL_TYPES.get(family, family), seed=seed, **fields)
    _change_weights(path, seed, layers_weigh)
    return path


def _change_weights(path: Path, seed: int, layers_weigh: float) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(seed)
    for name in tensors:
        if name.endswith("layer_scalar"):
            tensors[name] = 0.5 + torch.rand(1, generator=generator)
        elif "post_" in name:  # a norm behind attention, MLP or per-layer inputs
            tensors[name] *= layers_weigh
    save_file(tensors, file, metadata={"format": "pt"})


def edit_config(path: Path, **fields: Any) -> Path:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | fields))
    return path


# -- assistants --------------------------------------------------------------------------------
BACKBONE = 48  # the targets' hidden size
ASSISTANT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 6,
    "max_position_embeddings": 256, "layer_types": [S, S, F], "num_hidden_layers": 3,
    "rms_norm_eps": 1e-5,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "sliding_window": 7,
    "tie_word_embeddings": True,
}  # fmt: skip
FITS: dict[str, dict[str, Any]] = {  # what an assistant has in common with its target
    "gemma3_text": {
        "head_dim": 16, "global_head_dim": 16, "num_key_value_heads": 2, "rope_parameters": ROPES,
    },
    "gemma4_text": {
        "head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 2,
        "num_global_key_value_heads": 3, "attention_k_eq_v": True,
        "rope_parameters": GEMMA["gemma4_text"]["rope_parameters"],
    },
}  # fmt: skip
FITS["gemma4_small"] = FITS["gemma4_text"] | {"attention_k_eq_v": False}


def assistant_dir(
    tmp_path: Path, family: str = "gemma3_text", seed: int = 5,
    clusters: tuple[int, int] | None = None, **overrides: Any,
) -> Path:  # fmt: skip
    """A random assistant for `gemma_dir(…, family)`, in the public format; with `clusters` (how
    many, and how many of them get logits) one with ordered embeddings."""
    text = {"model_type": "gemma4_text", **ASSISTANT, **FITS[family], **overrides}
    size, inner, heads = text["hidden_size"], text["intermediate_size"], text["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (text["vocab_size"], size),
        "model.norm.weight": (size,),
        "pre_projection.weight": (size, 2 * BACKBONE),
        "post_projection.weight": (BACKBONE, size),
    }
    for i, kind in enumerate(text["layer_types"]):
        p, dim = f"model.layers.{i}.", text["head_dim" if kind == S else "global_head_dim"]
        shapes |= {
            f"{p}self_attn.q_proj.weight": (heads * dim, size),
            f"{p}self_attn.o_proj.weight": (size, heads * dim),
            f"{p}self_attn.q_norm.weight": (dim,),
            f"{p}mlp.gate_proj.weight": (inner, size),
            f"{p}mlp.up_proj.weight": (inner, size),
            f"{p}mlp.down_proj.weight": (size, inner),
            f"{p}layer_scalar": (1,),
        }
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{p}{norm}_layernorm.weight"] = (size,)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name or "layer_scalar" in name:
            tensors[name] = 1 + 0.2 * noise
        else:
            tensors[name] = noise * (0.5 if "embed" in name else shape[1] ** -0.5 * 1.5)
    raw: dict[str, Any] = {
        "model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": BACKBONE, "use_ordered_embeddings": False,
        "text_config": text | {"num_kv_shared_layers": len(text["layer_types"])},
    }  # fmt: skip
    if clusters is not None:
        raw |= {"use_ordered_embeddings": True, "num_centroids": clusters[0],
                "centroid_intermediate_top_k": clusters[1]}  # fmt: skip
        tensors["masked_embedding.centroids.weight"] = torch.randn(
            clusters[0], size, generator=generator
        )
        tensors["masked_embedding.token_ordering"] = torch.randperm(
            text["vocab_size"], generator=generator
        )
    path = tmp_path / f"assistant-{len(list(tmp_path.glob('assistant-*')))}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def hf_assistant(path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' module. Its 5.23 refuses a model whose layers are all shared, as these are, and
    does not hand out the keys of a target that shares none. Targets that share some are left as
    they are."""
    from transformers.models.gemma4 import Gemma4TextConfig
    from transformers.models.gemma4_assistant import Gemma4AssistantForCausalLM

    if hasattr(Gemma4TextConfig, "kv_sharing_modes"):
        own_modes: Any = Gemma4TextConfig.kv_sharing_modes

        def modes(config: Any) -> list[str | None]:
            types = config.layer_types
            if 0 < config.num_kv_shared_layers < len(types):
                return own_modes.fget(config)
            if config.num_kv_shared_layers:
                return ["reuse"] * len(types)
            return ["store" if kind not in types[i + 1 :] else None for i, kind in enumerate(types)]

        monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(modes))
    return Gemma4AssistantForCausalLM.from_pretrained(path, dtype=dtype).eval()


class NaiveAssistant:
    """The assistant's formula in float64, over keys that transformers' target makes from a text."""

    def __init__(self, assistant: Path, target: Path):
        from transformers import AutoModelForCausalLM

        self.flags: dict[str, Any] = {}  # mistakes: see `read`, `row` and `chain`
        self.raw = json.loads((assistant / "config.json").read_text())["text_config"]
        self.t = {n: t.double() for n, t in load_file(assistant / "model.safetensors").items()}
        self.target = AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        self.known: list[tuple[list[int], torch.Tensor, dict[str, Any]]] = []

    def foresee(self, text: list[int]) -> None:
        """Reads a text once for all that begins it."""
        self.known.append((text, *self._read(text)))

    def read(self, text: list[int]) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, ...]]]:
        """-> (the target's hidden state at the last token [H], by type K and V [n, heads, d])."""
        n = len(text)
        for known, states, keys in self.known if not self.flags else ():
            if known[:n] == text:
                return states[n - 1], {kind: tuple(x[:n] for x in kv) for kind, kv in keys.items()}
        states, keys = self._read(text)
        return states[-1], keys

    @torch.inference_mode()
    def _read(self, text: list[int]) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, ...]]]:
        """As `read`, with the states of all tokens [n, H]."""
        from transformers import DynamicCache

        cache = DynamicCache()  # of full length in every layer
        model, unnormed = self.target.model, []
        hook = model.norm.register_forward_pre_hook(lambda _, args: unnormed.append(args[0]))
        states = model(torch.tensor([text]), past_key_values=cache, use_cache=True)
        keys = {}  # the last layers may have none
        for kind, layer in zip(self.target.config.layer_types, cache.layers, strict=False):
            keys[kind] = tuple(x[0].transpose(0, 1) for x in (layer.keys, layer.values))
        hook.remove()
        last = unnormed[0] if self.flags.get("before_norm") else states.last_hidden_state
        return last[0], keys

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.raw["rms_norm_eps"])
        return x * scale * self.t[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.t[f"{name}.weight"].T

    def rotate(self, q: torch.Tensor, position: int, kind: str) -> torch.Tensor:
        rope, half = self.raw["rope_parameters"][kind], q.shape[-1] // 2
        freqs = rope["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        freqs[int(half * rope.get("partial_rotary_factor", 1)) :] = 0
        angles = position * freqs / rope.get("factor", 1)
        a, b = q[..., :half], q[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def row(
        self, token: int, h: torch.Tensor, position: int, keys: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> (logits, fed on)."""
        e = self.target.model.embed_tokens(torch.tensor(token))
        e = e / (BACKBONE**0.5 if self.flags.get("unscaled") else 1)
        x = self.linear(torch.cat([e, h]), "pre_projection")
        for i, kind in enumerate(self.raw["layer_types"]):
            p = f"model.layers.{i}."
            k, v = keys[kind]
            q = self.linear(self.norm(x, f"{p}input_layernorm"), f"{p}self_attn.q_proj")
            q = self.norm(q.view(-1, k.shape[-1]), f"{p}self_attn.q_norm")
            q = self.rotate(q, position, kind).view(k.shape[1], -1, k.shape[-1])
            if kind == S:
                k, v = k[-self.raw["sliding_window"] :], v[-self.raw["sliding_window"] :]
            weights = torch.einsum("hgd,nhd->hgn", q, k).softmax(-1)
            out = self.linear(
                torch.einsum("hgn,nhd->hgd", weights, v).flatten(), f"{p}self_attn.o_proj"
            )
            x = x + self.norm(out, f"{p}post_attention_layernorm")
            inner = self.norm(x, f"{p}pre_feedforward_layernorm")
            gate, up = (self.linear(inner, f"{p}mlp.{n}_proj") for n in ("gate", "up"))
            gate = torch.nn.functional.gelu(gate, approximate="tanh")
            out = self.linear(gate * up, f"{p}mlp.down_proj")
            x = x + self.norm(out, f"{p}post_feedforward_layernorm")
            x = x * self.t[f"{p}layer_scalar"]
        last, x = x, self.norm(x, "model.norm")
        fed_on = self.linear(last if self.flags.get("feeds_unnormed") else x, "post_projection")
        return x @ self.t["model.embed_tokens.weight"].T, fed_on

    @torch.inference_mode()
    def chain(self, text: list[int], hidden: Any, proposals: list[int]) -> list[torch.Tensor]:
        """The draft logits after `text`, one [V] per proposal; as `NaiveHead.chain`."""
        first, keys = self.read(text[:-1])
        logits, token, h = [], text[-1], first
        position = len(text) - 1 + self.flags.get("offset", 0)
        for step, proposal in enumerate(proposals):
            out, h = self.row(token, h, position + step * self.flags.get("advances", 0), keys)
            h = first if self.flags.get("feeds_nothing") else h
            logits.append(out)
            token = proposal
        return logits
