"""Records the router's requests as a trace (`--record`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foreword.config import ServerConfig
from foreword.observability.recording import RequestRecord, TraceRecorder
from foreword.routing.fleet import FinishedRequest


def open_recorder(config: ServerConfig) -> TraceRecorder | None:
    """None if no recording is configured. Raises ConfigError."""
    return TraceRecorder(Path(config.record), salt=config.record_salt) if config.record is not None else None


def record_finished(recorder: TraceRecorder) -> Callable[[FinishedRequest], None]:
    """A callback for `Fleet.on_finished`. Requests whose prompt was not tokenized have no blocks and are not recorded."""

    def record(request: FinishedRequest) -> None:
        placed, sent = request.placed, request.sent
        if not placed.keys and sent.tokens >= placed.block_size:
            return
        recorder.record(
            RequestRecord(
                sent.sent_at,
                placed.keys,
                placed.block_size,
                max(sent.tokens, 1),
                max(request.output_tokens or 1, 1),
                request.cached_tokens,
                None if request.first_at is None else request.first_at - sent.sent_at,
                request.finished_at - sent.sent_at,
                placed.session,
                placed.decoding.name,
            )
        )

    return record
