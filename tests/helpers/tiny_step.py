"""A tiny Step-3.5, dense or with experts, with MTP layers of both kinds; what it computes, by
transformers and written out naively."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from drafting import Foresight
from oracle import Oracle
from safetensors.torch import load_file, save_file
from tiny_heads import _rotate, _weights
from torch import Tensor

from trtspec import MTPDecodingConfig

VOCAB, SIZE, INNER, HEAD_DIM, GROUPS, EPS = 97, 48, 80, 8, 2, 1e-5
FULL, SLIDING = "full_attention", "sliding_attention"
TYPES = [FULL, SLIDING, SLIDING, FULL]
MTP_TYPES = [SLIDING, FULL, SLIDING, FULL]
HEADS = {FULL: 6, SLIDING: 4}
THETA = {FULL: 500.0, SLIDING: 10000.0}
ROTATED = {FULL: 0.5, SLIDING: 1.0}
EXPERTS, EXPERT_INNER, SHARED_INNER = 6, 24, 40
MOE: dict[str, Any] = {  # the public checkpoint's, with limits that bite in layers of every sort
    "moe_layers_enum": "1,2,3", "moe_num_experts": EXPERTS, "moe_top_k": 2,
    "moe_intermediate_size": EXPERT_INNER, "share_expert_dim": SHARED_INNER,
    "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0,
    "use_moe_router_bias": True, "norm_expert_weight": True, "need_fp32_gate": True,
    "swiglu_limits": [0.4, 0.0, 0.5, 0.6, 0.7, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.5, 0.0, None, 0.8, 0.0, 0.4, 0.0, 0.0],
}  # fmt: skip


def step_config(
    window: int, mtp_types: Sequence[str] = MTP_TYPES, **changes: Any
) -> dict[str, Any]:
    """config.json as the public checkpoint's is written, without experts; see `MOE`."""
    types = [*TYPES, *mtp_types]
    raw = {
        "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "vocab_size": VOCAB,
        "hidden_size": SIZE, "intermediate_size": INNER, "num_hidden_layers": len(TYPES),
        "num_attention_heads": HEADS[FULL], "num_attention_groups": GROUPS, "head_dim": HEAD_DIM,
        "max_seq_len": 256, "rms_norm_eps": EPS, "bos_token_id": 1, "eos_token_id": 2,
        "layer_types": types, "sliding_window": window, "rope_theta": [THETA[t] for t in types],
        "partial_rotary_factors": [ROTATED[t] for t in types], "use_head_wise_attn_gate": True,
        "attention_other_setting": {
            "attention_type": SLIDING, "num_attention_heads": HEADS[SLIDING],
            "num_attention_groups": GROUPS, "head_dim": HEAD_DIM,
        },
        "moe_layers_enum": "", "num_nextn_predict_layers": len(mtp_types), "use_qk_norm": True,
        "swiglu_limits": [0.0] * len(types), "swiglu_limits_shared": [None] * len(types),
        "torch_dtype": "float32", "zero_centered": True, "yarn_only_types": [FULL],
        "tie_word_embeddings": False,
    }  # fmt: skip
    return {**raw, **changes}


def step_dir(root: Path, window: int = 5, seed: int = 1, **changes: Any) -> Path:
    raw = step_config(window, **changes)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, SIZE),
        "lm_head.weight": (VOCAB, SIZE),
        "model.norm.weight": (SIZE,),
    }
    for i, kind in enumerate(raw["layer_types"]):
        p, heads = f"model.layers.{i}.", HEADS[kind]
        shapes |= {
            f"{p}self_attn.q_proj.weight": (heads * HEAD_DIM, SIZE),
            f"{p}self_attn.k_proj.weight": (GROUPS * HEAD_DIM, SIZE),
            f"{p}self_attn.v_proj.weight": (GROUPS * HEAD_DIM, SIZE),
            f"{p}self_attn.o_proj.weight": (SIZE, heads * HEAD_DIM),
            f"{p}self_attn.g_proj.weight": (heads, SIZE),
            f"{p}self_attn.q_norm.weight": (HEAD_DIM,),
            f"{p}self_attn.k_norm.weight": (HEAD_DIM,),
            f"{p}input_layernorm.weight": (SIZE,),
            f"{p}post_attention_layernorm.weight": (SIZE,),
        }
        if i in expert_layers(raw):
            shapes |= _mlp(f"{p}share_expert", raw["share_expert_dim"])
            shapes |= _mlp(f"{p}moe", raw["moe_intermediate_size"], raw["moe_num_experts"])
            shapes[f"{p}moe.gate.weight"] = (raw["moe_num_experts"], SIZE)
            if raw["use_moe_router_bias"]:
                shapes[f"{p}moe.router_bias"] = (raw["moe_num_experts"],)
        else:
            shapes |= _mlp(f"{p}mlp", INNER)
        if i >= raw["num_hidden_layers"]:
            shapes |= {
                f"{p}enorm.weight": (SIZE,),
                f"{p}hnorm.weight": (SIZE,),
                f"{p}eh_proj.weight": (SIZE, 2 * SIZE),
                f"{p}transformer.shared_head.norm.weight": (SIZE,),
                f"{p}transformer.shared_head.output.weight": (VOCAB, SIZE),
            }
    tensors = _weights(shapes, seed)
    for name in tensors:
        if "norm" in name:  # written as differences from one
            tensors[name] -= 1
    path = root / f"step-{len(list(root.glob('step-*')))}"
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(raw))
    return path


def _mlp(prefix: str, inner: int, *stack: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (*stack, inner, SIZE),
        f"{prefix}.up_proj.weight": (*stack, inner, SIZE),
        f"{prefix}.down_proj.weight": (*stack, SIZE, inner),
    }


def expert_layers(raw: dict[str, Any]) -> set[int]:
    said = raw["moe_layers_enum"]
    return {int(i) for i in (said.split(",") if isinstance(said, str) else said) if i != ""}


def as_step3p7(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The text model's tensors as transformers names and joins those of Step-3.7, whose public
    checkpoint has Step-3.5's names (its `conversion_mapping.py`)."""
    own = {
        name.removeprefix("model.").replace("share_expert.", "mlp.shared_experts."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.") and not _is_mtp(name)
    }
    for name in [name for name in own if name.endswith("moe.gate.weight")]:
        layer, moe = name.removesuffix("moe.gate.weight"), name.removesuffix("gate.weight")
        experts = [own.pop(f"{moe}{part}_proj.weight") for part in ("gate", "up", "down")]
        own[f"{layer}mlp.experts.gate_up_proj"] = torch.cat(experts[:2], dim=1)
        own[f"{layer}mlp.experts.down_proj"] = experts[2]
        own[f"{layer}mlp.gate.weight"] = own.pop(name)
        bias = own.pop(f"{moe}router_bias", torch.zeros(len(experts[0])))
        own[f"{layer}mlp.gate.e_score_correction_bias"] = bias
    return own


class StepOracle(Oracle):
    """transformers' text model of Step-3.7, which is Step-3.5's, and the lm_head."""

    def __init__(self, path: Path):
        from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
        from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

        raw = json.loads((path / "config.json").read_text())
        self.config = Step3p7TextConfig(
            **{k: v for k, v in raw.items() if k not in ("architectures", "model_type")},
            max_position_embeddings=raw["max_seq_len"],
            attn_implementation="eager",
        )
        model = Step3p7TextModel(self.config)
        tensors = load_file(path / "model.safetensors")
        self.lm_head = tensors["lm_head.weight"]
        model.load_state_dict(as_step3p7(tensors), strict=True)
        self.model = model.float().eval()
        self.next_token: dict[tuple[int, ...], int] = {}

    @torch.inference_mode()
    def hidden(self, text: Sequence[int]) -> Tensor:
        """[n, D] after the final norm."""
        return self.model(torch.tensor([list(text)])).last_hidden_state[0]

    def read(self, ids: Tensor) -> Tensor:
        return self.model(ids).last_hidden_state @ self.lm_head.T

    @torch.inference_mode()
    def logits(self, text: Sequence[int]) -> Tensor:
        return self.hidden(text) @ self.lm_head.T


def _is_mtp(name: str) -> bool:
    return name.startswith("model.layers.") and int(name.split(".")[2]) >= len(TYPES)


class NaiveStepMTP:
    """Step i reads everything with MTP layer i, a dense one, from the text alone, in float64."""

    def __init__(self, path: Path, window: int, mtp_types: Sequence[str] = MTP_TYPES):
        self.t = {n: t.double() for n, t in load_file(path / "model.safetensors").items()}
        self.window, self.types = window, mtp_types
        raw = json.loads((path / "config.json").read_text())
        self.limits = [limit or math.inf for limit in raw["swiglu_limits_shared"][len(TYPES) :]]

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return x * scale * (1 + self.t[f"{name}.weight"])

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.t[f"{name}.weight"].T

    def layer(self, ids: Tensor, h: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """ids, h of positions 0 … n-1 -> (logits [n, V], what is fed on)."""
        p, kind, n = f"model.layers.{len(TYPES) + step}.", self.types[step], len(ids)
        e = self.t["model.embed_tokens.weight"][ids]
        both = torch.cat([self.norm(e, f"{p}enorm"), self.norm(h, f"{p}hnorm")], -1)
        x = self.linear(both, f"{p}eh_proj")
        y, positions, heads = self.norm(x, f"{p}input_layernorm"), torch.arange(n), HEADS[kind]
        q = self.norm(self.linear(y, f"{p}self_attn.q_proj").view(n, heads, HEAD_DIM),
                      f"{p}self_attn.q_norm")  # fmt: skip
        k = self.norm(self.linear(y, f"{p}self_attn.k_proj").view(n, GROUPS, HEAD_DIM),
                      f"{p}self_attn.k_norm")  # fmt: skip
        v = self.linear(y, f"{p}self_attn.v_proj").view(n, GROUPS, HEAD_DIM)
        turned = int(HEAD_DIM * ROTATED[kind])
        q, k = (
            torch.cat([_rotate(z[..., :turned], positions, THETA[kind]), z[..., turned:]], -1)
            for z in (q, k)
        )
        k, v = (z.repeat_interleave(heads // GROUPS, 1) for z in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_DIM)
        distance = positions[:, None] - positions
        unseen = (distance < 0) | (distance >= (self.window if kind == SLIDING else n))
        attended = torch.einsum(
            "hqk,khd->qhd", scores.masked_fill(unseen, -math.inf).softmax(-1), v
        )
        gate = self.linear(y, f"{p}self_attn.g_proj").sigmoid()
        x = x + self.linear((attended * gate[..., None]).flatten(1), f"{p}self_attn.o_proj")
        y = self.norm(x, f"{p}post_attention_layernorm")
        inner = torch.nn.functional.silu(self.linear(y, f"{p}mlp.gate_proj"))
        limit = self.limits[step]
        inner = inner.clamp(max=limit) * self.linear(y, f"{p}mlp.up_proj").clamp(-limit, limit)
        out = x + self.linear(inner, f"{p}mlp.down_proj")
        normed = self.norm(out, f"{p}transformer.shared_head.norm")
        return self.linear(normed, f"{p}transformer.shared_head.output"), out

    def chain(self, text: list[int], hidden: Tensor, proposals: list[int]) -> list[Tensor]:
        """As `NaiveHead.chain`."""
        ids, h, logits = torch.tensor(text[1:]), hidden[: len(text) - 1].double(), []
        for step, proposal in enumerate(proposals):
            out, h = self.layer(ids, h, step)
            logits.append(out[-1])
            ids = torch.cat([ids[1:], torch.tensor([proposal])])
        return logits


WINDOW = 5


@dataclass
class StepCase(Foresight):
    """As `drafting.Case`."""

    target: Path
    config: MTPDecodingConfig
    naive: NaiveStepMTP
    oracle: StepOracle

    def compute(self, text: Sequence[int]) -> Tensor:
        return self.oracle.hidden(text)
