"""An answer of a server as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

from foreword.api import sse
from foreword.api.errors import error_body
from foreword.api.event_stream import COMMENTS, HEADERS, EventStream, comments_of
from foreword.api.front import Call
from foreword.errors import ForewordError

# Seconds without an event after which a stream between servers sends a comment, so that the reader knows it is alive.
KEEP_ALIVE: Final = 5.0
# A reader that asks for comments gets them no more often, in seconds.
_LEAST_KEEP_ALIVE: Final = 0.25


async def send_events(
    call: Call,
    events: AsyncGenerator[bytes, None],
    error_event: Callable[[ForewordError], bytes] = lambda error: sse.encode(error_body(error)),
    keep_alive: float = KEEP_ALIVE,
) -> None:
    """Answer a call with events. The head is sent with the first one, which may be empty.

    An error before it is raised, to be answered with its own HTTP status; one after it is sent as an event and ends the stream.
    When the client disconnects the generator is closed at once.
    """
    wanted = max(comments_of(call.headers), _LEAST_KEEP_ALIVE)
    own = dict(HEADERS)
    if COMMENTS in call.headers:
        keep_alive = min(keep_alive, wanted)
        own[COMMENTS] = f"{keep_alive:g}"
    stream = EventStream(call, lambda _: own, keep_alive)
    try:
        async with aclosing(events):
            async for event in events:
                if not stream.begun:
                    stream.send_comments()
                if not event or not stream.write_now(event):
                    await stream.write(event)
    except ForewordError as error:
        if not stream.begun:
            raise
        call.failure = error
        await stream.write(error_event(error))
    finally:
        stream.stop()
    await stream.close()
