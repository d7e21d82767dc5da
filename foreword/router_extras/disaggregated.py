"""Disaggregated prefill through the router.

A Foreword server gets the address of the prefill replica and fetches the KV itself. vLLM servers are called in two steps: the
prefill replica computes the prompt and returns `kv_transfer_params`, which go into the request for the decode replica.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from foreword.api.dialects.answer_reader import AnswerReader
from foreword.api.request import GenerateRequest
from foreword.errors import BadRequest
from foreword.request_errors import ReplicaFailed
from foreword.router.attempt import Attempt, describe_error, describe_response, is_certain, retry_after
from foreword.router.proxied_request import ProxiedRequest
from foreword.router.replica_body import ROUTER_FIELDS, edited, path_of
from foreword.router.replicas import CONNECTION_ERRORS, Upstream, is_refusal

logger = logging.getLogger(__name__)

_PREFILL_ONLY: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Fields that only concern the decode replica.
_DECODE_FIELDS: Final = frozenset(("stream_options", "min_tokens", "logprobs", "top_logprobs", "return_token_ids"))


async def prefilled(proxied: ProxiedRequest, attempt: Attempt, prefill: Upstream) -> Mapping[str, Any] | None:
    """`kv_transfer_params` for the decode replica, of the KV that `prefill` computes. None if that fails: the decode replica
    computes the prompt."""
    transfer = await _transfer_params(proxied, attempt, prefill)
    if transfer is None:
        proxied.decision_text += "; prefill fell back to the decode replica"
    return transfer


async def _transfer_params(proxied: ProxiedRequest, attempt: Attempt, prefill: Upstream) -> Mapping[str, Any] | None:
    """`kv_transfer_params` for the decode replica; None if it has to compute the prompt."""
    kind = attempt.upstream.kind
    if kind == "foreword" and prefill.info is not None and prefill.info.transfer is not None:
        return {"prefill": prefill.info.transfer}
    if kind == "vllm" and prefill.kind == "vllm":
        return await _prefill(proxied, prefill) if _can_be_split(proxied.request) else None
    logger.info("no disaggregated prefill between %s and %s: their kinds differ", prefill.url, attempt.upstream.url)
    return None


def _can_be_split(request: GenerateRequest) -> bool:
    """vLLM returns one `kv_transfer_params`, which is not enough for several prompts or choices. With some options it computes
    the whole prompt on the decode replica in any case."""
    return request.single and not (
        request.path or request.refusal or request.echo or "prompt_logprobs" in request.sampling
    )


async def _prefill(proxied: ProxiedRequest, prefill: Upstream) -> Mapping[str, Any] | None:
    """vLLM's first step: compute the prompt and one token. None if it failed."""
    prefill.in_flight += 1
    try:
        body = _prefill_body(proxied)
        response, data = await proxied.send(prefill, body, path_of(proxied.request), streams=False)
    except (*CONNECTION_ERRORS, ReplicaFailed) as error:
        if not is_certain(error) and await proxied.router.is_dead(prefill):
            proxied.ask.died(prefill)
            proxied.ask.check()
        _prefill_failed(proxied, prefill, describe_error(error), certain=is_certain(error))
        return None
    finally:
        prefill.in_flight -= 1
    if response.status == 429:
        proxied.router.paused(prefill, retry_after(response))
    elif not is_refusal(response.status):
        _prefill_failed(proxied, prefill, describe_response(response.status, data or b""))
    if response.status != 200:  # the decode replica will report errors of the client
        return None
    proxied.router.succeeded(prefill)
    return _returned_params(prefill, data or b"")


def _prefill_body(proxied: ProxiedRequest) -> bytes:
    dropped = _DECODE_FIELDS | ROUTER_FIELDS
    body = proxied.request.body
    limit = "max_completion_tokens" if "max_completion_tokens" in body.fields else "max_tokens"
    changes = {"stream": False, limit: 1, "kv_transfer_params": _PREFILL_ONLY, **proxied.own_fields("vllm")}
    return edited(body, dropped, changes)


def _prefill_failed(proxied: ProxiedRequest, prefill: Upstream, reason: str, *, certain: bool = False) -> None:
    logger.warning("request %s: prefill on %s failed: %s", proxied.request_id, prefill.url, reason)
    proxied.router.failed(prefill, reason, certain=certain)


def _returned_params(prefill: Upstream, data: bytes) -> Mapping[str, Any] | None:
    try:
        params = AnswerReader().read(data).kv_transfer_params
    except (ReplicaFailed, BadRequest):
        params = None
    if prefill.returns_transfer and params is None:
        logger.warning(
            "%s computed a prompt but returned no kv_transfer_params, so the prompt is recomputed. It needs a KV "
            "connector that sends KV (Foreword's with kv_role kv_producer, or kv_both and transfer)",
            prefill.url,
        )
    prefill.returns_transfer = params is not None
    return params
