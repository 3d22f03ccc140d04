"""How the server's process runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny import tiny_model_dir

from trtspec import LLM, AsyncLLM
from trtspec.serving import run
from trtspec.serving.config import ServerConfig


def test_threads_take_turns_quickly_while_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the engine's thread would wait for the event loop's for longer than a step takes."""
    seen: list[float] = []
    monkeypatch.setattr(
        run.Server, "run", lambda server, sockets: seen.append(sys.getswitchinterval())
    )
    before = sys.getswitchinterval()
    llm = AsyncLLM(LLM(tiny_model_dir(tmp_path), device="cpu", dtype="float32", max_seq_len=32))
    with run.listen(config := ServerConfig(port=0, served_model_name="tiny")) as listener:
        run.serve(llm, config, listener, lambda: None)
    assert seen == [pytest.approx(run.SWITCH_SECONDS)] and sys.getswitchinterval() == before
