"""Fields that other servers have: values that ask for what is done anyway, and advice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import shown

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "guided_decoding_backend": ("auto", "xgrammar"),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_processors": ([],),
    "mirostat": (0,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True,),
    "priority": (0,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "tfs_z": (1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
"""Fields that are not supported, with the values that ask for what is done anyway."""

_GRAMMAR = "use 'structured_outputs'"
_THINKING = (
    "give what the chat template reads in 'chat_template_kwargs', such as "
    '{"enable_thinking": false}'
)
ADVICE: Mapping[str, str] = {
    "add_generation_prompt": "send the text as it is to /v1/completions",
    "allowed_token_ids": "use 'logit_bias' or 'structured_outputs'",
    "cache_control": "the prefix cache needs no marks; leave it out",
    "chat_template": "it is the model's own; leave it out",
    "continue_final_message": "send the text as it is to /v1/completions",
    "ebnf": _GRAMMAR,
    "enable_thinking": _THINKING,
    "extra_body": "its fields belong into the request itself",
    "function_call": "use 'tool_choice'",
    "functions": "use 'tools'",
    "grammar": _GRAMMAR,
    "guided_decoding": _GRAMMAR,
    "json_schema": "use 'response_format'",
    "lora_path": "there is no LoRA; leave it out",
    "lora_request": "there is no LoRA; leave it out",
    "max_completion_tokens": "use 'max_tokens'",
    "max_new_tokens": "use 'max_tokens'",
    "max_output_tokens": "use 'max_tokens'",
    "messages": "send them to /v1/chat/completions",
    "min_new_tokens": "use 'min_tokens'",
    "n_predict": "use 'max_tokens'",
    "n_probs": "use 'logprobs'",
    "num_ctx": "it is the server's --max-seq-len; leave it out",
    "options": "its fields belong into the request itself",
    "prediction": "put the text into a message; a server with --speculative sa or ngram drafts "
    "from it",
    "prompt": "send it to /v1/completions",
    "reasoning": _THINKING,
    "reasoning_effort": _THINKING,
    "regex": _GRAMMAR,
    "repeat_penalty": "use 'repetition_penalty'",
    "request_id": "an answer has an 'id' of the server's; leave it out",
    "rid": "an answer has an 'id' of the server's; leave it out",
    "schema": "its type is 'json_schema', with the schema in 'json_schema'",
    "text": "use 'prompt'",
    "think": _THINKING,
    "thinking": _THINKING,
    "top_logprobs": "use 'logprobs', which is a number here",
    "truncate_prompt_tokens": "shorten the prompt",
}


def refusal(path: str, value: object) -> str:
    """Returns what is said of a field that is not supported.

    Args:
        path: of the field, its name last.
    """
    name = path.rpartition(".")[2]
    if path in NEUTRAL:
        allowed = " or ".join(map(shown, NEUTRAL[path]))
        said = f"{path!r} is {shown(value)}, which is not supported: it may be {allowed}"
        return f"{said}; {ADVICE[path]}." if path in ADVICE else f"{said}, or left out."
    return f"{path!r} is not supported: {ADVICE.get(name, 'leave it out')}."
