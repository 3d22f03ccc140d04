"""Targets that say what a block head can know, and heads that know it: every draft is accepted.

The residual stream has two halves, each with a place for every token: what a row reads, and what it
says. Targets are Llamas of one layer.

    period       the target repeats what it read PERIOD tokens ago. A head's row copies it from the
                 context, or from the block's first row. Keys and queries are one constant (a bias),
                 whose rotated product peaks at one distance.
    permutation  the target's next token follows from the last one. The head's choice by the token
                 before knows it; its rows know nothing.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

PERIOD, THETA, PEAK = 8, 10000.0, 20.0


class PerfectBlocks:
    """Targets and block heads over `tokens` tokens, the last of which is the mask.

    Attention has one head, as wide. `csrc` serves it with 64 tokens, bf16 and pages of 16 keys.
    """

    def __init__(self, tokens: int = 32):
        self.tokens, self.mask, self.size = tokens, tokens - 1, 2 * tokens
        self.reads, self.says = torch.eye(self.size).split(tokens)
        """[tokens, size] both: a token's place in a half."""

    def target(self, path: Path, kind: str, **fields: Any) -> Path:
        """The target of a kind, "period" or "permutation"; `fields` are more of its config."""
        says = self.says
        if kind == "permutation":
            says = torch.zeros(self.tokens, self.size)
            says[self._permuted()] = self.reads
        layer = self._layer(PERIOD - 1 if kind == "period" else None)
        tensors = {f"model.{name}": tensor for name, tensor in layer.items()}
        tensors |= {
            "model.layers.0.self_attn.o_proj.bias": torch.zeros(self.size),
            "model.embed_tokens.weight": self.reads.clone(),
            "model.norm.weight": torch.ones(self.size), "lm_head.weight": 8 * says,
        }  # fmt: skip
        raw = self._config(
            model_type="llama", architectures=["LlamaForCausalLM"], rms_norm_eps=1e-6
        )
        return _save(path, {**raw, "tie_word_embeddings": False, **fields}, tensors)

    def pard(self, path: Path) -> Path:
        """A PARD model that the "period" target agrees with: that target, for it looks at what
        stands PERIOD tokens ago whatever it reads."""
        return self.target(path, "period", pard_token=self.mask, spd_type="pard")

    def head(self, path: Path, kind: str, mode: str, block: int, anchor: bool = False) -> Path:
        """The head of a mode, "dflash", "dflash2" or "dspark", that the kind's target agrees with.

        Args:
            anchor: the row of the last token proposes too.
        """
        # A row copies what will stand at its position; of a head that samples from the anchor one
        # on. DFlash2's convolution moves every row's copy to the next row.
        shifts = mode == "dflash2" and kind == "period"
        distance = PERIOD - anchor - shifts
        ones = torch.ones(self.size)
        tensors = self._layer(distance if kind == "period" else None)
        tensors |= {
            "fc.weight": torch.cat([self.reads, torch.zeros(self.tokens, self.size)]),
            "hidden_norm.weight": ones, "norm.weight": ones.clone(),
        }  # fmt: skip
        nested = {"mask_token_id": self.mask, "target_layer_ids": [0], "sample_from_anchor": anchor}
        following, knows = self._permuted(), kind == "permutation"
        if mode == "dspark":
            certain = 100.0 * knows
            tensors["markov_head.markov_w1.weight"] = certain * torch.eye(self.tokens)
            tensors["markov_head.markov_w2.weight"] = torch.eye(self.tokens)[following].T
            nested |= {"markov_rank": self.tokens}
        if mode == "dflash2":
            base = torch.zeros(2, 2, self.size)
            base[0, 0] = base[1, int(shifts)] = 1
            still = torch.stack([torch.stack([ones, 0 * ones])] * 2)
            for part, kernel in (("attention", base), ("mlp", still)):
                tensors[f"layers.0.{part}_conv.base_kernel"] = kernel
                tensors[f"layers.0.{part}_conv.kernel_projection.weight"] = torch.zeros(
                    self.size // 4, self.size
                )
            name = "candidate_selector."
            tensors[f"{name}predecessor_codebook"] = 100.0 * knows * torch.eye(self.tokens)
            tensors[f"{name}successor_codebook"] = torch.eye(self.tokens)[following.argsort()]
            # The rows read masks alone: their states are 1 everywhere. (The mask's place is
            # sqrt(size) long behind the norm.) The row of the last token does not propose.
            tensors[f"{name}hidden_projection.weight"] = self.reads[self.mask].expand(
                self.tokens, -1
            ) / math.sqrt(self.size)
            nested |= {
                "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": self.tokens,
                "selector_top_k": self.tokens if knows else 16,
            }  # fmt: skip
        name = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}[mode]
        raw = self._config(model_type="qwen3", architectures=[f"{name}DraftModel"])
        return _save(path, {**raw, "block_size": block, "dflash_config": nested}, tensors)

    def text(self, kind: str, prompt: list[int], count: int) -> list[int]:
        """What a target of the kind says behind a prompt."""
        tokens, following = list(prompt), self._permuted().tolist()
        for _ in range(count):
            tokens.append(tokens[-PERIOD] if kind == "period" else following[tokens[-1]])
        return tokens[len(prompt) :]

    def _peak_at(self, distance: int) -> Tensor:
        """A query whose product with the key PEAK * ones is largest so many rows before."""
        frequencies = THETA ** (-torch.arange(0, self.tokens, 2) / self.tokens)
        angle = frequencies.double() * -distance
        pair = torch.cat([angle.cos() - angle.sin(), angle.cos() + angle.sin()])
        return (PEAK * pair).float()  # (1, 1) of each pair, rotated by the distance

    def _layer(self, distance: int | None) -> dict[str, Tensor]:
        """A layer that writes into the second half what the row at a distance read; or nothing."""
        p = "layers.0."
        none, ones = torch.zeros(self.tokens, self.size), torch.ones(self.size)
        tensors = {
            **{f"{p}self_attn.{n}_proj.weight": none.clone() for n in "qk"},
            f"{p}self_attn.q_proj.bias": self._peak_at(distance or 0),
            f"{p}self_attn.k_proj.bias": torch.full((self.tokens,), PEAK),
            f"{p}self_attn.v_proj.bias": torch.zeros(self.tokens),
            f"{p}self_attn.v_proj.weight": self.reads.clone(),
            f"{p}self_attn.o_proj.weight": (
                self.says if distance is not None else none
            ).T.contiguous(),
            **{f"{p}mlp.{n}_proj.weight": none.clone() for n in ("gate", "up")},
            f"{p}mlp.down_proj.weight": none.T.contiguous(),
            f"{p}input_layernorm.weight": ones,
            f"{p}post_attention_layernorm.weight": ones.clone(),
        }
        return tensors

    def _config(self, **fields: Any) -> dict[str, Any]:
        return {
            "vocab_size": self.tokens, "hidden_size": self.size, "intermediate_size": self.tokens,
            "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
            "head_dim": self.tokens, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
            "rope_theta": THETA, "attention_bias": True, "hidden_act": "silu", **fields,
        }  # fmt: skip

    def _permuted(self) -> Tensor:
        """The token after each token: one cycle through all but the mask."""
        order = torch.randperm(self.mask, generator=torch.Generator().manual_seed(5))
        following = torch.full((self.tokens,), self.mask)
        following[order] = order.roll(-1)
        return following


def _save(path: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(raw))
    metadata = {"format": "pt"}
    save_file({n: x.contiguous() for n, x in tensors.items()}, path / "model.safetensors", metadata)
    return path
