"""The newest requests: what each found cached, how long it took. Numbers only, no text; each tenant sees its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from foreword.engine.request import CacheReport, Delta, Request

KEPT = 1000
# Seconds after a look at the page in which requests are explained: an explanation costs the engine up to some milliseconds.
_WATCHED_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """A prompt that has been answered, or has not.

    Attributes:
        number: counts up.
        ended: seconds since the epoch.
        id: of the HTTP answer; a client may choose it.
        prefix: the named prefix before the prompt.
        first_token, seconds: from admission at the front door; None if there was no token.
        finish_reason: the engine's, or `abort` where the client went away.
        report: where the prompt's KV came from, if somebody watched.
    """

    number: int
    ended: float
    id: str
    salt: bytes
    prefix: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token: float | None
    seconds: float
    finish_reason: str
    report: CacheReport | None

    def plain(self) -> dict[str, Any]:
        """As JSON, without the salt."""
        shown = asdict(self)
        del shown["salt"]
        return shown


class RecentRequests:
    """Everything here runs on the event loop's thread."""

    def __init__(self) -> None:
        self._kept: deque[RecentRequest] = deque(maxlen=KEPT)
        self._count = 0
        self._looked = -_WATCHED_SECONDS

    def newest(self, salt: bytes, count: int) -> list[RecentRequest]:
        """A tenant's newest requests, the newest first. Requests that come soon after this will be explained."""
        self._looked = time.monotonic()
        mine = [one for one in self._kept if one.salt == salt]
        return mine[: -count - 1 : -1]

    @contextmanager
    def watch(self, requests: Sequence[Request], prefix: str | None) -> Iterator[Watch]:
        """Follow the prompts of one HTTP request until the end of the block."""
        explained = time.monotonic() - self._looked < _WATCHED_SECONDS
        watch = Watch([replace(one, want_cache_report=True) for one in requests] if explained else requests)
        try:
            yield watch
        finally:
            for prompt in range(len(requests)):
                self._count += 1
                self._kept.append(watch.result(prompt, self._count, prefix))


class Watch:
    """One HTTP request on its way through.

    Attributes:
        requests: what to run, one per prompt.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self._began = time.monotonic()
        self._first: dict[int, float] = {}
        self._last: dict[int, Delta] = {}
        self._output = [0] * len(requests)

    def note(self, prompt: int, delta: Delta) -> None:
        """A prompt's delta came. Where there are several sequences of a prompt, the first one stands for it."""
        self._output[prompt] += len(delta.tokens)
        if delta.index:
            return
        if delta.tokens and prompt not in self._first:
            self._first[prompt] = time.monotonic() - self._began
        self._last[prompt] = delta

    def result(self, prompt: int, number: int, prefix: str | None) -> RecentRequest:
        """What became of a prompt."""
        request, last = self.requests[prompt], self._last.get(prompt)
        return RecentRequest(
            number=number,
            ended=time.time(),
            id=request.id.rpartition(":")[0],
            salt=request.salt,
            prefix=prefix,
            prompt_tokens=len(request.tokens),
            cached_tokens=last.cached_tokens if last is not None else 0,
            output_tokens=self._output[prompt],
            first_token=self._first.get(prompt),
            seconds=time.monotonic() - self._began,
            finish_reason=(last.finish_reason if last is not None else None) or "abort",
            report=last.cache_report if last is not None else None,
        )
