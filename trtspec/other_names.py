"""Names of vLLM's, SGLang's, llama.cpp's and TensorRT-LLM's APIs, and ours for the same.

They are not taken: the error of an unknown name says which of ours is meant, or why there is none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_CACHE = "kv_cache_config=KvCacheConfig"
_BY_MACHINE = "kernels are chosen by the machine"
_LAYOUT = "the checkpoint says it"
_NO_BEAMS = "there is no beam search"
_NO_COPIES = "an LLM is one copy of the model; start several"
_NO_LORA = "there is no LoRA"
_NO_STAGES = "layers are not dealt out; tensor_parallel_size cuts them"
_NO_TREES = "drafts are a chain, never a tree"
_ONE_TEXT = "text is without special tokens and stop strings; token_ids has all tokens"
_NOT_FETCHED = "a directory is read, nothing is fetched"
_SAFETENSORS = "safetensors and GGUF files are read"
_SAMPLED = "sampled requests need no switch"
_STATS = "outputs have spec_stats, and LLM.stats() the engine's"

OURS: Mapping[str, tuple[str, ...]] = {
    # of an engine
    "attention_backend": ("attn_backend",),
    "block_size": (f"{_CACHE}(tokens_per_block=…)", "max_draft_len"),
    "context_length": ("max_seq_len",),
    "disable_radix_cache": (f"{_CACHE}(enable_block_reuse=…)",),
    "distributed_executor_backend": ("backend",),
    "enable_adaptive_verification": ('max_verified_drafts="auto"', 'max_draft_len="auto"'),
    "eagle3_layers_to_capture": ("target_layer_ids",),
    "enable_autotuner": ("cuda_graph_config=CudaGraphConfig(enable_autotuner=…)",),
    "enable_expert_parallel": ("moe_expert_parallel_size",),
    "enable_prefix_caching": (f"{_CACHE}(enable_block_reuse=…)", "enable_block_reuse"),
    "enforce_eager": ("cuda_graph_config=None",),
    "ep_size": ("moe_expert_parallel_size",),
    "gpu_memory_utilization": (
        f"{_CACHE}(free_gpu_memory_fraction=…)",
        "free_gpu_memory_fraction",
    ),
    "kv_cache_dtype": (f"{_CACHE}(dtype=…)",),
    "max_input_len": ("max_seq_len",),
    "max_model_len": ("max_seq_len",),
    "max_num_batched_tokens": ("max_num_tokens",),
    "max_num_seqs": ("max_batch_size",),
    "max_running_requests": ("max_batch_size",),
    "mem_fraction_static": (f"{_CACHE}(free_gpu_memory_fraction=…)",),
    "n_ctx": ("max_seq_len",),
    "quant_config": ("quant",),
    "quantization": ("quant",),
    "speculative_algorithm": ("speculative_config",),
    "speculative_accept_threshold_single": ("speculative_config", "acceptance"),
    "speculative_accept_threshold_acc": ("speculative_config", "acceptance"),
    "speculative_ngram_max_match_window_size": ("speculative_config", "max_matching_ngram_size"),
    "speculative_ngram_min_match_window_size": ("speculative_config", "min_matching_ngram_size"),
    "tp_size": ("tensor_parallel_size",),
    "use_cuda_graph": ("cuda_graph_config",),
    # of a decoding config
    "acceptance_length_threshold": ('draft_len_schedule="auto"',),
    "acceptance_window": ('draft_len_schedule="auto"',),
    "draft_model": ("speculative_model", "speculative_config"),
    "greedy_sampling": ("acceptance",),
    "max_total_draft_tokens": ("max_draft_len",),
    "method": ("decoding_type",),
    "model": ("speculative_model",),
    "model_path": ("model", "speculative_model"),
    "num_eagle_layers": ("max_draft_len",),
    "num_speculative_tokens": ("max_draft_len", "speculative_config"),
    "posterior_threshold": ("acceptance",),
    "prompt_lookup_max": ("max_matching_ngram_size",),
    "prompt_lookup_min": ("min_matching_ngram_size",),
    "pytorch_weights_path": ("speculative_model",),
    "quantization_config": ("quant",),
    "rejection_sample_method": ("acceptance",),
    "speculative_draft_model_path": ("speculative_config",),
    "speculative_model": ("speculative_config",),
    "speculative_model_dir": ("speculative_model", "speculative_config"),
    "speculative_num_draft_tokens": ("speculative_config",),
    "speculative_token_map": ("draft_token_ids", "speculative_config"),
    "speculative_draft_window_size": ("draft_window",),
    "speculative_num_steps": ("max_draft_len", "speculative_config"),
    "suffix_decoding_max_cached_requests": ("global_pool_tokens",),
    "suffix_decoding_max_tree_depth": ("max_matching_ngram_size",),
    "suffix_decoding_min_token_prob": ("min_token_prob",),
    "target_layer_ids": ("eagle3_layers_to_capture",),
    "use_rejection_sampling": ("acceptance",),
    "write_interval": ("tokens_per_file",),
    # of the KV cache, of graphs
    "copy_on_partial_reuse": ("enable_partial_reuse",),
    "max_batch_size": ("batch_sizes",),
    "max_gpu_total_bytes": ("max_tokens",),
    # of a request
    "allowed_token_ids": ("guided_decoding", "logit_bias"),
    "bad": ("bad_words",),
    "best_of": ("n",),
    "embedding_bias": ("logit_bias",),
    "end_id": ("stop_token_ids",),
    "inputs": ("prompts", "prompt"),
    "guided_choice": ("guided_decoding=GuidedDecodingParams(choice=…)",),
    "guided_grammar": ("guided_decoding=GuidedDecodingParams(grammar=…)",),
    "guided_json": ("guided_decoding=GuidedDecodingParams(json=…)",),
    "guided_regex": ("guided_decoding=GuidedDecodingParams(regex=…)",),
    "json_schema": ("guided_decoding=GuidedDecodingParams(json=…)",),
    "logits_processor": ("logit_bias",),
    "logits_processors": ("logit_bias",),
    "max_new_tokens": ("max_tokens", "sampling_params=SamplingParams(max_tokens=…)"),
    "max_tokens": ("sampling_params=SamplingParams(max_tokens=…)",),
    "min_length": ("min_tokens",),
    "min_new_tokens": ("min_tokens",),
    "n_predict": ("max_tokens",),
    "prompt": ("prompts", "messages"),
    "prompt_token_ids": ("prompts", "prompt"),
    "prompts": ("prompt",),
    "random_seed": ("seed",),
    "regex": ("guided_decoding=GuidedDecodingParams(regex=…)",),
    "repeat_penalty": ("repetition_penalty",),
    "return_context_logits": ("prompt_logprobs",),
    "return_generation_logits": ("logprobs",),
    "structured_outputs": ("guided_decoding",),
    "temperature": ("sampling_params=SamplingParams(temperature=…)",),
    "chat_template_kwargs": ("template_variables",),
}
"""Their name -> ours for the same, of which a place has one or none."""

NOT_HERE: Mapping[str, str] = {
    "add_generation_prompt": "the assistant's answer always follows",
    "allow_advanced_sampling": _SAMPLED,
    "backend": "it is XGrammar",
    "beam_width_array": _NO_BEAMS,
    "build_config": "an engine is made when LLM is",
    "chat_template": "the template is the tokenizer's",
    "chat_template_kwargs": "AsyncLLM.chat and the server take variables of a template",
    "continue_final_message": "the assistant's answer always follows",
    "data_parallel_size": _NO_COPIES,
    "detokenize": _ONE_TEXT,
    "disable_log_stats": _STATS,
    "download_dir": _NOT_FETCHED,
    "dp_size": _NO_COPIES,
    "dynamic_tree_max_topK": _NO_TREES,
    "eagle3_model_arch": _LAYOUT,
    "eagle_choices": _NO_TREES,
    "early_stopping": _NO_BEAMS,
    "enable_iter_perf_stats": _STATS,
    "enable_lora": _NO_LORA,
    "guided_decoding_backend": "it is XGrammar",
    "include_stop_str_in_output": _ONE_TEXT,
    "length_penalty": _NO_BEAMS,
    "load_format": _SAFETENSORS,
    "lora_request": _NO_LORA,
    "mask_token_id": _LAYOUT,
    "max_attention_window": "windows are the model's own",
    "max_beam_width": _NO_BEAMS,
    "max_non_leaves_per_layer": _NO_TREES,
    "moe_backend": _BY_MACHINE,
    "moe_config": _BY_MACHINE,
    "no_repeat_ngram_size": "repetition_penalty, frequency_penalty and bad_words are offered",
    "num_nextn_predict_layers_from_model_config": _LAYOUT,
    "pad_id": "nothing is padded",
    "pp_size": _NO_STAGES,
    "print_iter_log": _STATS,
    "priority": "requests run in the order of their arrival",
    "request_id": "a RequestOutput has the number that was given to it",
    "resource_manager": "a Drafter keeps what it needs",
    "return_perf_metrics": _STATS,
    "revision": _NOT_FETCHED,
    "sampler_type": "there is one",
    "scheduler_config": "there is one scheduler",
    "seed": "a seed is a request's: SamplingParams(seed=…)",
    "skip_special_tokens": _ONE_TEXT,
    "skip_tokenizer_init": "token ids are taken as they are",
    "spaces_between_special_tokens": _ONE_TEXT,
    "speculative_attention_mode": _BY_MACHINE,
    "speculative_eagle_topk": _NO_TREES,
    "speculative_token_tree": _NO_TREES,
    "stream": "generate_stream does it, and AsyncLLM",
    "streaming": "generate_stream does it, and AsyncLLM",
    "tokenizer": "it is the model directory's; another can be set, as LLM.tokenizer",
    "tools": "AsyncLLM.chat and the server take tools",
    "torch_compile_config": "a generation step is one CUDA graph",
    "truncate_prompt_tokens": "shorten the prompt",
    "trust_remote_code": "code of a checkpoint is never run",
    "use_beam_search": _NO_BEAMS,
    "use_dynamic_tree": _NO_TREES,
    "use_tqdm": "there is no progress bar",
    "whitespace_pattern": "white space between JSON's values is limited, not chosen",
}
"""What no place has, and why. Leave it out."""


def advice(name: str, known: Collection[str]) -> str | None:
    """Returns what to write in place of another engine's name; None if it is not known.

    Args:
        known: names that the place takes.
    """
    ours = [word for word in OURS.get(name, ()) if word.partition("=")[0] in known]
    if ours:
        return f"use {' or '.join(ours)}"
    return f"leave it out: {NOT_HERE[name]}" if name in NOT_HERE else None


def advices(names: Iterable[str], known: Collection[str]) -> str:
    """Returns a sentence for each of several names, "" where none is known."""
    found = ((name, advice(name, known)) for name in names)
    return "".join(f" For {name}: {text}." for name, text in found if text is not None)


def unexpected(caller: str, name: str, known: Collection[str]) -> TypeError:
    """Returns the error of an argument that a call does not have."""
    text = advice(name, known)
    return TypeError(
        f"{caller}() got an unexpected keyword argument {name!r}"
        f"{'' if text is None else f': {text}'} (known: {', '.join(sorted(known))})"
    )


class NamesFields:
    """Base of dataclasses whose constructors name ours for a field of another engine's."""

    def __new__(cls, *_: Any, **given: Any) -> Any:
        known: Mapping[str, Field[Any]] = cls.__dataclass_fields__  # type: ignore[attr-defined]
        maker = next(base for base in cls.__mro__ if "__init__" in vars(base))
        if "__dataclass_fields__" not in vars(maker):
            given = {}  # a subclass that takes arguments of its own
        for name in given:
            if name not in known or not known[name].init:
                taken = [field.name for field in fields(cls) if field.init]  # type: ignore[arg-type]
                raise unexpected(cls.__name__, name, taken)
        return super().__new__(cls)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if isinstance(found := getattr(type(self), name, None), property):
                return found.fget(self)  # raises what it raised before
            use = None
            if name in OURS:
                use = advice(name, [field.name for field in fields(type(self))])
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(text if use is None else f"{text}: {use}", name=name, obj=self)


class NamesAttributes:
    """Base of classes that name ours for an attribute of another engine's."""

    OTHER_ATTRIBUTES: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            ours = type(self).OTHER_ATTRIBUTES.get(name)
            use = "" if ours is None else f": use {ours}"
            text = f"{type(self).__name__!r} object has no attribute {name!r}{use}"
            raise AttributeError(text, name=name, obj=self)


def names_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a method: its error names ours for an argument of another engine's."""
    known = frozenset(inspect.signature(function).parameters) - {"self"}

    @functools.wraps(function)
    def wrapper(*args: P.args, **given: P.kwargs) -> R:
        for name in given:
            if name not in known:
                caller = f"{type(args[0]).__name__}.{function.__name__}"
                raise unexpected(caller, name, known)
        return function(*args, **given)

    return wrapper
