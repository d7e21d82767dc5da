"""Requests for single objects of a bucket: chunks, parts of them, and records. All of them run on the client's loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store

from foreword.blocks.runs import consecutive_runs
from foreword.errors import StoreConfigError, StoreUnavailable
from foreword.store.base import BAD, has_prefix
from foreword.store.object.chunks import (
    IndexEntry,
    ObjectChunk,
    chunk_path,
    pack,
    read_index,
    read_path,
    read_slot,
)
from foreword.store.object.client import error_text

_PAGE: Final = 1000  # chunks read of one listing
_NO_BUCKET = re.compile("status code: 404")
_UNKNOWN = re.compile("status code: 501")
_TOO_SHORT = re.compile("status code: 416|range was invalid")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class ChunkRead:
    """Consecutive slots of a chunk, and the indexes of the blocks in the call."""

    chunk: ObjectChunk
    first: int
    indexes: list[int]


def _to_its_end(
    write: Callable[Concatenate[ObjectBucket, bytes, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[ObjectBucket, bytes, P], Coroutine[Any, Any, T]]:
    """A write of a layout and root that continues when its caller gives up: the service may complete it at any time, so an
    erasure waits for its end (`ObjectBucket.settle`)."""

    async def begun(self: ObjectBucket, prefix: bytes, /, *args: P.args, **options: P.kwargs) -> T:
        task = asyncio.ensure_future(write(self, prefix, *args, **options))
        self.writing[task] = prefix
        # The failure of one that was given up is looked at here, or Python would report it.
        task.add_done_callback(lambda done: (self.writing.pop(done), done.cancelled() or done.exception()))
        return await asyncio.shield(task)

    return begun


class ObjectBucket:
    """The objects below a prefix.

    Attributes:
        prefix: of all paths; empty, or ends with a slash.
        conditional: whether the service can refuse to replace an object.
        versioned: whether it has shown that it keeps versions of what is deleted.
        writing: writes of chunks that have not ended, with their layouts and roots.
    """

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self.prefix = prefix
        self.conditional = True
        self.versioned = False
        self.writing = dict[asyncio.Future[Any], bytes]()

    async def settle(self, layout: bytes, root: bytes) -> None:
        """Wait for the end of all writes of this layout and root that have begun; b"" stands for any."""
        mine = [task for task, prefix in self.writing.items() if has_prefix(prefix, layout, root)]
        if mine:
            await asyncio.wait(mine)

    def relative(self, path: str) -> str:
        return path.removeprefix(self.prefix)

    async def list_section(self, path: str) -> tuple[list[ObjectChunk], bool]:
        """The chunks below a path, and whether these are all."""
        try:
            metas = await anext(obstore.list(self._client, self.prefix + path, chunk_size=_PAGE), None) or []
        except BaseError as error:
            if not _NO_BUCKET.search(str(error)):
                raise
            return [], True
        return [chunk for meta in metas if (chunk := self.read_meta(meta)) is not None], len(metas) < _PAGE

    def read_meta(self, meta: Any) -> ObjectChunk | None:
        return read_path(self.relative(meta["path"]), int(meta["size"]), meta["last_modified"].timestamp())

    async def read(self, chunk: ObjectChunk, start: int, length: int) -> memoryview | int | None:
        """Bytes of a chunk. None if it is gone, BAD if it is empty or has not the size that was listed. Raises StoreUnavailable
        if the service gives fewer bytes than it says that there are: that is no proof of damage."""
        if not length:
            return BAD
        try:
            options: Any = {"range": (start, start + length)}
            found = await obstore.get_async(self._client, self.prefix + chunk.path, options=options)
            data = memoryview(await found.bytes_async())
        except FileNotFoundError:
            return None
        except BaseError as error:
            if not _TOO_SHORT.search(str(error)):
                raise
            return BAD
        if found.meta["size"] == chunk.size and len(data) != length:
            raise StoreUnavailable(f"the object store gave {len(data)} of {length} bytes")
        return data if found.meta["size"] == chunk.size else BAD

    async def read_whole(self, path: str) -> bytes | None:
        try:
            return bytes(await (await obstore.get_async(self._client, path)).bytes_async())
        except FileNotFoundError:
            return None

    def write(
        self, prefix: bytes, head: bytes, blocks: Sequence[tuple[IndexEntry, memoryview]], *, own: bool = False
    ) -> Coroutine[Any, Any, str]:
        """A write of a chunk, which returns its path, "" if it was there. The blocks are copied now: the request may continue
        after the call. `own`: under a path that no other chunk has."""
        path = self.prefix + chunk_path(prefix, head, [entry.key for entry, _ in blocks], own=own)
        return self._write(prefix, path, pack(blocks))

    @_to_its_end
    async def _write(self, prefix: bytes, path: str, data: bytes) -> str:
        return path if await self.put_new(path, data) else ""

    async def put_new(self, path: str, data: bytes) -> bool:
        """Write an object unless there is one: then False. A server without conditions overwrites it."""
        try:
            await self.put(path, data, "create" if self.conditional else "overwrite")
        except (AlreadyExistsError, PreconditionError):
            return False
        except (NotImplementedError, BaseError) as error:
            if isinstance(error, BaseError) and not _UNKNOWN.search(str(error)):
                raise
            self.conditional = False
            await self.put(path, data, "overwrite")
        return True

    @_to_its_end
    async def remove_from(self, prefix: bytes, chunk: ObjectChunk, tags: Collection[bytes]) -> None:
        """Remove blocks from a chunk of this layout and root: write the others into new chunks, then remove it.

        No service that the client speaks deletes on a condition, so two instances may both do this with one chunk, and each
        copies what the other one deletes. Their copies are apart. Each of two that have found the chunk there after they had
        written their copies sees those of the other one in a listing after it has removed the chunk: `ObjectStore.delete` lists
        again.
        """
        kept = [place for place, tag in enumerate(chunk.tags) if tag not in tags]
        data = await self.read(chunk, 0, chunk.size) if kept and chunk.slot else None
        if isinstance(data, int):
            raise StoreUnavailable(f"{chunk.path} has changed")
        runs = consecutive_runs(kept) if data is not None else ()
        parts = [_blocks_of(chunk, data or memoryview(b""), kept[low:high]) for low, high in runs]
        copies = [await self.write(prefix, chunk.head, blocks, own=True) for blocks in parts if blocks]
        if not await self.remove(self.prefix + chunk.path):
            # Another has removed it since it was read, perhaps to erase all of its tenant.
            for path in filter(None, copies):
                await self.remove(path)

    async def put(self, path: str, data: bytes, mode: Any) -> None:
        try:
            self._note(await obstore.put_async(self._client, path, data, mode=mode, use_multipart=False))
        except FileNotFoundError as error:
            raise StoreConfigError(f"there is no such bucket: {error_text(error)}") from None

    async def remove(self, path: str) -> bool:
        try:
            self._note(await obstore.head_async(self._client, path))
            await obstore.delete_async(self._client, path)
        except FileNotFoundError:
            return False
        return True

    def _note(self, meta: Any) -> None:
        """Every object of Google's has a version, also where none are kept."""
        self.versioned |= isinstance(self._client, S3Store) and meta["version"] not in (None, "null")


def _blocks_of(chunk: ObjectChunk, data: memoryview, places: Sequence[int]) -> list[tuple[IndexEntry, memoryview]]:
    """The index entries and frames of some blocks of a chunk. Damaged ones are left out."""
    entries = dict(read_index(chunk, bytes(data[: chunk.index_bytes])))
    blocks = []
    for place in places:
        start, length = chunk.range_of(place, 1)
        frame = read_slot(data[start : start + length])
        if place in entries and frame is not None and len(frame) == entries[place].length:
            blocks.append((entries[place], frame))
    return blocks
