"""Host memory that each rank takes while it loads a checkpoint, on CPU.

    python benchmarks/load_memory.py --tp 1,2,4

The checkpoint has random weights and is written to a temporary folder. Pages of its file do not
count, for the system takes them back at need: what counts is anonymous memory (RssAnon of
/proc/PID/status). Its peak is compared with that of a rank whose model is tiny, and with the
weights that the rank keeps.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from random_models import Model, save

from trtspec import LLM

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32768,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
TINY = {**CONFIG, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tp", default="1,2,4", help="numbers of ranks")
    parser.add_argument("--one", nargs=2, metavar=("TP", "DIR"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        size, directory = args.one
        print(*load(int(size), directory))
        return
    with tempfile.TemporaryDirectory() as folder:
        models = {
            name: save(Path(folder, name), Model(config, 512).target())
            for name, config in (("tiny", TINY), ("model", CONFIG))
        }
        total = (models["model"] / "model.safetensors").stat().st_size
        print(f"checkpoint {total / 2**20:.0f} MiB; by rank, MiB")
        for size in map(int, args.tp.split(",")):
            before, peaks = (_measured(size, models[name]) for name in ("tiny", "model"))
            taken = [peak - least for peak, least in zip(peaks, before, strict=True)]
            share = total / size
            print(
                f"tp {size}: weights {share / 2**20:.0f}; peak "
                + ", ".join(f"{x / 2**20:.0f} ({x / share:.2f}x)" for x in taken)
            )


def _measured(size: int, directory: Path) -> list[int]:
    """Returns the peak of each rank, in a process of its own."""
    command = [sys.executable, __file__, "--one", str(size), str(directory)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [int(peak) for peak in done.stdout.split()]


def load(size: int, directory: str) -> list[int]:
    """Returns the peak of each rank, bytes, the largest first."""
    peaks: dict[int, int] = {}
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            for pid in _family(os.getpid()):
                peaks[pid] = max(peaks.get(pid, 0), _anonymous(pid))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    llm = LLM(
        directory, device="cpu", dtype="bfloat16", max_batch_size=1, tensor_parallel_size=size
    )
    is_over.set()
    watcher.join()
    llm.shutdown()
    return sorted(peaks.values(), reverse=True)[:size]


def _family(pid: int) -> Iterator[int]:
    """Yields a process and its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = children.read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in found:
            yield from _family(int(child))


def _anonymous(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("RssAnon:")), None)
    return 1024 * int(line.split()[1]) if line else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
