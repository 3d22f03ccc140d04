"""Checks of what users and files give."""

from __future__ import annotations

import math

import pytest

from trtspec.checks import are_ints, checked_int, int_range, is_int, is_list, is_number
from trtspec.errors import CheckpointError


def test_a_bool_is_no_number() -> None:
    assert is_int(3) and not is_int(True) and not is_int(3.0) and not is_int("3")
    assert is_number(3) and is_number(0.5) and is_number(math.nan)
    assert not is_number(False) and not is_number("1") and not is_number(None)
    assert are_ints([1, 2]) and are_ints(()) and not are_ints([1, True]) and not are_ints("12")
    assert is_list([None]) and is_list(()) and not is_list("a") and not is_list({1})


def test_both_ends_are_allowed() -> None:
    assert [is_int(n, 1, 3) for n in range(5)] == [False, True, True, True, False]
    assert is_int(10**30, 1) and is_int(-5, None, 0) and not is_int(1, None, 0)
    assert not are_ints([2, 0], 1)
    assert (int_range(1, 5), int_range(2, None)) == ("an int in 1 … 5", "an int >= 2")


def test_a_message_says_what_was_given_what_is_allowed_and_the_cure() -> None:
    assert checked_int("config.json", "heads", 4, range(1, 5)) == 4
    for value, allowed in ((5, range(1, 5)), (True, range(1, 5)), (1, range(1, 1))):
        with pytest.raises(CheckpointError) as caught:
            checked_int("config.json", "heads", value, allowed, " or null", "Correct it.")
        assert str(caught.value) == (
            f"config.json: heads={value!r}; it must be an int in 1 … {allowed.stop - 1} or null. "
            "Correct it."
        )
