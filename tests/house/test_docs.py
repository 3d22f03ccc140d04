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
    [
        "README.md",
        "docs/adding_a_drafter.md",
        "docs/draft_heads.md",
        "docs/guided_decoding.md",
        "docs/prefix_cache.md",
    ],
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


def _anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = [re.sub(r"[^\w\- ]", "", h.lower()) for h in re.findall(r"^#+ (.*)$", text, re.M)]
    return {heading.strip().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "trtspec").rglob("*.md")]
    num_anchors = 0
    for page in pages:
        for file, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            target = page.parent / file if file else page
            assert target.exists(), f"{page.name} links to {file}"
            if anchor:
                num_anchors += 1
                assert anchor in _anchors(target), f"{page.name} links to {file}#{anchor}"
    assert num_anchors > 100


@pytest.mark.parametrize("room", ["executor", "serving"])
def test_the_architecture_names_every_file(room: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    files = (ROOT / "trtspec" / room).glob("[a-z]*.py")
    assert [file.name for file in files if f"{file.name}`" not in page] == []
