"""What the documentation shows is run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.model
@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/adding_a_drafter.md", "docs/draft_heads.md", "docs/prefix_cache.md"],
)
def test_python_blocks_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = _python_blocks(page)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


@pytest.mark.model
def test_embedding_example_is_short_and_speculates() -> None:
    path = ROOT / "examples" / "embed_in_your_loop.py"
    assert len(path.read_text().splitlines()) < 80
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    tokens, passes = map(int, re.findall(r"(\d+) tokens in (\d+) passes", done.stdout)[0])
    assert "lazy dog" in done.stdout and passes < tokens / 2


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("room", ["executor", "serving"])
def test_the_architecture_names_every_file(room: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    files = (ROOT / "trtspec" / room).glob("[a-z]*.py")
    assert [file.name for file in files if f"{file.name}`" not in page] == []
