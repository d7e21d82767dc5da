"""`/v1/cache/*` in front of several replicas.

A verb about a prefix goes to the replicas that hold most of it, and to the one that serves its session. If none is known, it
goes to all replicas of the model. So does a release: a replica may keep a prefix whose blocks it had to give up. The answer is
that of the replica that keeps most, and has the answers of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

from msgspec import Struct
from msgspec.structs import replace

from foreword.api import cache_control, session_control
from foreword.api.dialects.answer_reader import decode_object
from foreword.api.dialects.decode import Limits, TooMany
from foreword.api.front import Answer, Call, Handler
from foreword.api.request import ClientBody, GenerateRequest
from foreword.api.routes import Right, Routes
from foreword.blocks.salt import Salt
from foreword.errors import BadRequest
from foreword.request_errors import NoReplica
from foreword.router.replica_body import edited, parse_request, read_body
from foreword.router.replica_pool import ReplicaPool
from foreword.router.replicas import Upstream, clock
from foreword.router.router import Router
from foreword.router_extras.fan_out import (
    Fails,
    FanOut,
    FanOutHandler,
    Listed,
    ReplicaAnswers,
    able,
    each_once,
    fan_out,
    healthy,
    union,
)
from foreword.routing.directory import CacheTier
from foreword.routing.placement import PlacementQuery
from foreword.usage import TokenUsage

_RANKS: Final = {"accepted": 2, "clipped": 1}
_LISTS: Final[dict[str, Any]] = {"fails": Fails.IF_ALL, "shape": Listed, "seconds": lambda upstream: 60.0}


class _SessionBody(Struct):
    """The fields of an answer about a session that are added up."""

    freed_blocks: dict[str, int] | None = None


def add_routes(routes: Routes[Handler], router: Router) -> None:
    sessions = FanOut(
        to=lambda router: able(healthy(router), "session"),
        merge=_summed,
        fails=Fails.IF_ANY_BREAKS,
        shape=_SessionBody,
    )

    @fan_out(router, FanOut(to=lambda router: able(healthy(router)), merge=union, **_LISTS))
    async def retained(call: Call, fan: FanOutHandler) -> Answer:
        """Retentions of the tenant, and on which replicas."""
        return (await _ask(fan, call)).merged()

    @fan_out(router, sessions)
    async def session(call: Call, fan: FanOutHandler) -> Answer:
        """Open a session on all replicas, fork it, compact it, or end it, which frees what only it has used in every tier."""
        return (await _ask(fan, call, body=ClientBody(call.raw))).merged()

    @fan_out(router, FanOut(to=lambda router: able(healthy(router), "session"), merge=union, **_LISTS))
    async def open_sessions(call: Call, fan: FanOutHandler) -> Answer:
        """The open sessions of the caller, and on which replicas."""
        return (await _ask(fan, call)).merged()

    def verb_handler(verb: str, text: str) -> Handler:
        async def control(call: Call, fan: FanOutHandler) -> Answer:
            return await _control(router, call, fan, verb)

        control.__name__, control.__doc__ = verb, text
        fails = Fails.IF_ANY if verb == "release" else Fails.IF_ALL
        plan = FanOut(to=lambda router: able(healthy(router), verb), merge=partial(_best, verb), fails=fails)
        return FanOutHandler(router, plan, control)

    session_control.add_routes(routes, session, open_sessions)
    cache_control.add_routes(routes, lambda verb: _parse, verb_handler, retained)


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


async def _control(router: Router, call: Call, fan: FanOutHandler, verb: str) -> Answer:
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
    answers = await _ask(fan, call, targets, request.body, salt)
    if computes:
        computed = sum(_count(one.body, "prompt_tokens") for one in answers.served.values())
        call.charge(TokenUsage(computed))
    return answers.merged()


async def _targets(
    router: Router, call: Call, request: GenerateRequest, salt: str | None, verb: str
) -> tuple[dict[Upstream, str], int]:
    """The replicas that get a request, and why; and the tokens of its prefix, 0 if they are not known. Raises NoReplica,
    UnknownModel."""
    if verb == "release" and request.model is None and not request.messages and not request.prompts:
        return dict.fromkeys(able(healthy(router)), "all replicas"), 0
    pool = router.pool(request.model)
    takers = able([one for one in healthy(router) if one.url in pool.upstreams], verb)
    if not takers:
        raise NoReplica("No replica of this model takes requests now")
    if verb == "release" or not pool.needs_prompts:
        return dict.fromkeys(takers, "all replicas"), 0
    prompt = await router.prompts.tokenize(request, pool, Salt.of(call.tenant.salt, salt), needed=True)
    session = request.session_name(call.headers)
    name = f"{call.tenant.name}/{session}" if session is not None else None
    known = _likely(pool, pool.query(prompt, request.model, Salt.of(call.tenant.salt, salt), name, None))
    found = {one: f"holds {known[one.url]} tokens" for one in takers if one.url in known}
    return found or dict.fromkeys(takers, "all replicas: none is known to hold it"), prompt.count


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
    fan: FanOutHandler,
    call: Call,
    targets: Mapping[Upstream, str] | None = None,
    body: ClientBody | None = None,
    salt: str | None = None,
) -> ReplicaAnswers:
    async def send_to(upstream: Upstream) -> Answer:
        # Only Foreword's servers know the tenant without it.
        given = salt if upstream.kind == "foreword" else Salt.of(call.tenant.salt, salt).text or None
        path, data = call.path, b""
        if body is not None:
            data = edited(body, ("cache_salt",), {"cache_salt": given} if given else {})
        elif given:
            path += "?" + urlencode({"cache_salt": given})
        return await fan.forward(call, upstream, path, data)

    return await fan.ask(call, targets, send_to)


def _best(verb: str, answers: ReplicaAnswers) -> Mapping[str, Any]:
    """The answer of the replica that keeps most, and those of all."""
    served = {upstream: one.body for upstream, one in answers.served.items()}
    best = max(served.values(), key=lambda body: (_RANKS.get(str(body.get("status")), 0), _count(body, "tokens")))
    if verb == "release":
        best = {**best, "released": each_once({one: body.get("released") for one, body in served.items()})}
    replicas = [
        {"replica": upstream.url, "why": answers.why.get(upstream, ""), **decode_object(one.answer.body)}
        for upstream, one in answers.each.items()
    ]
    return {**best, "replicas": replicas}


def _summed(answers: ReplicaAnswers) -> Mapping[str, Any]:
    """The answer of a replica that knows the session, with the blocks that all have freed."""
    freed: Counter[str] = Counter()
    bodies = [one.body for one in answers.served.values()]
    for body in bodies:
        freed.update(body.get("freed_blocks") or {})
    return {**bodies[0], **({"freed_blocks": freed} if "freed_blocks" in bodies[0] else {})}


def _count(body: Mapping[str, Any], name: str) -> int:
    found = body.get(name)
    return found if isinstance(found, int) and found > 0 else 0
