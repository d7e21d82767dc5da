"""The hand-off message: how a migrated request's answer is written. It travels with the request; engines do not read it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foreword.engine.request import Request
from foreword.errors import BadRequest
from foreword.server.job import Caller, ChatFormat, ChoiceFormat, CompletionFormat, Job

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine

VERSION = 1


def encode(job: Job) -> bytes:
    """From a job with one prompt and one answer."""
    choice = job.formats[0]
    message = {
        "version": VERSION,
        "kind": "chat" if isinstance(choice, ChatFormat) else "completion",
        "head": job.head,
        "stream": job.streams,
        "include_usage": job.include_usage,
        "prefix": job.prefix,
        "token_ids": job.token_ids,
        "echo": choice.echo if isinstance(choice, CompletionFormat) else "",
    }
    return json.dumps(message).encode()


def resume(engine: AsyncEngine, request: Request, output: Sequence[int], message: bytes, caller: Caller) -> Job:
    """The job that continues after the tokens `output`. Raises BadRequest for a message that this version does not know."""
    try:
        fields: dict[str, Any] = json.loads(message)
        if fields["version"] != VERSION:
            raise ValueError("another version")
        choice = _format(engine, fields, output if request.params.logprobs is not None else ())
        streams, usage = bool(fields["stream"]), bool(fields["include_usage"])
        head, prefix, ids = dict(fields["head"]), fields["prefix"], bool(fields["token_ids"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadRequest(
            "the migrated request's hand-off message has a format that this server does not know"
        ) from error
    return Job(head, (request,), (choice,), streams, usage, prefix, ids, caller=caller, resumed=len(output))


def _format(engine: AsyncEngine, fields: dict[str, Any], output: Sequence[int]) -> ChoiceFormat:
    if fields["kind"] == "chat":
        return ChatFormat(engine.tokenizer)
    choice = CompletionFormat(engine.tokenizer, str(fields["echo"]))
    choice.skip(output)
    return choice
