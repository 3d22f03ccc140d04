"""Triton's interpreter, made faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch_language_once_a_launch() -> None:
    """Makes the interpreter patch `triton.language` once a launch for each device function.

    By itself it does so at every call of one, which is up to half of its time.
    """
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    seen: set[Callable[..., Any]] = set()

    def patch_once(fn: Callable[..., Any]) -> Any:
        if fn in seen:
            return None
        seen.add(fn)
        return patch(fn)

    def fresh_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, fresh_launch
