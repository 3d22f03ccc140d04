"""A prompt with vectors, a tiny Qwen2.5-VL, and its greedy text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import DEFAULTS
from tiny_heads import eagle3_dir, mtp_model_dir
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2_5_VLForConditionalGeneration

from trtspec import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    EmbedsPrompt,
    NGramDecodingConfig,
)
from trtspec.config import DecodingBaseConfig

SIZE = DEFAULTS["hidden_size"]
LAYERS = 6
IMAGE = 96  # the placeholder's id
PROMPT = [5, 6, *[IMAGE] * 6, 7, 8, 9, IMAGE, IMAGE, 3]
MASK = torch.tensor([token == IMAGE for token in PROMPT])


def mrope_positions_of_prompt() -> Tensor:
    """[3, n]: an image of 2 x 3 patches between texts, then one of 1 x 2."""
    columns = [(0, 0, 0), (1, 1, 1)]
    columns += [(2, 2 + y, 2 + x) for y in range(2) for x in range(3)]
    columns += [(5, 5, 5), (6, 6, 6), (7, 7, 7), (8, 8, 8), (8, 8, 9), (10, 10, 10)]
    return torch.tensor(columns).T


def embeds_prompt(**changes: Any) -> EmbedsPrompt:
    vectors = torch.randn(int(MASK.sum()), SIZE, generator=torch.Generator().manual_seed(3))
    return EmbedsPrompt(**{
        "prompt_token_ids": PROMPT, "prompt_embeds": vectors, "is_embed": MASK, **changes
    })  # fmt: skip


def vl_model_dir(folder: Path) -> Path:
    """A Qwen2.5-VL checkpoint as a whole, encoder included."""
    path = folder / "qwen2_5_vl"
    text = {
        **DEFAULTS, "num_hidden_layers": LAYERS, "num_attention_heads": 6,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2],
        },
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size":
        SIZE, "fullatt_block_indexes": [0],
    }  # fmt: skip
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision)
    config.tie_word_embeddings = False
    torch.manual_seed(4)
    model = Qwen2_5_VLForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                noise = 1 + 0.2 * noise
            elif parameter.dim() > 1:
                noise *= parameter[0].numel() ** -0.5 * (3 if "lm_head" in name else 1.5)
            parameter.copy_(noise)
    model.save_pretrained(path)
    return path


def greedy_with_embeds(model_dir: Path, prompt: EmbedsPrompt, count: int) -> list[int]:
    """transformers' greedy output, the whole text anew for every token."""
    is_vl = "qwen2_5_vl" in model_dir.name
    kind = Qwen2_5_VLForConditionalGeneration if is_vl else AutoModelForCausalLM
    model = kind.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    body = model.model.language_model if is_vl else model.model
    ids = list(prompt.prompt_token_ids)
    output: list[int] = []
    with torch.no_grad():
        embeds = model.get_input_embeddings()(torch.tensor(ids))
        embeds[MASK] = prompt.prompt_embeds
        positions = torch.arange(len(ids)).repeat(3, 1)
        if prompt.mrope_positions is not None:
            positions = prompt.mrope_positions
        for _ in range(count):
            where = positions[:, None] if is_vl else positions[:1]
            hidden = body(inputs_embeds=embeds[None], position_ids=where, use_cache=False)[0]
            output.append(int(model.lm_head(hidden[0, -1]).argmax()))
            following = model.get_input_embeddings()(torch.tensor(output[-1:]))
            embeds = torch.cat([embeds, following])
            positions = torch.cat([positions, positions.max().view(1, 1).expand(3, 1) + 1], dim=1)
    return output


def embeds_configs(tmp_path: Path, target: Path) -> dict[str, DecodingBaseConfig | None]:
    head = eagle3_dir(tmp_path, draft_vocab=None)
    return {
        "none": None,
        "ngram": NGramDecodingConfig(max_draft_len=3),
        "eagle3": EagleDecodingConfig(max_draft_len=3, speculative_model=str(head)),
        "eagle3_two_engine": EagleDecodingConfig(
            max_draft_len=2, speculative_model=str(head), eagle3_one_model=False
        ),
        "draft_target": DraftTargetDecodingConfig(max_draft_len=3, speculative_model=str(target)),
    }


def vl_with_mtp(vl_dir: Path, tmp_path: Path, num_layers: int) -> Path:
    other = mtp_model_dir(tmp_path, num_hidden_layers=LAYERS, num_mtp_layers=num_layers)
    tensors = load_file(vl_dir / "model.safetensors")
    mine = tuple(f"model.layers.{LAYERS + i}." for i in range(num_layers))
    for name, tensor in load_file(other / "model.safetensors").items():
        if name.startswith(mine):
            tensors[name] = tensor
    raw = json.loads((vl_dir / "config.json").read_text())
    raw["text_config"]["num_nextn_predict_layers"] = num_layers
    target = tmp_path / "qwen2_5_vl"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(raw))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
