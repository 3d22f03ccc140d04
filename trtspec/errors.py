"""The exceptions a user can meet.

Each message says what was given, what is allowed and what to do. All of them derive from
`TrtspecError`; where a builtin type says the same thing (a bad argument is a `ValueError`) the
class derives from it too, so callers need not import this module to catch it.
"""

import threading

MAX_SHOWN = 200


def errors_of_callers() -> tuple[type[BaseException], ...]:
    """Returns what a caller's code may raise at the cost of its request alone.

    In the main thread an interrupt is the program's. No other thread gets one: there code raises
    such exceptions by itself, as `asyncio.CancelledError`.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return (Exception,) if is_main else (BaseException,)


def shown(value: object) -> str:
    """A value as a message has it: its `repr`, cut where that is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits, a list of as many levels
        return f"<{type(value).__name__} that cannot be printed>"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def described(error: BaseException) -> str:
    """An exception as a message has it: its type and what it says."""
    return f"{type(error).__name__}: {error}"


class TrtspecError(Exception):
    """Base of every error trtspec raises on purpose."""


class ConfigError(TrtspecError, ValueError):
    """An argument or a combination of arguments that cannot work."""


class CheckpointError(TrtspecError, ValueError):
    """A model directory or weight file that is missing, damaged or does not fit its config."""


class RequestError(TrtspecError, ValueError):
    """A request that is refused before it reaches the device; other requests are unaffected."""


class DrafterError(TrtspecError, RuntimeError):
    """A user-provided drafter raised, or returned something that is not a list of draft tokens."""


class KVCacheError(TrtspecError, RuntimeError):
    """The block accounting was asked for something impossible (a bug in the caller)."""


class RankError(TrtspecError, RuntimeError):
    """A rank of an engine over several GPUs failed or is gone: the whole engine is at its end."""


class QueueFullError(TrtspecError, RuntimeError):
    """As many requests wait as the queue holds: try again later."""


class EngineError(TrtspecError, RuntimeError):
    """The engine failed or is shut down. No request can be served any more."""
