"""The documentation as the site renders it: lists, tables and code blocks come out as they were written.

The pages go through the site's Markdown extensions (mkdocs.yml) without the theme, so no browser is needed.
"""

from __future__ import annotations

import functools
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

markdown = pytest.importorskip(
    "markdown", reason="the documentation's renderer is not installed (dependency group dev)"
)
mkdocs_config = pytest.importorskip("mkdocs.config", reason="mkdocs is not installed (dependency group dev)")

pytestmark = pytest.mark.extended
ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "tests/README.md")),
        *(
            page
            for folder in ("docs", "dev", "packages", "examples", "deploy")
            for page in (ROOT / folder).rglob("*.md")
        ),
    ]
)
_VOID = {"br", "hr", "img", "input", "meta", "link"}


class Element:
    """An HTML element with its text, in order."""

    def __init__(self, tag: str, parent: Element | None, attributes: dict[str, str | None]) -> None:
        self.tag, self.parent, self.attributes = tag, parent, attributes
        self.children: list[Element | str] = []

    def all(self, *tags: str) -> list[Element]:
        """Elements below this one with one of these tags."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                found += [child] * (child.tag in tags) + child.all(*tags)
        return found

    def own(self, tag: str) -> list[Element]:
        """Children with this tag."""
        return [child for child in self.children if isinstance(child, Element) and child.tag == tag]

    def text(self, without: tuple[str, ...] = ()) -> str:
        """The text, except that of elements with these tags."""
        return "".join(
            child if isinstance(child, str) else "" if child.tag in without else child.text(without)
            for child in self.children
        )


class Tree(HTMLParser):
    """Builds the elements of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root = self.at = Element("page", None, {})
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, self.at, dict(attrs))
        self.at.children.append(element)
        if tag not in _VOID:
            self.at = element

    def handle_endtag(self, tag: str) -> None:
        while self.at.parent is not None and self.at.tag != tag:
            self.at = self.at.parent
        self.at = self.at.parent or self.at

    def handle_data(self, data: str) -> None:
        self.at.children.append(data)


@functools.cache
def site() -> Any:
    return mkdocs_config.load_config(str(ROOT / "mkdocs.yml"))


def rendered(text: str) -> Element:
    """A page's text as the site renders it."""
    config = site()
    return Tree(
        markdown.markdown(text, extensions=config.markdown_extensions, extension_configs=config.mdx_configs)
    ).root


def outside_code(text: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"(?ms)^([ >]*)(```+).*?^[ >]*\2[ ]*$", r"\1", text)


def faults(text: str) -> list[str]:
    """Parts of a page's Markdown that its HTML does not show."""
    page = rendered(text)
    found = []
    for one in page.all("ol"):
        if len(one.own("li")) < 2:
            found.append(f"a numbered list of one item: {one.text().split(chr(10))[0][:60] or one.text()[:60]!r}")
    prose = outside_code(text)
    rules = len(re.findall(r"(?m)^[ >]*\|?[ ]*:?-{2,}:?[ ]*(?:\|[ ]*:?-{2,}:?[ ]*)*\|[ ]*$", prose))
    tables = [table for table in page.all("table") if "highlighttable" not in (table.attributes.get("class") or "")]
    if rules != len(tables):
        found.append(f"{rules} tables are written, {len(tables)} are shown")
    for table in tables:
        widths = {len(row.own("td")) + len(row.own("th")) for row in table.all("tr")}
        if len(widths) > 1:
            found.append(f"a table with rows of {sorted(widths)} cells: {table.all('tr')[0].text().strip()!r}")
    fences = len(re.findall(r"(?m)^[ >]*```", text)) // 2
    indented = len(re.findall(r"(?m)(?:\A|\n[ ]*\n)(?: {4}(?![ ]*(?:[-*]|\d+\.) ).*\n?)+", _without_lists(prose)))
    shown = len(page.all("pre"))
    if fences + indented != shown:
        found.append(f"{fences + indented} code blocks are written, {shown} are shown")
    inside = len(re.findall(r"(?m)^ +```", text)) // 2
    kept = sum(len(item.all("pre")) for item in page.all("li") if not _inside(item, "li"))
    if inside != kept:
        found.append(f"{inside} code blocks belong to list items, {kept} are shown inside of them")
    for paragraph in page.all("p", "li"):
        plain = paragraph.text(without=("pre", "code", "p", "li"))
        if re.search(r"(?m)^\s*(?:[-*]|1\.) \S", plain) or "```" in plain:
            found.append(f"a list or a fence inside a paragraph: {plain.strip()[:80]!r}")
    return found


def _inside(element: Element, tag: str) -> bool:
    """Whether an element lies in one with this tag."""
    above = element.parent
    return above is not None and (above.tag == tag or _inside(above, tag))


def _without_lists(prose: str) -> str:
    """The text without lists and what belongs to them, in which a paragraph may be indented."""
    return re.sub(r"(?m)^(?:[-*]|\d+\.) .*\n(?:(?:[ ]+.*)?\n)*", "", prose)


@pytest.mark.parametrize("page", PAGES)
def test_page_renders_as_written(page: str) -> None:
    """Numbered steps are one list; tables, code blocks and lists are shown as such, also inside of lists."""
    assert not faults((ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("1. One\n\n   ```\n   code\n   ```\n\n2. Two\n\n   more\n", "a numbered list of one item"),
        ("Text\n| a | b |\n|---|---|\n| 1 | 2 |\n", "tables are written"),
        ("| a | b |\n|---|---|\n| `x|y` | 2 | 3 |\n", ""),
        ("Text:\n- one\n- two\n", "inside a paragraph"),
        ("- one\n\n  ```\n  code\n  ```\n", "code blocks belong to list items"),
    ],
)
def test_faults_are_found(text: str, fault: str) -> None:
    """Each kind of mistake that Python-Markdown shows in another way than GitHub is named."""
    found = faults(text)
    assert not fault or any(fault in one for one in found), found


def test_steps_with_code_are_one_list() -> None:
    """Four spaces keep code and paragraphs inside a step."""
    text = "1. One\n\n    ```\n    code\n    ```\n\n2. Two\n\n    more\n"
    page = rendered(text)
    assert not faults(text)
    assert [len(one.own("li")) for one in page.all("ol")] == [2] and len(page.all("pre")) == 1


@functools.cache
def anchors(page: Path) -> set[str]:
    """The ids of a rendered page."""
    found, left = set(), [rendered(page.read_text(encoding="utf-8"))]
    while left:
        element = left.pop()
        found.add(element.attributes.get("id") or "")
        left += [child for child in element.children if isinstance(child, Element)]
    return found


def dead_links(page: str, text: str) -> list[str]:
    """Links of a page to files, and to anchors of pages, that do not exist."""
    dead = []
    for link in rendered(text).all("a"):
        target, _, anchor = (link.attributes.get("href") or "").partition("#")
        if ":" in target or "headerlink" in (link.attributes.get("class") or ""):
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        if not path.exists():
            dead.append(target)
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            dead.append(f"{target}#{anchor}")
    return dead


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Each link to a file of the repository finds it, and each anchor its heading, also between docs/ and dev/."""
    assert not dead_links(page, (ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("link", ["docs/none.md", "docs/glossary.md#none", "#none", "dev/decisions/9999.md"])
def test_dead_links_are_found(link: str) -> None:
    """A missing file, a missing heading of another page and one of the same page are named."""
    assert dead_links("README.md", f"[text]({link})") == [link]
