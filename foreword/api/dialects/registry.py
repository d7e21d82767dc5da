"""The table of dialects: which path speaks which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from foreword.api import sse
from foreword.api.dialects import chat, completions
from foreword.api.dialects.chat import ChatBody
from foreword.api.dialects.completions import CompletionBody
from foreword.api.dialects.dialect import Dialect
from foreword.api.errors import error_body, openai_error
from foreword.api.request import DialectName, GenerateRequest
from foreword.errors import ForewordError
from foreword.plugins import of_product

# Has responses and messages, in a package of its own.
_MORE: Final = "foreword.api.dialects.more_dialects:DIALECTS"


def _error_event(request: GenerateRequest, error: ForewordError) -> bytes:
    return sse.encode(error_body(error))


def _table() -> dict[DialectName, Dialect]:
    found = [
        Dialect("chat", "/v1/chat/completions", "chatcmpl-", ChatBody, chat.parse, openai_error, _error_event),
        Dialect(
            "completions", "/v1/completions", "cmpl-", CompletionBody, completions.parse, openai_error, _error_event
        ),
    ]
    return {one.name: one for one in (*found, *(of_product(_MORE) or ()))}


# Dialects that are installed.
DIALECTS: Final[Mapping[DialectName, Dialect]] = _table()
