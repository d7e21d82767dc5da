"""Errors as aiohttp responses."""

from __future__ import annotations

from aiohttp import web

from foreword.api.errors import ErrorResponse


def to_aiohttp(answer: ErrorResponse) -> web.Response:
    """An error of `foreword.api.errors` as aiohttp's response."""
    return web.Response(body=answer.body, status=answer.status, headers=answer.headers)
