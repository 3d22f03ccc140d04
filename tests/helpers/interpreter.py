"""Triton's interpreter, made faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def patch_interpreter() -> None:
    """Leaves out what the interpreter does again and again, and what it throws away."""
    from triton.language import core
    from triton.runtime import interpreter

    _patch_language_once_a_launch(interpreter)
    _look_for_no_overflows(interpreter)
    _remember_dtypes(interpreter)
    _remember_shapes(core)


def _patch_language_once_a_launch(interpreter: Any) -> None:
    """Makes the interpreter patch `triton.language` once a launch for each device function.

    By itself it does so at every call of one, which is up to half of its time.
    """
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


def _look_for_no_overflows(interpreter: Any) -> None:
    """Each sum, difference and product of integers is computed in 64 bits too and compared with
    the limits. What finds an overflow is an assertion, which the interpreter has turned off."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _remember_dtypes(interpreter: Any) -> None:
    """NumPy's dtype of a Triton type, for which a table was built at every call."""
    look_up = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = look_up(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = remembered


def _remember_shapes(core: Any) -> None:
    """Blocks and tensors of one shape share what describes it, which nothing changes."""
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([core._unwrap_if_constexpr(size) for size in shape])
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = blocks[key]
        self.name = f"<{text}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in tensors:
            make_tensor(self, handle, type)
            tensors[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[key]

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
