"""Observers of an engine that record its requests and trace them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from foreword.errors import ForewordError
from foreword.events import Event, FirstToken, PrefixLookup, RequestFinished
from foreword.newest import Newest
from foreword.observability.recording import RequestRecord, TraceRecorder
from foreword.observability.tracing import Attributes, Span, Tracer
from foreword.usage import MissExplained

# First-token times of unfinished requests.
_MAX_UNFINISHED: Final = 8192
# Records that wait for the cause of their miss.
_MAX_PENDING: Final = 1024
# Finish reasons of requests that are recorded.
_COMPLETE: Final = ("stop", "length")


class EngineRecorder:
    """An observer that records an engine's complete requests; aborted requests are not recorded.

    Args:
        explained: misses of requests are explained (`MissExplained`): a record waits for that.
    """

    def __init__(self, recorder: TraceRecorder, block_size: int, *, explained: bool = False) -> None:
        self.recorder = recorder
        self._most_pending = _MAX_PENDING if explained else 0
        self._block_size = block_size
        self._ttft: Newest[str, float] = Newest(_MAX_UNFINISHED)
        self._misses: Newest[str, MissExplained] = Newest(_MAX_UNFINISHED)
        self._pending: OrderedDict[str, RequestRecord] = OrderedDict()

    def close(self) -> None:
        """Record what is pending, and close the recorder. The engine has ended."""
        self._record_pending(0)
        self.recorder.close()

    def notify(self, event: Event) -> None:
        if isinstance(event, FirstToken):
            self._ttft[event.request_id] = event.seconds
        elif isinstance(event, RequestFinished):
            self._finished(event)
        elif isinstance(event, MissExplained):
            self._explained(event)

    def _finished(self, event: RequestFinished) -> None:
        ttft = self._ttft.pop(event.request_id, None)
        miss = self._misses.pop(event.request_id, None)
        if event.reason not in _COMPLETE or not event.prompt_tokens:
            return
        record = RequestRecord(
            time.monotonic() - event.seconds,
            event.keys,
            self._block_size,
            event.prompt_tokens,
            max(event.output_tokens, 1),
            event.cached_tokens,
            ttft,
            event.seconds,
            miss=miss,
        )
        if miss is not None or event.request_id in self._pending:
            self.recorder.add(record)
            return
        self._pending[event.request_id] = record
        self._record_pending(self._most_pending)

    def _explained(self, event: MissExplained) -> None:
        record = self._pending.pop(event.request_id, None)
        if record is not None:
            self.recorder.add(replace(record, miss=event))
            return
        self._misses[event.request_id] = event

    def _record_pending(self, most: int) -> None:
        while len(self._pending) > most:
            self.recorder.add(self._pending.popitem(last=False)[1])


@dataclass(slots=True)
class EngineTimes:
    """When the engine admitted a request, after waiting `loading` seconds for stores, and when its first token came."""

    admitted: float | None = None
    loading: float = 0.0
    cached_tokens: int = 0
    first: float | None = None


class EngineTraces:
    """Makes the spans of a server's requests, with their parts in the engine: queue, load, prefill, decode.

    It is an observer of the engine and called on the engine's thread.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._times: dict[str, EngineTimes] = {}

    def notify(self, event: Event) -> None:
        if not isinstance(event, (PrefixLookup, FirstToken)) or (times := self._times.get(event.request_id)) is None:
            return
        # The first of a prompt's sequences counts.
        if isinstance(event, FirstToken):
            times.first = times.first or time.monotonic()
        elif times.admitted is None:
            times.admitted, times.loading, times.cached_tokens = time.monotonic(), event.load_seconds, event.hit_tokens

    @contextmanager
    def request(self, headers: Mapping[str, str], attributes: Attributes, prompts: Mapping[str, int]) -> Iterator[None]:
        """A span around the block. `prompts`: the tokens of each prompt, by the name of its engine request."""
        span, arrived, problem = self.tracer.request("llm_request", headers, attributes), time.monotonic(), ""
        self._times.update((name, EngineTimes()) for name in prompts)
        try:
            yield
        except ForewordError as error:
            problem = error.message
            raise
        finally:
            for name, tokens in prompts.items():
                _add_parts(span, self._times.pop(name), arrived, tokens)
            span.end(problem)


def _add_parts(span: Span, times: EngineTimes, arrived: float, prompt_tokens: int) -> None:
    now = time.monotonic()
    admitted, first = times.admitted, times.first
    found = max(admitted - times.loading, arrived) if admitted is not None else now
    span.part("queue", arrived, found)
    if admitted is None:
        return
    if times.loading:
        span.part("load", found, admitted)
    tokens = {"gen_ai.usage.prompt_tokens": prompt_tokens, "foreword.cached_tokens": times.cached_tokens}
    span.part("prefill", admitted, first or now, tokens)
    if first is not None:
        span.part("decode", first, now)
