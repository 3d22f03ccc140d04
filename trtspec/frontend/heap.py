"""`HeapAside`: sets all objects there are aside from Python's garbage collector, while steps run.

A full collection walks over what torch, transformers and a model are made of: 0.1 to 0.3 s, in
which no step runs. What exists when steps begin is therefore left out until they end. What is made
meanwhile is collected as ever.
"""

from __future__ import annotations

import gc
import threading

IMMORTAL = 10_000
"""More objects than Python freezes by itself: in 3.12 those that live for ever (PEP 683), 375."""


class HeapAside:
    """One user's part in it. The heap is set aside while there is a user who began and did not end.

    A heap that the program froze itself (`gc.freeze`) is left alone, from then on.
    """

    _lock = threading.Lock()
    _num_users = 0
    _is_callers = False  # the program froze it: asking again would walk over it

    def __init__(self) -> None:
        self._has_begun = False

    def begin(self) -> None:
        """Sets the heap aside, in a few microseconds. Does nothing after another `begin`."""
        if self._has_begun:
            return
        self._has_begun, shared = True, HeapAside
        with shared._lock:
            shared._num_users += 1
            if shared._num_users == 1 and not shared._is_callers:
                shared._is_callers = gc.get_freeze_count() > IMMORTAL
                if not shared._is_callers:
                    gc.freeze()

    def end(self) -> None:
        """Gives the heap back once no other user needs it. Does nothing without `begin`."""
        if not self._has_begun:
            return
        self._has_begun, shared = False, HeapAside
        with shared._lock:
            shared._num_users -= 1
            if shared._num_users == 0 and not shared._is_callers:
                gc.unfreeze()
