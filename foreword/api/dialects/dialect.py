"""A dialect: a format of requests, and of the errors that answer them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from foreword.api.dialects.decode import Limits, TooMany
from foreword.api.dialects.foreign import read_foreign
from foreword.api.errors import BodyTooLarge, ErrorResponder
from foreword.api.request import ClientBody, DialectName, GenerateRequest
from foreword.errors import BadRequest, ForewordError


@dataclass(frozen=True, slots=True)
class Dialect:
    """A format of requests. Its answers are written by `dialect_writers`.

    Attributes:
        path: where clients send it.
        id_prefix: begins the id of each response.
        body: the fields of a request. parse: a body to a request; raises BadRequest and BodyTooLarge.
        error_response: the answer to a request that fails before anything was sent.
        error_event: the end of a stream that fails.
    """

    name: DialectName
    path: str
    id_prefix: str
    body: type[Struct]
    parse: Callable[[bytes, Limits], GenerateRequest]
    error_response: ErrorResponder
    error_event: Callable[[GenerateRequest, ForewordError], bytes]

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
            # The request keeps it, and their tracebacks keep the request.
            refusal.__traceback__ = refusal.__context__ = refusal.__cause__ = None
        return replace(request, body=body, model=request.model or None)  # vLLM takes an empty name for none
