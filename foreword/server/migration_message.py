"""The hand-off message: how a migrated request's answer is written. It travels with the request; engines do not read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from foreword.api import logprobs
from foreword.api.dialects.registry import DIALECTS
from foreword.api.dialects.writer import ResponseHead
from foreword.api.request import GenerateRequest
from foreword.api.tools.parser import AnswerFormats
from foreword.disaggregation.unclaimed import UnclaimedRequest
from foreword.errors import BadRequest
from foreword.server.job import Caller, Job, reader_for

if TYPE_CHECKING:
    from foreword.engine.tokenizer import Tokenizer

VERSION: Final = 2


class HandoffMessage(msgspec.Struct, frozen=True):
    """`owner` is the salt of the tenant; `request` is without its messages and prompts."""

    version: int
    request: GenerateRequest
    head: ResponseHead
    owner: bytes
    streams: bool


def encode(job: Job) -> bytes:
    """From a job with one prompt and one answer."""
    request = replace(job.request, messages=(), prompts=(), output_format=None)
    return msgspec.json.encode(HandoffMessage(VERSION, request, job.head, job.owner, job.streams))


def owner(message: bytes) -> bytes:
    """The salt of the tenant that the request belongs to. Raises BadRequest."""
    return _decode(message).owner


def resume(tokenizer: Tokenizer, unclaimed: UnclaimedRequest, formats: AnswerFormats, caller: Caller) -> Job:
    """The job that continues after `unclaimed.output`. Raises BadRequest for a message that this version does not know."""
    message = _decode(unclaimed.envelope)
    request = message.request
    writer = DIALECTS[request.dialect].writer(request, message.head)
    reader = reader_for(tokenizer, request, formats, unclaimed.request, 0)
    sent = reader.resume(unclaimed.output)
    writer.resume(0, logprobs.entries(tokenizer, sent) if unclaimed.request.params.logprobs is not None else ())
    return Job(
        request,
        message.head,
        writer,
        (unclaimed.request,),
        (reader,),
        message.owner,
        message.streams,
        caller,
        resumed=len(unclaimed.output),
    )


def _decode(message: bytes) -> HandoffMessage:
    try:
        found = msgspec.json.decode(message, type=HandoffMessage)
    except (msgspec.DecodeError, ValueError) as error:
        raise _unknown() from error
    if found.version != VERSION:
        raise _unknown()
    return found


def _unknown() -> BadRequest:
    return BadRequest("the migrated request's hand-off message has a format that this server does not know")
