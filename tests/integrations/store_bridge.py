"""A store in the process of a test, for an engine in another: `serve` makes a socket of it, `contract://SOCKET` opens that."""

from __future__ import annotations

import os
import socket
import socketserver
import struct
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from foreword.blocks.layout import Layout
from foreword.errors import StoreError, StoreUnavailable
from foreword.store.base import Name, Store, StoreStatus
from foreword.store.frame import Frame, check
from foreword.store.tiered import TieredStore
from foreword.store.types import Reach, StoreType, StoreUrl
from foreword.store.urls import TYPES


def _send(to: socket.socket, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    to.sendall(struct.pack("<Q", len(data)) + data)


def _receive(source: socket.socket) -> Any:
    def read(count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = source.recv(count - len(parts))
            if not part:
                raise StoreUnavailable("the test has closed its store")
            parts += part
        return bytes(parts)

    return msgspec.msgpack.decode(read(struct.unpack("<Q", read(8))[0]))


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads, block_on_close = True, False


def serve(store: TieredStore) -> str:
    """The socket of a store with one tier, until this process ends. What is stored is stored by `store`, which reports it."""
    inner = store.tiers[0].store

    def get(names: list[bytes], sizes: list[int], deadline: float) -> list[Any]:
        buffers = [memoryview(bytearray(size)) for size in sizes]
        found = inner.get(names, buffers, deadline=deadline)
        return [bytes(row[:size]) if size > 0 else size for size, row in zip(found, buffers, strict=True)]

    def put(frames: list[bytes], deadline: float) -> int:
        return store.put([check(memoryview(one)) for one in frames], deadline=deadline)

    def call(name: str, arguments: list[Any], deadline: float) -> Any:
        if name in ("get", "put"):
            return {"get": get, "put": put}[name](*arguments, deadline)
        return getattr(inner, name)(*arguments, **({} if name == "status" else {"deadline": deadline}))

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            name, arguments, seconds = _receive(self.request)
            try:
                answer = {"value": call(name, arguments, time.monotonic() + seconds)}
            except StoreError as error:
                answer = {"error": error.message}
            try:
                _send(self.request, answer)
            except OSError:
                return  # the engine was ended meanwhile

    path = os.path.join(tempfile.mkdtemp(), "store")
    threading.Thread(target=_Server(path, Handler).serve_forever, daemon=True).start()
    return path


class BridgedStore(Store):
    """The store behind a socket. Each call has a connection of its own, so that one that hangs holds up no other."""

    label = "contract"

    def __init__(self, path: str) -> None:
        self._path = path

    def _call(self, name: str, *arguments: Any, deadline: float) -> Any:
        with socket.socket(socket.AF_UNIX) as to:
            to.connect(self._path)
            _send(to, (name, arguments, min(max(deadline - time.monotonic(), 0.0), 1e6)))
            answer = _receive(to)
        if "error" in answer:
            raise StoreUnavailable(answer["error"])
        return answer["value"]

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        return int(self._call("lookup", list(names), deadline=deadline))

    def present(self, names: Sequence[Name], *, deadline: float) -> list[bool]:
        return list(self._call("present", list(names), deadline=deadline))

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        found = self._call("get", list(names), [len(one) for one in buffers], deadline=deadline)
        for one, buffer in zip(found, buffers, strict=True):
            if isinstance(one, bytes):
                buffer[: len(one)] = one
        return [len(one) if isinstance(one, bytes) else one for one in found]

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        return int(self._call("put", [bytes(one.data) for one in frames], deadline=deadline))

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        return int(self._call("delete", list(names), deadline=deadline))

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        return 0

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        self._call("put_record", key, data, deadline=deadline)

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        found: bytes | None = self._call("get_record", key, deadline=deadline)
        return found

    def delete_record(self, key: str, *, deadline: float) -> bool:
        return bool(self._call("delete_record", key, deadline=deadline))

    def records(self, prefix: str, *, deadline: float) -> list[str]:
        return list(self._call("records", prefix, deadline=deadline))

    def status(self) -> StoreStatus:
        return StoreStatus()

    def close(self) -> None:
        """Nothing: the store is the test's."""


class BridgeType(StoreType):
    label = "contract"
    reach = Reach.NETWORK

    def open(self, url: StoreUrl, layout: Layout | None) -> Store:
        return BridgedStore(url.path)


def register() -> None:
    """Let this process open `contract://` URLs."""
    TYPES._parts["contract"] = BridgeType()
