"""Named prefixes for replicas of any kind.

The router remembers what clients registered. Foreword's servers get the registrations, also after a restart. For other servers
the router puts the prefix itself before the prompt, and computes it once on each of them, so that later requests hit.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import quote

import aiohttp
import msgspec

from foreword.api.dialects.answer_reader import check_whole, decode_object
from foreword.api.dialects.decode import Limits
from foreword.api.request import GenerateRequest
from foreword.api.rights import Tenant
from foreword.blocks.salt import PUBLIC, Salt
from foreword.decoders import decode_json
from foreword.errors import BadRequest, ConfigError, StoreUnavailable, reason_of
from foreword.newest import Newest
from foreword.prefixes.book import NamedPrefix, PrefixBook, content_of, size_of
from foreword.request_errors import ReplicaFailed
from foreword.router.auth import RouterAuth
from foreword.router.extras import Prefixes
from foreword.router.replica_body import PATHS, edited, parse_request
from foreword.router.replicas import CONNECTION_ERRORS, MAX_RESPONSE_BYTES, ReplicaInfo, Upstream, read_whole
from foreword.router_extras.worker_links import workers_of

if TYPE_CHECKING:
    from foreword.router.replica_pool import ReplicaPool

logger = logging.getLogger(__name__)

# To compute one prefix on one replica.
_SECONDS: Final = 120.0
# To bring a replica up to date before it gets requests. What is missing then is registered when it is asked for.
_REPAIR_SECONDS: Final = 30.0
_AT_A_TIME: Final = 8
# Whose prefixes are public. No tenant with a key has such a name.
PUBLIC_TENANT: Final = Tenant(PUBLIC.tenant.decode(), PUBLIC.tenant, "router")
_MOST_FORGOTTEN: Final = 1000


class NewPrefix(msgspec.Struct):
    """The body that registers a prefix: text for completions, or messages for chats."""

    name: str = ""
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    replace: bool = False


class _Saved(msgspec.Struct, frozen=True):
    """A prefix in the file."""

    tenant: str
    name: str
    content: str | tuple[Mapping[str, Any], ...]
    version: int
    created: float


class PrefixRegistry:
    """All registered prefixes.

    Args:
        path: a file that keeps them over restarts.

    Raises ConfigError for an unreadable file.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._book = PrefixBook()
        self._forgotten: Newest[str, float] = Newest(_MOST_FORGOTTEN)  # when, by `time.monotonic`
        for one in _read_saved(path) if path is not None and path.exists() else ():
            self.put(one.tenant, NamedPrefix(one.name, one.version, one.content, (), one.created))

    def all(self) -> list[tuple[str, NamedPrefix]]:
        """Tenants and their prefixes."""
        return [(tenant.decode(), prefix) for tenant, prefix in self._book.all()]

    def of(self, tenant: str) -> list[NamedPrefix]:
        """A tenant's prefixes, by name."""
        return self._book.list(salt=tenant.encode())

    def find(self, tenant: str, name: str) -> NamedPrefix | None:
        """A prefix of the tenant's own."""
        return self.get(tenant, name) if self._book.version(name, salt=tenant.encode()) else None

    def get(self, tenant: str, name: str) -> NamedPrefix:
        """Raises UnknownPrefix."""
        return self._book.get(name, salt=tenant.encode())

    def make(self, tenant: str, new: NewPrefix) -> NamedPrefix:
        """The prefix for `put`. Raises BadRequest and PrefixBudgetExceeded."""
        content, salt = content_of(new.content, new.messages), tenant.encode()
        self._book.check(new.name, content, None, salt=salt, replace=new.replace)
        version = self._book.version(new.name, salt=salt) + 1
        return NamedPrefix(new.name, version, content, (), time.time(), size_of(content), made=time.monotonic())

    def put(self, tenant: str, prefix: NamedPrefix) -> None:
        """Register a prefix or a new version of it, unless its tenant was forgotten since it was made."""
        if prefix.made > self._forgotten.get(tenant, -math.inf):
            sized = replace(prefix, bytes=prefix.bytes or size_of(prefix.content))
            self._book.commit(sized, salt=tenant.encode())

    def learn(self, tenant: str, name: str, version: int, content: Any, created: float, made: float) -> None:
        """Register what another worker has registered. Of two of one version all keep the later one."""
        given = content if isinstance(content, str) else tuple(content)
        known = self.find(tenant, name)
        if known is None or (version, created, str(given)) > (known.version, known.created, str(known.content)):
            self.put(tenant, NamedPrefix(name, version, given, (), created, size_of(given), made=made))

    def unlearn(self, tenant: str, name: str, version: int) -> None:
        """Remove what another worker has removed, but no later version, which that one may not have known."""
        known = self.find(tenant, name)
        if known is not None and known.version <= version:
            self.remove(tenant, name)

    def remove(self, tenant: str, name: str) -> NamedPrefix:
        """Raises UnknownPrefix."""
        return self._book.remove(name, salt=tenant.encode())

    def forget(self, tenant: str, at: float = math.inf) -> None:
        """Remove all of a tenant, also what is being registered. `at`: only what was made until then, by `time.monotonic`."""
        at = min(at, time.monotonic())
        self._forgotten[tenant] = max(at, self._forgotten.get(tenant, at))
        for prefix in self.of(tenant):
            if prefix.made <= at:
                self.remove(tenant, prefix.name)

    def write(self, prefixes: Sequence[tuple[str, NamedPrefix]]) -> None:
        """Write the file with these prefixes, if there is one. Takes time; runs on any thread. Raises OSError."""
        if self._path is None:
            return
        saved = [_Saved(owner, one.name, one.content, one.version, one.created) for owner, one in prefixes]
        temporary = self._path.with_name(self._path.name + ".new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(saved))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name of the file, too
        finally:
            os.close(folder)


class _Router(Protocol):
    """The part of the router that named prefixes need."""

    auth: RouterAuth
    session: aiohttp.ClientSession
    upstreams: dict[str, Upstream]

    def healthy(self) -> list[Upstream]: ...

    def background(self, work: Coroutine[Any, Any, None]) -> object: ...


class RouterPrefixes(Prefixes):
    """The registrations, and what replicas need of them. Runs on the event loop.

    Raises ConfigError for an unreadable file.
    """

    def __init__(self, router: _Router, path: str | None) -> None:
        self.registry = PrefixRegistry(Path(path) if path is not None else None)
        self._router = router
        self._writing = asyncio.Lock()

    # Registrations

    async def add(self, tenant: Tenant, prefix: NamedPrefix, computed: Callable[[int], None]) -> None:
        """Keep a registration, and compute the prefix where the router puts it before prompts. `computed` gets the tokens of
        each replica that has done so."""
        self.registry.put(tenant.name, prefix)
        told = tenant.name, prefix.name, prefix.version, prefix.content, prefix.created, prefix.made
        await workers_of(self._router).repeat("prefix", told)
        await self.save()
        for upstream in self._router.healthy():
            if upstream.info is not None and upstream.kind != "foreword" and tenant is not PUBLIC_TENANT:
                self._router.background(self._warm(upstream.url, upstream.info, tenant, prefix, computed))

    async def remove(self, tenant: Tenant, name: str) -> NamedPrefix:
        """Raises UnknownPrefix, and StoreUnavailable if the file would bring it back."""
        removed = self.registry.remove(tenant.name, name)
        if problem := await self.save():
            self.registry.put(tenant.name, removed)
            raise StoreUnavailable(f"the prefix is not removed, its file could not be written: {problem}")
        await workers_of(self._router).repeat("prefix removed", (tenant.name, name, removed.version))
        return removed

    def follow_workers(self) -> None:
        """Register and remove what other workers of this router do."""

        def known() -> Iterator[Any]:
            for tenant, one in self.registry.all():
                yield tenant, one.name, one.version, one.content, one.created, one.made

        workers_of(self._router).on("prefix", lambda told: self.registry.learn(*told), known)
        workers_of(self._router).on("prefix removed", lambda told: self.registry.unlearn(*told))

    async def save(self) -> str:
        """Write the file. Returns why that failed, "" if it did not."""
        async with self._writing:
            try:
                await asyncio.to_thread(self.registry.write, self.registry.all())
            except OSError as error:
                logger.error("named prefixes could not be written: %s", error)
                return str(error)
        return ""

    # Requests

    def expanded(self, pool: ReplicaPool, tenant: Tenant, request: GenerateRequest) -> GenerateRequest:
        if request.prefix is None or pool.kind == "foreword":
            return request
        prefix = self.registry.get(tenant.name, request.prefix)
        changes = _with_text(prefix, request) if request.dialect == "completions" else with_messages(prefix, request)
        return parse_request(request.dialect, edited(request.body, ("prefix",), changes), Limits())

    def check(self, tenant: Tenant, request: GenerateRequest) -> None:
        if request.prefix is not None:
            with_messages(self.registry.get(tenant.name, request.prefix), request)

    async def repair(self, upstream: Upstream, tenant: Tenant, name: str) -> bool:
        prefix = self.registry.find(tenant.name, name)
        return prefix is not None and upstream.kind == "foreword" and await self._ensure(upstream.url, tenant, prefix)

    # Replicas

    async def prepare(self, url: str, info: ReplicaInfo) -> None:
        tenants = self._router.auth.tenants
        owners = {PUBLIC_TENANT.name: PUBLIC_TENANT}
        named = [(owners.get(name) or tenants.named(name), one) for name, one in self.registry.all()]
        wanted = [(tenant, one) for tenant, one in named if tenant is not None]
        if info.kind != "foreword":
            self._router.background(self._warm_all(url, info, wanted))
            return
        limit = asyncio.Semaphore(_AT_A_TIME)

        async def ensure(tenant: Tenant, prefix: NamedPrefix) -> bool:
            async with limit:
                return await self._ensure(url, tenant, prefix)

        try:
            async with asyncio.timeout(_REPAIR_SECONDS):
                known = await asyncio.gather(*(ensure(tenant, prefix) for tenant, prefix in wanted))
        except TimeoutError:
            known = [False]
        if not all(known):
            logger.warning("replica %s does not have all named prefixes yet", url)

    async def _ensure(self, url: str, tenant: Tenant, prefix: NamedPrefix) -> bool:
        path = f"/v1/prefixes/{quote(prefix.name, safe='')}"
        try:
            status, data = await self.send(url, "foreword", tenant, "GET", path)
            if status == 200 and prefix.body.items() <= decode_object(data).items():  # it has the same content there
                return True
            status, _ = await self.send(url, "foreword", tenant, "PUT", path, prefix.body)
        except (*CONNECTION_ERRORS, ReplicaFailed) as error:
            logger.warning("prefix %r could not be registered at %s: %s", prefix.name, url, error)
            return False
        if status >= 300:
            logger.warning("prefix %r could not be registered at %s: status %d", prefix.name, url, status)
        return status < 300

    async def _warm_all(self, url: str, info: ReplicaInfo, wanted: list[tuple[Tenant, NamedPrefix]]) -> None:
        for tenant, prefix in wanted:
            if url in self._router.upstreams:
                await self._warm(url, info, tenant, prefix)

    async def _warm(
        self,
        url: str,
        info: ReplicaInfo,
        tenant: Tenant,
        prefix: NamedPrefix,
        computed: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """Compute a prefix, so that the first request that names it hits."""
        path = PATHS["completions" if prefix.kind == "text" else "chat"]
        body: dict[str, Any] = {"model": info.models[0], "max_tokens": 1}
        body["prompt" if prefix.kind == "text" else "messages"] = prefix.content
        if info.kind == "vllm" and tenant.salt:
            body["cache_salt"] = Salt(tenant.salt).text
        try:
            _, data = await self.send(url, info.kind, tenant, "POST", path, body)
            computed(check_whole(data).prompt or 0)
        except (*CONNECTION_ERRORS, ReplicaFailed) as error:
            logger.info("prefix %r was not computed on %s: %s", prefix.name, url, error)

    async def send(
        self,
        url: str,
        kind: str,
        tenant: Tenant,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        most: int = MAX_RESPONSE_BYTES,
    ) -> tuple[int, bytes]:
        """Status and body of the router's own call for a tenant. Raises what aiohttp raises, and ReplicaFailed for an answer of
        more than `most` bytes."""
        headers = {**self._router.auth.headers_of(tenant, kind), "content-type": "application/json"}
        limit = aiohttp.ClientTimeout(total=_SECONDS)
        data = None if body is None else msgspec.json.encode(body)
        async with self._router.session.request(
            method, url + path, data=data, headers=headers, allow_redirects=False, timeout=limit
        ) as response:
            return response.status, await read_whole(response, most)


def with_messages(prefix: NamedPrefix, request: GenerateRequest) -> dict[str, Any]:
    """The messages of a chat behind those of a prefix. Raises BadRequest for a prefix of text."""
    messages = request.body.only("messages").get("messages")
    if isinstance(prefix.content, str) or messages is None:
        raise BadRequest(f"prefix: {prefix.name!r} is text; a chat needs a prefix of messages", param="prefix")
    return {"messages": [*prefix.content, *decode_json(messages, list[msgspec.Raw])]}


def _with_text(prefix: NamedPrefix, request: GenerateRequest) -> dict[str, Any]:
    content = prefix.content
    if not isinstance(content, str):
        raise BadRequest(f"prefix: {prefix.name!r} is messages; a prompt needs a prefix of text", param="prefix")
    prompts = [content + one for one in request.prompts if isinstance(one, str)]
    if not prompts:
        raise BadRequest("prompt: must be text after a named prefix on these replicas", param="prompt")
    return {"prompt": prompts if len(prompts) > 1 else prompts[0]}


def _read_saved(path: Path) -> list[_Saved]:
    try:
        return decode_json(path.read_bytes(), list[_Saved])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read router.prefix_file {path}: {reason_of(error)}") from None
