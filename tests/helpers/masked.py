"""Drafters that read mask tokens, with their oracles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from drafting import Case, Script
from oracle import VOCAB
from tiny_heads import MASK_TOKEN, NaiveHead, p_eagle_dir, pard_dir
from torch import Tensor

from trtspec import LLM, DraftTargetDecodingConfig, EagleDecodingConfig
from trtspec.config import DecodingBaseConfig

MASKED_CASES = ["p_eagle", "p_eagle_flags", "pard"]


class NaivePEagle(NaiveHead):
    """One pass over the text, shifted left by one, and the masks; layers after the first are those
    of a Llama."""

    def chain(self, text: list[int], hidden: Tensor, proposals: list[int]) -> list[Tensor]:
        known, masks = len(text) - 1, len(proposals) - 1
        ids = torch.tensor(text[1:] + [MASK_TOKEN] * masks)
        mask_hidden = self.project(self.t["mask_hidden"]).expand(masks, -1)
        h = torch.cat([self.project(hidden[:known].double()), mask_hidden])
        e, positions, p = self.embedding[ids], torch.arange(len(ids)), "layers.0."
        n = self.norm(h, f"{p}hidden_norm")
        x = torch.cat([self.norm(e, f"{p}input_layernorm"), n], -1)
        r = n if self.flags.get("norm_before_residual") else h
        out = self.after_norm(r, x, positions, p)
        for i in range(1, self.flags.get("num_layers", 2)):
            p = f"layers.{i}."
            out = self.after_norm(out, self.norm(out, f"{p}input_layernorm"), positions, p)
        logits = self.norm(out, "norm") @ self.lm_head.T
        return list(logits[known - 1 :])

    def after_norm(self, r: Tensor, x: Tensor, positions: Tensor, p: str) -> Tensor:
        r = r + self.attention(x, positions, {}, f"{p}self_attn")
        return r + self.mlp(self.norm(r, f"{p}post_attention_layernorm"), f"{p}mlp")


class NaivePard:
    """transformers in float64 over the text and the masks."""

    def __init__(self, draft_dir: Path):
        from transformers import AutoModelForCausalLM

        self.flags: dict[str, Any] = {}
        self.model = AutoModelForCausalLM.from_pretrained(
            draft_dir, dtype=torch.float64, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def chain(self, text: list[int], hidden: Tensor, proposals: list[int]) -> list[Tensor]:
        ids = torch.tensor([text + [MASK_TOKEN] * (len(proposals) - 1)])
        return list(self.model(ids).logits[0, len(text) - 1 :])


def make_masked_case(name: str, target: Path, tmp_path: Path, k: int) -> Case:
    if name == "pard":
        draft = pard_dir(tmp_path)
        config: DecodingBaseConfig = DraftTargetDecodingConfig(
            max_draft_len=k, speculative_model=draft
        )
        return Case(target, config, NaivePard(draft))  # type: ignore[arg-type]
    flags: dict[str, Any] = {}
    if name == "p_eagle_flags":
        flags = {
            "norm_before_residual": True, "norm_before_fc": True, "own_embedding": True,
            "draft_vocab": VOCAB, "num_layers": 3,
        }  # fmt: skip
    head = p_eagle_dir(tmp_path, **flags)
    config = EagleDecodingConfig(max_draft_len=k, speculative_model=head)
    return Case(target, config, NaivePEagle(head, target, "eagle3", **flags), capture=(1, 3, 4))


class MaskedScript(Script):
    """All proposals come in one call, by place and then by request; and from one pass."""

    def __init__(self, llm: LLM, case: Case, seed: int):
        super().__init__(llm, case, seed)
        self.passes: list[int] = []  # rows of each draft pass since the last look
        model = self.executor.draft_model
        assert isinstance(model, torch.nn.Module)
        model.register_forward_pre_hook(lambda _, args: self.passes.append(len(args[0])))

    def _sample(self, logits: Tensor, d2t: Tensor | None = None) -> Tensor:
        batch = len(self.logits)
        return torch.cat([super(MaskedScript, self)._sample(x, d2t) for x in logits.split(batch)])
