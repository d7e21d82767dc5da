"""The table of writers: the dialect of a request -> the class that writes its response."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from foreword.api.dialects.messages_writer import MessagesWriter
from foreword.api.dialects.openai_writer import ChatWriter, CompletionWriter
from foreword.api.dialects.responses_writer import ResponsesWriter
from foreword.api.dialects.writer import ResponseHead, Writer
from foreword.api.request import DialectName, GenerateRequest

WRITERS: Final[Mapping[DialectName, Callable[[GenerateRequest, ResponseHead], Writer]]] = {
    "chat": ChatWriter,
    "completions": CompletionWriter,
    "responses": ResponsesWriter,
    "messages": MessagesWriter,
}
