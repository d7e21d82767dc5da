"""Routes that ask several replicas.

Such a route has a declaration: which replicas it asks, how their answers become one, what the failure of one makes of it, and
limits. What is true of all of them is here: replicas are asked side by side, an answer that comes late, is too large, or is not
what the route's replicas answer counts as a failure, and each replica that failed is named in what the client gets.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import msgspec
from msgspec import Struct

from foreword.api.dialects.answer_reader import error_of, read_error
from foreword.api.errors import error_body
from foreword.api.front import Answer, Call, Reply
from foreword.decoders import convert, decode_json
from foreword.request_errors import NoReplica, ReplicaFailed
from foreword.router.passthrough import send
from foreword.router.replicas import CONNECTION_ERRORS, Upstream
from foreword.router.router import Router
from foreword.tasks import to_its_end

ASKED: Final = "x-foreword-replicas"
FAILED: Final = "x-foreword-failed-replicas"
ANSWER_BYTES: Final = 4 << 20
AT_A_TIME: Final = 64
_MOST_NAMED: Final = 16

Send = Callable[[Upstream], Awaitable[Answer]]


class Fails(Enum):
    """The meaning of a replica's failure for the client's answer, where others succeeded. A 404 is no failure: that replica
    does not know what the request names."""

    IF_ANY = "any failure"
    """The failure, so that the client repeats the request. What is done stays done."""
    IF_ANY_BREAKS = "any answer of 5xx, or none"
    """The same, but for a replica that refuses the request."""
    IF_ALL = "all have failed"
    """The answers of the others."""
    LATER = "all have failed; the others are asked again"
    """The answers of the others with status 207. The handler asks again in the background."""

    def decides(self, status: int) -> bool:
        """Whether a failure of this status is the answer although others succeeded."""
        return self is Fails.IF_ANY or (self is Fails.IF_ANY_BREAKS and status >= 500)


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """The outcome of asking one replica.

    Attributes:
        answer: its own, or an error in the format of most paths.
        body: the object of an answer that is no failure; empty for others.
        error: why there is no answer of its own.
    """

    answer: Answer
    body: Mapping[str, Any] = field(default_factory=dict)
    error: ReplicaFailed | None = None

    @property
    def served(self) -> bool:
        return self.answer.status < 400

    @property
    def failed(self) -> bool:
        return not self.served and self.answer.status != 404


@dataclass(frozen=True, slots=True)
class ReplicaAnswers:
    """The outcomes of asking replicas, in their order.

    Attributes:
        why: each of them was asked; empty where the declaration says it.
    """

    plan: FanOut
    each: Mapping[Upstream, ReplicaAnswer]
    why: Mapping[Upstream, str] = field(default_factory=dict)

    @property
    def served(self) -> dict[Upstream, ReplicaAnswer]:
        return {upstream: one for upstream, one in self.each.items() if one.served}

    def merged(self) -> Answer:
        """The client's answer. Raises NoReplica if none was asked, and ReplicaFailed if the client gets the failure of a
        replica that did not answer."""
        served, failures = self.served, {upstream: one for upstream, one in self.each.items() if one.failed}
        failed = [upstream.url for upstream in failures]
        if not self.each:
            raise NoReplica(self.plan.none)
        deciding = [one for one in failures.values() if self.plan.fails.decides(one.answer.status)]
        if served and not deciding:
            assert self.plan.merge is not None, "the handler makes the answer"
            made = self.plan.merge(self)
            answer = made if isinstance(made, Answer) else Answer.json(made)
        else:
            one = (deciding or [*failures.values()] or [*self.each.values()])[0]
            if one.error is not None:
                raise naming(one.error, failed)
            answer = one.answer
        return Answer(answer.status, answer.body, {**answer.headers, **counted(served, self.each, failed)})


def named(failed: Sequence[str]) -> str:
    """The first of these replicas, and how many more there are: a header has its limits."""
    more = len(failed) - _MOST_NAMED
    return ", ".join([*failed[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])])


def naming(error: ReplicaFailed, failed: Sequence[str]) -> ReplicaFailed:
    """The error of one of these replicas, with the names of all."""
    return ReplicaFailed(f"{error.message} (failed: {named(failed)})") if len(failed) > 1 else error


def counted(served: Sized, asked: Sized, failed: Sequence[str]) -> dict[str, str]:
    """The headers that say on how many replicas a request succeeded, and on which it failed."""
    return {ASKED: f"{len(served)} of {len(asked)}", **({FAILED: named(failed)} if failed else {})}


def _any_time(upstream: Upstream) -> float:
    return float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class FanOut:
    """The declaration of a route that asks several replicas.

    Attributes:
        to: which it asks, where the handler does not name fewer. Raises NoReplica, or returns an empty list where the handler
            knows an answer without any.
        merge: makes one answer of those of which at least one succeeded. None if the handler does, of more than one asking.
        fails: what the failure of a replica means.
        shape: fields that an answer has, with their types, as far as `merge` needs them.
        seconds: for the answer of a replica. It is never more than the router's limit of a request.
        answer_bytes: of one answer.
        at_a_time: replicas that are asked side by side.
        to_its_end: it is carried out although its client has left.
        none: the error where no replica can be asked.
    """

    to: Callable[[Router], list[Upstream]]
    merge: Callable[[ReplicaAnswers], Answer | Mapping[str, Any]] | None
    fails: Fails
    shape: type[Any] = dict[str, Any]
    seconds: Callable[[Upstream], float] = _any_time
    answer_bytes: int = ANSWER_BYTES
    at_a_time: int = AT_A_TIME
    to_its_end: bool = False
    none: str = "No replica that can do this takes requests now"


class FanOutHandler:
    """The handler of a route with a declaration.

    Attributes:
        plan: the declaration.
    """

    def __init__(
        self, router: Router, plan: FanOut, work: Callable[[Call, FanOutHandler], Coroutine[Any, Any, Reply]]
    ) -> None:
        self.plan = plan
        self._router, self._work = router, work
        functools.update_wrapper(self, work)

    async def __call__(self, call: Call) -> Reply:
        work = self._work(call, self)
        if not self.plan.to_its_end:
            return await work
        return await to_its_end(work, f"request {call.id}, whose client has left: {call.method} {call.path}")

    async def ask(
        self,
        call: Call,
        targets: Sequence[Upstream] | Mapping[Upstream, str] | None = None,
        send_to: Send | None = None,
    ) -> ReplicaAnswers:
        """Ask these replicas, or those of the declaration.

        Args:
            targets: may say why each is asked.
            send_to: sends the request to one of them; by default it is forwarded as it came. Raises ReplicaFailed, and what
                aiohttp raises.

        Raises NoReplica, where the declaration's `to` does.
        """
        chosen = self.plan.to(self._router) if targets is None else list(targets)
        sent = send_to or (lambda upstream: self.forward(call, upstream, call.path, call.raw))
        limit = asyncio.Semaphore(self.plan.at_a_time)
        each = await asyncio.gather(*(self._one(call, upstream, sent, limit) for upstream in chosen))
        why = targets if isinstance(targets, Mapping) else {}
        return ReplicaAnswers(self.plan, dict(zip(chosen, each, strict=True)), why)

    async def forward(self, call: Call, upstream: Upstream, path: str, body: bytes) -> Answer:
        """Send the client's request to a replica, within the limits of the declaration. Raises ReplicaFailed, and what aiohttp
        raises."""
        return await send(self._router, call, upstream, path, body, limit=self.plan.answer_bytes)

    async def _one(self, call: Call, upstream: Upstream, sent: Send, limit: asyncio.Semaphore) -> ReplicaAnswer:
        seconds = min(self.plan.seconds(upstream), self._router.config.request_timeout)
        try:
            async with limit, asyncio.timeout(seconds):
                answer = await self._sent(upstream, sent)
            # A HEAD has no body.
            body = self._body(upstream, answer) if answer.status < 400 and call.method != "HEAD" else {}
        except TimeoutError:
            if (
                seconds == self._router.config.request_timeout
            ):  # what hangs for all the time of a request is no slow answer
                self._router.failed(upstream, f"no answer within {seconds:.0f} s")
            return _failure(ReplicaFailed(f"{upstream.url} did not answer within {seconds:.0f} s"))
        except ReplicaFailed as error:
            return _failure(error)
        if answer.status >= 400 and error_of(answer.body).message is None:  # vLLM's, which has no such path
            return ReplicaAnswer(Answer.json(error_body(read_error(answer.status, answer.body)), answer.status))
        return ReplicaAnswer(answer, body)

    async def _sent(self, upstream: Upstream, sent: Send) -> Answer:
        """Raises ReplicaFailed."""
        try:
            return await sent(upstream)
        except CONNECTION_ERRORS as error:
            self._router.failed(upstream, f"the connection broke ({type(error).__name__})")
            raise ReplicaFailed(f"{upstream.url} did not answer; it may have executed the request. Retry it") from None
        except ReplicaFailed as error:
            named = upstream.url in error.message
            raise ReplicaFailed(error.message if named else f"{upstream.url}: {error.message}") from None

    def _body(self, upstream: Upstream, answer: Answer) -> Mapping[str, Any]:
        """Raises ReplicaFailed for what is no answer of this route."""
        try:
            body = decode_json(answer.body, dict[str, Any])
            convert(body, self.plan.shape)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ReplicaFailed(f"{upstream.url} answered with something else than the route does: {error}") from None
        return body


def fan_out(
    router: Router, plan: FanOut
) -> Callable[[Callable[[Call, FanOutHandler], Coroutine[Any, Any, Reply]]], FanOutHandler]:
    """Put this above a function that answers a call with the help of `FanOutHandler.ask`, and under its route."""
    return lambda work: FanOutHandler(router, plan, work)


def _failure(error: ReplicaFailed) -> ReplicaAnswer:
    return ReplicaAnswer(Answer.json(error_body(error), error.status), error=error)


# Replicas


def healthy(router: Router) -> list[Upstream]:
    """Replicas that take requests, the least loaded first. Raises NoReplica if there are none."""
    found = router.healthy()
    if not found:
        raise NoReplica(f"No request can be taken now: {router.ready()}")
    return found


def foreword_replicas(router: Router) -> list[Upstream]:
    """Foreword's servers among the replicas that take requests, the least loaded first."""
    return [one for one in router.healthy() if one.kind == "foreword"]


def all_servers(router: Router) -> list[Upstream]:
    """All of Foreword's servers, also those that take no requests now."""
    return [one for one in router.upstreams.values() if one.kind == "foreword"]


def able(replicas: Sequence[Upstream], verb: str = "") -> list[Upstream]:
    """Foreword's servers among the replicas, and those of vLLM for a prefetch or a session; all if there are none."""
    kinds = ("foreword", "vllm") if verb in ("prefetch", "session") else ("foreword",)
    return [one for one in replicas if one.kind in kinds] or list(replicas)


# Merges


class Listed(Struct):
    """The fields of a list that `union` needs."""

    data: list[Any] = msgspec.field(default_factory=list)


def first(answers: ReplicaAnswers) -> Answer:
    """The first success, as that replica answered."""
    return next(iter(answers.served.values())).answer


def union(answers: ReplicaAnswers) -> Mapping[str, Any]:
    """The entries of all lists, each once."""
    lists = {upstream: one.body.get("data") for upstream, one in answers.served.items()}
    return {"object": "list", "data": each_once(lists)}


def each_once(lists: Mapping[Upstream, Any]) -> list[dict[str, Any]]:
    """Entries of several replicas, each once, with the replicas that have it."""
    found: dict[Any, dict[str, Any]] = {}
    for upstream, entries in lists.items():
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("id"), str):
                found.setdefault(entry["id"], {**entry, "replicas": []})["replicas"].append(upstream.url)
    return list(found.values())
