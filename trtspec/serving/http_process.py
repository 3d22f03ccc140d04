"""The process of HTTP: clients, JSON, chat templates, tokens to text. The engine's starts it.

python -m trtspec.serving.http_process CHANNEL LISTENER      (file descriptors)
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys

from ..checkpoints.tokenizer import load_tokenizer
from ..frontend.inputs import Inputs
from .channel import Settings, receive
from .remote_llm import RemoteLLM
from .run import Server

LAST_SECONDS = 3.0
"""How long clients have to read that the engine's process is gone."""


def main(channel: socket.socket, listener: socket.socket) -> None:
    """Serves until the engine's process says that it ends, or is gone."""
    try:
        settings: Settings = receive(channel)
    except (EOFError, OSError):  # no model could be loaded
        return
    facts, config = settings.facts, settings.config
    inputs = Inputs(facts.model_dir, load_tokenizer(facts.model_dir))
    llm = RemoteLLM(facts, inputs, settings.max_num_requests_in_queue, channel)
    server = Server(llm, config, llm.say_ready, observation=llm)

    def stop() -> None:
        server.should_exit = True
        if llm.failure is not None:
            asyncio.get_running_loop().call_later(LAST_SECONDS, os._exit, 1)

    llm.on_stop = stop
    gc.collect()
    gc.freeze()  # what is imported stays
    server.run(sockets=[listener])


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    main(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
