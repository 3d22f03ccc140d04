"""Writes prompts like a coding agent's: files edited in context, tool loops, tasks tried again.

The same seed writes the same prompts. Their order counts: a later prompt's answer may repeat an
answer to an earlier one, which its own text does not hold.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from .acceptance_prompts import AcceptancePrompt

Message = dict[str, str]

THINGS = {
    "account": ("owner", "balance", "deposit", "withdraw"),
    "stack": ("label", "height", "push", "pop"),
    "tank": ("place", "level", "fill", "drain"),
    "score": ("player", "points", "add", "remove"),
    "shelf": ("room", "count", "store", "take"),
    "battery": ("device", "charge", "load", "use"),
}
"""Things that a file is about: an owner, an amount, what raises it and what lowers it."""

SYSTEM = (
    "You are a coding agent. You work on one file at a time. When you are asked to change a file, "
    "reply with the whole file in one code block and nothing else."
)
TOOLS = (
    "You are an agent that calls tools. Reply with one JSON object and nothing else, like this:\n"
    '{"thought": "why", "tool": "read_file", "arguments": {"path": "src/main.py", "start": 1, '
    '"end": 40}}\nTools: read_file(path, start, end), search(path, pattern), run_tests(path).'
)


def agent_prompts(seed: int = 0, per_category: int = 6) -> list[AcceptancePrompt]:
    """Returns `per_category` prompts of each category, at most as many as there are THINGS."""
    rng, prompts = random.Random(seed), []
    names = rng.sample(sorted(THINGS), per_category)
    for category, write in CATEGORIES.items():
        for i, name in enumerate(names, 1):
            messages = tuple(write(name, i))
            prompts.append(AcceptancePrompt(f"{category}-{i:02}", category, messages))
    return prompts


def source_of(name: str) -> str:
    """Returns a small Python file about a thing."""
    owner, amount, raises, lowers = THINGS[name]
    title = name.title()
    return (
        f"class {title}:\n"
        f"    def __init__(self, {owner}, {amount}=0):\n"
        f"        self.{owner} = {owner}\n"
        f"        self.{amount} = {amount}\n"
        f"        self.history = []\n\n"
        f"    def {raises}(self, value):\n"
        f"        if value <= 0:\n"
        f'            raise ValueError("value must be positive")\n'
        f"        self.{amount} += value\n"
        f'        self.history.append(("{raises}", value))\n'
        f"        return self.{amount}\n\n"
        f"    def {lowers}(self, value):\n"
        f"        if value > self.{amount}:\n"
        f'            raise ValueError("not enough {amount}")\n'
        f"        self.{amount} -= value\n"
        f'        self.history.append(("{lowers}", value))\n'
        f"        return self.{amount}\n"
    )


def _block(path: str, source: str) -> str:
    return f"{path}\n```python\n{source}```"


def _edit(name: str, number: int) -> list[Message]:
    """A file, and a change of it."""
    amount = THINGS[name][1]
    task = f"Rename `{amount}` to `total_{amount}` in this file. Reply with the whole file."
    return [_system(SYSTEM), _user(f"{task}\n\n{_block(f'src/{name}.py', source_of(name))}")]


def _edit_again(name: str, number: int) -> list[Message]:
    """A change after another one, whose result is in context."""
    lowers, amount = THINGS[name][3], THINGS[name][1]
    edited = source_of(name).replace(amount, f"total_{amount}")
    path = f"src/{name}.py"
    return [
        *_edit(name, number),
        {"role": "assistant", "content": f"```python\n{edited}```"},
        _user(f"Good. Now rename `{lowers}` to `{lowers}_some` in {path}. Reply with the file."),
    ]


def _tool_loop(name: str, number: int) -> list[Message]:
    """Calls of tools and their results, before the next call."""
    messages = [_system(TOOLS), _user(f"Find out why the tests of src/{name}.py fail.")]
    for start in range(1, 20 * (number % 3 + 2), 20):
        call = {
            "thought": f"I read lines {start} to {start + 19} of src/{name}.py to find the error.",
            "tool": "read_file",
            "arguments": {"path": f"src/{name}.py", "start": start, "end": start + 19},
        }
        lines = source_of(name).splitlines()[start - 1 : start + 19] or ["(end of file)"]
        messages.append({"role": "assistant", "content": json.dumps(call)})
        messages.append(_user("result:\n" + "\n".join(lines)))
    return messages


def _retry(name: str, number: int) -> list[Message]:
    """The task of `edit` in a new session, after a test has failed."""
    log = (
        f"The last attempt failed: tests/test_{name}.py::test_{THINGS[name][2]} FAILED, "
        f"AttributeError in line {10 + number}."
    )
    system, task = _edit(name, number)
    return [system, _user(f"{task['content']}\n\n{log} Try again.")]


def _write_tests(name: str, number: int) -> list[Message]:
    """The same instruction for another file each time."""
    task = (
        f"Write pytest tests for the class {name.title()}. Begin with the imports. Write one test "
        "for each method, and one for each error. Reply with the code only."
    )
    return [_system(SYSTEM), _user(f"{task}\n\n{_block(f'src/{name}.py', source_of(name))}")]


def _system(content: str) -> Message:
    return {"role": "system", "content": content}


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


CATEGORIES: dict[str, Callable[[str, int], list[Message]]] = {
    "edit": _edit,
    "edit_again": _edit_again,
    "tool_loop": _tool_loop,
    "retry": _retry,
    "write_tests": _write_tests,
}
