"""Driving a worker from a loop that is not trtspec's.

The worker (prompt lookup here) verifies, accepts and drafts; this loop owns everything else. The
target is transformers' model, asked for the logits of the last K+1 tokens with its own KV cache,
to show that a worker needs none of our executor: tensors in, tensors out.

    python examples/embed_in_your_loop.py [MODEL_DIR]
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from trtspec import NGramDecodingConfig, SpecMetadata
from trtspec.checkpoints.zoo import resolve_model
from trtspec.workers import NGramWorker

K, MAX_TOKENS = 4, 64
PROMPT = "Repeat exactly: the quick brown fox jumps over the lazy dog.\nthe quick brown fox"


@torch.inference_mode()
def main(model_dir: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)
    target = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, trust_remote_code=False
    ).eval()
    worker = NGramWorker(NGramDecodingConfig(max_draft_len=K))
    state = worker.allocate_state(num_slots=1, max_seq_len=1024, device=torch.device("cpu"))

    text = tokenizer.encode(PROMPT)
    worker.admit(state, slot=0, token_ids=text)
    cache, prompt_len, steps = DynamicCache(), len(text), 0
    rows = text  # the prompt first; then [last token, drafts]
    while len(text) < prompt_len + MAX_TOKENS:
        is_context = steps == 0
        spec = SpecMetadata(
            max_num_requests=1,
            max_draft_len=K,
            max_total_draft_tokens=K,
            request_ids=[0],
            num_generations=0 if is_context else 1,
            draft_tokens=None if is_context else torch.tensor([rows[1:]], dtype=torch.int32),
            slot_ids=torch.tensor([0]),
            state=state,
        )
        ids = torch.tensor([rows]).clamp_min(0)  # -1 is "no draft here": any id will do
        # The fourth argument is the cache. Its name depends on transformers' version.
        logits = target(ids, None, None, cache, use_cache=True).logits[0]
        positions = cache.get_seq_length() - len(rows) + torch.arange(len(rows))
        out = worker(
            input_ids=ids[0],
            position_ids=positions,
            hidden_states=None,
            logits=logits[-1:] if is_context else logits,
            attn_metadata=None,
            spec_metadata=spec,
        )
        accepted = out["new_tokens"][0, : int(out["new_tokens_lens"][0])].tolist()
        text += accepted
        rejected = cache.get_seq_length() - (len(text) - 1)  # the last token has no KV yet
        if rejected:
            cache.crop(-rejected)
        rows = out["next_new_tokens"][0].tolist()
        steps += 1
    text = text[: prompt_len + MAX_TOKENS]  # the last step may go beyond
    print(tokenizer.decode(text))
    print(f"{len(text) - prompt_len} tokens in {steps} passes of the target")


if __name__ == "__main__":
    main(str(resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")))
