"""Changes to chats that make them hit the cache (`foreword.api.normalisers`), as the router applies them."""

from __future__ import annotations

import dataclasses

import msgspec

from foreword.api.dialects.chat_reader import ChatReader
from foreword.api.normalisers import HEADER, Normalisers
from foreword.api.output import Piece
from foreword.api.sse import DONE, EventParser
from foreword.api.tenants import Tenant
from foreword.errors import ForewordError
from foreword.router.client_request import ClientRequest


class NormalisedChat:
    """What was changed in one chat, and the parts of the answer that later turns may need.

    Attributes:
        headers: for the response; they name the changes.
    """

    def __init__(self, normalisers: Normalisers, tenant: str, request: ClientRequest, changes: str) -> None:
        self.headers = {HEADER: changes} if changes else {}
        self._normalisers = normalisers
        self._tenant = tenant
        self._request = request
        # Nothing is read where nothing is remembered.
        self._reads = normalisers.answers is not None and request.single
        self._reader = ChatReader()
        self._parser = EventParser()
        self._pieces: list[Piece] = []

    def stream(self, data: bytes) -> None:
        """Events that were sent to the client."""
        if not self._reads:
            return
        try:
            for event in self._parser.feed(data):
                if event.data == DONE:
                    self._remember()
                elif event.data:
                    self._pieces += [piece for delta in self._reader.read_chunk(event.data) for piece in delta.pieces]
        except ForewordError:
            # The answer is not restored then.
            self._reads = False

    def whole(self, data: bytes) -> None:
        """The response that was sent to the client."""
        if not self._reads:
            return
        try:
            self._pieces = [piece for delta in self._reader.read_whole(data) for piece in delta.pieces]
        except ForewordError:
            return
        self._remember()

    def _remember(self) -> None:
        self._normalisers.remember(self._tenant, self._request.body, self._pieces)
        self._reads = False


def normalise(
    normalisers: Normalisers, tenant: Tenant, request: ClientRequest
) -> tuple[ClientRequest, NormalisedChat | None]:
    """The request to send, and what is to be done with the response; None if nothing."""
    if not normalisers or request.interface != "chat":
        return request, None
    body, changes = normalisers.apply(request.body, tenant.name)
    chat = NormalisedChat(normalisers, tenant.name, request, changes)
    if changes:
        request = dataclasses.replace(request, body=body, raw=msgspec.json.encode(body))
    return request, chat
