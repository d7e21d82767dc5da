"""Lists and watches objects of the Kubernetes API.

The protocol is that of the Kubernetes API concepts page: list, then watch from the list's resourceVersion; after 410 Gone list
again. A failing API server changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Literal, TypeVar

import aiohttp
import msgspec

from foreword.decoders import decode_json
from foreword.errors import ConfigError, ForewordError
from foreword.router.replicas import CONNECTION_ERRORS, read_whole, url_parts

logger = logging.getLogger(__name__)

_PAGE: Final = 500
_MAX_OBJECTS: Final = 10_000
# Pages may have fewer objects than asked for, or none.
_MAX_PAGES: Final = 1_000
# etcd stores objects of at most 1.5 MiB; a page of them is larger.
_MAX_EVENT_BYTES: Final = 8 << 20
_MAX_PAGE_BYTES: Final = 256 << 20
_CALL_SECONDS: Final = 30.0
# The server ends a watch after this time, and token and certificates are read again.
_WATCH_SECONDS: Final = 240
_MIN_PAUSE: Final = 1.0
_MAX_PAUSE: Final = 30.0
_GONE: Final = 410
_NOT_FOUND: Final = 404


class ApiError(ForewordError, code="kubernetes_error"):
    """The API server refused a call, or answered something else than the API says.

    Args:
        problem: the same each time that it happens.
        detail: what differs, such as the server's own words.
    """

    def __init__(self, problem: str, detail: str = "") -> None:
        super().__init__(": ".join(filter(None, (problem, detail))))
        self.problem, self.detail = problem, detail


class _Gone(Exception):
    """The resource version is too old: list again."""


class _Absent(Exception):
    """The cluster does not have this kind of object."""


class ObjectMetadata(msgspec.Struct):
    """Metadata of an object or of a list."""

    name: str = ""
    resource_version: str = msgspec.field(name="resourceVersion", default="")
    next_page: str = msgspec.field(name="continue", default="")


class ApiObject(msgspec.Struct):
    """An object of the API. Subclasses name the fields that are used; all others are ignored."""

    metadata: ObjectMetadata


Kind = TypeVar("Kind", bound=ApiObject)


class _List(msgspec.Struct):
    metadata: ObjectMetadata
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class ApiServer:
    """Where the Kubernetes API is, and how this process authenticates.

    Args:
        url: of the API server; by default that of the cluster in which this process runs.
        folder: `token` and `ca.crt` of a service account. They are read for every list and watch, because they are replaced
            while a pod runs. The token is sent over TLS only.

    Raises ConfigError.
    """

    def __init__(self, url: str | None, folder: str) -> None:
        if url is None:
            host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            if not host:
                raise ConfigError("this process does not run in a Kubernetes cluster: give --kubernetes-api URL")
            url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        parts = url_parts(url)
        if parts is None or parts.scheme not in ("http", "https") or "@" in url or parts.query:
            raise ConfigError(f"--kubernetes-api takes a URL such as https://10.96.0.1, not {url!r}")
        self.url = url.rstrip("/")
        self._folder = Path(folder)

    def session(self) -> aiohttp.ClientSession:
        """A session with the present token and certificates. Raises OSError, or ssl.SSLError (an OSError)."""
        headers, connector = {"accept": "application/json"}, None
        if self.url.startswith("https:"):
            authority = self._folder / "ca.crt"
            context = ssl.create_default_context(cafile=str(authority) if authority.exists() else None)
            connector = aiohttp.TCPConnector(ssl=context)
            token = self._folder / "token"
            if token.exists():
                headers["authorization"] = f"Bearer {token.read_text().strip()}"
        return aiohttp.ClientSession(headers=headers, connector=connector, cookie_jar=aiohttp.DummyCookieJar())


@dataclass(frozen=True, slots=True)
class ObjectsOf:
    """Objects of one kind in a namespace.

    Attributes:
        group: with its version, such as `discovery.k8s.io/v1`.
        resource: the kind as in a path, such as `endpointslices`.
        purpose: what they say, for messages.
        labels: selects those with these; empty for all.
        optional: a cluster may lack this kind; then there are none.
    """

    group: str
    resource: str
    namespace: str
    purpose: str
    labels: str = ""
    optional: bool = False


class ObjectWatch(Generic[Kind]):
    """Keeps objects of the API by name; calls `changed` with all of them after every change.

    A failure is logged once, until another one takes its place or a watch has brought something, or ended in time. `run`
    counts every one; that a cluster lacks an optional kind is none.
    """

    def __init__(
        self, api: ApiServer, what: ObjectsOf, kind: type[Kind], changed: Callable[[Mapping[str, Kind]], object]
    ) -> None:
        self._api, self._what, self._kind, self._changed = api, what, kind, changed
        self.objects: dict[str, Kind] = {}
        self._version = ""
        # The present failure, without details that differ each time; None before the first answer, empty if all works.
        self._problem: str | None = None

    async def run(self, failed: Callable[[str], object]) -> None:
        """Watch until cancelled. `failed` is called with what is watched for every list and every watch that fails."""
        pause = _MIN_PAUSE
        while True:
            try:
                async with self._api.session() as session:
                    if not self._version:
                        await self._list(session)
                    await self._watch(session)
                pause = _MIN_PAUSE
                # A server that ends watches at once is not asked in a loop.
                await asyncio.sleep(_MIN_PAUSE)
            except _Gone:
                logger.info("Kubernetes: the version of the %s is too old; listing them", self._what.purpose)
                self._version = ""
                if pause > _MIN_PAUSE:  # a version is too old now and then, but not at once after a list
                    failed(self._what.purpose)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE)
            except _Absent:
                self._is_absent()
                self._version = ""
                if self.objects:
                    self.objects = {}
                    self._changed(self.objects)
                await asyncio.sleep(_MAX_PAUSE * random.uniform(0.5, 1.0))
            except (*CONNECTION_ERRORS, ForewordError, msgspec.DecodeError, ValueError, RecursionError) as error:
                # The last three: an answer that is no JSON, no text or nested too deeply, and a token that is half-written.
                if not isinstance(error, CONNECTION_ERRORS):
                    self._version = ""
                failed(self._what.purpose)
                self._log_failure(error)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, _MAX_PAUSE)

    def _works(self) -> None:
        if self._problem:
            logger.info("Kubernetes: the %s are watched again", self._what.purpose)
        self._problem = ""

    def _is_absent(self) -> None:
        what = self._what
        if self._problem != "absent":
            self._problem = "absent"
            logger.info(
                "Kubernetes: there are no %s: the cluster has no %s of %s (asked in the namespace %s). Install their CRD, if "
                "you have such objects; it is found then",
                *(what.purpose, what.resource, what.group, what.namespace),
            )

    def _log_failure(self, error: Exception) -> None:
        if isinstance(error, ApiError):
            problem, detail = error.problem, error.detail
        else:
            problem, detail = type(error).__name__, str(error)
        if problem != self._problem:
            self._problem = problem
            text = ": ".join(filter(None, (problem, detail)))
            logger.warning("Kubernetes: cannot watch the %s; they are unchanged: %s", self._what.purpose, text)

    async def _list(self, session: aiohttp.ClientSession) -> None:
        objects: dict[str, Kind] = {}
        query = {"limit": str(_PAGE)}
        for _ in range(_MAX_PAGES):
            async with self._get(session, query, _CALL_SECONDS) as response:
                found = decode_json(await read_whole(response, _MAX_PAGE_BYTES), _List)
            for item in found.items or ():
                one = decode_json(item, self._kind)
                objects[one.metadata.name] = one
            self._check_number(objects)
            if not found.metadata.next_page:
                break
            if found.metadata.next_page == query.get("continue"):
                raise ApiError("a page of the list is followed by itself")
            query["continue"] = found.metadata.next_page
        else:
            raise ApiError(f"the list has more than {_MAX_PAGES} pages")
        self.objects, self._version = objects, found.metadata.resource_version
        self._changed(objects)

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        """Apply events until the server ends the watch. Raises _Gone, ApiError and what aiohttp and msgspec raise."""
        seconds = int(_WATCH_SECONDS * random.uniform(0.8, 1.0))
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        query["resourceVersion"] = self._version
        async with self._get(session, query, seconds + _CALL_SECONDS) as response:
            line = bytearray()
            async for piece in response.content.iter_any():
                for part in piece.splitlines(keepends=True):
                    line += part
                    if len(line) > _MAX_EVENT_BYTES:
                        raise ApiError("an event has no end")
                    if line.endswith(b"\n"):
                        self._apply(decode_json(line, _Event))
                        # Not the response's status: what follows it may be an error each time.
                        self._works()
                        line.clear()
        self._works()

    def _apply(self, event: _Event) -> None:
        if event.type == "ERROR":
            status = decode_json(event.object, _Status)
            if status.code == _GONE:
                raise _Gone
            raise ApiError(f"the watch ended with {status.code}", status.message[:200])
        # A bookmark is an object of the kind with a version alone.
        known = ApiObject if event.type == "BOOKMARK" else self._kind
        one = decode_json(event.object, known)
        self._version = one.metadata.resource_version or self._version
        if event.type == "BOOKMARK":
            return
        if event.type == "DELETED":
            self.objects.pop(one.metadata.name, None)
        else:
            assert isinstance(one, self._kind)
            self.objects[one.metadata.name] = one
        self._check_number(self.objects)
        self._changed(self.objects)

    @contextlib.asynccontextmanager
    async def _get(
        self, session: aiohttp.ClientSession, query: Mapping[str, str], seconds: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A successful response. Raises _Gone, _Absent, ApiError and what aiohttp raises."""
        what = self._what
        url = f"{self._api.url}/apis/{what.group}/namespaces/{what.namespace}/{what.resource}"
        if what.labels:
            query = {"labelSelector": what.labels, **query}
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CALL_SECONDS)
        async with session.get(url, params=query, timeout=timeout, allow_redirects=False) as response:
            if response.status == _GONE:
                raise _Gone
            if response.status == _NOT_FOUND and what.optional:
                raise _Absent
            if response.status != 200:
                body = (await response.content.read(4096)).decode("utf-8", "replace")
                role = f" (a Role must allow list and watch of {what.resource} of {what.group} in {what.namespace})"
                hint = role if response.status in (401, 403) else ""
                raise ApiError(f"the API server says {response.status}{hint}", body[:200])
            yield response

    def _check_number(self, objects: Mapping[str, Kind]) -> None:
        if len(objects) > _MAX_OBJECTS:
            raise ApiError(f"there are more than {_MAX_OBJECTS} {self._what.resource}")
