"""`/v1/cache/*` in front of several replicas.

A verb about a prefix goes to the replicas that hold most of it, and to the one that serves its session. If none is known, it
goes to all replicas of the model. So does a release: a replica may keep a prefix whose blocks it had to give up. The answer is
that of the replica that keeps most, and has the answers of all.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

from msgspec.structs import replace

from foreword.api import cache_control, session_control
from foreword.api.dialects.answer_reader import decode_object, error_of, read_error
from foreword.api.dialects.decode import Limits, TooMany
from foreword.api.errors import error_body
from foreword.api.front import Answer, Call, Handler
from foreword.api.request import ClientBody, GenerateRequest
from foreword.api.routes import Right, Routes
from foreword.blocks.salt import Salt
from foreword.errors import BadRequest
from foreword.request_errors import NoReplica, ReplicaFailed
from foreword.router.replica_body import edited, parse_request, read_body
from foreword.router.replica_pool import ReplicaPool
from foreword.router.replicas import Upstream, clock
from foreword.router.router import Router
from foreword.router_extras.fan_out import healthy, send_once
from foreword.routing.directory import CacheTier
from foreword.routing.placement import PlacementQuery
from foreword.usage import TokenUsage

_RANKS: Final = {"accepted": 2, "clipped": 1}


def add_routes(routes: Routes[Handler], router: Router) -> None:
    async def retained(call: Call) -> Answer:
        """Retentions of the tenant, and on which replicas."""
        return _retained(await _ask(router, call, _able(healthy(router))))

    async def session(call: Call) -> Answer:
        """Open a session on all replicas, fork it, compact it, or end it, which frees what only it has used in every tier."""
        answers = await _ask(router, call, _able(healthy(router), "session"), ClientBody(call.raw))
        return _session_answer(answers)

    async def open_sessions(call: Call) -> Answer:
        """The open sessions of the caller, and on which replicas."""
        return _retained(await _ask(router, call, _able(healthy(router), "session")))

    session_control.add_routes(routes, session, open_sessions)
    cache_control.add_routes(routes, lambda verb: _parse, partial(_control, router), retained)


def _parse(raw: bytes, limits: Limits) -> GenerateRequest:
    """The prefix as a request that is placed; without a prompt if the replicas have to say what is wrong with it. Raises
    BadRequest."""
    body = read_body(raw, limits)
    if body.only("cache_salt") and body.text("cache_salt") is None:
        raise BadRequest("cache_salt must be a string", param="cache_salt")
    try:
        request = parse_request("completions" if body.only("prompt") else "chat", raw, limits)
    except TooMany:
        raise
    except BadRequest:
        return GenerateRequest("chat", model=body.text("model"), cache_salt=body.text("cache_salt") or "", body=body)
    return replace(request, add_generation_prompt=False)


async def _control(router: Router, call: Call, verb: str) -> Answer:
    request, computes = call.body, verb in ("retain", "pin")
    if router.order and request.messages:  # as its requests are
        request = router.order.arranged(request, router.pool(request.model).model)
    everything = bytes(request.body.fields.get("all", b"")) == b"true"
    if everything:
        call.require(Right.OWNER, "releasing everything")
    salt = router.audit.salts_of(call.tenant.salt, request.cache_salt or None)[-1]
    targets, tokens = await _targets(router, call, request, salt, "release" if everything else verb)
    if computes:  # as far as it is known, so that a client that leaves before the answer has paid
        call.charge(TokenUsage(tokens * len(targets)))
    answers = await _ask(router, call, list(targets), request.body, salt)
    if computes:
        computed = sum(_count(decode_object(one.body), "prompt_tokens") for one in answers.values() if one.status < 400)
        call.charge(TokenUsage(computed))
    return _answer(verb, targets, answers)


def _able(replicas: Sequence[Upstream], verb: str = "") -> list[Upstream]:
    """Foreword's servers among the replicas, and those of vLLM for a prefetch or a session; all if there are none."""
    kinds = ("foreword", "vllm") if verb in ("prefetch", "session") else ("foreword",)
    return [one for one in replicas if one.kind in kinds] or list(replicas)


async def _targets(
    router: Router, call: Call, request: GenerateRequest, salt: str | None, verb: str
) -> tuple[dict[Upstream, str], int]:
    """The replicas that get a request, and why; and the tokens of its prefix, 0 if they are not known. Raises NoReplica,
    UnknownModel."""
    if verb == "release" and request.model is None and not request.messages and not request.prompts:
        return dict.fromkeys(_able(healthy(router)), "all replicas"), 0
    pool = router.pool(request.model)
    able = _able([one for one in healthy(router) if one.url in pool.upstreams], verb)
    if not able:
        raise NoReplica("No replica of this model takes requests now")
    if verb == "release" or not pool.needs_prompts:
        return dict.fromkeys(able, "all replicas"), 0
    prompt = await router.prompts.tokenize(request, pool, Salt.of(call.tenant.salt, salt), needed=True)
    session = request.session_name(call.headers)
    name = f"{call.tenant.name}/{session}" if session is not None else None
    known = _likely(pool, pool.query(prompt, request.model, Salt.of(call.tenant.salt, salt), name, None))
    found = {one: f"holds {known[one.url]} tokens" for one in able if one.url in known}
    return found or dict.fromkeys(able, "all replicas: none is known to hold it"), prompt.count


def _likely(pool: ReplicaPool, query: PlacementQuery) -> dict[str, int]:
    """Replicas that have more than half of a prompt in tiers of their own, or serve its session; with the tokens that they
    have of it."""
    now = clock()
    session = pool.fleet.home(query, now)
    home = session.replica if session is not None else None
    held = {
        one.name: min(one.reach[CacheTier.DISK] * (one.block_size or query.block_size), query.tokens)
        for one in pool.fleet.candidates(query, now)
    }
    return {url: tokens for url, tokens in held.items() if 2 * tokens > query.tokens or url == home}


async def _ask(
    router: Router, call: Call, targets: Sequence[Upstream], body: ClientBody | None = None, salt: str | None = None
) -> dict[Upstream, Answer]:
    """The answers of these replicas. One that does not answer counts as an error response."""

    async def one(upstream: Upstream) -> Answer:
        # Only Foreword's servers know the tenant without it.
        given = salt if upstream.kind == "foreword" else Salt.of(call.tenant.salt, salt).text or None
        path, data = call.path, b""
        if body is not None:
            data = edited(body, ("cache_salt",), {"cache_salt": given} if given else {})
        elif given:
            path += "?" + urlencode({"cache_salt": given})
        try:
            answer = await send_once(router, call, upstream, path, data)
        except ReplicaFailed as error:
            return Answer.json(error_body(error), error.status)
        if answer.status >= 400 and error_of(answer.body).message is None:  # vLLM's, which has no such path
            return Answer.json(error_body(read_error(answer.status, answer.body)), answer.status)
        return answer

    return dict(zip(targets, await asyncio.gather(*map(one, targets)), strict=True))


def _answer(verb: str, why: Mapping[Upstream, str], answers: Mapping[Upstream, Answer]) -> Answer:
    """The answers of all replicas in one. A release fails if one of them does, so that the client repeats it."""
    served = {one: decode_object(answer.body) for one, answer in answers.items() if answer.status < 400}
    failed = [answer for answer in answers.values() if answer.status >= 400 and answer.status != 404]
    if not served or (verb == "release" and failed):
        return (failed or list(answers.values()))[0]
    best = max(served.values(), key=lambda body: (_RANKS.get(str(body.get("status")), 0), _count(body, "tokens")))
    if verb == "release":
        best = {**best, "released": _merged({one: body.get("released") for one, body in served.items()})}
    replicas = [{"replica": one.url, "why": why[one], **decode_object(answer.body)} for one, answer in answers.items()]
    return _respond({**best, "replicas": replicas}, len(served), len(answers))


def _session_answer(answers: Mapping[Upstream, Answer]) -> Answer:
    """The answer of a replica that knows the session, with the blocks that all have freed. It fails if one could not be asked,
    so that the client repeats it: what is done stays done."""
    served = {one: decode_object(answer.body) for one, answer in answers.items() if answer.status < 400}
    failed = [answer for answer in answers.values() if answer.status >= 500]
    if failed or not served:
        return (failed or list(answers.values()))[0]
    freed: Counter[str] = Counter()
    for body in served.values():
        freed.update(body.get("freed_blocks") or {})
    body = next(iter(served.values()))
    return _respond({**body, **({"freed_blocks": freed} if "freed_blocks" in body else {})}, len(served), len(answers))


def _retained(answers: Mapping[Upstream, Answer]) -> Answer:
    served = {one: decode_object(answer.body).get("data") for one, answer in answers.items() if answer.status < 400}
    if not served:
        return next(iter(answers.values()))
    return _respond({"object": "list", "data": _merged(served)}, len(served), len(answers))


def _merged(lists: Mapping[Upstream, Any]) -> list[dict[str, Any]]:
    """Entries of several replicas, each once, with the replicas that have it."""
    found: dict[Any, dict[str, Any]] = {}
    for upstream, entries in lists.items():
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("id"), str):
                found.setdefault(entry["id"], {**entry, "replicas": []})["replicas"].append(upstream.url)
    return list(found.values())


def _respond(body: Mapping[str, Any], served: int, asked: int) -> Answer:
    return Answer.json(body, headers={"x-foreword-replicas": f"{served} of {asked}"})


def _count(body: Mapping[str, Any], name: str) -> int:
    found = body.get(name)
    return found if isinstance(found, int) and found > 0 else 0
