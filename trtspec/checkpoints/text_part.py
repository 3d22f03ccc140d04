"""The text model inside a checkpoint that also reads images or sound.

Such a checkpoint nests the text model's config under `text_config` and its tensors under
`language_model`; Qwen2-VL's older ones have both beside the encoder's. Everything else in it is
left alone; a prompt has the encoder's embeddings as an `EmbedsPrompt`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckpointError

Source = TypeVar("Source")

TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""`model_type` of the whole -> of its text model."""

_TIED_BY_EITHER = "qwen2_vl", "qwen2_5_vl"
"""transformers ties a text model of these where its own config says so, whatever the other does."""
_OF_BOTH = (
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)
_PREFIX = re.compile(r"^(?:model\.language_model\.|language_model\.model\.)")
_OTHER_PARTS = re.compile(
    r"^(?:model\.)?(?:vision_tower|vision_embedder|multi_modal_projector|audio_tower|embed_vision"
    r"|embed_audio|visual)\."
)


def text_config(raw: dict[str, Any], where: Path) -> dict[str, Any]:
    """Returns the text model's config: `raw` itself, unless it is of a model with more parts.

    Then the config says `is_text_part`.

    Raises:
        CheckpointError: it has no `text_config`.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in TEXT_TYPES:
        return raw
    inner = raw.get("text_config")
    if inner is None and "hidden_size" in raw:
        inner = {k: v for k, v in raw.items() if k not in ("model_type", "vision_config")}
    if not isinstance(inner, dict):
        raise CheckpointError(
            f"{where}: text_config={inner!r}; a {model_type!r} model keeps its text model's config "
            "there, as an object. Copy the file again from the model's source."
        )
    outer = {name: raw[name] for name in _OF_BOTH if raw.get(name) is not None}
    if model_type in _TIED_BY_EITHER and inner.get("tie_word_embeddings") is True:
        outer["tie_word_embeddings"] = True
    return {"model_type": TEXT_TYPES[model_type], **inner, **outer, "is_text_part": True}


def text_tensors(sources: dict[str, Source]) -> dict[str, Source]:
    """Returns the text model's tensors, by their names in a checkpoint of text alone."""
    if not any(_PREFIX.match(name) or name.startswith("visual.") for name in sources):
        return sources
    return {
        re.sub(r"^language_model\.lm_head\.", "lm_head.", _PREFIX.sub("model.", name)): source
        for name, source in sources.items()
        if not _OTHER_PARTS.match(name)
    }
