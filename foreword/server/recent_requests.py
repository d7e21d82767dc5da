"""The newest finished requests, for the dashboard: cached tokens, times, cache reports. Numbers only, no text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from foreword.engine.request import Request
from foreword.server.job import Job

KEPT = 1000
# Seconds after a look at the page in which requests get a cache report. A report costs the engine up to some milliseconds.
_REPORT_SECONDS = 15.0


class RecentRequests:
    """Runs on the event loop's thread."""

    def __init__(self) -> None:
        self._kept: deque[tuple[bytes, dict[str, Any]]] = deque(maxlen=KEPT)
        self._count = 0
        self._viewed = -_REPORT_SECONDS

    def newest(self, salt: bytes, count: int) -> list[dict[str, Any]]:
        """The newest requests of the tenant with this salt, newest first. Requests in the next seconds get a cache report."""
        self._viewed = time.monotonic()
        own = [shown for owner, shown in self._kept if owner == salt]
        return own[: -count - 1 : -1]

    @contextmanager
    def record(self, job: Job) -> Iterator[list[Request]]:
        """Remember the job's prompts at the end of the block. Gives the engine's requests to run."""
        started = time.monotonic()
        report = started - self._viewed < _REPORT_SECONDS
        try:
            yield [replace(one, want_cache_report=True) if report else one for one in job.requests]
        finally:
            for prompt in range(len(job.requests)):
                self._count += 1
                self._kept.append((job.owner, self._describe(job, prompt, started)))

    def _describe(self, job: Job, prompt: int, started: float) -> dict[str, Any]:
        """One prompt as JSON. `finish_reason` is `abort` if the client disconnected; `ttft` is None without a token."""
        request, progress, now = job.requests[prompt], job.progress[prompt], time.monotonic()
        first, report = progress.first_token_at, progress.cache_report
        return {
            "number": self._count,
            "ended": time.time(),
            "id": request.id.rpartition(":")[0],
            "dialect": job.request.dialect,
            "prefix": job.request.prefix,
            "prompt_tokens": len(request.tokens),
            "cached_tokens": progress.cached_tokens,
            "output_tokens": progress.output_tokens,
            "ttft": first - started if first is not None else None,
            "seconds": now - started,
            "finish_reason": progress.finish_reason or "abort",
            "report": asdict(report) if report is not None else None,
            "miss": asdict(progress.miss) if progress.miss is not None else None,
        }
