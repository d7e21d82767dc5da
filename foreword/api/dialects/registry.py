"""The table of dialects: which path speaks which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from foreword.api.dialects import chat, completions, messages, responses
from foreword.api.dialects.chat import ChatBody
from foreword.api.dialects.completions import CompletionBody
from foreword.api.dialects.decode import Limits, TooMany
from foreword.api.dialects.foreign import read_foreign
from foreword.api.dialects.messages import MessagesBody
from foreword.api.dialects.messages_writer import MessagesWriter, error_response
from foreword.api.dialects.openai_writer import ChatWriter, CompletionWriter
from foreword.api.dialects.responses import ResponsesBody
from foreword.api.dialects.responses_writer import ResponsesWriter
from foreword.api.dialects.writer import ResponseHead, Writer
from foreword.api.errors import BodyTooLarge, ErrorResponder, openai_error
from foreword.api.request import ClientBody, DialectName, GenerateRequest
from foreword.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Dialect:
    """A format of requests and responses.

    Attributes:
        path: where clients send it.
        id_prefix: begins the id of each response.
        body: the fields of a request. parse: a body to a request; raises BadRequest and BodyTooLarge.
        writer: makes the writer of one response.
    """

    name: DialectName
    path: str
    id_prefix: str
    body: type[Struct]
    parse: Callable[[bytes, Limits], GenerateRequest]
    writer: Callable[[GenerateRequest, ResponseHead], Writer]
    error_response: ErrorResponder

    def read(self, raw: bytes, limits: Limits) -> GenerateRequest:
        """A request with its body, for a router: what this server does not understand is left to others.

        Raises BadRequest for what no server understands, or the router needs, and BodyTooLarge.
        """
        body = ClientBody(raw)
        try:
            request = self.parse(raw, limits)
            if len(raw) > limits.text_bytes:
                raise BodyTooLarge(limits.text_bytes)
        except (TooMany, BodyTooLarge):
            raise
        except BadRequest as refusal:
            limits.check(raw)
            request = read_foreign(self.parse, body, limits, refusal)
        return replace(request, body=body, model=request.model or None)  # vLLM takes an empty name for none


DIALECTS: Final[Mapping[DialectName, Dialect]] = {
    one.name: one
    for one in (
        Dialect("chat", "/v1/chat/completions", "chatcmpl-", ChatBody, chat.parse, ChatWriter, openai_error),
        Dialect(
            "completions", "/v1/completions", "cmpl-", CompletionBody, completions.parse, CompletionWriter, openai_error
        ),
        Dialect("responses", "/v1/responses", "resp_", ResponsesBody, responses.parse, ResponsesWriter, openai_error),
        Dialect("messages", "/v1/messages", "msg_", MessagesBody, messages.parse, MessagesWriter, error_response),
    )
}
