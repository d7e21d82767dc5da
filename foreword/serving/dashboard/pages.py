"""The page's own files. They hold no data, so nobody needs a key for them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from foreword.errors import NotFound, Unauthorized

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


class _Door(Protocol):
    def tenant(self, request: Request) -> object: ...


def welcome(door: _Door, request: Request) -> bool:
    """Whether a request comes with a key that is known, or needs none: asked for so that no browser logs an error 401."""
    try:
        door.tenant(request)
    except Unauthorized:
        return False
    return True


class File:
    """A file as it is sent. Raises OSError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.content = path.read_bytes()
        self.media_type = _TYPES[path.suffix]
        self.tag = f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    def answer(self, request: Request) -> Response:
        """The file, or 304 if the browser has it."""
        headers = {**HEADERS, "etag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def files() -> dict[str, File]:
    """All files of the page by name."""
    return {path.name: File(path) for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}


def router() -> APIRouter:
    """`/ui` and its files."""
    known = files()
    routes = APIRouter(prefix="/ui", tags=["dashboard"], include_in_schema=False)

    @routes.get("")
    async def to_folder() -> Response:
        # Relative, so that it also works behind a proxy that adds a path.
        return RedirectResponse("ui/", headers=HEADERS)

    @routes.get("/")
    async def page(request: Request) -> Response:
        return known[PAGE].answer(request)

    @routes.get("/{name}")
    async def file(request: Request, name: str) -> Response:
        if name not in known:
            raise NotFound(f"The dashboard has no file {name!r}")
        return known[name].answer(request)

    return routes
