"""An EAGLE-3 head drafting in a loop that is not trtspec's.

The target is transformers' model with its own KV cache; the head's keys and values live in a paged
cache of ours, described to the worker by an `AttentionMetadata` per pass. One call of the worker
verifies, accepts and drafts.

    python examples/eagle3_in_your_loop.py [MODEL HEAD]
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from trtspec import EagleDecodingConfig, SpecMetadata
from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.checkpoints.heads.load import load_head
from trtspec.checkpoints.heads.records import HeadRequest, LoadOptions
from trtspec.checkpoints.hf_config import load_config
from trtspec.checkpoints.zoo import resolve_head, resolve_model
from trtspec.metadata import AttentionMetadata, CapturedHiddenStates
from trtspec.ops.step.slots import slot_mapping
from trtspec.state.kv_cache import KVCacheManager, KVGroupSpec
from trtspec.workers import Eagle3OneModelWorker

K, PAGE = 4, 32
CPU = torch.device("cpu")


@torch.inference_mode()
def generate(
    model_dir: str, head_dir: str, prompt: list[int], max_tokens: int
) -> tuple[list[int], int]:
    """Greedy tokens after the prompt, and the passes of the target they took."""
    target = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, trust_remote_code=False
    ).eval()
    config = load_config(model_dir)
    ends = SimpleNamespace(  # what a head may share
        config=config,
        embed_tokens=target.get_input_embeddings(),
        lm_head=target.get_output_embeddings(),
    )
    head = load_head(
        head_dir,
        ends,
        HeadRequest(kind="eagle"),
        LoadOptions(dtype=torch.float32, device=CPU, backend=TorchAttention(), kv_group=0),
    )
    layers, shape = head.layers_to_capture, head.config.decoder
    worker = Eagle3OneModelWorker(EagleDecodingConfig(max_draft_len=K, speculative_model=head_dir))

    longest = len(prompt) + max_tokens + 2 * K
    spec = KVGroupSpec(shape.num_layers, shape.num_kv_heads, shape.head_dim, torch.float32)
    draft_cache = KVCacheManager([spec], num_blocks=longest // PAGE + 4, page_size=PAGE, device=CPU)
    draft_cache.reserve(0, longest)
    captured = CapturedHiddenStates(
        layers, torch.zeros(len(prompt) + K + 1, len(layers) * config.hidden_size)
    )

    cache, text, steps = DynamicCache(), list(prompt), 0
    rows = text  # the prompt first; then [last token, drafts]
    while len(text) < len(prompt) + max_tokens:
        is_context, start = steps == 0, cache.get_seq_length()
        meta = describe_pass(draft_cache, start, len(rows), is_context, longest)
        step = SpecMetadata(
            max_num_requests=1,
            max_draft_len=K,
            max_total_draft_tokens=K,
            request_ids=[0],
            num_generations=meta.num_generations,
            draft_tokens=None if is_context else torch.tensor([rows[1:]], dtype=torch.int32),
            captured=captured,
        )
        ids = torch.tensor([rows]).clamp_min(0)  # -1 is "no draft here": any id will do
        # The fourth argument is the cache. Its name depends on transformers' version.
        out = target(ids, None, None, cache, use_cache=True, output_hidden_states=True)
        for layer in layers:  # hidden_states[0] is the embedding
            step.maybe_capture_hidden_states(layer, out.hidden_states[layer + 1][0])
        result = worker(
            input_ids=ids[0],
            position_ids=meta.position_ids,
            hidden_states=None,
            logits=out.logits[0, -1:] if is_context else out.logits[0],
            attn_metadata=meta,
            spec_metadata=step,
            draft_model=head,
        )
        text += result["new_tokens"][0, : int(result["new_tokens_lens"][0])].tolist()
        rejected = cache.get_seq_length() - (len(text) - 1)  # the last token has no KV yet
        if rejected:
            cache.crop(-rejected)
        rows = result["next_new_tokens"][0].tolist()
        steps += 1
    return text[len(prompt) : len(prompt) + max_tokens], steps


def describe_pass(
    cache: KVCacheManager, start: int, count: int, is_context: bool, max_seq_len: int
) -> AttentionMetadata:
    """Rows of one request at positions `start …`, and where the head keeps their KV.

    The cache hands out block ids from 2 on: 0 and 1 are reserved, which tables of your own must
    leave alone.
    """
    positions = torch.arange(start, start + count)
    (table,) = cache.block_tables([0])
    inside = positions < max_seq_len
    slots = slot_mapping(table, positions[None], inside[None], cache.page_size)
    return AttentionMetadata(
        context_lens=(count,) if is_context else (),
        context_starts=(start,) if is_context else (),
        num_generations=0 if is_context else 1,
        rows_per_generation=count,
        position_ids=positions,
        kv_lens=torch.tensor([start + count], dtype=torch.int32),
        max_kv_len=start + count,
        kv_groups=cache.groups,
        block_tables=(table,),
        slot_mappings=(slots.flatten(),),
        max_seq_len=max_seq_len,
    )


def main(model: str = "smollm2-135m", head: str = "smollm2-135m-eagle3") -> None:
    """Directories, or the names that the package knows."""
    model_dir, head_dir = str(resolve_model(model)), str(resolve_head(head))
    tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)
    prompt = tokenizer.encode("The quick brown fox")
    tokens, steps = generate(model_dir, head_dir, prompt, 64)
    print(tokenizer.decode(prompt + tokens))
    print(f"{len(tokens)} tokens in {steps} passes of the target")


if __name__ == "__main__":
    main(*sys.argv[1:3])
