"""transformers' greedy texts, a drafter that proposes them, and prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from loading import ON_CPU
from tiny import prefill_metadata
from transformers import AutoModelForCausalLM

from trtspec.checkpoints.weights import load_decoder

VOCAB = 97


class Oracle:
    """transformers' greedy continuation, one token at a time from scratch, remembered."""

    def __init__(self, model_dir: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.next_token: dict[tuple[int, ...], int] = {}

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [n, L, V] of texts [n, L]."""
        return self.model(ids).logits

    def extend(self, prompt: Sequence[int], count: int) -> list[int]:
        return self.extend_all([prompt], count)[0]

    @torch.inference_mode()
    def extend_all(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """The continuation of each; a pass reads all texts, padded behind where no token looks."""
        texts = [list(prompt) for prompt in prompts]
        for _ in range(count):
            if unknown := [text for text in texts if tuple(text) not in self.next_token]:
                longest = max(map(len, unknown))
                ids = torch.tensor([text + [0] * (longest - len(text)) for text in unknown])
                logits = self.read(ids)
                for text, row in zip(unknown, logits, strict=True):
                    self.next_token[tuple(text)] = int(row[len(text) - 1].argmax())
            for text in texts:
                text.append(self.next_token[tuple(text)])
        return [text[len(prompt) :] for prompt, text in zip(prompts, texts, strict=True)]


class Scripted:
    """Proposes the oracle's tokens, spoilt from a position on that depends on the length so far,
    so that every acceptance length comes up."""

    def __init__(self, oracle: Oracle):
        self.oracle = oracle

    def draft(self, request_id: int, token_ids: Sequence[int], max_draft_len: int) -> list[int]:
        drafts = self.oracle.extend(token_ids, max_draft_len)
        good = random.Random(len(token_ids)).randrange(max_draft_len + 2)
        drafts[good:] = [(token + 1) % VOCAB for token in drafts[good:]]
        return drafts if good <= max_draft_len else []


def random_prompts(count: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    prompts[0] = prompts[0][:3] * 8  # something for the n-gram lookup
    return prompts


LENGTHS = [5, 37, 1, 20]


def prompt_tensors(vocab_size: int, lengths: list[int] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def logit_error(path: Path, prompts: list[torch.Tensor]) -> tuple[float, float]:
    """Largest difference from transformers in fp32, and the standard deviation of its logits."""
    reference = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    model = load_decoder(path, ON_CPU)
    meta, positions = prefill_metadata(model.config, [len(prompt) for prompt in prompts])
    with torch.no_grad():
        hidden = model(torch.cat(prompts), positions, meta)
        logits = model.compute_logits(hidden)
        expected = torch.cat([reference(prompt[None]).logits[0] for prompt in prompts])
    assert logits.shape == expected.shape and logits.dtype == torch.float32
    return (logits - expected).abs().max().item(), expected.std().item()
