"""How `gpu_step.py` tells what it measured: a line for each row, JSON, lists of kernels."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from step_timing import STEPS_PER_BLOCK, copy_bandwidth

Row = dict[str, Any]

COLUMNS = [  # title, width, how a row is shown
    ("mode", -19, lambda r: r["mode"]),
    ("K", 2, lambda r: str(r["k"])),
    ("batch", 5, lambda r: str(r["batch"])),
    ("context", 7, lambda r: str(r["context"])),
    ("plain", 7, lambda r: _number(r["plain_ms"])),
    ("step ms", 7, lambda r: _number(r["step_ms"])),
    ("x plain", 7, lambda r: _number(r["times_plain"], 2)),
    ("graph", 7, lambda r: _number(r["graph_ms"])),
    ("target", 7, lambda r: _number(r["target_ms"])),
    ("accept", 6, lambda r: _number(r["accept_ms"])),
    ("draft", 7, lambda r: _number(r["draft_ms"])),
    ("floor", 7, lambda r: _number(r["floor_ms"])),
    ("x floor", 7, lambda r: _number(r["times_floor"], 2)),
    ("tokens/s", 8, lambda r: _number(r["tokens_per_second"], 0)),
    ("prompts", 8, lambda r: _number(r["prompts_ms"], 1)),
    ("AL", 11, lambda r: f"{r['acceptance_length']:.2f}" + _forced_mark(r)),
]


def title_line() -> str:
    return "  ".join(_pad(title, width) for title, width, _ in COLUMNS)


def row_line(row: Row) -> str:
    return "  ".join(_pad(show(row), width) for _, width, show in COLUMNS)


def further_drafts(rows: list[Row]) -> list[Row]:
    """ms that one draft more costs, between the smallest and the largest K of a mode."""
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["mode"], row["batch"], row["context"]), []).append(row)
    slopes = []
    for (mode, batch, context), group in groups.items():
        low, high = (f(group, key=lambda row: row["k"]) for f in (min, max))
        steps = high["k"] - low["k"]
        if steps == 0:
            continue
        slope = {"mode": mode, "batch": batch, "context": context, "k": [low["k"], high["k"]]}
        for name in ("step_ms", "graph_ms"):
            known = low[name] is not None and high[name] is not None
            slope[name] = (high[name] - low[name]) / steps if known else None
        slopes.append(slope)
    return slopes


def header(args: argparse.Namespace, device: torch.device, longest: int) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "command": shlex.join(["python", "benchmarks/gpu_step.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device.type,
        "hardware": torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": _version("triton"),
            "trtspec": _version("trtspec"),
        },
        "preset": str(args.config or args.preset),
        "dtype": "bfloat16",
        "attn_backend": args.attn_backend,
        "accept": args.accept,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "max_seq_len": longest,
        "blocks": args.blocks,
        "replays": args.replays,
        "steps_per_block": STEPS_PER_BLOCK,
        "copy_bytes_per_second": copy_bandwidth(device),
        "rows": [],
        "further_draft_ms": [],
    }


def introduction(report: dict[str, Any]) -> str:
    versions, accept = report["versions"], report["accept"]
    forced = "nothing is forced: random drafts are accepted by chance"
    if accept > 0:
        forced = f"acceptance is FORCED: {accept:g} drafts a step (at most K), bonus not counted"
    if report["temperature"]:
        forced += f"; sampled at temperature {report['temperature']:g}, top-p {report['top_p']:g}"
    return (
        f"{report['hardware']}, torch {versions['torch']}, triton {versions['triton']}, "
        f"{report['date']}\n"
        f"{report['preset']}'s shape, random weights, bf16, max_seq_len {report['max_seq_len']}; "
        f"{forced}\n"
        f"a large copy: {report['copy_bytes_per_second'] / 1e9:.0f} GB/s, read and written; "
        "times in ms"
    )


def slope_line(slope: Row) -> str:
    return (
        f"each further draft, {slope['mode']}, batch {slope['batch']}, context "
        f"{slope['context']}, K {slope['k'][0]} to {slope['k'][1]}: "
        f"{_number(slope['step_ms'])} ms a step, graph {_number(slope['graph_ms'])}"
    )


def print_profile(row: Row) -> None:
    profile = row["profile"]
    what = "kernels" if row["graph_ms"] is not None else "operations"
    print(
        f"\n{row['mode']}, K {row['k']}, batch {row['batch']}, context {row['context']}: step "
        f"{row['step_ms']:.3f} ms, {what} {profile['kernel_ms']:.3f} ms "
        f"({profile['kernels_per_step']:.0f} a step), gaps {profile['gap_ms']:.3f} ms; "
        f"{len(profile['kernels'])} of {profile['num_names']} names"
    )
    print_kernels(profile["kernels"])


def print_kernels(kernels: list[dict[str, Any]]) -> None:
    """As `step_timing.kernel_times` lists them."""
    print(f"{'us a step':>10} {'a step':>7} {'mean us':>8}  name")
    for kernel in kernels:
        print(
            f"{kernel['us_per_step']:10.1f} {kernel['per_step']:7.1f} {kernel['mean_us']:8.2f}  "
            f"{kernel['name']}"
        )


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    """After every line, so that a run that is cut short leaves what it has."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _forced_mark(row: Row) -> str:
    return " forced" if row["forced_acceptance"] is not None else ""


def _pad(text: str, width: int) -> str:
    return text.ljust(-width) if width < 0 else text.rjust(width)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return None
