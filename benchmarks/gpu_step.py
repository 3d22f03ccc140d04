"""What a generation step costs, part by part, against the bytes it has to read.

    make bench-gpu ARGS="--preset llama-3.1-8b --modes plain,eagle3_one_model --k 1,3 --json-file F"

Weights are random: a step costs the same, and acceptance is forced. Each mode and K has an engine,
one at a time, which serves every batch size and context length. Its longest sequence sets the width
of its block tables (--max-seq-len). One line each:

    step      ms a step by the wall clock, steps overlapping as in use: median of blocks of 10.
    graph     ms of the captured graph alone, by events over the replays.
    target, accept, draft   the graph's parts. They are differences of graphs: of target + logits,
              of these + acceptance, and of the whole step.
    prompts   ms until `batch` prompts of `context` tokens, given at once, have their first token.
    floor     ms to read, at the speed of a large copy, the bytes a step has to. These are the
              target's weights and KV once, the draft layers' at each of K passes.

The sequences' length is `context` in the middle of the blocks and during all replays. Without a GPU
there are no graphs, and the parts are timed by the clock.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from random_models import (
    DFLASH_LAYERS,
    MASKED,
    PRESETS,
    QUANTIZATIONS,
    Model,
    in_memory,
    load_config_file,
)
from step_report import (
    Row,
    further_drafts,
    header,
    introduction,
    print_profile,
    row_line,
    slope_line,
    title_line,
    write_json,
)
from step_timing import STEPS_PER_BLOCK, WARM_UP_STEPS, SteadyBatch, prompts_ms

from trtspec import (
    LLM,
    CudaGraphConfig,
    DFlashDecodingConfig,
    DSparkDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    TrtspecError,
)
from trtspec.acceptance.forced import FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR as FORCE
from trtspec.config import ENGINE_ARGUMENTS, MAX_DRAFT_LEN, DecodingBaseConfig
from trtspec.executor.device import resolve_device

DRAFTERS = {
    "plain": "",
    "eagle3_one_model": "eagle3",
    "eagle3": "eagle3",
    "mtp_eagle_one_model": "mtp",
    "mtp_eagle": "mtp",
    "mtp": "mtp",
    "dflash": "dflash",
    "dflash2": "dflash2",
    "dspark": "dspark",
    "ngram": "",
    "sa": "",
}
"""mode -> the kind of its draft layers."""


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def main() -> None:
    args = _parse()
    try:
        run(args)
    except TrtspecError as error:
        sys.exit(f"error: {error}")
    except torch.cuda.OutOfMemoryError as error:
        sys.exit(f"error: {str(error).splitlines()[0]} Lower --batch or --context.")


def run(args: argparse.Namespace) -> None:
    device = resolve_device(args.device)
    raw = load_config_file(args.config) if args.config else PRESETS[args.preset]
    if args.quant in QUANTIZATIONS:
        raw = {**raw, "quantization_config": QUANTIZATIONS[args.quant]}
    longest = args.max_seq_len or _longest(args)
    model = Model(raw, longest, where=str(args.config or args.preset))
    report = header(args, device, longest)
    report["config"] = model.raw
    rows: list[Row] = report["rows"]
    print(introduction(report))
    print(title_line(), flush=True)
    plain: dict[tuple[int, int], float] = {}
    with tempfile.TemporaryDirectory() as root:
        for number, (mode, k) in enumerate(_engines(args)):
            with _engine(Path(root, str(number)), model, mode, k, args, longest) as llm:
                for batch in args.batch:
                    for context in args.context:
                        row = _measure(llm, model, mode, k, batch, context, args, report)
                        if mode == "plain":
                            plain[batch, context] = row["step_ms"]
                        base = row["plain_ms"] = plain.get((batch, context))
                        row["times_plain"] = None if base is None else row["step_ms"] / base
                        rows.append(row)
                        report["further_draft_ms"] = further_drafts(rows)
                        write_json(args.json, report)
                        if args.prompt_repeats:
                            row["prompts_ms"] = prompts_ms(
                                llm.executor, batch, context, args.prompt_repeats
                            )
                            write_json(args.json, report)
                        print(row_line(row), flush=True)
            del llm
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the next engine needs the room
    for slope in report["further_draft_ms"]:
        print(slope_line(slope))
    for row in rows:
        if "profile" in row:
            print_profile(row)


# -- engines ----------------------------------------------------------------------------------
def _engines(args: argparse.Namespace) -> list[tuple[str, int]]:
    """(mode, K), plain first, for the others are compared with it."""
    first = [("plain", 0)] if "plain" in args.modes else []
    return first + [(mode, k) for mode in args.modes if mode != "plain" for k in args.k]


@contextmanager
def _engine(
    root: Path, model: Model, mode: str, k: int, args: argparse.Namespace, longest: int
) -> Iterator[LLM]:
    kind, target_dir, head_dir = DRAFTERS[mode], root / "target", root / "head"
    config: DecodingBaseConfig | None = None
    among = {"draft_token_ids": range(args.draft_tokens)} if args.draft_tokens else {}
    if kind == "eagle3":
        config = EagleDecodingConfig(
            max_draft_len=k,
            speculative_model=head_dir,
            eagle3_one_model=mode != "eagle3",
            quant=args.draft_quant,
        )
    elif kind in MASKED:
        named = DSparkDecodingConfig if kind == "dspark" else DFlashDecodingConfig
        config = named(max_draft_len=k, speculative_model=head_dir, quant=args.draft_quant, **among)
    elif kind == "mtp":
        config = MTPDecodingConfig(
            num_nextn_predict_layers=k,
            use_mtp_vanilla=mode == "mtp",
            mtp_eagle_one_model=mode != "mtp_eagle",
            quant=args.draft_quant,
            **among,
        )
    elif mode == "sa":
        config = SADecodingConfig(max_draft_len=k)
    elif mode == "ngram":
        config = NGramDecodingConfig(max_draft_len=k)
    num_mtp_layers = {"mtp": k, "mtp_eagle": 1, "mtp_eagle_one_model": 1}.get(mode, 0)
    checkpoints = {target_dir: model.target(num_mtp_layers)}
    if kind == "eagle3":
        checkpoints[head_dir] = model.eagle3_head()
    if kind in MASKED:
        checkpoints[head_dir] = model.dflash_head(k if kind == "dspark" else k + 1, kind)
    largest = max(args.batch)
    with (
        in_memory(checkpoints, resolve_device(args.device)),
        forced_acceptance(args.accept if k else 0),
    ):
        llm = LLM(
            target_dir,
            config,
            device=args.device,
            dtype="bfloat16",
            max_batch_size=largest,
            max_seq_len=longest,
            kv_cache_config=KvCacheConfig(
                max_tokens=largest * (longest + 96),
                enable_block_reuse=False,
                dtype=args.kv_cache_dtype,
            ),
            attn_backend=args.attn_backend,
            quant=None if args.quant in QUANTIZATIONS else args.quant,
            cuda_graph_config=CudaGraphConfig(enable_autotuner=args.autotune),
        )
    yield llm


@contextmanager
def forced_acceptance(accept: float) -> Iterator[None]:
    """Forced acceptance for engines that are built inside; 0 is off."""
    before = os.environ.pop(FORCE, None)
    if accept > 0:
        os.environ[FORCE] = str(accept)
    try:
        yield
    finally:
        os.environ.pop(FORCE, None)
        if before is not None:
            os.environ[FORCE] = before


def _longest(args: argparse.Namespace) -> int:
    """Returns the tokens that the longest sequence may grow to, a multiple of 32."""
    rows, context = max(args.k) + 1, max(args.context)
    steps = args.blocks * STEPS_PER_BLOCK + WARM_UP_STEPS
    if args.accept > 0:  # sequences start half of their growth below `context`, if they can
        grown = steps * (math.ceil(min(args.accept, rows - 1)) + 1)
        after_blocks = max(context + grown / 2, grown)
    else:
        after_blocks = context + steps * rows
    # Otherwise: the first steps while a batch fills; those under the profiler.
    other_steps = max(max(args.batch) + 3, 32)
    needed = max(after_blocks, context + other_steps * rows) + 4 * rows
    return -(-math.ceil(needed) // 32) * 32


# -- one line ---------------------------------------------------------------------------------
def _measure(
    llm: LLM,
    model: Model,
    mode: str,
    k: int,
    batch: int,
    context: int,
    args: argparse.Namespace,
    report: dict[str, Any],
) -> Row:
    forced = min(args.accept, k)
    with closing(SteadyBatch(llm.executor, batch, context, _sampling(args))) as steady:
        wall = steady.wall_clock(args.blocks, 1 + forced)
        split = steady.split(args.replays)
        row: Row = {
            "mode": mode,
            "k": k,
            "batch": batch,
            "context": context,
            "step_ms": wall.ms,
            "plain_ms": None,
            "times_plain": None,
            "block_ms": wall.block_ms,
            **asdict(split),
            "prompts_ms": None,
            "tokens_per_second": batch * wall.acceptance_length / wall.ms * 1e3,
            "acceptance_length": wall.acceptance_length,
            "kv_tokens": wall.kv_tokens,
            "forced_acceptance": llm.stats().forced_acceptance,
        }
        kind = DRAFTERS[mode]
        blocks = dict.fromkeys(MASKED, DFLASH_LAYERS)
        layers_that_attend = {"": 0, **blocks}.get(kind, k)
        bytes_read = {
            "target_weights": model.target_weight_bytes(batch * (k + 1), args.quant),
            "target_kv": batch * model.kv_bytes(context) / (2 if _has_fp8_cache(args) else 1),
            "draft_weights": model.draft_weight_bytes(
                kind, k, batch, args.draft_quant == "fp8", args.draft_tokens
            ),
            "draft_kv": batch * model.kv_bytes(context, layers_that_attend),
        }
        row["bytes"] = bytes_read
        row["floor_ms"] = sum(bytes_read.values()) / report["copy_bytes_per_second"] * 1e3
        row["times_floor"] = row["step_ms"] / row["floor_ms"]
        if args.profile:
            row["profile"] = steady.profile(wall.ms)
    return row


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    return {"temperature": args.temperature, "top_p": args.top_p} if args.temperature else {}


# -- arguments --------------------------------------------------------------------------------
def _has_fp8_cache(args: argparse.Namespace) -> bool:
    return bool(args.kv_cache_dtype == "fp8")


def _parse() -> argparse.Namespace:
    assert __doc__ is not None
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--preset",
        default="smollm2-135m",
        type=_preset,
        metavar="NAME",
        help=f"one of {', '.join(PRESETS)}",
    )
    model.add_argument("--config", type=Path, metavar="FILE", help="an HF config.json instead")
    for name in ("device", "attn_backend"):
        argument = ENGINE_ARGUMENTS[name]
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=argument.default,
            metavar="NAME",
            help=argument.metadata["help"],
        )
    parser.add_argument(
        "--quant",
        choices=("fp8", *QUANTIZATIONS),
        help="the target's layers in FP8 by rows, or as AWQ, NVFP4 or FP8 by blocks has them; its "
        "lm_head is bfloat16",
    )
    parser.add_argument(
        "--draft-tokens",
        type=_count,
        default=0,
        help="DFlash and MTP draft the first N tokens alone",
    )
    parser.add_argument("--draft-quant", choices=("fp8",), help="large products of heads in FP8")
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="the target's keys"
    )
    parser.add_argument(
        "--modes", type=_modes, default="plain,eagle3_one_model", help=f"of {','.join(DRAFTERS)}"
    )
    parser.add_argument("--k", type=_k, default="3", help="drafts a step")
    parser.add_argument("--batch", type=_sizes, default="1,32", help="requests")
    parser.add_argument("--context", type=_sizes, default="1024", help="tokens of each request")
    parser.add_argument(
        "--accept",
        type=_accept,
        default="2.0",
        metavar="X",
        help="drafts accepted a step by force, a mean; 0: none",
    )
    parser.add_argument(
        "--temperature", type=_accept, default="0", metavar="T", help="of all requests; 0: greedy"
    )
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="with a temperature")
    parser.add_argument("--blocks", type=_size, default="20", help="of 10 steps")
    parser.add_argument("--replays", type=_size, default="200", help="of each captured graph")
    parser.add_argument(
        "--prompt-repeats",
        type=_count,
        default="3",
        metavar="N",
        help="times that the prompts are read and timed; 0: not",
    )
    parser.add_argument(
        "--autotune",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="choose cuBLAS's algorithms by measurement",
    )
    parser.add_argument("--max-seq-len", type=_size, help="of the engines; default: what is needed")
    parser.add_argument("--profile", action="store_true", help="list kernels of 20 steps each")
    parser.add_argument(
        "--json-file",
        "--json",
        dest="json",
        type=Path,
        metavar="FILE",
        help="write everything there; --json is its old name",
    )
    args = parser.parse_args()
    needed = _longest(args)
    if args.max_seq_len is not None and args.max_seq_len < needed:
        parser.error(f"--max-seq-len {args.max_seq_len}: sequences grow to {needed}; give more.")
    if args.top_p < 1 and not args.temperature:
        parser.error("--top-p needs a --temperature: greedy requests have no use for it.")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json-file {args.json}: there is no such directory; make it first.")
    return args


def _preset(text: str) -> str:
    if text not in PRESETS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(PRESETS)}.")
    return text


def _modes(text: str) -> list[str]:
    modes = text.split(",")
    unknown = [mode for mode in modes if mode not in DRAFTERS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is not a mode; give a comma list of {', '.join(DRAFTERS)}."
        )
    return list(dict.fromkeys(modes))


def _count(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an int >= {least}.")
    return int(text)


def _size(text: str) -> int:
    return _count(text, least=1)


def _sizes(text: str) -> list[int]:
    return list(dict.fromkeys(_size(part) for part in text.split(",")))


def _k(text: str) -> list[int]:
    sizes = _sizes(text)
    if max(sizes) > MAX_DRAFT_LEN:
        raise argparse.ArgumentTypeError(f"{max(sizes)} is above {MAX_DRAFT_LEN}; lower it.")
    return sizes


def _accept(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 0 (0 forces nothing).")
    return value


if __name__ == "__main__":
    main()
