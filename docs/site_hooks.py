"""Hooks of the site (mkdocs.yml): a page may link to a file of the repository outside of docs/, relative to itself, as GitHub
shows it; on the site such a link leads to the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# How much a page counts in the site's search, by the start of its path; the first that fits. A user's word stands on many
# pages of the reference, and is answered on one of the guides.
BOOSTS = {
    "design": 0.1,
    "operations/alerts": 0.1,
    "reference/": 0.15,
    "benchmarks": 0.15,
    "concepts/": 0.4,
    "glossary": 0.4,
}
_LINK = re.compile(r"\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace links that leave docs/ by URLs of the repository, and say what the page counts in the search."""
    for start, boost in BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta.setdefault("search", {"boost": boost})
            break
    folder = Path(page.file.abs_src_path).parent

    def outside(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if target.is_relative_to(ROOT / "docs") or not target.exists():
            return link[0]  # mkdocs checks it
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{target.relative_to(ROOT).as_posix()}{link[2] or ''})"

    return _LINK.sub(outside, markdown)
