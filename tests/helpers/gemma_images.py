"""Whole Gemma checkpoints that read images, and their greedy text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_gemma import gemma_dir
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from trtspec import (
    EmbedsPrompt,
)

SIZE, IMAGE = 48, 96  # 96 is the placeholder's id
COUNT = 16
WHOLE: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "model_type": "gemma3", "prefix": "language_model.model.",
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "image_size": 8,
            "num_hidden_layers": 1, "patch_size": 4,
        },
    },
    "gemma4_text": {
        "model_type": "gemma4", "prefix": "model.language_model.",
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8,
            "num_key_value_heads": 2, "num_hidden_layers": 1,
        },
    },
}  # fmt: skip


def whole_dir(tmp_path: Path, family: str, is_image_last: bool = False, **overrides: Any) -> Path:
    """A checkpoint as published, of which the encoder has no tensors."""
    if family == "gemma4_text":
        overrides = {"use_bidirectional_attention": "vision", **overrides}
    path = gemma_dir(tmp_path, family, seed=3, layers_weigh=4, **overrides)
    said = WHOLE[family]
    raw = json.loads((path / "config.json").read_text())
    dtype = raw.pop("dtype")
    raw = {
        "model_type": said["model_type"], "text_config": raw, "dtype": dtype,
        "vision_config": said["vision_config"], "tie_word_embeddings": True,
        "image_token_id": IMAGE, "video_token_id": 95, "audio_token_id": 94,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(path / "model.safetensors")
    renamed = {name.replace("model.", said["prefix"], 1): t for name, t in tensors.items()}
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    return path


def image_prompt(
    lengths: tuple[int, ...] = (6, 3), types: bool = False, seed: int = 3
) -> EmbedsPrompt:
    """Images of so many tokens, with two to four tokens of text before each and after the last."""
    ids: list[int] = [7, 8]
    for i, length in enumerate(lengths):
        ids += [*[IMAGE] * length, *range(11 + i, 13 + 2 * i)]
    mask = torch.tensor([token == IMAGE for token in ids])
    generator = torch.Generator().manual_seed(seed)
    return EmbedsPrompt(
        ids, 7 * torch.randn(int(mask.sum()), SIZE, generator=generator), mask,
        mm_token_type_ids=mask.int() if types else None,
    )  # fmt: skip


class ImageOracle:
    """transformers' whole model, greedy, everything anew for every token."""

    def __init__(self, path: Path):
        raw = json.loads((path / "config.json").read_text())
        config = AutoConfig.for_model(**raw)
        self.model: Any = AutoModelForImageTextToText.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        prefix = WHOLE[raw["text_config"]["model_type"]]["prefix"]
        text = {
            name.removeprefix(prefix): tensor
            for name, tensor in load_file(path / "model.safetensors").items()
        }
        self.model.model.language_model.load_state_dict(text)
        self.model.tie_weights()
        self.name = "token_type_ids" if raw["model_type"] == "gemma3" else "mm_token_type_ids"

    @torch.inference_mode()
    def extend(self, given: EmbedsPrompt, count: int, kinds: Tensor | None = None) -> list[int]:
        embeds = self.model.get_input_embeddings()(torch.tensor(given.prompt_token_ids))
        assert given.is_embed is not None
        embeds[given.is_embed] = given.prompt_embeds
        kinds = given.is_embed.long() if kinds is None else kinds
        output: list[int] = []
        for _ in range(count):
            kinds = torch.cat([kinds, kinds.new_zeros(len(embeds) - len(kinds))])
            logits = self.model(
                inputs_embeds=embeds[None], use_cache=False, **{self.name: kinds[None]}
            ).logits[0, -1]
            output.append(int(logits.argmax()))
            following = self.model.get_input_embeddings()(torch.tensor(output[-1:]))
            embeds = torch.cat([embeds, following])
        return output
