"""Erasures on all replicas. Those that do not answer are asked again when they take requests, while this router runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from msgspec import Struct
from yarl import URL

from foreword.api.cache_control import EraseQuery
from foreword.api.front import Answer, Call, Handler
from foreword.api.routes import NO_BODY, Meter, Right, Routes
from foreword.api.stored_responses import StoredResponses
from foreword.errors import BadRequest
from foreword.newest import Newest
from foreword.request_errors import NoReplica
from foreword.router.replicas import Upstream, clock
from foreword.router.router import Router
from foreword.router_extras.fan_out import (
    Fails,
    FanOut,
    FanOutHandler,
    ReplicaAnswer,
    all_servers,
    counted,
    fan_out,
    first,
    naming,
)
from foreword.router_extras.router_prefixes import RouterPrefixes
from foreword.router_extras.worker_links import workers_of

_ANSWER_SECONDS: Final = 90.0  # a replica may have much to erase, and waits for its devices (`prefixes/erasure.py`)
_DOWN_SECONDS: Final = 15.0  # of one that takes no requests
_PAUSE: Final = 5.0  # seconds
_LONGEST_PAUSE: Final = 300.0
_MAX: Final = 64  # of a tenant
_FILE: Final = "the router's named prefixes"  # a place in receipts
_WORKERS: Final = "the router's other processes"
_FORGOTTEN: Final = 1000
_MOVED: Final = "a request that ran during the erasure moved there"


class _Receipt(Struct):
    """The fields of a replica's receipt that are read."""

    what: str
    id: str = ""
    left: int = 0
    device_blocks: int = 0
    complete: bool = True


@dataclass(slots=True, eq=False)
class FleetErasure:
    """An erasure.

    Attributes:
        call: the client's.
        fan: asks replicas.
        path: what replicas are asked for.
        receipts: of the replicas that answered, by URL.
        open: why none came from the others, by URL, and why the router's own file is not written.
        moved: replicas to which a request has moved since they were asked.
        failures: their answers that are no receipts, and errors.
        began: by `clock`.
        forgotten: what other workers forget. silent: those that have not said that they have.
    """

    call: Call
    fan: FanOutHandler
    path: str
    id: str = field(default_factory=lambda: os.urandom(12).hex())
    receipts: dict[str, dict[str, Any]] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)
    failures: list[ReplicaAnswer] = field(default_factory=list)
    began: float = field(default_factory=clock)
    forgotten: tuple[str, bytes, list[str], float] | None = None
    silent: set[int] = field(default_factory=set)

    def note(self, url: str, answer: ReplicaAnswer) -> None:
        if answer.served:
            self.receipts[url] = dict(answer.body)
            self.open.pop(url, None)
        else:
            self.open[url] = f"HTTP {answer.answer.status}" if answer.error is None else answer.error.message
            self.failures.append(answer)

    def answer(self) -> Answer:
        """The replicas' receipts as one. Raises the first failure if there are none."""
        each = self.receipts.values()
        if not each:
            if not self.failures:
                raise NoReplica(self.fan.plan.none)
            if (error := self.failures[0].error) is not None:
                raise naming(error, self._failed)
            failed = self.failures[0].answer
            return Answer(failed.status, failed.body, {**failed.headers, **self._counted()})
        left, device = (sum(one.get(name, 0) for one in each) for name in ("left", "device_blocks"))
        complete = not self.open and all(one.get("complete", not one.get("left")) for one in each)
        merged = {"what": next(iter(each))["what"], "left": left, "device_blocks": device, "complete": complete}
        receipt = {"id": self.id, **merged, "unreachable": self.open, "replicas": self.receipts}
        return Answer.json(receipt, 200 if complete else 207, self._counted())

    @property
    def _failed(self) -> list[str]:
        return [place for place in self.open if place not in (_FILE, _WORKERS)]

    def _counted(self) -> dict[str, str]:
        return counted(self.receipts, {*self.receipts, *self._failed}, self._failed)


class FleetErasures:
    """The last 64 erasures of each tenant."""

    def __init__(self, router: Router, prefixes: RouterPrefixes, responses: StoredResponses) -> None:
        self._router, self._prefixes, self._responses = router, prefixes, responses
        self._known: list[FleetErasure] = []
        self._repeating: asyncio.Task[None] | None = None
        router.on_failover = self._failed_over
        workers_of(router).on("moved", lambda told: self._note_moved(*told))
        # Newest forgettings, also for a worker that joins: another one may have told it what it had not forgotten yet.
        self._forgotten: Newest[tuple[str, bool], tuple[str, bytes, list[str], float]] = Newest(_FORGOTTEN)
        # Records of erasures that other workers have, or had.
        self._others: Newest[tuple[str, str], list[Any]] = Newest(_FORGOTTEN)
        workers_of(router).on("forget", lambda told: self._forget(*told), self._forgotten.values)
        workers_of(router).on("erasure so far", lambda told: self._note_other(*told), self._records)
        workers_of(router).on("erasure", lambda asked: self._record(*asked))

    async def erase(self, call: Call, fan: FanOutHandler) -> Answer:
        """Erase on every replica, also on those that take no requests now."""
        query: EraseQuery = call.query
        if query.scope == "device":  # replicas would take the router for an operator
            raise BadRequest("the cache of all tenants is cleared on each server by itself", param="scope")
        given = query.cache_salt
        salts = [one for salt in given for one in self._router.audit.salts_of(call.tenant.salt, salt)]
        one = FleetErasure(call, fan, str(URL("/v1/cache").with_query([("cache_salt", str(salt)) for salt in salts])))
        older = self._of(call.tenant.name)[: 1 - _MAX]
        # It is known from here on: a request may move while replicas are asked.
        self._known = [*(known for known in self._known if known not in older), one]
        upstreams = self._router.upstreams.values()
        asked = fan.plan.to(self._router)
        forgotten = call.tenant.name, call.tenant.salt, list(given), one.began
        self._forget(*forgotten)
        told = await workers_of(self._router).repeat("forget", forgotten)
        one.forgotten, one.silent = forgotten, set(told.silent)
        if not given:
            one.open[_FILE] = "they are being removed"
        await self._ask(one, asked)
        for upstream in upstreams:
            if upstream.kind != "foreword":
                unknown = upstream.info is None
                one.open[upstream.url] = "it was not reached yet" if unknown else "it is not a Foreword server"
            elif upstream not in asked:
                one.open[upstream.url] = "it was reached during the erasure"
        if not one.receipts:  # the client gets an error, and asks again
            self._known.remove(one)
        self._continue()
        return one.answer()

    def _forget(self, tenant: str, salt: bytes, given: list[str], at: float) -> None:
        """Forget what this process knows of a tenant, or of requests with these salts: what was made until `at`, also what
        is on its way here."""
        known = self._forgotten.get((tenant, bool(given)))
        if known is None or at >= known[3]:
            self._forgotten[tenant, bool(given)] = tenant, salt, list(given), at
        self._router.warm_up.forget(tenant, given)
        for pool in self._router.pools.values():
            pool.known.forget(salt)
        if not given:
            self._responses.forget(salt, at)
            self._prefixes.registry.forget(tenant, at)

    def _failed_over(self, tenant: str, arrived: float, upstream: Upstream) -> None:
        """A request is, or was, on another replica than at first. Another worker may have the erasure."""
        self._note_moved(tenant, arrived, upstream.url)
        workers_of(self._router).tell("moved", (tenant, arrived, upstream.url))

    def _note_moved(self, tenant: str, arrived: float, url: str) -> None:
        """A request that began before an erasure of its tenant moved to a replica, which knows it as a new one: what it leaves
        there is erased, too."""
        for one in self._known:
            if one.call.tenant.name == tenant and arrived <= one.began:
                one.moved.add(url)
                one.open[url] = _MOVED
                self._continue()

    def _continue(self) -> None:
        if any(one.open for one in self._known) and (self._repeating is None or self._repeating.done()):
            self._repeating = self._router.background(self._repeat())

    async def show(self, call: Call, fan: FanOutHandler) -> Answer:
        """An erasure by its id, or by a replica's id of it."""
        for one in await self._named(call, fan, call.names["name"]):
            unfinished = {url: done.get("id") for url, done in one.receipts.items() if not done.get("complete", True)}
            upstreams = self._router.upstreams
            asked = {
                upstreams[url]: f"/v1/cache/erasures/{name}" for url, name in unfinished.items() if url in upstreams
            }
            later = await fan.ask(call, list(asked), partial(_send, call, fan, asked))
            for upstream, receipt in later.each.items():
                if receipt.served and receipt.body:
                    one.note(upstream.url, receipt)
            return one.answer()
        return (await fan.ask(call)).merged()

    def _of(self, tenant: str) -> list[FleetErasure]:
        return [one for one in self._known if one.call.tenant.name == tenant]

    async def _named(self, call: Call, fan: FanOutHandler, name: str) -> list[FleetErasure]:
        """The caller's erasure with this id, if there is one; another worker may have it."""
        tenant = call.tenant.name
        if found := [one for one in self._of(tenant) if one.id == name]:
            return found
        told = await workers_of(self._router).repeat("erasure", (tenant, name))
        if not any(told) and (ended := self._others.get((tenant, name))) is not None:
            told.append(ended)  # its worker has
        return [FleetErasure(call, fan, *one) for one in told if one is not None]

    def _records(self) -> list[tuple[str, list[Any]]]:
        own = [(one.call.tenant.name, [one.path, one.id, one.receipts, one.open]) for one in self._known]
        return [*((tenant, record) for (tenant, _), record in self._others.items()), *own]

    def _note_other(self, tenant: str, record: list[Any]) -> None:
        self._others[tenant, record[1]] = record

    def _record(self, tenant: str, name: str) -> tuple[str, str, dict[str, dict[str, Any]], dict[str, str]] | None:
        """The first attributes of an erasure, for another worker."""
        found = (one for one in self._of(tenant) if one.id == name)
        return next(((one.path, one.id, one.receipts, one.open) for one in found), None)

    async def _ask(self, one: FleetErasure, upstreams: list[Upstream]) -> None:
        """Ask replicas, and write the router's file if that is open."""
        one.moved -= {upstream.url for upstream in upstreams}
        if _FILE in one.open and not (problem := await self._prefixes.save()):
            del one.open[_FILE]
        elif _FILE in one.open:
            one.open[_FILE] = problem
        paths = dict.fromkeys(upstreams, one.path)
        answers = await one.fan.ask(one.call, upstreams, partial(_send, one.call, one.fan, paths))
        for upstream, answer in answers.each.items():
            one.note(upstream.url, answer)
        one.open |= dict.fromkeys(one.moved, _MOVED)
        one.open.pop(_WORKERS, None)
        if one.silent:
            one.open[_WORKERS] = f"workers {', '.join(map(str, sorted(one.silent)))} have not answered"
        workers_of(self._router).tell(
            "erasure so far", (one.call.tenant.name, [one.path, one.id, one.receipts, one.open])
        )

    async def _repeat(self) -> None:
        """Ask replicas that did not answer, when they take requests. Ends when there are none."""
        pause = _PAUSE
        while any(self._waits_for(one) for one in self._known):
            await asyncio.sleep(pause)
            healthy = {upstream.url: upstream for upstream in self._router.healthy() if upstream.kind == "foreword"}
            asked = [(one, [healthy[url] for url in one.open if url in healthy]) for one in self._known if one.open]
            for one, upstreams in asked:
                if one.silent:
                    told = await workers_of(self._router).repeat("forget", one.forgotten)
                    one.silent &= set(told.silent)
                await self._ask(one, upstreams)
            refused = any(upstream.url in one.open for one, upstreams in asked for upstream in upstreams)
            pause = min(2 * pause, _LONGEST_PAUSE) if refused else _PAUSE

    def _waits_for(self, one: FleetErasure) -> bool:
        """Whether a replica may answer later, or the file be written: a replica that has left, or is no Foreword server, does
        not."""
        upstreams = (self._router.upstreams.get(url) for url in one.open)
        able = (one for one in upstreams if one is not None and (one.info is None or one.kind == "foreword"))
        return bool({_FILE, _WORKERS} & one.open.keys()) or any(able)


async def _send(call: Call, fan: FanOutHandler, paths: Mapping[Upstream, str], upstream: Upstream) -> Answer:
    """Ask a replica for its path."""
    return await fan.forward(call, upstream, paths[upstream], b"")


def _seconds(upstream: Upstream) -> float:
    return _DOWN_SECONDS if upstream.excluded(clock()) else _ANSWER_SECONDS


def add_routes(routes: Routes[Handler], router: Router, prefixes: RouterPrefixes, responses: StoredResponses) -> None:
    erasures = FleetErasures(router, prefixes, responses)
    none = "No replica can remove cached blocks"
    erase = FanOut(to=all_servers, merge=None, fails=Fails.LATER, shape=_Receipt, seconds=_seconds, none=none)

    @routes.add("DELETE", "/v1/cache", right=Right.OWNER, meter=Meter.FREE, body=NO_BODY, query=EraseQuery, tag="cache")
    @fan_out(router, erase)
    async def clear_cache(call: Call, fan: FanOutHandler) -> Answer:
        """Remove the tenant's blocks from all replicas, and return the receipt of each. The status is 207 while a replica has
        not answered, or a place of one is open: such a replica is asked again as soon as it takes requests."""
        return await erasures.erase(call, fan)

    @routes.add("GET", "/v1/cache/erasures/{name}", right=Right.OWNER, meter=Meter.FREE, body=NO_BODY, tag="cache")
    @fan_out(router, replace(erase, merge=first, fails=Fails.IF_ALL))
    async def erasure(call: Call, fan: FanOutHandler) -> Answer:
        """The receipt of an erasure, so far, by its `id`, or by that in the receipt of a replica."""
        return await erasures.show(call, fan)
