"""Sources and documentation keep to the field's words and to docs/glossary.md."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if page.name not in ("glossary.md", "log.md")  # one lists old words, one is a diary
]
MODULES = sorted((ROOT / "trtspec").rglob("*.py"))

# word -> what to write
WORDS = {
    r"\bnobody\b|\bsomebody\b": 'the thing itself: "no request", "the caller"',
    r"\bwhoever\b": "the thing itself",
    r"\btheirs\b": "by what it is: `teacher`, TensorRT-LLM's",
    r"\bso many\b": "the number's name",
    r"\bturned down\b": "rejected",
    r"\bis_kept\b|\bkept drafts?\b|\bdrafts? (?:is|are) kept\b": "accepted",
    r"\bis told\b|\btold by\b": "a per-layer input, or what is passed or stored",
    r"\bfed on\b|\bfeeds (?:nothing )?on\b": "feedback",
    r"\bplaces on\b|\bits place in the (?:text|sequence|memory)\b": "position",
    r"\bdrafts? in parallel\b|\bparallel drafters?\b": "masked",
}
REFERENCES = {
    r"\bDESIGN\b|\bREVIEW\b": "no such document is in the repository",
    r"\bdecision D\d": "decisions are in docs/decisions/, by number",
    r"\b(?:a|the) bar\b(?: of|:)": "no such limit is in the repository",
}


@cache
def prose_and_names(module: Path) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Comments and docstrings, and each name where it first stands, with their line numbers.

    Other strings are messages, prompts and data.
    """
    source = module.read_text(encoding="utf-8")
    texts = [
        (node.lineno, node.value.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
    ]
    lines: dict[str, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            texts.append((token.start[0], token.string))
        elif token.type == tokenize.NAME:
            lines.setdefault(token.string, token.start[0])
    return texts, [(line, name) for name, line in lines.items()]


def found(path: Path, pieces: Iterable[tuple[int, str]], words: dict[str, str]) -> list[str]:
    """Returns a line for every forbidden word."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {match[0]!r} -> {instead}"
        for line, text in pieces
        for word, instead in words.items()
        for match in re.finditer(word, " ".join(text.split()))
    ]


def test_sources_use_the_glossarys_words() -> None:
    lines = []
    for module in MODULES:
        texts, names = prose_and_names(module)
        lines += found(module, texts, WORDS | REFERENCES) + found(module, names, WORDS)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_the_glossarys_words(page: Path) -> None:
    words = WORDS | REFERENCES
    assert not (lines := found(page, [(1, page.read_text("utf-8"))], words)), "\n".join(lines)


_PATH = re.compile(r"(?<![\w/.{}<*-])((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|md|cuh|cu))(?![\w{*])")
_EXAMPLES = re.compile(r"/x\.\w+$|/folder/|^flashinfer/")  # "add `workers/x.py`"; another project's
_ROOTS = (ROOT, ROOT / "trtspec", ROOT / "trtspec" / "ops", ROOT / "docs", ROOT / "tests")
_ATTRIBUTE = re.compile(
    r"`(?:trtspec\.)?((?:ops|workers|metadata|models|acceptance|checkpoints)\.[\w.]+)"
)


def prose() -> Iterator[tuple[Path, str]]:
    """Yields what describes the code as it is. Decisions describe it as it was."""
    for module in MODULES:
        if module.name != "_moved.py":
            yield from ((module, text) for _, text in prose_and_names(module)[0])
    yield from ((page, page.read_text("utf-8")) for page in PAGES if "decisions" not in page.parts)


def test_paths_in_sources_and_pages_exist() -> None:
    """A moved module must not live on in a comment."""
    lines = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in prose()
        for name in _PATH.findall(text)
        if not _EXAMPLES.search(name)
        and not any((root / name).exists() for root in (*_ROOTS, path.parent))
    ]
    assert not lines, "\n".join(lines)


def is_defined(name: str) -> bool:
    """Returns whether a dotted name is a module of the package, or occurs in one."""
    room, *rest = name.rstrip(".").split(".")
    path = ROOT / "trtspec" / room
    while rest and (path / rest[0]).is_dir():
        path /= rest.pop(0)
    if rest and (path / f"{rest[0]}.py").exists():
        path = path / f"{rest.pop(0)}.py"
    else:
        path /= "__init__.py"
    return not rest or rest[0] in path.read_text("utf-8")


def test_dotted_names_in_sources_and_pages_exist() -> None:
    lines = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in prose()
        for name in _ATTRIBUTE.findall(text)
        if not is_defined(name)
    ]
    assert not lines, "\n".join(lines)
