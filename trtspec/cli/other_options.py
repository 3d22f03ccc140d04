"""Options of other engines' commands, and their words for drafters, with ours for the same."""

from __future__ import annotations

from collections.abc import Mapping

_FRACTION = ("--free-gpu-memory-fraction",)
_DRAFTER = ("--head", "--draft-model")
_RANKS = ("--tp", "--ep")
_NO_LOGS = "requests are not logged; /metrics counts them"
_NO_LORA = "there is no LoRA"
_NOT_FETCHED = "a directory is read, nothing is fetched"
_NO_TREES = "drafts are a chain, never a tree"
_PROXY = "a proxy before the server can do it"
_PYTHON = "LLM has it, in Python"
_TEMPLATE = "the chat template says it"

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "--alias": ("--served-model-name",),
    "--context-length": ("--max-seq-len",),
    "--ctx-size": ("--max-seq-len",),
    "--data-parallel-size": _RANKS,
    "--disable-radix-cache": ("--no-block-reuse",),
    "--draft-max": ("--max-draft-len",),
    "--enable-expert-parallel": ("--ep",),
    "--ep-size": ("--ep",),
    "--lr": ("--learning-rate",),
    "--gpu-memory-utilization": _FRACTION,
    "--kv-cache-free-gpu-memory-fraction": _FRACTION,
    "--max-concurrency": ("--concurrency", "--max-batch-size"),
    "--max-model-len": ("--max-seq-len",),
    "--max-new-tokens": ("--max-tokens",),
    "--max-num-seqs": ("--max-batch-size",),
    "--max-queued-requests": ("--max-num-requests-in-queue",),
    "--max-running-requests": ("--max-batch-size",),
    "--mem-fraction-static": _FRACTION,
    "--model": ("--target", "model"),
    "--model-draft": ("--draft-model",),
    "--model-path": ("--model", "--target", "model"),
    "--n-gpu-layers": ("--device",),
    "--n-predict": ("--max-tokens",),
    "--no-enable-prefix-caching": ("--no-block-reuse",),
    "--num-speculative-tokens": ("--max-draft-len",),
    "--parallel": ("--max-batch-size",),
    "--pipeline-parallel-size": _RANKS,
    "--pp-size": _RANKS,
    "--quantization": ("--quant",),
    "--spec-type": ("--speculative",),
    "--speculative-algo": ("--speculative",),
    "--speculative-algorithm": ("--speculative",),
    "--speculative-config": ("--speculative", "--head", "--draft-model", "--max-draft-len"),
    "--speculative-draft-model-path": _DRAFTER,
    "--speculative-draft-model-quantization": ("--draft-quant",),
    "--speculative-model": _DRAFTER,
    "--speculative-token-map": ("--draft-token-ids",),
    "--speculative-accept-threshold-single": ("--acceptance",),
    "--speculative-accept-threshold-acc": ("--acceptance",),
    "--speculative-num-draft-tokens": ("--max-draft-len",),
    "--speculative-num-steps": ("--max-draft-len",),
    "--target": ("--model",),
    "--tp-size": ("--tp",),
}
"""Options of vLLM, SGLang, llama.cpp, TensorRT-LLM and of our other commands, with what a command
may have for the same. Letters often mislead: `--max-n` is nearest to `--max-num-seqs`."""

NOT_OFFERED: Mapping[str, str] = {
    "--allowed-origins": "pages of other origins are not served",
    "--backend": "there is one",
    "--block-size": _PYTHON,
    "--chat-template": "it is the model's own",
    "--chunked-prefill-size": _PYTHON,
    "--config": "options are given one by one, and LLM takes a file's fields in Python",
    "--disable-cuda-graph": _PYTHON,
    "--disable-log-requests": _NO_LOGS,
    "--disable-log-stats": _NO_LOGS,
    "--enable-auto-tool-choice": _TEMPLATE,
    "--enable-chunked-prefill": _PYTHON,
    "--enable-lora": _NO_LORA,
    "--enable-prefix-caching": "the prefix cache is on",
    "--enforce-eager": _PYTHON,
    "--extra-llm-api-options": "options are given one by one, and LLM takes a file's fields in "
    "Python",
    "--guided-decoding-backend": "it is XGrammar",
    "--log-level": _NO_LOGS,
    "--log-requests": _NO_LOGS,
    "--lora-modules": _NO_LORA,
    "--max-num-batched-tokens": _PYTHON,
    "--max-num-tokens": _PYTHON,
    "--num-postprocess-workers": "HTTP has a process of its own",
    "--reasoning-parser": _TEMPLATE,
    "--root-path": _PROXY,
    "--seed": "a seed is a request's",
    "--speculative-attention-mode": "kernels are chosen by the machine",
    "--speculative-draft-model-revision": _NOT_FETCHED,
    "--speculative-draft-tensor-parallel-size": _PYTHON,
    "--speculative-eagle-topk": _NO_TREES,
    "--speculative-ngram-max-match-window-size": _PYTHON,
    "--speculative-ngram-min-match-window-size": _PYTHON,
    "--ssl-certfile": _PROXY,
    "--ssl-keyfile": _PROXY,
    "--tokenizer": "it is the model directory's",
    "--tool-call-parser": _TEMPLATE,
    "--trust-remote-code": "code of a checkpoint is never run",
    "--uvicorn-log-level": _NO_LOGS,
}
"""Options of other engines that no command has, and why."""

DRAFTERS: Mapping[str, str] = {
    "deepseek_mtp": "mtp_eagle",
    "dflash2": "dflash",
    "draft_model": "draft_target",
    "eagle": "eagle3",
    "nextn": "mtp_eagle",
    "p_eagle": "eagle3",
    "pard": "draft_target",
    "peagle": "eagle3",
    "standalone": "draft_target",
    "suffix": "sa",
}
"""Their words for ways of drafting, and the value of `--speculative` for the same."""
