"""Calls of extras that go to all replicas, or to all of Foreword's servers, and how their answers become one."""

from __future__ import annotations

import asyncio

from foreword.api.front import Answer, Call
from foreword.request_errors import NoReplica, ReplicaFailed
from foreword.router.passthrough import send
from foreword.router.replicas import CONNECTION_ERRORS, Upstream
from foreword.router.router import Router


def healthy(router: Router) -> list[Upstream]:
    """Replicas that take requests, the least loaded first. Raises NoReplica if there are none."""
    found = router.healthy()
    if not found:
        raise NoReplica(f"No request can be taken now: {router.ready()}")
    return found


def foreword_replicas(router: Router) -> list[Upstream]:
    """Foreword's servers among the replicas that take requests, the least loaded first."""
    return [one for one in router.healthy() if one.kind == "foreword"]


async def send_to_all(router: Router, call: Call, replicas: list[Upstream], body: bytes) -> list[Answer]:
    """Forward a request to these replicas."""
    return await asyncio.gather(*(send_once(router, call, one, call.path, body) for one in replicas))


def chosen(answers: list[Answer]) -> Answer:
    """The answer that counts: of several the first failure, else the first success."""
    failed = [answer for answer in answers if answer.status >= 400 and answer.status != 404]
    succeeded = [answer for answer in answers if answer.status < 400]
    one = (failed or succeeded or answers)[0]
    counts = {"x-foreword-replicas": f"{len(succeeded)} of {len(answers)}"}
    return Answer(one.status, one.body, {**one.headers, **counts})


async def send_once(router: Router, call: Call, upstream: Upstream, path: str, body: bytes) -> Answer:
    """Forward a request that may change something to a replica. Raises ReplicaFailed."""
    try:
        return await send(router, call, upstream, path, body)
    except CONNECTION_ERRORS as error:
        router.failed(upstream, f"the connection broke ({type(error).__name__})")
        raise ReplicaFailed(f"{upstream.url} did not answer; it may have executed the request. Retry it") from None
