"""Whether a replica that is silent on a request has it.

That a replica answers others, over other connections, says nothing of this one: its connection may be dead, and a proxy on the
way may have swallowed the request or the answer. So the replica is asked for this very request, over a new connection.
Foreword's servers list the requests that they run. vLLM sends the head of a stream once it has taken the request, and counts
those that it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

from foreword.api.dialects.answer_reader import decode_object
from foreword.request_errors import ReplicaFailed
from foreword.router.replica_metrics import parse_metrics
from foreword.router.replicas import CONNECTION_ERRORS, AwaitedResponse, Upstream, clock, read_whole

# Two of these, and the time in which an answer arrives, are less than what the first question comes ahead of --stall-timeout.
_LIMIT: Final = aiohttp.ClientTimeout(total=2.5)
# An answer that has just been sent arrives in this time.
_ARRIVAL_SECONDS: Final = 0.5
_MOST_BYTES: Final = 8 << 20


async def why_lost(session: aiohttp.ClientSession, upstream: Upstream, response: AwaitedResponse) -> str:
    """Why no answer will come to a request, over a session that opens a new connection each time; empty if it may."""
    last = response.last
    try:
        reason = await _reason(session, upstream, response)
    except (*CONNECTION_ERRORS, ReplicaFailed) as error:
        reason = f"it does not answer over a new connection ({type(error).__name__})"
    if not reason:
        return ""
    await asyncio.sleep(_ARRIVAL_SECONDS)
    return reason if response in upstream.awaited and response.last == last else ""


async def _reason(session: aiohttp.ClientSession, upstream: Upstream, response: AwaitedResponse) -> str:
    if upstream.kind == "foreword":
        if response.comments and clock() - response.last > 2 * response.comments:
            return f"not even a comment came for {clock() - response.last:.0f} s"
        status, data = await _get(session, f"{upstream.url}/v1/requests", response.headers())
        listed = decode_object(data).get("data") if status == 200 else None
        if isinstance(listed, list):
            known = any(_is_named(one, response.request_id) for one in listed)
            return "" if known else "it does not have the request (any more), although it answers others"
    status, _ = await _get(session, f"{upstream.url}/health")
    if status >= 500:
        return f"/health says {status}"
    if upstream.kind != "vllm":
        return ""
    if response.streams and response.headless:
        return "it has not begun to answer the request, although it answers others"
    status, data = await _get(session, f"{upstream.url}/metrics")
    found = await asyncio.to_thread(parse_metrics, data.decode("utf-8", "replace"))
    silent = sorted((one for one in upstream.awaited if not one.begun), key=lambda one: one.last)
    if found.requests is None or response not in silent[: max(len(silent) - found.requests, 0)]:
        return ""
    return f"it has {found.requests} requests, and is silent on {len(silent)}"


async def _get(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    async with session.get(url, headers=headers, timeout=_LIMIT, allow_redirects=False) as response:
        return response.status, await read_whole(response, _MOST_BYTES)


def _is_named(listed: Any, request_id: str) -> bool:
    """Whether an entry of `/v1/requests` is the request with this id: of its answer, behind a prefix."""
    return isinstance(listed, dict) and str(listed.get("answer", "")).partition("-")[2] == request_id
