"""A server that speaks the part of the Kubernetes API that is used: list and watch of EndpointSlices and objectives, over TLS.

It keeps a history of changes with resource versions, answers 410 Gone for versions that it has forgotten, sends pages and
bookmarks, and checks the token. No cluster is needed; what a real API server does beyond its documentation is not here.
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import ssl
from collections import Counter
from pathlib import Path
from typing import Any

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from router_parts import Loop

PATH = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"


def endpoint(host: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [host], "conditions": conditions}


def endpoint_slice(name: str, port: int, *endpoints: dict[str, Any], family: str = "IPv4") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "vllm"}},
        "addressType": family,
        "endpoints": list(endpoints) or None,
        "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": port, "protocol": "TCP"}],
    }


def objectives_path(group: str) -> str:
    return f"/apis/{group}/namespaces/llm/inferenceobjectives"


def objective(name: str, pool: str = "llama", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "llm"}, "spec": {"poolRef": {"name": pool}, **spec}}


class KubernetesApi:
    """The server. `folder` has its `ca.crt` and the `token` that it accepts, as a pod's service account has. `kinds`: paths of
    the objects that it has."""

    def __init__(self, loop: Loop, folder: Path, *kinds: str) -> None:
        self._loop = loop
        self.folder = folder
        self.version = 100
        self.objects: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in kinds or (PATH,)}
        self.slices = self.objects.get(PATH, {})
        # Versions, kinds and events.
        self.history: list[tuple[int, str, dict[str, Any]]] = []
        # Changes up to this version are forgotten.
        self.oldest = 0
        self.token = ""
        self.refusing = 0
        # Whether a watch begins with a bookmark, and has one after each change.
        self.bookmarks = True
        # How often it refused, and did not know a kind, by path.
        self.refused: Counter[str] = Counter()
        self.absent: Counter[str] = Counter()
        # Answers in place of its own, which end with the watch or list that gets them.
        self.hostile: list[bytes] = []
        # The page that each page of a list names as the next; `new` for ever new ones.
        self.next_page = ""
        self.lists = self.watches = self.gone = 0
        # Annotations of pods, and all patches in order.
        self.annotations: dict[str, dict[str, str]] = {}
        self.patches: list[str] = []
        self._changed = asyncio.Event()
        self._writers: list[asyncio.Task[Any]] = []
        self.set_token("first")
        self.url = loop.call(self._start)

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_get("/apis/{rest:.*}", self._get)
        app.router.add_patch("/api/v1/namespaces/llm/pods/{name}", self._patch)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.ends.append(runner.cleanup)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=_certificate(self.folder)).start()
        return f"https://127.0.0.1:{runner.addresses[0][1]}"

    # Changes in the cluster

    def set_token(self, token: str) -> None:
        """The kubelet writes a new token, and only this one is valid."""
        self.token = token
        (self.folder / "token").write_text(f"{token}\n")

    def put(self, one: dict[str, Any], kind: str = PATH) -> None:
        known = self.objects[kind]
        self._loop.call(lambda: self._change("MODIFIED" if one["metadata"]["name"] in known else "ADDED", one, kind))

    def delete(self, name: str, kind: str = PATH) -> None:
        self._loop.call(lambda: self._change("DELETED", self.objects[kind][name], kind))

    def send(self, event: dict[str, Any], kind: str = PATH) -> None:
        """An event to all who watch, without a change."""
        self._loop.call(lambda: self._add(event, kind))

    def close_watches(self) -> None:
        self._loop.call(self._close)

    def compact(self) -> None:
        """Forget all changes so far, and end all watches."""
        self.oldest = self.version
        self.close_watches()

    def _close(self) -> None:
        for one in self._writers:
            one.cancel()

    def _change(self, change: str, one: dict[str, Any], kind: str) -> None:
        self.version += 1
        one = {**one, "metadata": {**one["metadata"], "resourceVersion": str(self.version)}}
        if change == "DELETED":
            del self.objects[kind][one["metadata"]["name"]]
        else:
            self.objects[kind][one["metadata"]["name"]] = one
        self._add({"type": change, "object": one}, kind)

    def _add(self, event: dict[str, Any], kind: str) -> None:
        self.history.append((self.version, kind, event))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # The API

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if self.refusing:
            self.refused[request.path] += 1
            return _status(self.refusing, f"refused {sum(self.refused.values())}")
        if self.hostile and request.path in self.objects:
            return web.Response(body=self.hostile.pop(0))
        if request.path not in self.objects:
            self.absent[request.path] += 1
            return _status(404, "the server could not find the requested resource")
        if request.path == PATH and request.query["labelSelector"] != "kubernetes.io/service-name=vllm":
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": None})
        return await (self._watch(request) if request.query.get("watch") else self._list(request))

    async def _patch(self, request: web.Request) -> web.Response:
        """A merge patch of a pod's annotations. Pods are those that an endpoint names."""
        name = request.match_info["name"]
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if self.refusing:
            return _status(self.refusing, "refused")
        pods = {pod.get("targetRef", {}).get("name") for one in self.slices.values() for pod in one["endpoints"] or ()}
        if name not in pods:
            return _status(404, "not found")
        assert request.content_type == "application/merge-patch+json"
        self.patches.append(name)
        self.annotations.setdefault(name, {}).update((await request.json())["metadata"]["annotations"])
        return web.json_response({})

    async def _list(self, request: web.Request) -> web.Response:
        """Pages of two, whatever larger limit was asked for."""
        self.lists += 1
        first = int(request.query.get("continue", "0")) if not self.next_page else 0
        found = list(self.objects[request.path].values())
        metadata = {"resourceVersion": str(self.version)}
        if len(found) > first + 2:
            metadata["continue"] = str(first + 2)
        if self.next_page:
            metadata["continue"] = self.next_page if self.next_page != "new" else f"0{self.lists}"
        body = {"kind": "List", "metadata": metadata, "items": found[first : first + 2]}
        return web.json_response(body)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        if since < self.oldest:
            self.gone += 1
            return _status(410, "too old resource version")
        self.watches += 1
        task = asyncio.current_task()
        assert task is not None
        self._writers.append(task)
        response = web.StreamResponse(headers={"content-type": "application/json"})
        try:
            await response.prepare(request)
            sent = next((at for at, (version, *_) in enumerate(self.history) if version > since), len(self.history))
            while True:
                changed, bookmark = self._changed, {"metadata": {"resourceVersion": str(self.version)}}
                events, sent = self.history[sent:], len(self.history)
                for _, kind, event in events:
                    if kind == request.path:
                        await response.write(json.dumps(event).encode() + b"\n")
                if self.bookmarks:
                    await response.write(json.dumps({"type": "BOOKMARK", "object": bookmark}).encode() + b"\n")
                await changed.wait()
        except asyncio.CancelledError:
            task.uncancel()
            await response.write_eof()
        finally:
            self._writers.remove(task)
        return response


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "message": message, "code": code}, status=code)


def _certificate(folder: Path) -> ssl.SSLContext:
    """A self-signed certificate for 127.0.0.1: `ca.crt`, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    start = datetime.datetime(2020, 1, 1)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number(), start)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = builder.not_valid_after(datetime.datetime(2200, 1, 1)).add_extension(names, critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.crt", folder / "server.key")
    return context
