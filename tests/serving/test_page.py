"""The page at `/`: its policy, its structure and what its script may do. No browser is needed."""

from __future__ import annotations

import base64
import hashlib
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from trtspec.serving.observe import read_page

ROOT = Path(__file__).parents[2]
VOID = {"meta", "link", "input", "br", "hr", "img"}


class Outline(HTMLParser):
    """Collects elements with their attributes, and checks that tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.within_label: list[dict[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.elements.append((tag, attributes))
        if "label" in self.open:
            self.within_label.append(attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}>"


@pytest.fixture(scope="module")
def page() -> str:
    return read_page()[0]


@pytest.fixture(scope="module")
def outline(page: str) -> Outline:
    outline = Outline()
    outline.feed(page)
    assert not outline.open
    return outline


def inline(page: str, tag: str) -> str:
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return text


def test_the_policy_allows_its_own_script_and_style_alone(page: str) -> None:
    headers = read_page()[1]
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["frame-ancestors"] == "'none'" and policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        digest = hashlib.sha256(inline(page, tag).encode()).digest()
        assert policy[f"{tag}-src"] == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_nothing_is_loaded_from_elsewhere(page: str, outline: Outline) -> None:
    for _, attributes in outline.elements:
        assert "style" not in attributes, "the policy forbids it"
        assert not [name for name in attributes if name.startswith("on")]
        assert "src" not in attributes
        assert attributes.get("href", "metrics").startswith(("data:", "metrics"))
    addresses = set(re.findall(r"https?:[^\s'\"]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name space is no address"
    assert "@import" not in page and "url(" not in page


def test_data_becomes_text_only(page: str) -> None:
    script = inline(page, "script")
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                 "new Function", "localStorage", "sessionStorage", "cookie"):  # fmt: skip
        assert word not in script, word
    assert "textContent" in script and '"use strict"' in script


def test_every_element_that_the_script_names_exists_once(page: str, outline: Outline) -> None:
    script = inline(page, "script")
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = set(re.findall(r'(?:\$|set|big|unknown)\("([\w-]+)"', script))
    named |= {f"{chart}-{part}" for chart in re.findall(r'new Chart\("(\w+)"', script)
              for part in ("plot", "read")}  # fmt: skip
    assert named and named <= set(ids), named - set(ids)


def test_it_can_be_used_with_a_keyboard_and_a_screen_reader(outline: Outline) -> None:
    elements = outline.elements
    assert ("html", {"lang": "en"}) in elements
    described = {a["for"] for tag, a in elements if tag == "label" and "for" in a}
    for tag, attributes in elements:
        if tag in ("input", "textarea"):
            is_named = attributes in outline.within_label or attributes["id"] in described
            assert is_named, f"{attributes['id']} has no label"
        if "aria-labelledby" in attributes:
            assert any(a.get("id") == attributes["aria-labelledby"] for _, a in elements)
        if tag == "button":
            assert attributes["type"] in ("submit", "button")
    assert sum(tag == "h1" for tag, _ in elements) == 1
    live = [a["id"] for _, a in elements if a.get("role") in ("status", "alert", "log")]
    assert set(live) == {"link", "warnings", "sum"}, "streamed tokens and figures are not read out"
    (key,) = (a for tag, a in elements if a.get("type") == "password")
    assert key["autocomplete"] == "off"


def test_it_suits_light_and_dark_small_screens_and_little_motion(page: str) -> None:
    style = inline(page, "style")
    for query in ("prefers-color-scheme: dark", "max-width: 640px", "prefers-reduced-motion"):
        assert f"@media ({query}" in style
    assert 'name="viewport" content="width=device-width' in page and ":focus-visible" in style
    defined = set(re.findall(r"(--[\w-]+):", style)) | {"--p"}
    assert set(re.findall(r"var\((--[\w-]+)\)", style)) <= defined


def test_colours_can_be_read(page: str) -> None:
    """Text has a contrast of 4.5 at least, in both schemes (WCAG AA)."""
    light, dark = re.findall(r":root \{(.*?)\}", inline(page, "style"), re.DOTALL)
    for scheme in (light, dark):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})[;\s]", scheme))
        for text in ("ink", "soft", "faint", "accent", "bad"):
            for ground in ("paper", "card"):
                contrast = _contrast(colours[text], colours[ground])
                assert contrast >= 4.5, f"{text} on {ground}: {contrast:.2f}"
        assert _contrast(colours["warn"], colours["warn-bg"]) >= 4.5


def _contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_wheel_has_the_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "serving/page.html" in project["tool"]["setuptools"]["package-data"]["trtspec"]
    assert (ROOT / "trtspec" / "serving" / "page.html").is_file()
