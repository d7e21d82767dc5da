"""Hooks of the site (mkdocs.yml): a page may link to a file of the repository outside of docs/, relative to itself, as GitHub
shows it; on the site such a link leads to the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace links that leave docs/ by URLs of the repository."""
    folder = Path(page.file.abs_src_path).parent

    def outside(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if target.is_relative_to(ROOT / "docs") or not target.exists():
            return link[0]  # mkdocs checks it
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{target.relative_to(ROOT).as_posix()}{link[2] or ''})"

    return _LINK.sub(outside, markdown)
