"""A tiny model with a tokenizer and a chat template, to be served, and what a test asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from guided import save_tokenizer
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir

from trtspec import LLM, NGramDecodingConfig, SamplingParams
from trtspec.metadata.attention import NUM_RESERVED_BLOCKS

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}\n{% endfor %}"
    "{% if tools %}{{ tools | length }} tools\n{% endif %}"
    "{% if slow %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PROMPTS = ["abc 12", "the end of (xy", "a", "{12: true}, zz"]
MAX_SEQ_LEN = 256


def served_model_dir(tmp_path: Path) -> Path:
    """Its attention is weak, so that its texts loop soon, and n-grams are accepted."""
    path = tiny_model_dir(tmp_path, max_position_embeddings=MAX_SEQ_LEN)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if "o_proj" in name]:
        tensors[name] *= 0.02
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    tokenizer = save_tokenizer(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def make_llm(path: Path, **changes: Any) -> LLM:
    arguments = {
        "speculative_config": NGramDecodingConfig(max_draft_len=3),
        "device": "cpu",
        "dtype": "float32",
        "max_batch_size": 4,
        "max_seq_len": MAX_SEQ_LEN,
    }
    return LLM(path, **(arguments | changes))


def greedy(max_tokens: int = 24, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


def is_at_rest(llm: LLM) -> bool:
    """Whether no request is left, in a slot, a block or the queue."""
    executor = llm.executor
    blocks = executor.kv_cache
    is_free = blocks.num_free_blocks == blocks.num_blocks - NUM_RESERVED_BLOCKS
    return is_free and not (executor.has_work or executor.book.live)


def texts(outputs: Sequence[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]
