"""The page's own files. They hold no data, so nobody needs a key for them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from foreword.errors import NotFound

PAGE: Final = "index.html"
_FOLDER: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts, styles and data from this server only; nothing inline, no frames around it.
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


class File:
    """A file as it is sent. Raises OSError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.content = path.read_bytes()
        self.tag = f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'
        self.headers = {**HEADERS, "content-type": _TYPES[path.suffix], "etag": self.tag}

    def answer(self, known: str | None) -> tuple[int, bytes]:
        """Status and body, for a browser that has the version `known` (its `If-None-Match`)."""
        return (304, b"") if known == self.tag else (200, self.content)


def files() -> dict[str, File]:
    """All files of the page by name."""
    return {path.name: File(path) for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}


def find(known: Mapping[str, File], name: str) -> File:
    """A file by name; the page itself for "". Raises NotFound."""
    found = known.get(name or PAGE)
    if found is None:
        raise NotFound(f"The dashboard has no file {name!r}")
    return found
