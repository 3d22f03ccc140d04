"""GGUF to a Hugging Face directory, once: bf16 safetensors, config, tokenizer, chat template.

transformers reads the file. Added here: it must have used every tensor and setting, and what it is
known to get wrong in tokenizers is put right from the file's own fields.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError, ConfigError, described
from ..utils import set_usual_mode
from .hf_config import load_config

logger = logging.getLogger(__name__)

ARCHITECTURES = ("llama", "qwen2", "qwen3")
TOKENIZERS = ("gpt2", "llama")
_NOT_CARRIED_OVER: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scale_linear": (0, 1),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
}
"""Settings that transformers does not read, and the values that change nothing."""
_NEEDED = ("context_length", "attention.layer_norm_rms_epsilon")
"""Settings for which transformers has values of its own where a file has none."""


def convert_gguf(gguf_path: Path, out_dir: Path) -> None:
    """Writes `out_dir` in one rename; nothing is left behind on failure.

    Raises:
        CheckpointError: the file is missing, damaged, not GGUF, or of a model that would not be
            computed as it was meant.
        ConfigError: the gguf or accelerate package is missing, or `out_dir` exists.
        OSError: `out_dir` cannot be written, as on a full disk.
    """
    gguf_path, out_dir = Path(gguf_path), Path(out_dir)
    if out_dir.exists():
        raise ConfigError(f"{out_dir} exists already. Give a new directory, or remove that one.")
    fields, num_tensors = _open(gguf_path)
    _refuse_unsupported(fields, num_tensors, gguf_path)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        with _quiet_transformers():
            model, tokenizer = _load(gguf_path, num_tensors, work)
            _refuse_partial_rotation(fields, model.config, gguf_path)
            vars(model.config).pop("quantization_config", None)
            model.config.rms_norm_eps = float(str(np.float32(model.config.rms_norm_eps)))  # 1e-05
            context = model.config.max_position_embeddings
            model.config.eos_token_id = model.generation_config.eos_token_id = _end_ids(fields)
            _write(model, _corrected(tokenizer, fields, context, gguf_path), work)
        load_config(work)
        work.chmod(0o755)
        os.rename(work, out_dir)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_readers(name: str) -> None:
    """Raises ConfigError if a package that reads GGUF files is missing; `name` is the file's."""
    from transformers.utils import is_accelerate_available, is_gguf_available

    if not (is_gguf_available() and is_accelerate_available()):
        raise ConfigError(
            f"Reading {name} needs the packages gguf and accelerate, one of which is missing "
            "or too old: pip install 'trtspec[demo]'."
        )


def _open(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the file's key-value pairs except arrays, and its number of tensors."""
    if not path.is_file():
        raise CheckpointError(f"There is no file {path}. Give the path of a .gguf file.")
    check_readers(path.name)
    from gguf import GGUFReader, GGUFValueType

    try:
        reader = GGUFReader(path)
        scalars = {k: f for k, f in reader.fields.items() if f.types[0] != GGUFValueType.ARRAY}
        return {name: field.contents() for name, field in scalars.items()}, len(reader.tensors)
    except (ValueError, IndexError, KeyError, OSError, OverflowError, MemoryError) as error:
        raise CheckpointError(
            f"{path} is not a complete GGUF file ({error}). Copy it again from the model's source."
        ) from error


def _refuse_unsupported(fields: dict[str, Any], num_tensors: int, path: Path) -> None:
    arch = fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: architecture {arch!r} is not supported; allowed are "
            f"{', '.join(ARCHITECTURES)}. Use another model."
        )
    tokenizer = fields.get("tokenizer.ggml.model")
    if tokenizer not in TOKENIZERS:  # older transformers read any as if it were "gpt2"
        raise CheckpointError(
            f"{path}: tokenizer {tokenizer!r} is not supported; allowed are "
            f"{', '.join(TOKENIZERS)}. Use the model's Hugging Face directory instead."
        )
    blocks = fields.get(f"{arch}.block_count", 0)
    if not isinstance(blocks, int) or blocks > num_tensors:  # transformers would build them all
        raise CheckpointError(
            f"{path}: {arch}.block_count={blocks!r}, but the file holds {num_tensors} tensors. "
            "Copy it again from the model's source."
        )
    for name in _NEEDED:
        if fields.get(f"{arch}.{name}") is None:
            raise CheckpointError(
                f"{path} does not say {arch}.{name}. Copy it again from the model's source, or use "
                "the model's Hugging Face directory."
            )
    for name, neutral in _NOT_CARRIED_OVER.items():
        value = fields.get(f"{arch}.{name}")
        if value is not None and value not in neutral:
            raise CheckpointError(
                f"{path}: {arch}.{name}={value!r} is a setting the conversion does not carry over. "
                "Use the model's Hugging Face directory instead."
            )


def _refuse_partial_rotation(fields: dict[str, Any], config: Any, path: Path) -> None:
    """Refuses a file that rotates a part of each head: of Qwen's transformers does not read it."""
    name = f"{fields['general.architecture']}.rope.dimension_count"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if fields.get(name) not in (None, head_dim):
        raise CheckpointError(
            f"{path}: {name}={fields[name]!r} of heads of {head_dim} is a setting the conversion "
            "does not carry over. Use the model's Hugging Face directory instead."
        )


def _end_ids(fields: dict[str, Any]) -> list[int] | None:
    """Returns the tokens that end an output: of the text, of a turn, of a message."""
    ids = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(i for i in ids if i is not None)) or None


def _load(path: Path, num_tensors: int, work: Path) -> tuple[Any, Any]:
    """Returns transformers' model and tokenizer.

    Meanwhile the file is linked into `work`, alone: transformers would also read files beside it,
    such as a tokenizer_config.json.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    link = work / "model.gguf"
    link.symlink_to(path.resolve())
    source = {"gguf_file": link.name, "local_files_only": True}
    options = {"dtype": torch.bfloat16, "output_loading_info": True, **_dequantized()}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            work, trust_remote_code=False, **source, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(work, trust_remote_code=False, **source)
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot load {path} ({described(error)}). Use the model's "
            "Hugging Face directory instead, or a file of another quantisation."
        ) from error
    finally:
        link.unlink()
    missing = sorted(info["missing_keys"])
    used = len(list(model.parameters()))
    if missing or used != num_tensors:
        raise CheckpointError(
            f"{path}: of its {num_tensors} tensors, the {model.config.model_type} model takes "
            f"{used - len(missing)} and lacks {missing[:5] or 'none'}. The rest, such as biases or "
            "RoPE factors, would be lost. Use the model's Hugging Face directory instead."
        )
    return model, tokenizer


def _dequantized() -> dict[str, Any]:
    """Returns the option to unpack weights; versions of transformers without it always do."""
    import transformers

    try:
        return {"quantization_config": transformers.GgufConfig(dequantize=True)}
    except (AttributeError, TypeError):
        return {}


def _corrected(loaded: Any, fields: dict[str, Any], context: int, path: Path) -> Any:
    """Returns the tokenizer with the file's special tokens, and SmolLM's split of digits."""
    from tokenizers import decoders
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import PreTrainedTokenizerFast

    tokenizer_fields = {k.removeprefix("tokenizer.ggml."): v for k, v in fields.items()}
    backend, split = loaded.backend_tokenizer, tokenizer_fields.get("pre")
    if split == "smollm":  # also changes how the spaces before a digit are cut
        digits = Digits(individual_digits=True)
        backend.pre_tokenizer = Sequence([digits, ByteLevel(add_prefix_space=False)])
        backend.decoder = decoders.ByteLevel()
    elif isinstance(backend.pre_tokenizer, ByteLevel) and split != "gpt-2":
        logger.warning(
            "%s asks for the text split %r, which transformers does not know: it splits as GPT-2 "
            "does, so some token ids may differ. Use the model's Hugging Face directory if so.",
            path,
            split,
        )
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {short: tokenizer_fields.get(f"{name}_token_id") for short, name in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields.get("tokenizer.chat_template"),
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        add_bos_token=tokenizer_fields.get(
            "add_bos_token", tokenizer_fields.get("model") == "llama"
        ),  # as llama.cpp
        add_eos_token=tokenizer_fields.get("add_eos_token", False),
        **{f"{short}_token": backend.id_to_token(i) for short, i in ids.items() if i is not None},
    )


def _write(model: Any, tokenizer: Any, work: Path) -> None:
    try:
        model.save_pretrained(work, max_shard_size="1000GB")  # one file
        tokenizer.save_pretrained(work)
        for path in work.glob("*.safetensors"):
            set_usual_mode(path)
    except Exception as error:
        if "os error" not in str(error):
            raise
        raise OSError(str(error)) from error  # Rust's libraries have types of their own for it


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bars and no warnings. Its GGUF bar is plain tqdm, so `disable_progress_bar` has no say."""
    from transformers.utils import logging as hf_logging

    tqdm: Any = importlib.import_module("tqdm.auto").tqdm
    verbosity, bar_init = hf_logging.get_verbosity(), tqdm.__init__
    hf_logging.set_verbosity_error()
    tqdm.__init__ = partialmethod(bar_init, disable=True)
    try:
        yield
    finally:
        tqdm.__init__ = bar_init
        hf_logging.set_verbosity(verbosity)
