"""How an answer is written, for the server where its request goes on: JSON that travels with the request, opaque to engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foreword.engine.request import Request
from foreword.errors import BadRequest
from foreword.server.job import Caller, ChatShape, CompletionShape, Job, Shape

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine

VERSION = 1


def seal(job: Job) -> bytes:
    """A job with one prompt and one answer."""
    shape = job.shapes[0]
    written = {
        "version": VERSION,
        "kind": "chat" if isinstance(shape, ChatShape) else "completion",
        "head": job.head,
        "stream": job.streams,
        "include_usage": job.include_usage,
        "prefix": job.prefix,
        "token_ids": job.token_ids,
        "echo": shape.echo if isinstance(shape, CompletionShape) else "",
    }
    return json.dumps(written).encode()


def resume(engine: AsyncEngine, request: Request, output: Sequence[int], envelope: bytes, caller: Caller) -> Job:
    """The job, to go on after the tokens `output`. Raises BadRequest if there is no envelope that is understood."""
    try:
        written: dict[str, Any] = json.loads(envelope)
        if written["version"] != VERSION:
            raise ValueError("another version")
        shape = _shape(engine, written, output if request.params.logprobs is not None else ())
        streams, usage = bool(written["stream"]), bool(written["include_usage"])
        head, prefix, ids = dict(written["head"]), written["prefix"], bool(written["token_ids"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadRequest("the request moved here without a description of its answer that is understood") from error
    return Job(head, (request,), (shape,), streams, usage, prefix, ids, caller=caller, resumed=len(output))


def _shape(engine: AsyncEngine, written: dict[str, Any], output: Sequence[int]) -> Shape:
    if written["kind"] == "chat":
        return ChatShape(engine.tokenizer)
    shape = CompletionShape(engine.tokenizer, str(written["echo"]))
    shape.skip(output)
    return shape
