"""Rooms import only rooms above them in LAYERS: the direction of imports, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "trtspec"
LAYERS = [
    ["errors", "utils", "_lazy", "other_names"],
    ["checks", "native"],
    ["distributed"],
    ["metadata"],
    ["ops"],
    ["config"],
    ["state", "acceptance", "api", "data"],
    ["guided"],
    ["layers"],
    ["attention"],
    ["models", "workers"],
    ["checkpoints"],
    ["executor"],
    ["frontend"],
    ["llm"],
    ["async_llm"],
    ["train"],
    ["doctor"],
    ["report"],
    ["serving"],
    ["cli"],
    ["__main__"],
]
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
BESIDE = {"models", "workers"}  # neither may import the other


def _room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    package = ("trtspec", *path.relative_to(ROOT).parent.parts)
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = [*base, *(node.module or "").split(".")]
            names = [module] if node.module else [[*base, a.name] for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        rooms |= {name[1] for name in names if name[0] == "trtspec" and len(name) > 1 and name[1]}
    return rooms


def test_imports_point_left() -> None:
    wrong, seen = [], set()
    for path in ROOT.rglob("*.py"):
        room = _room(path)
        if room in ("__init__", "_moved"):
            continue
        assert room in RANK, f"{room} has no place in LAYERS"
        for other in _imports(path) - {room}:
            seen.add((room, other))
            beside = {room, other} == BESIDE
            if beside or RANK[other] > RANK[room]:
                wrong.append(f"{path.relative_to(ROOT)} imports {other}")
    assert ("executor", "workers") in seen, "the reader of imports is broken"
    assert not wrong, wrong
