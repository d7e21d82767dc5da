"""Prompts that another replica computes: Foreword servers are told where to fetch the KV, vLLM's are asked in two steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from foreword.errors import ReplicaFailed
from foreword.router import attempt as calls
from foreword.router import client_request as asking
from foreword.router.pool import Ticket
from foreword.router.replicas import LOST, Upstream

if TYPE_CHECKING:
    from foreword.router.attempt import Call

logger = logging.getLogger(__name__)

_ASK_PREFILL: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# What concerns the answer only: it is left to the replica that decodes.
_ANSWER: Final = frozenset(("stream_options", "min_tokens", "logprobs", "top_logprobs", "return_token_ids"))
# With these vLLM computes the whole prompt where it decodes, whatever it could be sent.
_COMPUTED_THERE: Final = ("prompt_logprobs", "echo", "use_beam_search")


async def body(call: Call, ticket: Ticket) -> bytes:
    """The body for the replica that decodes. If the prefill replica fails, the prompt is computed where it decodes."""
    transfer = None
    if ticket.prefill is not None:
        transfer = await _transfer(call, ticket)
        if transfer is None:
            call.words += "; after all it is computed where it decodes"
    return asking.for_replica(call.asked, ticket.upstream.kind, call.salt, transfer)


async def _transfer(call: Call, ticket: Ticket) -> Mapping[str, Any] | None:
    prefill = ticket.prefill
    assert prefill is not None
    if ticket.upstream.kind == "foreword" and prefill.facts is not None and prefill.facts.transfer is not None:
        return {"prefill": prefill.facts.transfer}
    if ticket.upstream.kind == "vllm" and prefill.kind == "vllm":
        return await _prefill(call, prefill) if _can_be_split(call.asked) else None
    logger.info(
        "%s and %s cannot share a request: the prompt is computed where it decodes", prefill.url, ticket.upstream.url
    )
    return None


def _can_be_split(asked: asking.Asked) -> bool:
    """Whether one `kv_transfer_params` says all: of several prompts or answers vLLM tells only one."""
    return asked.single and not any(asked.body.get(name) for name in _COMPUTED_THERE)


async def _prefill(call: Call, prefill: Upstream) -> Mapping[str, Any] | None:
    """vLLM's first step: one token, and where its KV can be fetched. None if it failed."""
    prefill.in_flight += 1
    try:
        response, data = await call.fetch(prefill, _first_step(call))
    except (*LOST, ReplicaFailed) as error:
        reason, certain = calls.sentence(error), calls.is_certain(error)
        logger.warning("request %s: %s computes no prompt: %s", call.request_id, prefill.url, reason)
        call.router.failed(prefill, reason, certain=certain)
        return None
    finally:
        prefill.in_flight -= 1
    if response.status != 200:
        _blame(call, prefill, response, data)
        return None
    call.router.succeeded(prefill)
    return _told(prefill, data)


def _first_step(call: Call) -> bytes:
    asked = {name: value for name, value in call.asked.body.items() if name not in _ANSWER}
    most = "max_completion_tokens" if "max_completion_tokens" in asked else "max_tokens"
    asked |= {"stream": False, most: 1, "kv_transfer_params": _ASK_PREFILL, "cache_salt": call.salt}
    if not call.salt:
        del asked["cache_salt"]
    return msgspec.json.encode(asked)


def _blame(call: Call, prefill: Upstream, response: aiohttp.ClientResponse, data: bytes) -> None:
    """What the client did wrong the other replica will say; one that has too much to do is left alone for a while."""
    if response.status == 429:
        call.router.paused(prefill, calls.pause_of(response))
    elif response.status >= 500:
        reason = f"it says {response.status}{calls.said(data)}"
        logger.warning("request %s: %s computes no prompt: %s", call.request_id, prefill.url, reason)
        call.router.failed(prefill, reason)


def _told(prefill: Upstream, data: bytes) -> Mapping[str, Any] | None:
    try:
        found = msgspec.json.decode(data).get("kv_transfer_params")
    except (msgspec.DecodeError, AttributeError):
        found = None
    handed_over = isinstance(found, dict)
    if prefill.hands_over and not handed_over:
        logger.warning(
            "%s does not say where the KV of a prompt is that it computed, so that it is computed again: it needs a KV "
            "connector that hands over (ours with kv_role kv_producer, or kv_both and transfer)",
            prefill.url,
        )
    prefill.hands_over = handed_over
    return found if handed_over else None
