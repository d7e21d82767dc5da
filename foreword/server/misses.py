"""The causes of this server's cache misses: found for each prompt, for its response, the metrics and the recording."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from foreword.api.misses.causes import MissFinder
from foreword.api.misses.outline import Conversation, outline
from foreword.api.request import GenerateRequest
from foreword.api.work_queue import WorkQueue
from foreword.engine.request import Delta
from foreword.events import MissExplained

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.server.job import Job

# Longer conversations are hashed on a thread.
_INLINE_CHARACTERS: Final = 4096


class ServerMisses:
    """Runs on the event loop's thread."""

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

    def begin(self, job: Job, now: float) -> None:
        """The job is admitted."""
        for conversation in job.conversations:
            conversation.began = now
            self._finder.add(conversation)

    def note(self, engine: AsyncEngine, job: Job, prompt: int, delta: Delta) -> None:
        """A delta was counted. With the last one of a prompt the cause is known."""
        if delta.index or not job.conversations:
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
    prompts = [replace(request, prompts=(prompt,)) for prompt in request.prompts] or [request]
    return tuple(outline(one, **fields) for one in prompts)  # type: ignore[arg-type]
