"""GGUF to a Hugging Face directory, once: bf16 safetensors, config, tokenizer, chat template.

The `gguf` package reads and dequantises; names and hyperparameters are mapped here, so that one
this mapping does not know is refused instead of dropped.

Sources: the GGUF specification (ggml project) for keys and tensor names; for Llama files, llama.cpp
stores the rows of q and k with RoPE's pairs side by side, undone in `_unpermute`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError, ConfigError
from .hf_config import load_config

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_REQUIRED = {  # GGUF key, after the architecture's name -> config field
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = (
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "vocab_size",
)
_SPLITS = ("smollm", "gpt-2", "qwen2")  # known values of tokenizer.ggml.pre
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}


def convert_gguf(gguf_path: Path, out_dir: Path) -> None:
    """Writes `out_dir` in one rename; nothing is left behind on failure.

    Raises:
        CheckpointError: the file is missing, damaged, not GGUF, or of a model that would not be
            computed as it was meant.
        ConfigError: the `gguf` package is missing, or `out_dir` exists.
    """
    gguf_path, out_dir = Path(gguf_path), Path(out_dir)
    if out_dir.exists():
        raise ConfigError(f"{out_dir} exists already. Give a new directory, or remove that one.")
    reader, fields = _open(gguf_path)
    config = _config_fields(fields, {t.name: tuple(t.shape) for t in reader.tensors}, gguf_path)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        _save_config(config, work)
        _save_weights(reader, config, gguf_path, work)
        _save_tokenizer(fields, config, gguf_path, work)
        load_config(work)
        work.chmod(0o755)
        os.rename(work, out_dir)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _open(path: Path) -> tuple[Any, dict[str, Any]]:
    """The gguf package's reader, and the file's key-value pairs."""
    if not path.is_file():
        raise CheckpointError(f"There is no file {path}. Give the path of a .gguf file.")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(
            f"Reading {path.name} needs the gguf package: pip install 'trtspec[demo]'."
        ) from error
    try:
        reader = GGUFReader(path)
        return reader, {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OSError, OverflowError, MemoryError) as error:
        raise CheckpointError(
            f"{path} is not a complete GGUF file ({error}). Copy it again from the model's source."
        ) from error


def _config_fields(
    fields: dict[str, Any], tensors: dict[str, tuple[int, ...]], path: Path
) -> dict[str, Any]:
    """The Hugging Face config's fields. `tensors`: name -> shape, GGUF order (columns first)."""
    arch = fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: architecture {arch!r} is not supported; allowed are "
            f"{', '.join(ARCHITECTURES)}. Use another model."
        )
    own = {
        name.removeprefix(f"{arch}."): value
        for name, value in fields.items()
        if name.startswith(f"{arch}.")
    }
    _check_keys(own, tensors, fields, path)
    config = {new: _plain(own[old]) for old, new in _REQUIRED.items()}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = own.get("attention.key_length", hidden // heads)
    dims = {own.get("attention.value_length", head_dim), own.get("rope.dimension_count", head_dim)}
    if dims != {head_dim}:
        raise CheckpointError(
            f"{path}: key, value and RoPE dimensions differ ({head_dim}, {sorted(dims)}); allowed "
            "is one size for all. Use another model."
        )
    config |= {
        "model_type": arch,
        "architectures": [ARCHITECTURES[arch]],
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": int(tensors["token_embd.weight"][1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": _plain(own.get("rope.freq_base", 10000.0)),
        "dtype": "bfloat16",
    }
    if arch != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if arch == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    for old, new in _SPECIAL.items():
        config[new] = fields.get(f"tokenizer.ggml.{old}_token_id")
    return config


def _check_keys(
    own: dict[str, Any], tensors: dict[str, Any], fields: dict[str, Any], path: Path
) -> None:
    missing = [key for key in _REQUIRED if key not in own]
    if missing or "token_embd.weight" not in tensors:
        raise CheckpointError(
            f"{path} lacks {', '.join(missing) or 'token_embd.weight'}. Copy the file again, or "
            "use another model."
        )
    unknown = sorted(own.keys() - _REQUIRED.keys() - set(_OPTIONAL))
    unknown += [f"{key} per layer" for key, value in own.items() if isinstance(value, list)]
    if own.get("rope.scaling.type", "none") != "none":
        unknown.append(f"rope.scaling.type={own['rope.scaling.type']}")
    if "rope_freqs.weight" in tensors:
        unknown.append("rope_freqs.weight (scaled RoPE)")
    if fields.get("split.count", 1) > 1:
        unknown.append("split.count (a file in parts)")
    if unknown:
        raise CheckpointError(
            f"{path} has settings the conversion does not carry over: {', '.join(unknown)}. Use "
            "the model's Hugging Face directory instead."
        )


def _save_config(config: dict[str, Any], work: Path) -> None:
    from transformers import AutoConfig, GenerationConfig

    fields = dict(config)
    AutoConfig.for_model(fields.pop("model_type"), **fields).save_pretrained(work)
    tokens = {name: config[name] for name in _SPECIAL.values()}
    GenerationConfig(**tokens).save_pretrained(work)


def _save_weights(reader: Any, config: dict[str, Any], path: Path, work: Path) -> None:
    from gguf import dequantize
    from safetensors.torch import save_file

    weights = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name, path)
        try:
            values = dequantize(tensor.data, tensor.tensor_type)  # [rows, columns] or [n] float32
        except NotImplementedError as error:
            raise CheckpointError(
                f"{path}: {tensor.name} is of type {tensor.tensor_type.name}, which the gguf "
                "package cannot dequantise. Use a file with another quantisation."
            ) from error
        if config["model_type"] == "llama" and ".q_proj." in name:
            values = _unpermute(values, config["num_attention_heads"])
        elif config["model_type"] == "llama" and ".k_proj." in name:
            values = _unpermute(values, config["num_key_value_heads"])
        weights[name] = torch.from_numpy(np.array(values, order="C")).to(torch.bfloat16)
    save_file(weights, work / "model.safetensors", metadata={"format": "pt"})


def _hf_name(name: str, path: Path) -> str:
    stem, _, leaf = name.rpartition(".")
    parts = stem.split(".", 2)
    if leaf in ("weight", "bias"):
        if stem in _TOP:
            return f"{_TOP[stem]}.{leaf}"
        if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _BLOCK:
            return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{leaf}"
    raise CheckpointError(
        f"{path}: tensor {name!r} is not known; allowed are {', '.join(_TOP)} and blk.N. with "
        f"{', '.join(_BLOCK)}. Use the model's Hugging Face directory instead."
    )


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """[heads * D, ...] with pair (i, i + D/2) side by side -> the two halves in sequence."""
    half = values.shape[0] // heads // 2
    paired = values.reshape(heads, half, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


def _save_tokenizer(fields: dict[str, Any], config: dict[str, Any], path: Path, work: Path) -> None:
    """Byte-level BPE from the file's own tokens and merges (transformers' reader differs by
    version: it has dropped the digit split, and taken <|im_start|> for the end token)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    own = {k.removeprefix("tokenizer.ggml."): v for k, v in fields.items()}
    split = own.get("pre")
    missing = [key for key in ("tokens", "merges", "token_type") if not own.get(key)]
    if own.get("model") != "gpt2" or split not in _SPLITS or missing or own.get("add_eos_token"):
        raise CheckpointError(
            f"{path}: tokenizer {own.get('model')!r} with split {split!r} cannot be converted "
            f"(absent: {missing}, add_eos_token: {own.get('add_eos_token', False)}); allowed is "
            f"'gpt2' with one of {', '.join(_SPLITS)}. Use the model's Hugging Face directory."
        )
    tokens = own["tokens"]
    merges = [tuple(merge.split(" ")) for merge in own["merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    kinds = zip(tokens, own["token_type"], strict=True)  # 3: control, 4: user-defined
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=kind == 3) for t, kind in kinds if kind in (3, 4)]
    )
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {short: own.get(f"{name}_token_id") for short, name in names.items()}
    bos = ids["bos"]
    if own.get("add_bos_token") and bos is not None:
        _prepend(tokenizer, tokens[bos], bos)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields.get("tokenizer.chat_template"),
        model_max_length=config["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        **{f"{short}_token": tokens[i] for short, i in ids.items() if i is not None},
    ).save_pretrained(work)


def _pre_tokenizer(split: str) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if split == "smollm":  # every digit alone; this also changes how the spaces before it are cut
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if split == "qwen2":
        pattern = Split(Regex(_QWEN2), behavior="isolated")
        return Sequence([pattern, ByteLevel(add_prefix_space=False, use_regex=False)])
    return ByteLevel(add_prefix_space=False)


def _prepend(tokenizer: Any, token: str, token_id: int) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, token_id)]
    )


def _plain(value: Any) -> Any:
    """A float32 as the short decimal it was written from: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
