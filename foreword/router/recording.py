"""What the router tells its recorder of each request (`--record`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foreword.config import ServerConfig
from foreword.observability.recording import Recorded, Recorder
from foreword.routing.fleet import Ended


def recorder_of(config: ServerConfig) -> Recorder | None:
    """None if nothing is to be recorded. Raises ConfigError."""
    return Recorder(Path(config.record), salt=config.record_salt) if config.record is not None else None


def told(recorder: Recorder) -> Callable[[Ended], None]:
    """For `Fleet.on_finished`. Requests whose prompt was not looked at have no blocks to record."""

    def note(ended: Ended) -> None:
        if not ended.keys and ended.prompt_tokens >= ended.block_size:
            return
        first = None if ended.first_at is None else ended.first_at - ended.sent_at
        recorder.record(
            Recorded(
                ended.sent_at,
                ended.keys,
                ended.block_size,
                max(ended.prompt_tokens, 1),
                max(ended.output_tokens or 1, 1),
                ended.cached_tokens,
                first,
                ended.ended_at - ended.sent_at,
                ended.session,
                ended.replica,
            )
        )

    return note
