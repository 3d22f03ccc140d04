"""Layers that are kept for a draft head, whatever kind of layer they are, against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny import prefill_metadata, tiny_model_dir
from tiny_trained import load_target
from torch import Tensor
from transformers import AutoModelForCausalLM

IDS = [5, 17, 3, 44, 2, 9, 30]


class Twice:
    """Keeps every layer twice, in columns of a wider matrix, as two heads might ask for it."""

    def __init__(self, num_layers: int, size: int):
        self.size, self.buffer = size, torch.full((len(IDS), 2 * num_layers * size), 9.0)

    def places_of_layer(self, layer_id: int, rows: int, size: int) -> Sequence[Tensor]:
        assert (rows, size) == (len(IDS), self.size)
        return self.buffer.split(size, dim=1)[2 * layer_id : 2 * layer_id + 2]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"])
def test_every_layer_is_kept(tmp_path: Path, family: str) -> None:
    """The last product writes the first copy of a dense layer; others are copied."""
    path = tiny_model_dir(tmp_path, family, num_hidden_layers=3)
    target = load_target(path)
    meta, positions = prefill_metadata(target.config, [len(IDS)])
    kept = Twice(3, target.config.hidden_size)
    with torch.no_grad():
        target(torch.tensor(IDS), positions, meta, capture=kept)
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        states: list[Tensor] = []
        for layer in reference.model.layers:
            layer.register_forward_hook(
                lambda module, inputs, out: states.append(out[0] if isinstance(out, tuple) else out)
            )
        reference(torch.tensor([IDS]))
    for layer, expected in enumerate(states):
        first, second = kept.places_of_layer(layer, len(IDS), kept.size)
        torch.testing.assert_close(first, expected.view(first.shape), atol=1e-4, rtol=1e-4)
        assert torch.equal(first, second)
    assert len(states) == 3
    assert [layer.copies_output for layer in target.layers] == [family == "llama"] * 3
