"""Requests of other dialects as chat completions, which every replica knows; their answers are written in the client's dialect.

Placement, failover and all guards work on the chat completion; nothing of them depends on the client's dialect.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace

from foreword.api.dialects.answer_reader import EventParser, read_error
from foreword.api.dialects.chat_request import write_request
from foreword.api.dialects.choice_reader import ChoiceReader
from foreword.api.dialects.conversations import conversation
from foreword.api.dialects.dialect import Dialect
from foreword.api.dialects.dialect_writers import WRITERS
from foreword.api.dialects.writer import ChoiceOutput, ResponseHead, to_json
from foreword.api.errors import ErrorResponse
from foreword.api.output import Usage
from foreword.api.request import ClientBody, GenerateRequest, Message, ReplicaKind
from foreword.api.sse import DONE
from foreword.errors import ForewordError
from foreword.router.extras import Translation

# Keeps a response: its id, the conversation with the answer, and the response as JSON.
Store = Callable[[str, tuple[Message, ...], bytes], None]


def chat_request(request: GenerateRequest, kind: ReplicaKind) -> GenerateRequest:
    """A request of another dialect as a chat completion for replicas of this kind. Raises BadRequest."""
    if request.refusal is not None:
        raise request.refusal
    body = write_request(request, kind)
    if request.prefix is not None:
        body["prefix"] = request.prefix
    return replace(request, dialect="chat", body=ClientBody(to_json(body)), include_usage=True)


class ChatTranslation(Translation):
    """A request of another dialect that is a chat completion to its replicas.

    Args:
        store: called with the complete response if the client wants to continue it later.
    """

    def __init__(
        self, dialect: Dialect, request: GenerateRequest, model: str, request_id: str, store: Store | None = None
    ) -> None:
        self.dialect = dialect
        self.request = request
        self._request_id = request_id
        self._store = store
        head = ResponseHead(f"{dialect.id_prefix}{request_id}", model, int(time.time()))
        self._response_id = head.id
        self._writer = WRITERS[request.dialect](request, head)
        self._reader = ChoiceReader()
        self._parser = EventParser()
        self._answer = ChoiceOutput()

    def begin(self, prompt_tokens: int) -> bytes:
        return b"".join(self._writer.start(Usage(prompt_tokens=prompt_tokens)))

    def events(self, data: bytes) -> bytes:
        found: list[bytes] = []
        for event in self._parser.feed(data):
            if event.data == DONE:
                found.append(self._writer.end(self._reader.usage, self._reader.report))
                self._keep()
            elif not event.data:
                found.append(event.raw + b"\n\n")
            else:
                for delta in self._reader.read_deltas(event.data):
                    self._answer.add(delta)
                    found += self._writer.events(delta)
        return b"".join(found)

    def whole(self, data: bytes) -> bytes:
        delta = self._reader.read_whole(data)
        self._answer.add(delta)
        self._writer.add(delta)
        answer = to_json(self._writer.whole(self._reader.usage, self._reader.report))
        self._keep(answer)
        return answer

    def error_event(self, error: ForewordError) -> bytes:
        return self._writer.error(error)

    def error_response(self, status: int, data: bytes) -> ErrorResponse:
        return self.dialect.error_response(read_error(status, data), None, self._request_id)

    def _keep(self, answer: bytes | None = None) -> None:
        if self._store is None or not self.request.store:
            return
        if answer is None:
            answer = to_json(self._writer.whole(self._reader.usage, self._reader.report))
        self._store(self._response_id, conversation(self.request, self._answer), answer)
