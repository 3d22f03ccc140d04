"""Loading safetensors into a decoder: every tensor expected is there, and nothing else is.

Names and shapes are checked from the files' headers before anything is allocated; then tensors
are copied one by one, so the peak is the model plus one tensor.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..attention.base import AttentionBackend
from ..errors import CheckpointError
from ..ops.linear import Linear
from .config import DecoderConfig
from .decoder import Decoder
from .hf_config import load_config, read_json_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Module of the decoder -> modules of the checkpoint whose rows it stacks, in this order."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_CONFIG_FIELDS = {
    "embed_tokens": "vocab_size and hidden_size",
    "lm_head": "vocab_size and hidden_size",
    "q_proj": "num_attention_heads, head_dim and hidden_size",
    "k_proj": "num_key_value_heads, head_dim and hidden_size",
    "v_proj": "num_key_value_heads, head_dim and hidden_size",
    "o_proj": "num_attention_heads, head_dim and hidden_size",
    "gate_proj": "intermediate_size and hidden_size",
    "up_proj": "intermediate_size and hidden_size",
    "down_proj": "intermediate_size and hidden_size",
    "q_norm": "head_dim",
    "k_norm": "head_dim",
}


@dataclass(frozen=True)
class _Target:
    """Where one checkpoint tensor goes: rows `start:start + shape[0]` of a module's parameter."""

    module: str
    leaf: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Source:
    file: Any  # an open safetensors file
    path: Path
    shape: tuple[int, ...]
    dtype: str


def load_decoder(
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
    kv_group: int = 0,
) -> Decoder:
    """Config, model and weights of a Hugging Face directory, ready to run (in eval mode).

    Raises:
        CheckpointError: as `load_config` and `load_weights`.
    """
    config = load_config(model_dir)
    with torch.device("meta"):
        model = Decoder(config, backend, kv_group)
    load_weights(model, model_dir, dtype, device)
    return model.eval()


def load_weights(model: Decoder, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Fills the model from `model.safetensors` or its sharded form, cast to dtype, on device.

    The model's own parameters (meta or not) are replaced. On CPU every `Linear` is packed.
    `rotary_emb.inv_freq` buffers are skipped; so is an `lm_head.weight` equal to the embedding
    it is tied to.

    Raises:
        CheckpointError: no, damaged, missing, surplus, mis-shaped or quantised tensors.
    """
    targets = _targets(model)
    tied = model.config.tie_word_embeddings
    with ExitStack() as stack:
        sources = _open_checkpoint(Path(model_dir), stack)
        _check(targets, sources, Path(model_dir), tied)
        _allocate(model, dtype, device)
        for name, target in targets.items():
            parameter = getattr(model.get_submodule(target.module), target.leaf)
            parameter.data.narrow(0, target.start, target.shape[0]).copy_(
                _read(sources[name], name)
            )
        if tied:
            _tie(model, sources.get("lm_head.weight"), Path(model_dir))
    model.cos_sin = model.cos_sin.to(device)
    if device.type == "cpu":
        for module in model.modules():
            if isinstance(module, Linear):
                module.pack()


def _targets(model: Decoder) -> dict[str, _Target]:
    """Checkpoint name -> where it goes, for every tensor the model needs."""
    config = model.config
    targets: dict[str, _Target] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, leaf = name.rsplit(".", 1)
        if module == "lm_head":
            if not config.tie_word_embeddings:
                targets[name] = _Target(module, leaf, 0, tuple(parameter.shape))
            continue
        parent, _, last = module.rpartition(".")
        start = 0
        for part in PACKED.get(last, (last,)):
            rows = _rows(part, config) if last in PACKED else parameter.shape[0]
            source = ".".join(filter(None, ("model", parent, part, leaf)))
            targets[source] = _Target(module, leaf, start, (rows, *parameter.shape[1:]))
            start += rows
    return targets


def _rows(part: str, config: DecoderConfig) -> int:
    if part in ("gate_proj", "up_proj"):
        return config.intermediate_size
    return (config.num_heads if part == "q_proj" else config.num_kv_heads) * config.head_dim


def _open_checkpoint(model_dir: Path, stack: ExitStack) -> dict[str, _Source]:
    sources: dict[str, _Source] = {}
    for path, promised in _files(model_dir).items():
        try:
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            found = {}
            for name in file.keys():  # noqa: SIM118 (an open file is no dict)
                part = file.get_slice(name)
                found[name] = _Source(file, path, tuple(part.get_shape()), str(part.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(_damaged(path, error)) from error
        absent = sorted(promised - found.keys())
        twice = sorted(sources.keys() & found.keys())
        if absent or twice:
            what = (
                f"lacks {_some(absent)}" if absent else f"repeats {_some(twice)} of another shard"
            )
            raise CheckpointError(
                f"{path} {what}, against {INDEX}. Copy all shards and the index from one source."
            )
        sources |= found
    return sources


def _files(model_dir: Path) -> dict[Path, set[str]]:
    """Weight file -> the tensors the index promises in it (none without an index)."""
    if (model_dir / WEIGHTS).exists():
        return {model_dir / WEIGHTS: set()}
    if not (model_dir / INDEX).exists():
        pickles = sorted(path.name for path in model_dir.glob("pytorch_model*.bin"))
        if pickles:
            raise CheckpointError(
                f"{model_dir} holds its weights as pickle ({pickles[0]}), which can run code when "
                "loaded; allowed is safetensors. Convert it: load it with transformers and call "
                "save_pretrained."
            )
        raise CheckpointError(
            f"There are no weights in {model_dir}: it needs {WEIGHTS} or {INDEX} with its shards. "
            "Copy them from the model's source."
        )
    index = read_json_object(model_dir / INDEX, "Copy it again from the model's source.")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{model_dir / INDEX} has no weight_map. Copy it again.")
    files: dict[Path, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{model_dir / INDEX} puts {name} into {shard!r}; allowed is a file name of "
                "the same directory. Copy the index again."
            )
        files.setdefault(model_dir / shard, set()).add(name)
    gone = sorted(path.name for path in files if not path.exists())
    if gone:
        raise CheckpointError(
            f"{model_dir / INDEX} names {len(gone)} of {len(files)} shards that are not there: "
            f"{_some(gone)}. Copy them from the model's source."
        )
    return files


def _check(
    targets: dict[str, _Target], sources: dict[str, _Source], model_dir: Path, tied: bool
) -> None:
    missing = [name for name in targets if name not in sources]
    if missing:
        hint = ""
        if "lm_head.weight" in missing:
            hint = " (if it shares the embedding, config.json must say tie_word_embeddings: true)"
        raise CheckpointError(
            f"{model_dir} lacks {len(missing)} of {len(targets)} tensors: {_some(missing)}{hint}. "
            "Check that config.json belongs to these weights."
        )
    allowed = {"lm_head.weight"} if tied else set()
    surplus = [
        name
        for name in sources
        if name not in targets and name not in allowed and not name.endswith("rotary_emb.inv_freq")
    ]
    if surplus:
        raise CheckpointError(
            f"{model_dir} holds {len(surplus)} tensors its config.json has no place for: "
            f"{_some(surplus)}. Check model_type, num_hidden_layers, attention_bias and mlp_bias."
        )
    for name, target in targets.items():
        source = sources[name]
        if source.shape != target.shape:
            fields = _CONFIG_FIELDS.get(name.rsplit(".", 2)[-2], "hidden_size")
            raise CheckpointError(
                f"{name} in {source.path} has shape {list(source.shape)}, but config.json makes it "
                f"{list(target.shape)}. Check {fields} there."
            )
        if source.dtype not in _FLOATS:
            raise CheckpointError(
                f"{name} in {source.path} has dtype {source.dtype}; allowed are "
                f"{', '.join(_FLOATS)}. Use the unquantised checkpoint."
            )


def _allocate(model: Decoder, dtype: torch.dtype, device: torch.device) -> None:
    """Gives every parameter but a tied lm_head's uninitialised storage."""
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        module, leaf = name.rsplit(".", 1)
        empty = torch.empty(parameter.shape, dtype=dtype, device=device)
        setattr(model.get_submodule(module), leaf, nn.Parameter(empty, requires_grad=False))


def _read(source: _Source, name: str) -> Tensor:
    try:
        return source.file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(_damaged(source.path, error)) from error


def _tie(model: Decoder, own: _Source | None, model_dir: Path) -> None:
    weight = model.embed_tokens.weight
    assert isinstance(weight, nn.Parameter)
    if own is not None:
        same = own.shape == tuple(weight.shape)
        if not same or not torch.equal(_read(own, "lm_head.weight").to(weight), weight):
            raise CheckpointError(
                f"{model_dir} says tie_word_embeddings: true, but its lm_head.weight differs from "
                "model.embed_tokens.weight. Set tie_word_embeddings to false to use both, or "
                "remove lm_head.weight."
            )
    model.lm_head.weight = weight


def _damaged(path: Path, error: Exception) -> str:
    return f"{path} is not a complete safetensors file ({error}). Copy it again from its source."


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
