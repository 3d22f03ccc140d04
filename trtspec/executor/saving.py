"""From the rows of a step to samples on disk (mode SAVE_HIDDEN_STATES)."""

from __future__ import annotations

from torch import Tensor

from ..hidden_states import HiddenStatesWriter
from .request import Request

_NOT_WHOLE = ("cancelled", "error")


class HiddenStatesSaver:
    """Turns requests into samples of a `HiddenStatesWriter`."""

    def __init__(self, writer: HiddenStatesWriter, hidden_size: int):
        self.writer, self.hidden_size = writer, hidden_size

    def add(self, request: Request, start: int, rows: Tensor) -> None:
        """Rows [n, (layers + 1) * D] of the request's tokens from position `start` on; the token
        after the last of them is known by now."""
        text, end = request.token_ids, start + rows.shape[0]
        captured = rows.shape[1] - self.hidden_size
        self.writer.add(
            request.request_id, start, text[start:end], text[start + 1 : end + 1],
            rows[:, :captured], rows[:, captured:],
        )  # fmt: skip
        if request.is_finished:
            self.finish(request)

    def finish(self, request: Request) -> None:
        """The request's sample is whole, or is dropped if it was cancelled or failed."""
        if request.finish_reason is None or request.finish_reason in _NOT_WHOLE:
            self.writer.drop(request.request_id)
        else:
            prompt = request.prompt_token_ids
            self.writer.finish(request.request_id, prompt, request.finish_reason)

    def flush(self) -> None:
        self.writer.flush()
