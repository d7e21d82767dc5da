"""Records the router's requests as a trace (`--record`)."""

from __future__ import annotations

from collections.abc import Callable

from foreword.observability.recording import RequestRecord
from foreword.routing.fleet import PlacedRequest


def record_finished(write: Callable[[RequestRecord], None]) -> Callable[[PlacedRequest], None]:
    """A callback for `Fleet.on_finished`. Requests whose prompt was not tokenized have no blocks and are not recorded."""

    def record(request: PlacedRequest) -> None:
        if not request.keys and request.tokens >= request.block_size:
            return
        write(
            RequestRecord(
                request.sent_at,
                request.keys,
                request.block_size,
                max(request.tokens, 1),
                max(request.output_tokens or 1, 1),
                request.cached_tokens,
                None if request.first_at is None else request.first_at - request.sent_at,
                request.finished_at - request.sent_at,
                request.session,
                request.decoding.name,
            )
        )

    return record
