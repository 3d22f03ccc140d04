"""Saves the rows of steps as samples on disk (mode SAVE_HIDDEN_STATES)."""

from __future__ import annotations

from torch import Tensor

from ..data.hidden_states import HiddenStatesWriter
from .request import Request

NOT_WHOLE = ("cancelled", "error")
"""Finish reasons of requests that are no samples."""


class HiddenStatesSaver:
    """Collects the rows of requests and writes them as samples of a `HiddenStatesWriter`."""

    def __init__(self, writer: HiddenStatesWriter, hidden_size: int):
        self.writer, self.hidden_size = writer, hidden_size

    def add(self, request: Request, start: int, rows: Tensor) -> None:
        """Adds rows [n, (layers + 1) * D] of the request's tokens from position `start` on.

        The token after the last of them must be known.
        """
        text = request.tokens_between(start, start + rows.shape[0] + 1)
        captured = rows.shape[1] - self.hidden_size
        self.writer.add(
            request.request_id, start, text[:-1], text[1:], rows[:, :captured], rows[:, captured:]
        )

    def write_full_shard(self) -> None:
        self.writer.write_full_shard()

    def finish(self, request: Request) -> None:
        """Completes the request's sample, or drops it if the request was cancelled or failed."""
        if request.finish_reason is None or request.finish_reason in NOT_WHOLE:
            self.writer.drop(request.request_id)
        else:
            prompt = request.prompt_token_ids
            self.writer.finish(request.request_id, prompt, request.finish_reason)

    def start_over(self) -> set[int]:
        """Drops unfinished samples after an exception. Returns the ids of their requests."""
        return self.writer.start_over()

    def flush(self) -> None:
        self.writer.flush()
