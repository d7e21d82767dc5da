"""The causes of cache misses, found from the requests that the router forwards, and the records of a trace: for any engine
behind it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from foreword.api.misses.causes import Miss, MissFinder
from foreword.api.request import CacheControl
from foreword.observability.recording import RequestRecord, TraceRecorder
from foreword.router.attempt import DecisionLog
from foreword.router.extras import Misses, ServedRequest
from foreword.router.router_metrics import RouterMetrics
from foreword.routing.fleet import Fleet, PlacedRequest
from foreword.store.background_jobs import BackgroundJobs
from foreword.usage import MissExplained

# Shorter prompts cost too little to ask why.
_MIN_TOKENS: Final = 256
_MAX_WAITING: Final = 256
# Requests after which one is forgotten. Few of them may be long enough to be compared, and the outlines of these would fill
# their limit after hundreds of thousands of requests only. A cache has rarely kept what was asked this long ago.
_WINDOW: Final = 8192


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


class RouterMisses(Misses):
    """Compares finished requests on a thread. Its methods run on the event loop.

    Args:
        recorder: of the trace; a record has the cause if it is known. None: there is no trace.
    """

    def __init__(self, metrics: RouterMetrics, decisions: DecisionLog, recorder: TraceRecorder | None) -> None:
        self._metrics = metrics
        self._decisions = decisions
        self._recorder = recorder
        self._finder = MissFinder(window=_WINDOW)
        self._jobs = BackgroundJobs("misses", most=_MAX_WAITING)
        self._passed = 0  # requests since the last that was compared
        self._held: RequestRecord | None = None
        self._waiting: dict[int, RequestRecord | None] = {}

    def follow(self, fleet: Fleet) -> None:
        if self._recorder is not None:
            fleet.on_finished = record_finished(self._hold)

    def _hold(self, record: RequestRecord) -> None:
        """Keep the record of a request that finishes now; `finished` follows."""
        self._held = record

    def _record(self, record: RequestRecord) -> None:
        if self._recorder is not None:
            self._recorder.add(record)

    def finished(self, served: ServedRequest) -> asyncio.Future[Miss] | None:
        record, self._held = self._held, None
        if not _is_compared(served) or len(self._waiting) >= _MAX_WAITING:
            self._passed += 1
            if record is not None:
                self._record(record)
            return None
        passed, self._passed = self._passed, 0
        explained = asyncio.wrap_future(self._jobs.submit(self._explain, served, passed))
        self._waiting[id(explained)] = record
        explained.add_done_callback(lambda done: self._note(served.id, done))
        return explained

    def close(self) -> None:
        self._jobs.stop()
        self._jobs.close(threading.TIMEOUT_MAX)
        for record in self._waiting.values():
            if record is not None:
                self._record(record)
        self._waiting.clear()
        if self._recorder is not None:
            self._recorder.close()

    def _explain(self, served: ServedRequest, passed: int) -> Miss:
        self._finder.passed(passed)
        conversation = self._finder.begin(
            replace(served.request, cache=CacheControl(key=served.session)),
            served.tenant,
            model=served.model,
            salt=served.request.cache_salt,
            began=served.began,
        )
        conversation.computed_at = served.computed_at
        return self._finder.explain(
            conversation,
            served.prompt_tokens or 0,
            served.cached_tokens or 0,
            replica=served.replica,
            block_size=served.block_size,
        )

    def _note(self, request_id: str, done: asyncio.Future[Miss]) -> None:
        record = self._waiting.pop(id(done), None)
        if done.cancelled():
            return
        miss = done.result()
        self._metrics.miss(miss.cause, miss.tokens_lost)
        self._decisions.explained(request_id, miss)
        if record is not None:
            explained = MissExplained(request_id, miss.cause, miss.where, miss.tokens_lost)
            self._record(dataclasses.replace(record, miss=explained))


def _is_compared(served: ServedRequest) -> bool:
    known = served.cached_tokens is not None and (served.prompt_tokens or 0) >= _MIN_TOKENS
    return known and not served.request.path
