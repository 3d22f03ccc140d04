"""Draws docs/demo.svg from a real run of `trtspec demo`.

python benchmarks/demo_picture.py docs/demo.svg
"""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from trtspec.cli import demo
from trtspec.cli.options import EngineOptions, SamplingOptions


def main(path: str) -> None:
    console = Console(record=True, force_terminal=True, width=110)
    patches: dict[str, Any] = {
        "make_console": lambda: console,
        "Live": lambda **_: nullcontext(),  # only the finished view, not every frame
    }
    for name, value in patches.items():
        setattr(demo, name, value)
    options = EngineOptions(
        speculative="eagle3", max_draft_len=3, dtype="bfloat16", device="cpu", max_batch_size=1
    )
    demo.run_demo(options, SamplingOptions(max_tokens=128))
    svg = console.export_svg(title="make demo")
    # rich names web fonts by address; the reader's own monospace font will do.
    Path(path).write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main(sys.argv[1])
