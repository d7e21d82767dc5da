"""The dashboard's own files. They contain no data, so they need no API key."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Final, NamedTuple

from foreword.api.front import Answer, Call, Handler
from foreword.api.routes import NO_BODY, Meter, Right, Routes
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
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


class PageFile(NamedTuple):
    """A file with its entity tag."""

    content: bytes
    tag: str
    media_type: str


@functools.cache
def files() -> dict[str, PageFile]:
    """All files of the dashboard by name."""
    found = {}
    for path in sorted(_FOLDER.iterdir()):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.name] = PageFile(content, tag, _TYPES[path.suffix])
    return found


def add_pages(routes: Routes[Handler]) -> None:
    """Add `/` and `/ui`."""

    async def root(call: Call) -> Answer:
        return Answer(307, b"", {"location": "ui"})

    async def page(call: Call) -> Answer:
        return respond(call.names.get("name"), call.headers.get("if-none-match"))

    for path, handler in (("/", root), ("/ui", page), ("/ui/{name:path}", page)):
        routes.add("GET", path, right=Right.ANYONE, meter=Meter.FREE, body=NO_BODY, tag=None)(handler)


def respond(name: str | None, known_tag: str | None) -> Answer:
    """The response to `/ui/NAME`, or to `/ui` if `name` is None. Raises NotFound.

    Args:
        known_tag: the browser's `If-None-Match`.
    """
    if name is None:
        # Relative, so that it also works behind a proxy that adds a path.
        return Answer(307, b"", {**_HEADERS, "location": "ui/"})
    file = files().get(name or PAGE)
    if file is None:
        raise NotFound(f"The dashboard has no file {name!r}")
    headers = {**_HEADERS, "content-type": file.media_type, "etag": file.tag}
    return Answer(304, b"", headers) if known_tag == file.tag else Answer(200, file.content, headers)
