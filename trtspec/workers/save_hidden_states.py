"""Plain decoding; the executor writes captured layers to disk."""

from __future__ import annotations

from .plain import PlainWorker


class SaveHiddenStatesWorker(PlainWorker):
    """Mode SAVE_HIDDEN_STATES. The target's forward captures; `executor/saving.py` writes."""

    reads_final_states = True  # they are saved, too
