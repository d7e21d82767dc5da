"""Prompts that another replica computes: Foreword servers are told where to fetch the KV, vLLM's are asked in two steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from foreword.serving.router import asked as asking
from foreword.serving.router.pool import Ticket
from foreword.serving.router.replicas import LOST, Upstream

if TYPE_CHECKING:
    from foreword.serving.router.call import Call

logger = logging.getLogger(__name__)

_ASK_PREFILL: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


async def body(call: Call, ticket: Ticket) -> bytes:
    """The body for the replica that decodes. If the prefill replica fails, the prompt is computed where it decodes."""
    transfer = await _transfer(call, ticket) if ticket.prefill is not None else None
    return asking.for_replica(call.asked, ticket.upstream.kind, call.salt, transfer)


async def _transfer(call: Call, ticket: Ticket) -> Mapping[str, Any] | None:
    prefill = ticket.prefill
    assert prefill is not None
    if ticket.upstream.kind == "foreword" and prefill.facts is not None and prefill.facts.transfer is not None:
        return {"prefill": prefill.facts.transfer}
    if ticket.upstream.kind == "vllm" and prefill.kind == "vllm":
        return await _prefill(call, prefill)
    logger.info(
        "%s and %s cannot share a request: the prompt is computed where it decodes", prefill.url, ticket.upstream.url
    )
    return None


async def _prefill(call: Call, prefill: Upstream) -> Mapping[str, Any] | None:
    """vLLM's first step: one token, and where its KV can be fetched. None if it failed."""
    asked = {name: value for name, value in call.asked.body.items() if name not in ("stream_options", "min_tokens")}
    most = "max_completion_tokens" if "max_completion_tokens" in asked else "max_tokens"
    asked |= {"stream": False, most: 1, "kv_transfer_params": _ASK_PREFILL, "cache_salt": call.salt}
    if not call.salt:
        del asked["cache_salt"]
    prefill.in_flight += 1
    try:
        async with call.router.session.post(
            prefill.url + call.asked.path, data=msgspec.json.encode(asked), headers=call.headers(prefill)
        ) as answer:
            data = await answer.read()
        if answer.status != 200:
            call.router.failed(prefill, f"it says {answer.status}")
            return None
        found = msgspec.json.decode(data).get("kv_transfer_params")
    except LOST as error:
        call.router.failed(prefill, f"the connection broke ({type(error).__name__})")
        return None
    except (msgspec.DecodeError, AttributeError):
        return None
    finally:
        prefill.in_flight -= 1
    return found if isinstance(found, dict) else None
