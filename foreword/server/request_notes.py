"""Notes of a server about its requests: those that run, the newest finished ones, and the causes of their cache misses."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from foreword.api.misses.causes import MissFinder
from foreword.api.misses.outline import Conversation, first_difference, outline
from foreword.api.request import GenerateRequest
from foreword.api.work_queue import WorkQueue
from foreword.engine.request import Delta, Request
from foreword.errors import NotFound, did_you_mean
from foreword.server.job import Job
from foreword.transfer.errors import CannotMigrate
from foreword.usage import MissExplained

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine

# Longer conversations are hashed on a thread.
_INLINE_CHARACTERS: Final = 4096
_NEWEST = 1000
# Seconds after a look at the page in which requests get a cache report. A report costs the engine up to some milliseconds.
_REPORT_SECONDS = 15.0


class ServerMisses:
    """The causes of cache misses: found for each prompt, for its response, the metrics and the recording. Runs on the event
    loop's thread."""

    def __init__(self) -> None:
        self._finder = MissFinder()

    async def outlines(self, work: WorkQueue, engine: AsyncEngine, job: Job, size: int) -> tuple[Conversation, ...]:
        """The conversations of a job, one per prompt; `size` is their length in characters."""
        request, tenant = job.request, job.owner.hex()
        make = partial(
            _outlines,
            request,
            tenant=tenant,
            model=engine.info.name,
            salt=request.cache_salt or "",
            template=engine.tokenizer.chat_template,
            known=self._finder.known_messages(request, tenant),
        )
        return make() if size <= _INLINE_CHARACTERS else await work.run(size, make)

    def begin(self, job: Job, requests: Sequence[Request], now: float) -> list[Request]:
        """The job is admitted. Its requests, with those that they supersede: where a client has shortened a history."""
        found = list(requests)
        for number, conversation in enumerate(job.conversations):
            conversation.began, conversation.request = now, requests[number].id
            self._finder.add(conversation)
            old = conversation.nearest
            difference = first_difference(old, conversation) if old is not None else None
            if old is not None and difference is not None and difference.change == "compacted":
                found[number] = replace(found[number], supersedes=old.request)
        return found

    def note(self, engine: AsyncEngine, job: Job, prompt: int, delta: Delta) -> None:
        """A delta was counted. With the last one of a prompt the cause is known."""
        if delta.index != job.requests[prompt].index or prompt >= len(job.conversations):
            return
        conversation, progress = job.conversations[prompt], job.progress[prompt]
        if progress.first_token_at is not None and math.isinf(conversation.computed_at):
            conversation.computed_at = progress.first_token_at
        if delta.finish_reason not in ("stop", "length"):
            return
        request = job.requests[prompt]
        reason = progress.cache_report.reason if progress.cache_report is not None else ""
        miss = self._finder.explain(conversation, len(request.tokens), progress.cached_tokens, reason=reason)
        progress.miss = miss
        engine.notify(MissExplained(request.id, miss.cause, miss.where, miss.tokens_lost))

    def answered(self, job: Job) -> None:
        """The job's deltas have been read."""
        if job.conversations and job.request.messages:
            self._finder.answered(job.conversations[0], job.answer)


def _outlines(request: GenerateRequest, **fields: object) -> tuple[Conversation, ...]:
    prompts = [structs.replace(request, prompts=(prompt,)) for prompt in request.prompts] or [request]
    return tuple(outline(one, **fields) for one in prompts)  # type: ignore[arg-type]


class RecentRequests:
    """The newest finished requests, for the dashboard: cached tokens, times, cache reports. Numbers only, no text. Runs on the
    event loop's thread."""

    def __init__(self) -> None:
        self._kept: deque[tuple[bytes, dict[str, Any]]] = deque(maxlen=_NEWEST)
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
        """A prompt as JSON. `finish_reason` is `abort` if the client disconnected; `ttft` is None without a token."""
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


class ActiveRequests:
    """The HTTP requests that run now. Clients list them; routers and operators migrate them. Runs on the event loop's
    thread."""

    def __init__(self) -> None:
        self._jobs: dict[Job, None] = {}

    @contextmanager
    def track(self, job: Job) -> Iterator[None]:
        """List a job until the end of the block."""
        self._jobs[job] = None
        try:
            yield
        finally:
            del self._jobs[job]

    def all(self, salt: bytes | None = None) -> list[Job]:
        """The jobs of the tenant with this salt; of all tenants if it is None."""
        return [job for job in self._jobs if salt is None or job.owner == salt]

    def find(self, name: str, salt: bytes | None = None) -> Job:
        """By the engine's id, the answer's id or the client's `X-Request-Id`. Raises NotFound, or CannotMigrate for a name that
        several requests have."""
        visible = self.all(salt)
        exact = [job for job in visible if job.requests[0].id == name]
        found = exact or [job for job in visible if name in _names(job)]
        if not found:
            raise NotFound(
                f"no request {name!r} runs here{did_you_mean(name, [job.requests[0].id for job in visible])}"
            )
        if len(found) > 1:
            raise CannotMigrate(f"{len(found)} requests are called {name!r}; use the id from GET /v1/requests")
        return found[0]


def describe(job: Job) -> dict[str, Any]:
    """An active request as JSON."""
    shown: dict[str, Any] = {
        "id": job.requests[0].id,
        "answer": job.head.id,
        "dialect": job.request.dialect,
        "created": job.head.created,
        "prompt_tokens": job.prompt_tokens,
        "output_tokens": job.output_tokens,
        "stream": job.streams,
        "movable": job.movable,
    }
    if job.departure is not None:
        shown["moved"] = {"to": job.departure.to, "request_id": job.departure.request_id}
    return shown


def _names(job: Job) -> tuple[str, str]:
    answer = job.head.id
    return answer, answer.partition("-")[2]
