"""Words, one for each concept (docs/glossary.md); lines that fit a terminal; files that exist."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended
ROOT = Path(__file__).parents[1]
# A word or phrase that is not used, and what stands in its place.
REPLACED = {
    r"sooner": "faster, earlier",
    r"go(es)? on elsewhere|the seam|seams?": "failover, continuation",
    r"(is|was|are) left alone": "circuit opened",
    r"(is|was) well again": "recovered",
    r"beginnings?": "prefix, start",
    r"computed again|not computed again": "recomputed, cached",
    r"quiet_below": "next_block_at",
    r"lenders?|handover": "KV producer, hand-off",
    r"untold|(is|are|was|were) told": "pending, synced, published",
    r"bury|buried|set aside|set_aside": "roll back, quarantine",
    r"disk_room": "eviction",
    r"presence(?! and frequency)": "liveness lock",
    r"reckons?|reckoned": "cost model, estimate",
    r"whoever|nobody|somebody": "name who: the scheduler, the client, another replica",
    r"neighbours?|front doors?|doors?": "endpoint, interface, peer",
    r"gaps between tokens": "inter-token latency (ITL)",
    r"requests that move|request that moves|moved requests?": "migrated request",
    r"of late": "recently",
    r"house|rooms": "architecture, packages",
    r"R[0-9]{1,2}": "no requirement numbers",
    r"good-bye": "close",
    r"no company": "not batched",
    r"kept (?:prefix(?:es)?|KV)|KeptKV|KeptBytes|NamedKV": "lease",
}
FOLDERS = ("foreword", "docs", "dev", "benchmarks")
SUFFIXES = {".py", ".md", ".js", ".html", ".cpp", ".h", ".css"}


def _files() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield ROOT / "CHANGELOG.md"
    yield ROOT / "CONTRIBUTING.md"
    for folder in FOLDERS:
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES)


@pytest.mark.parametrize("pattern", REPLACED)
def test_vocabulary(pattern: str) -> None:
    """Words of the first version's private vocabulary do not come back."""
    word = re.compile(rf"\b(?:{pattern})\b", 0 if pattern.startswith("R[") else re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in _files()
        if "models" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if word.search(line)
    ]
    assert not found, f"write {REPLACED[pattern]!r}:\n" + "\n".join(found)


def test_first_words_of_docstrings_and_comments() -> None:
    """Docstrings and comments begin with a verb or a noun of the field, and so say at once what they are about: none begins
    with a question word that stands for the noun."""
    begins = re.compile(r'\s*(?:[rf]?"""|# )What\b')
    folders = "foreword", "tests", "benchmarks", "examples", "packages", "training", ".ci"
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if begins.match(line)
    ]
    assert not found, "begin with a verb or a noun:\n" + "\n".join(found)


def test_lines_of_documentation() -> None:
    """Lines of text have at most 120 characters; tables and code may be longer."""
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "dev").rglob("*.md"))):
        in_code = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            in_code ^= line.lstrip("> ").startswith("```")
            if (
                len(line) > 120
                and not in_code
                and not line.lstrip().startswith(("|", "![", "<!-- given:"))
                and " " in line.strip()
            ):
                found.append(f"{path.relative_to(ROOT)}:{number}")
    assert not found


@pytest.mark.parametrize(
    "page", ["docs/design.md", *(f"dev/{name}.md" for name in ("README", "paths", "blocks", "request"))]
)
def test_files_named_in_the_architecture(page: str) -> None:
    """Each file that the pages on the architecture name exists."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("docs/generate.py", "").replace("`docs/`", "")
    named = set(re.findall(r"\b([a-z_]+(?:/[a-z_]+)*(?:\.py|/))(?=[`\s])", text))
    files = itertools.chain((ROOT / "foreword").rglob("*"), (ROOT / "tests").rglob("*"))
    package = [f"/{path.relative_to(ROOT).as_posix()}" + "/" * path.is_dir() for path in files]
    assert named
    assert not {name for name in named if not any(path.endswith(f"/{name}") for path in package)}


CHANGES = ["Before you upgrade", "Your stored KV", "Added", "Changed", "Fixed"]


def test_form_of_the_changelog() -> None:
    """The newest version's section has the five headings in their order, entries only, and says nothing twice."""
    section = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    before, *texts = section.split("\n### ")
    assert not before.partition("\n")[2].strip(), "what stands above the headings belongs under one of them"
    parts = [text.split("\n", 1) for text in texts]
    assert [title for title, _ in parts] == CHANGES
    entries = []
    for title, text in parts:
        assert re.match(r"\n*- ", text), f"{title}: entries begin with a dash"
        for line in text.splitlines():
            assert not line or line.startswith(("- ", "  ")), f"{title}: no text between entries: {line}"
        entries += [" ".join(entry.split()) for entry in re.split(r"^- ", text, flags=re.MULTILINE)[1:]]
    sentences = [sentence.strip(" .*") for entry in entries for sentence in re.split(r"(?<=[.:;]) ", entry)]
    assert not {said for said in sentences if len(said) > 25 and sentences.count(said) > 1}


def test_words_of_users_pages() -> None:
    """The pages for users can be read: what explains the code, and what was tried, is in dev/. References that are written from
    the code are looked up, not read."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    words = sum(len(text.split()) for text in texts if not text.startswith("<!-- Written by docs/generate.py"))
    assert words <= 82_000
