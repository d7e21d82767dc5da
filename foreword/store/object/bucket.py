"""Requests for single objects of a bucket: chunks, parts of them, and records. All of them run on the client's loop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from foreword.blocks.runs import consecutive_runs
from foreword.errors import StoreConfigError
from foreword.store.base import BAD
from foreword.store.frame import Frame
from foreword.store.object.chunks import (
    IndexEntry,
    ObjectChunk,
    chunk_path,
    entry_of,
    pack,
    read_index,
    read_path,
    read_slot,
)
from foreword.store.object.client import error_text

_PAGE: Final = 1000  # chunks read of one listing
_NO_BUCKET = re.compile("status code: 404")
_UNKNOWN = re.compile("status code: 501")
_TOO_SHORT = re.compile("status code: 416|Invalid range")


@dataclass(slots=True)
class ChunkRead:
    """Consecutive slots of a chunk, and the indexes of the blocks in the call."""

    chunk: ObjectChunk
    first: int
    indexes: list[int]


class ObjectBucket:
    """The objects below a prefix.

    Attributes:
        prefix: of all paths; empty, or ends with a slash.
        conditional: whether the service can refuse to replace an object.
    """

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self.prefix = prefix
        self.conditional = True

    def relative(self, path: str) -> str:
        return path.removeprefix(self.prefix)

    async def list_section(self, path: str) -> tuple[list[ObjectChunk], bool]:
        """The chunks below a path, and whether these are all."""
        try:
            metas = await anext(obstore.list(self._client, self.prefix + path, chunk_size=_PAGE), None) or []
        except BaseError as error:
            if not _NO_BUCKET.search(str(error)):
                raise
            metas = []
        chunks = [chunk for meta in metas if (chunk := self.read_meta(meta)) is not None]
        return chunks, len(metas) < _PAGE

    def read_meta(self, meta: Any) -> ObjectChunk | None:
        return read_path(self.relative(meta["path"]), int(meta["size"]), meta["last_modified"].timestamp())

    async def read(self, read: ChunkRead) -> memoryview | int | None:
        """Slots of a chunk. None if the chunk is gone, BAD if it is shorter than it was."""
        start, length = read.chunk.range_of(read.first, len(read.indexes))
        path = self.prefix + read.chunk.path
        try:
            data = memoryview(await obstore.get_range_async(self._client, path, start=start, length=length))
        except FileNotFoundError:
            return None
        except BaseError as error:
            if not _TOO_SHORT.search(str(error)):
                raise
            return BAD
        return data if len(data) == length else BAD

    async def index(self, chunk: ObjectChunk) -> bytes:
        length = min(chunk.index_bytes, chunk.size)
        try:
            path = self.prefix + chunk.path
            return bytes(await obstore.get_range_async(self._client, path, start=0, length=length)) if length else b""
        except FileNotFoundError:  # removed since it was listed
            return b""

    async def read_whole(self, path: str) -> bytes | None:
        try:
            return bytes(await (await obstore.get_async(self._client, path)).bytes_async())
        except FileNotFoundError:
            return None

    async def write(self, prefix: bytes, head: bytes, frames: Sequence[Frame]) -> None:
        blocks = [(entry_of(frame), frame.data.cast("B")) for frame in frames]
        await self.write_chunk(prefix, head, blocks)

    async def write_chunk(self, prefix: bytes, head: bytes, blocks: Sequence[tuple[IndexEntry, memoryview]]) -> None:
        path = self.prefix + chunk_path(prefix, head, [entry.key for entry, _ in blocks])
        # A copy: a cancelled request may continue for a moment after the call.
        await self.put_new(path, pack(blocks))

    async def put_new(self, path: str, data: bytes) -> None:
        """Write an object unless there is one; a server without conditions overwrites it."""
        if self.conditional:
            try:
                await self.put(path, data, "create")
            except (AlreadyExistsError, PreconditionError):
                return
            except (NotImplementedError, BaseError) as error:
                if isinstance(error, BaseError) and not _UNKNOWN.search(str(error)):
                    raise
                self.conditional = False
            else:
                return
        await self.put(path, data, "overwrite")

    async def remove_from(self, chunk: ObjectChunk, tags: set[tuple[bytes, bytes]]) -> None:
        """Remove blocks from a chunk: write the others into new chunks, then remove it."""
        path = self.prefix + chunk.path
        kept = [place for place, tag in enumerate(chunk.tags) if (chunk.prefix, tag) not in tags]
        if kept and chunk.slot:
            data = memoryview(await self.read_whole(path) or b"")
            if len(data) == chunk.size:
                runs = (kept[low:high] for low, high in consecutive_runs(kept))
                for blocks in filter(None, (_blocks_of(chunk, data, run) for run in runs)):
                    await self.write_chunk(chunk.prefix, chunk.head, blocks)
        await self.remove(path)

    async def put(self, path: str, data: bytes, mode: Any) -> None:
        try:
            await obstore.put_async(self._client, path, data, mode=mode, use_multipart=False)
        except FileNotFoundError as error:
            raise StoreConfigError(f"there is no such bucket: {error_text(error)}") from None

    async def remove(self, path: str) -> bool:
        try:
            await obstore.head_async(self._client, path)
            await obstore.delete_async(self._client, path)
        except FileNotFoundError:
            return False
        return True


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
