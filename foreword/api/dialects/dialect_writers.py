"""The table of writers: which dialect is answered by which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from foreword.api.dialects.messages_writer import MessagesWriter
from foreword.api.dialects.openai_writer import ChatWriter, CompletionWriter
from foreword.api.dialects.responses_writer import ResponsesWriter
from foreword.api.dialects.writer import ResponseHead, Writer
from foreword.api.request import DialectName, GenerateRequest

_WRITERS: Final[Mapping[DialectName, Callable[[GenerateRequest, ResponseHead], Writer]]] = {
    "chat": ChatWriter,
    "completions": CompletionWriter,
    "responses": ResponsesWriter,
    "messages": MessagesWriter,
}


def writer_for(request: GenerateRequest, head: ResponseHead) -> Writer:
    """The writer of the response to a request, in its dialect."""
    return _WRITERS[request.dialect](request, head)
