"""Sabotages the heads in the package, one mistake to a copy, and asks the doctor what is wrong.

A copy has one mistake that a person could make in config.json or in converting the tensors. The
texts are those of `trtspec doctor`, written once. On a CPU they are fewer and shorter for the
DSpark head (8 of 48 tokens at most), since an examination of it takes minutes there. The last line
counts the copies whose mistake was named; exit code 1 if they are fewer than nine in ten, or if a
good head is blamed.

Left out: an MTP layer fed the hidden state before the norm (no file says so; it is an argument of
MTPDecodingConfig), and weights in another dtype (none is above 4, so float16 holds them all).

    python benchmarks/doctor_sabotage.py [--prompts 16] [--max-tokens 64]
        [--heads eagle3,mtp,dspark] [--only NAME] [--device cuda]
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trtspec import LLM, SamplingParams
from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.checkpoints.place import LoadOptions
from trtspec.checkpoints.weights import load_decoder
from trtspec.checkpoints.zoo import resolve_head, resolve_model
from trtspec.data.acceptance_prompts import AcceptancePrompt, load_prompts
from trtspec.doctor import Diagnosis, diagnose, texts_of
from trtspec.models.decoder import Decoder
from trtspec.train.records import Sequences

MODEL = "smollm2-135m"
SHARE_TO_NAME = 0.9
HEADS = {"eagle3": "eagle", "mtp": "mtp", "dspark": "dspark"}  # -> `diagnose`'s kind
DSPARK_PROMPTS, DSPARK_TOKENS = 8, 48
Config, Tensors = dict[str, Any], dict[str, Tensor]


@dataclass(frozen=True)
class Sabotage:
    """One mistake."""

    head: str  # a key of HEADS
    name: str
    named: str  # what the verdict must hold
    change: Callable[[Config, Tensors], None]


def _shift_layers(by: int) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [i + by for i in ids]

    return change


def _reverse_layers(config: Config, tensors: Tensors) -> None:
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"].reverse()


def _reverse_fc(config: Config, tensors: Tensors) -> None:
    blocks = tensors["fc.weight"].split(config["target_hidden_size"], dim=1)
    tensors["fc.weight"] = torch.cat(blocks[::-1], dim=1)


def _set(name: str, value: object) -> Callable[[Config, Tensors], None]:
    return lambda config, tensors: config.update({name: value})


def _rope_theta(config: Config, tensors: Tensors) -> None:
    config["rope_parameters"]["rope_theta"] = 10_000.0
    if "rope_theta" in config:
        config["rope_theta"] = 10_000.0


def _d2t_as_ids(config: Config, tensors: Tensors) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def _d2t_one_up(config: Config, tensors: Tensors) -> None:
    """Both maps, as a wrong list of ids makes them."""
    tensors["d2t"] += 1
    tensors["t2d"] = tensors["t2d"].roll(1)


def _swap_halves(*names: str) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith(tuple(f"{n}.weight" for n in names))]:
            left, right = tensors[key].chunk(2, dim=1)
            tensors[key] = torch.cat([right, left], dim=1)

    return change


def _rotate_neighbours(config: Config, tensors: Tensors) -> None:
    """Rows as Meta's checkpoints and GGUF files have them."""
    half = config["head_dim"] // 2
    for key in [key for key in tensors if key.endswith(("q_proj.weight", "k_proj.weight"))]:
        heads = tensors[key].unflatten(0, (-1, 2, half))
        tensors[key] = heads.transpose(1, 2).flatten(0, 2)


def _dflash(**fields: object) -> Callable[[Config, Tensors], None]:
    return lambda config, tensors: config["dflash_config"].update(fields)


def _shift_dflash_layers(by: int) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        nested = config["dflash_config"]
        nested["target_layer_ids"] = [i + by for i in nested["target_layer_ids"]]

    return change


def _reverse_dflash_layers(config: Config, tensors: Tensors) -> None:
    config["dflash_config"]["target_layer_ids"].reverse()


def _swap_last_layers(config: Config, tensors: Tensors) -> None:
    layers = config["dflash_config"]["target_layer_ids"]
    layers[-2:] = layers[-1], layers[-2]


def _norms_around_0(config: Config, tensors: Tensors) -> None:
    for key in [key for key in tensors if "norm" in key]:
        tensors[key] = tensors[key] - 1


def _lose_qk_norms(config: Config, tensors: Tensors) -> None:
    for key in [key for key in tensors if "q_norm" in key or "k_norm" in key]:
        tensors[key] = torch.ones_like(tensors[key])


def _swap_markov(config: Config, tensors: Tensors) -> None:
    one, other = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
    tensors[one], tensors[other] = tensors[other], tensors[one]


def _window(config: Config, tensors: Tensors) -> None:
    layers = ["sliding_attention"] * config["num_hidden_layers"]
    config.update(layer_types=layers, sliding_window=16, use_sliding_window=True)


def _count_the_mtp_layer(config: Config, tensors: Tensors) -> None:
    config["num_hidden_layers"] += 1


def _scaled(name: str, factor: float) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith(f"{name}.weight")]:
            tensors[key] = tensors[key] * factor

    return change


def _norms_swapped(one: str, other: str) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith(f"{one}.weight")]:
            twin = key.replace(one, other)
            tensors[key], tensors[twin] = tensors[twin], tensors[key]

    return change


def _every_second_row_zero(name: str) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith(f"{name}.weight")]:
            tensors[key][::2] = 0

    return change


SABOTAGES = [
    Sabotage("eagle3", "layer ids one too high", "one too late", _shift_layers(1)),
    Sabotage("eagle3", "layer ids one too low", "one too early", _shift_layers(-1)),
    Sabotage("eagle3", "layer ids in reverse order", "in reverse order", _reverse_layers),
    Sabotage("eagle3", "blocks of fc in reverse order", "in reverse order", _reverse_fc),
    Sabotage(
        "eagle3",
        "norm_before_residual true",
        "norm_before_residual is wrong",
        _set("norm_before_residual", True),
    ),
    Sabotage(
        "eagle3", "norm_output true", "fed on before the final norm", _set("norm_output", True)
    ),
    Sabotage("eagle3", "rope_theta 10000", "rope_theta should be the target's", _rope_theta),
    Sabotage("eagle3", "d2t holds ids", "ids in place of offsets", _d2t_as_ids),
    Sabotage("eagle3", "d2t one too high", "one token too high", _d2t_one_up),
    Sabotage(
        "eagle3",
        "halves of q, k, v swapped",
        "in the other order",
        _swap_halves("q_proj", "k_proj", "v_proj"),
    ),
    Sabotage("mtp", "halves of eh_proj swapped", "in the other order", _swap_halves("eh_proj")),
    Sabotage("mtp", "rope_theta 10000", "rope_theta should be the target's", _rope_theta),
    Sabotage(
        "mtp", "num_hidden_layers counts the layer", "not numbered from 31", _count_the_mtp_layer
    ),
    Sabotage(
        "eagle3",
        "q, k rows of neighbours",
        "for a RoPE that rotates neighbours",
        _rotate_neighbours,
    ),
    Sabotage(
        "mtp", "q, k rows of neighbours", "for a RoPE that rotates neighbours", _rotate_neighbours
    ),
    Sabotage("eagle3", "fc doubled", "fc is too large", _scaled("fc", 2)),
    Sabotage("eagle3", "fc halved", "fc is too small", _scaled("fc", 0.5)),
    Sabotage(
        "eagle3",
        "input norms swapped",
        "input_layernorm and hidden_norm are in each other's place",
        _norms_swapped("input_layernorm", "hidden_norm"),
    ),
    Sabotage("eagle3", "half of o_proj zero", "rows of midlayer", _every_second_row_zero("o_proj")),
    Sabotage(
        "eagle3", "half of lm_head zero", "rows of lm_head", _every_second_row_zero("lm_head")
    ),
    Sabotage(
        "mtp", "enorm, hnorm swapped", "enorm and hnorm are in", _norms_swapped("enorm", "hnorm")
    ),
    Sabotage("mtp", "eh_proj doubled", "eh_proj is too large", _scaled("eh_proj", 2)),
    Sabotage("mtp", "half of down_proj zero", "rows of", _every_second_row_zero("down_proj")),
    Sabotage("dspark", "layer ids one too high", "one too late", _shift_dflash_layers(1)),
    Sabotage("dspark", "layer ids one too low", "one too early", _shift_dflash_layers(-1)),
    Sabotage("dspark", "last two layer ids swapped", "in each other's place", _swap_last_layers),
    Sabotage("dspark", "mask token 0", "the mask token should be", _dflash(mask_token_id=0)),
    Sabotage("dspark", "is_causal true", "see each other both ways", _set("is_causal", True)),
    Sabotage("dspark", "rope_theta 10000", "rope_theta should be the target's", _rope_theta),
    Sabotage("dspark", "block_size 16", "trained with 8 drafts a block", _set("block_size", 16)),
    Sabotage("dspark", "q, k norms all 1", "q_norm and k_norm are lost", _lose_qk_norms),
    Sabotage(
        "dspark",
        "q, k rows of neighbours",
        "for a RoPE that rotates neighbours",
        _rotate_neighbours,
    ),
    Sabotage("dspark", "sliding windows of 16", "should have no window", _window),
    Sabotage("dspark", "w1 and w2 of the bias swapped", "bias is transposed", _swap_markov),
    Sabotage("dspark", "norms minus 1", "norms are written around 0", _norms_around_0),
    Sabotage("dspark", "layer ids in reverse order", "in reverse order", _reverse_dflash_layers),
    Sabotage("dspark", "block_size 4", "trained with 8 drafts a block", _set("block_size", 4)),
]


def _size(prompt: AcceptancePrompt) -> int:
    return sum(len(message["content"]) for message in prompt.messages)


class Clinic:
    """The target and its texts, for many heads; prompts of `longest` characters at most."""

    def __init__(
        self,
        num_prompts: int,
        max_tokens: int,
        longest: float = float("inf"),
        device_name: str = "cpu",
    ):
        model_dir, device = resolve_model(MODEL), torch.device(device_name)
        llm = LLM(
            model_dir, device=device_name, dtype="float32", max_batch_size=16, max_seq_len=1024
        )
        prompts = [prompt for prompt in load_prompts() if _size(prompt) <= longest]
        chosen = prompts[:: max(1, len(prompts) // num_prompts)][:num_prompts]  # as the command's
        outputs = llm.chat(
            [list(prompt.messages) for prompt in chosen], SamplingParams(max_tokens=max_tokens)
        )
        self.target: Decoder = load_decoder(
            model_dir,
            LoadOptions(dtype=torch.float32, device=device, backend=TorchAttention(), pack=False),
        )
        self.tokenizer = llm.tokenizer
        self.texts: Sequences = texts_of(
            [output.prompt_token_ids for output in outputs],
            [output.outputs[0].token_ids for output in outputs],
            device,
        )

    def examine(self, head: str, sabotage: Sabotage | None = None) -> Diagnosis:
        """A head of the package, or a copy of it with a mistake. head: a key of HEADS."""
        source = resolve_head(f"{MODEL}-{head}")
        if sabotage is None:
            return self._diagnose(source, head)
        with tempfile.TemporaryDirectory() as name:
            sabotaged_copy(source, Path(name), sabotage)
            return self._diagnose(Path(name), head)

    def _diagnose(self, directory: Path, head: str) -> Diagnosis:
        return diagnose(self.target, directory, HEADS[head], self.texts, tokenizer=self.tokenizer)


def sabotaged_copy(source: Path, out: Path, sabotage: Sabotage) -> None:
    shutil.copytree(source, out, dirs_exist_ok=True)
    config = json.loads((out / "config.json").read_text())
    tensors = load_file(out / "model.safetensors")
    sabotage.change(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, out / "model.safetensors")


def is_named(diagnosis: Diagnosis, sabotage: Sabotage) -> bool:
    """That mistake, and no other beside it; one that is called likely counts, too."""
    return sabotage.named in diagnosis.verdict and len(diagnosis.changes) <= 1


def is_silent(diagnosis: Diagnosis) -> bool:
    return diagnosis.is_well and not diagnosis.changes


def _row(head: str, name: str, diagnosis: Diagnosis, is_right: bool, started: float) -> str:
    loaded = diagnosis.as_loaded
    length = f"{loaded.acceptance_length:.2f}" if loaded else "-"
    said = " and ".join(finding.name for finding in diagnosis.changes) or diagnosis.verdict
    if not diagnosis.changes and diagnosis.is_well:
        said = "nothing"
    elif not diagnosis.changes and diagnosis.likely is not None:
        said = f"likely: {diagnosis.likely.name}"
    mark = "right" if is_right else "WRONG"
    seconds = time.perf_counter() - started
    return f"{head:6} {name:36} {length:>5}  {mark}  {seconds:4.0f} s  {said}"


@functools.cache
def _clinic_of(num_prompts: int, max_tokens: int, device: str) -> Clinic:
    """Clinics of one size are the same one: its texts take a while."""
    started = time.perf_counter()
    clinic = Clinic(num_prompts, max_tokens, device_name=device)
    judged, seconds = int(clinic.texts.loss_mask.sum()), time.perf_counter() - started
    print(f"{judged} tokens of {MODEL} in {seconds:.0f} s")
    print(f"{'head':6} {'mistake':36} {'length':>5} {'':7} {'':6}   what the doctor named")
    return clinic


def _clinic(head: str, num_prompts: int, max_tokens: int, device: str) -> Clinic:
    if head == "dspark" and device == "cpu":
        num_prompts, max_tokens = min(num_prompts, DSPARK_PROMPTS), min(max_tokens, DSPARK_TOKENS)
    return _clinic_of(num_prompts, max_tokens, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--heads", default=",".join(HEADS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="mistakes whose name holds this")
    args = parser.parse_args()

    began = time.perf_counter()
    silent, named = [], []
    for head in args.heads.split(","):
        clinic = _clinic(head, args.prompts, args.max_tokens, args.device)
        started = time.perf_counter()
        diagnosis = clinic.examine(head)
        silent.append(is_silent(diagnosis))
        print(_row(head, "(none)", diagnosis, silent[-1], started), flush=True)
        for sabotage in SABOTAGES:
            if sabotage.head != head or args.only not in sabotage.name:
                continue
            started = time.perf_counter()
            diagnosis = clinic.examine(head, sabotage)
            named.append(is_named(diagnosis, sabotage))
            print(_row(head, sabotage.name, diagnosis, named[-1], started), flush=True)
    seconds = time.perf_counter() - began
    print(
        f"{sum(named)} of {len(named)} mistakes named, {sum(silent)} of {len(silent)} good heads "
        f"left in peace, {seconds:.0f} s"
    )
    sys.exit(sum(named) < SHARE_TO_NAME * len(named) or not all(silent))


if __name__ == "__main__":
    main()
