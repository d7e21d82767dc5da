"""Dialects that a replica need not know: a router translates them to chat completions."""

from __future__ import annotations

from typing import Final

from foreword.api.dialects import messages, responses
from foreword.api.dialects.dialect import Dialect
from foreword.api.dialects.dialect_writers import WRITERS
from foreword.api.dialects.messages import MessagesBody
from foreword.api.dialects.messages_writer import error_response
from foreword.api.dialects.responses import ResponsesBody
from foreword.api.dialects.writer import ResponseHead
from foreword.api.errors import openai_error
from foreword.api.request import GenerateRequest
from foreword.errors import ForewordError


def _error_event(request: GenerateRequest, error: ForewordError) -> bytes:
    return WRITERS[request.dialect](request, ResponseHead("", "", 0)).error(error)


DIALECTS: Final = (
    Dialect("responses", "/v1/responses", "resp_", ResponsesBody, responses.parse, openai_error, _error_event),
    Dialect("messages", "/v1/messages", "msg_", MessagesBody, messages.parse, error_response, _error_event),
)
