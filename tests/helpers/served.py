"""A tiny model with a tokenizer and a chat template, to be served, and what a test asks of it."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from guided import save_tokenizer
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir

from trtspec import LLM, NGramDecodingConfig, SamplingParams
from trtspec.async_llm import facts_of
from trtspec.metadata.attention import NUM_RESERVED_BLOCKS
from trtspec.serving.config import ServerConfig
from trtspec.serving.engine_host import EngineHost
from trtspec.serving.observe import EngineObservation
from trtspec.serving.remote_llm import RemoteLLM
from trtspec.serving.run import Server, listen

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}\n{% endfor %}"
    "{% if tools %}{{ tools | length }} tools\n{% endif %}"
    "{% if slow %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PROMPTS = ["abc 12", "the end of (xy", "a", "{12: true}, zz"]
MAX_SEQ_LEN = 256


def served_model_dir(tmp_path: Path, **overrides: Any) -> Path:
    """Its attention is weak, so that its texts loop soon, and n-grams are accepted."""
    path = tiny_model_dir(tmp_path, max_position_embeddings=MAX_SEQ_LEN, **overrides)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if "o_proj" in name]:
        tensors[name] *= 0.02
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    tokenizer = save_tokenizer(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def make_llm(path: Path, **changes: Any) -> LLM:
    arguments = {
        "speculative_config": NGramDecodingConfig(max_draft_len=3),
        "device": "cpu",
        "dtype": "float32",
        "max_batch_size": 4,
        "max_seq_len": MAX_SEQ_LEN,
    }
    return LLM(path, **(arguments | changes))


def greedy(max_tokens: int = 24, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


def is_at_rest(llm: LLM) -> bool:
    """Whether no request is left, in a slot, a block or the queue."""
    executor = llm.executor
    blocks = executor.kv_cache
    is_free = blocks.num_free_blocks == blocks.num_blocks - NUM_RESERVED_BLOCKS
    return is_free and not (executor.has_work or executor.book.live)


class Served:
    """Both sides of a server, each in a thread of its own, on a free port of loopback.

    They share the tokenizer, and else have the socket alone.
    """

    def __init__(self, llm: LLM, queue: int = 64, **config: Any):
        self.llm = llm
        self.config = ServerConfig(port=0, served_model_name="tiny", **config)
        ours, theirs = socket.socketpair()
        observation = EngineObservation(llm, "tiny", {})
        self.host = EngineHost(llm, observation, ours, lambda: None)
        self.host_thread = threading.Thread(target=self.host.run, daemon=True)
        self.host_thread.start()
        self.engine = RemoteLLM(facts_of(llm), llm.inputs, queue, theirs)
        self.listener = listen(self.config)
        self.port: int = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        started = threading.Event()
        self.server = Server(self.engine, self.config, started.set, self.engine)
        arguments = {"sockets": [self.listener]}
        self.thread = threading.Thread(target=self.server.run, kwargs=arguments, daemon=True)
        self.thread.start()
        assert started.wait(30)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        self.host_thread.join(30)
        assert not (self.thread.is_alive() or self.host_thread.is_alive())
        assert self.host.close(30)

    def wait_for_rest(self, seconds: float = 15) -> None:
        """Waits until no request holds anything."""
        end = time.monotonic() + seconds
        while self.engine.num_live or not is_at_rest(self.llm):
            assert time.monotonic() < end, "requests or blocks are left"
            time.sleep(0.02)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        if isinstance(body, bytes):
            head = {"content-type": "application/json"} | headers
            return httpx.post(self.url + path, content=body, headers=head, timeout=30)
        return httpx.post(self.url + path, json=body, headers=headers, timeout=30)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=15)


def raw_post(path: str, body: bytes, length: int | None = None) -> bytes:
    """Returns the bytes of a request."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


def read_all(connection: socket.socket) -> bytes:
    """Returns what comes until the other side closes."""
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received
