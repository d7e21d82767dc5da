"""Blocks in an object store: S3 and compatible services, Google Cloud Storage, Azure, or a folder.

Objects below the URL and the prefix:

    <layout>/<root>/<head>/...       chunks of up to 32 blocks, each written by one PUT (`chunks.py`)
    records/<key, / as !>.record     a record

A lookup lists the sections of a chain, about one per 128 blocks, and a load reads the parts of chunks that it needs. So a
block is found through the blocks before it: those of the same call, of an earlier one, or of `note_chain`. Concurrent
writers may store a block in several chunks.

The store never evicts. A lifecycle rule of the bucket removes old chunks. A rule by age removes the first blocks of a
chain before the later ones, which then cannot be found any more until the rule removes them too. With `touch`, chunks that
are read stay young.

The requests of obstore run on an event loop in a background thread, so a call that passes its deadline is cancelled
there while its caller continues. A process that forks must open its stores after the fork.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore

from foreword.blocks.layout import ROOT_BYTES, key_of
from foreword.errors import StoreConfigError, StoreError, StoreReadOnly, StoreUnreadable
from foreword.newest import Newest
from foreword.store.base import (
    BAD,
    FAILED,
    MISSING,
    Erased,
    Name,
    Store,
    StoredBlock,
    StoreStatus,
    check_record,
    check_record_key,
    copy_error,
    step_deadline,
    time_left,
)
from foreword.store.frame import Frame
from foreword.store.object.bucket import ChunkRead, ObjectBucket
from foreword.store.object.chunks import (
    KNOWN,
    MAX_BLOCKS,
    Heads,
    Location,
    ObjectChunk,
    Search,
    Section,
    divide,
    entry_of,
    prefix_of,
    read_index,
    read_slot,
    section_path,
    tag_of,
)
from foreword.store.object.client import ClientLoop, open_client, remove_leftovers
from foreword.store.opened_folder import OpenedFolder

_WAITING: Final = 1024  # chunks
_WITHIN: Final = 120.0  # seconds for one chunk
_DAY: Final = 86400.0  # seconds
_RENEWED: Final = _DAY / 2
# Records that say what blocks are: they are written when an engine starts, by a store that may be closed soon, and needed as
# long as blocks are written. A rule of the bucket that removes by age would remove them before the blocks.
_LASTING: Final = ("layouts/", "namespaces/")
_written: Newest[tuple[str, str], tuple[bytes, float]] = Newest(1024)  # by place and path, by this process
_STEP_OBJECTS: Final = 64  # of one step of an erasure, which has a time limit
_DELETIONS: Final = 16  # rounds of one call; a block that is there after so many is being stored again
_ROUNDS: Final = 64  # listings of one call that follow blocks which were stored outside of their section
_PREFIX = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)?")
_DIGITS = re.compile(r"[0-9a-f]{32}")
_BLOCK_PATH = re.compile(r"[0-9a-f]{32}/[0-9a-f]{32}/.*")
_RECORD = re.compile(r"records/([^/]+)\.record")


class ObjectStore(Store):
    """A store in a bucket. The module's docstring describes the objects.

    Args:
        url: `s3://bucket[/path]`, `gs://`, `az://account/container` or `file:///folder`. The query has options of
            obstore for the service, such as `endpoint=http://host:9000`, `region=` or `access_key_id=`, and for its
            HTTP client, such as `proxy_url=`. Defaults come from the environment (`AWS_ENDPOINT_URL`,
            `AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, ...).
        prefix: a path below that of the URL.
        chunk: blocks per object, at most.
        parallel: concurrent requests per call. For requests without a body it is four times as many.
        touch: days after which a chunk that is read is written again; 0: never.
        options: as in the URL; they take precedence.
    """

    def __init__(
        self,
        url: str,
        *,
        label: str = "objects",
        prefix: str = "",
        chunk: int = MAX_BLOCKS,
        parallel: int = 16,
        touch: float = 0.0,
        **options: str,
    ) -> None:
        self.check_options(prefix, chunk, parallel, touch)
        prefix = prefix.strip("/")
        self.label = label
        self._store = open_client(url, options)
        self._opened = OpenedFolder(str(self._store.prefix)) if isinstance(self._store, LocalStore) else None
        self._prefix = prefix + "/" if prefix else ""
        self._place = f"{url} {sorted(options.items())} {self._prefix}"
        self._bucket = ObjectBucket(self._store, self._prefix)
        self._chunk = chunk
        self._heads = Heads()
        self._locations: Newest[Name, Location] = Newest(KNOWN)
        self._loop = ClientLoop(label, parallel)
        self._renewals = Renewals(self._store, self._prefix, self._loop, touch * _DAY)

    @staticmethod
    def check_options(prefix: str = "", chunk: int = MAX_BLOCKS, parallel: int = 1, touch: float = 0.0) -> None:
        """Raises StoreConfigError for what the constructor would refuse."""
        if not _PREFIX.fullmatch(prefix.strip("/")):
            raise StoreConfigError(f"a prefix is a path of letters, digits and ._-, not {prefix!r}")
        if parallel < 1:
            raise StoreConfigError(f"parallel is at least 1, not {parallel}")
        if not 1 <= chunk <= MAX_BLOCKS:
            raise StoreConfigError(f"chunk is from 1 to {MAX_BLOCKS}, not {chunk}")
        if touch < 0:
            raise StoreConfigError(f"touch is 0 or more days, not {touch}")

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        self._check_open(deadline)
        search = Search(names)
        self._list(search, self._heads.sections(names[:1]), deadline)
        if search.gap or search.incomplete:  # the first block may be among the chunks that the listing has not shown
            self._list(search, self._heads.sections(names), deadline, partly=True)
            self._follow(search, deadline)
        return search.gap

    def note_chain(self, before: Sequence[Name], names: Sequence[Name]) -> None:
        self._heads.expect(before, names)

    def present(self, names: Sequence[Name], *, deadline: float) -> list[bool]:
        found = self._search(names, deadline).found
        return [name in found for name in names]

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        self._check_open(deadline)
        views = [buffer.cast("B") for buffer in buffers]
        lengths, reads = self._plan(names, deadline)
        calls = (self._bucket.read(read.chunk, *read.chunk.range_of(read.first, len(read.indexes))) for read in reads)
        errors = []
        for read, data in zip(reads, self._loop.results(calls, deadline), strict=True):
            if isinstance(data, StoreError):
                errors.append(data)
                data = FAILED
            elif not isinstance(data, memoryview):
                for index in read.indexes:
                    self._locations.pop(names[index], None)
            for place, index in enumerate(read.indexes):
                lengths[index] = _copied(data, place, len(read.indexes), views[index])
        if errors and all(length == FAILED for length in lengths):
            raise copy_error(errors[0])
        self._renewals.used(read.chunk for read in reads)
        return lengths

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        """Store frames. Damaged chunks, and those whose slots cannot have the frames, are replaced."""
        self._check_open(deadline)
        found = self._present_frames(frames, deadline)
        missing = list({frame.name: frame for frame in frames if frame.name not in found}.values())
        calls = (
            self._bucket.write(prefix, head, [(entry_of(frame), frame.data.cast("B")) for frame in chunk])
            for prefix, head, chunk in list(divide(missing, self._section_of, self._chunk))
        )
        list(self._loop.each(calls, deadline, StoreReadOnly))
        with contextlib.suppress(StoreError):
            self._renew_records(deadline)
        return len(frames)

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        """Delete blocks. A chunk that has other blocks too is written again without the deleted ones.

        Blocks count as deleted when two listings have shown none of them: another instance may have copied them while it
        deleted others of the same chunk, and a listing that runs meanwhile may show neither its copies nor the chunk.
        """
        self._check_open(deadline)
        deleted, without = set[Name](), 0
        for _ in range(_DELETIONS):
            search = self._search(names, deadline, StoreReadOnly)
            without = 0 if search.chunks else without + 1
            if without == 2:
                break
            deleted.update(search.found)
            self._remove_from(search.chunks.values(), names, deadline)
        return len(deleted)

    def _remove_from(self, chunks: Iterable[ObjectChunk], names: Sequence[Name], deadline: float) -> None:
        tags = defaultdict[bytes, set[bytes]](set)
        for name in names:
            tags[prefix_of(name)].add(tag_of(name))
        calls = (self._bucket.remove_from(chunk.prefix, chunk, tags[chunk.prefix]) for chunk in chunks)
        list(self._loop.each(calls, deadline, StoreReadOnly))
        for name in names:
            self._locations.pop(name, None)

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        """Count the blocks that are present. Pins have no effect: the store never evicts."""
        return sum(self.present(names, deadline=deadline))

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        """List all blocks, with one request per chunk for its index."""
        seen: set[Name] = set()
        for page, _ in self._blocks("", deadline):
            new = {block.name: block for block in page if block.name not in seen}
            seen.update(new)
            yield from new.values()

    def list_names(self, layout: bytes = b"", root: bytes = b"", *, deadline: float) -> Iterator[Sequence[Name]]:
        """List names, with one request per chunk for its index. Only the objects of this layout and root are listed."""
        for folder in self._folders(layout, root, deadline):
            for page, _ in self._blocks(folder, deadline):
                if page:
                    yield [block.name for block in page]

    def erase_steps(
        self, layout: bytes = b"", root: bytes = b"", *, chosen: Collection[Name] | None = None, deadline: float
    ) -> Iterator[Erased]:
        """Erase. Waits for writes that have begun, and removes objects of a whole root without reading them, so
        damaged chunks are removed too. Of a part of a root it removes all of a chunk whose index does not tell its blocks."""
        try:
            self._loop.one(self._bucket.settle(layout, root), step_deadline(deadline))
            for folder in self._folders(layout, root, step_deadline(deadline)):
                if chosen is None:
                    yield from (Erased(self._remove(metas, deadline)) for metas in self._pages(folder, deadline))
                    remove_leftovers(self._store, self._prefix + folder)
                    continue
                for page, unknown in self._blocks(folder, deadline):
                    names = [block.name for block in page if block.name in chosen]
                    yield Erased(self.delete(names, deadline=step_deadline(deadline)) + self._remove(unknown, deadline))
            if root and chosen is None:
                remove_leftovers(self._store, f"{self._prefix}records", f"!{root.hex()}")
            if self._opened is not None:
                self._opened.check()
            if self._bucket.versioned:
                raise StoreUnreadable("the bucket keeps versions of what is deleted, which only its own rules remove")
        except StoreError as error:
            yield Erased.failed(error)

    def _remove(self, metas: Sequence[Any], deadline: float) -> int:
        """Remove a page of objects. Returns how many blocks they had."""
        mine = [meta for meta in metas if _BLOCK_PATH.fullmatch(self._bucket.relative(meta["path"]))]
        calls = (self._bucket.remove(meta["path"]) for meta in mine)
        list(self._loop.each(calls, deadline, StoreReadOnly, light=True))
        return sum(1 if chunk is None else len(chunk.tags) for chunk in map(self._bucket.read_meta, mine))

    def _folders(self, layout: bytes, root: bytes, deadline: float) -> list[str]:
        """The paths below which blocks with this layout and roots that begin with these bytes are; b"" stands for any."""
        layouts = [layout.hex()] if layout else self._digit_folders("", deadline)
        if len(root) in (0, ROOT_BYTES):
            return [f"{one}/{root.hex()}" if root else one for one in layouts]
        roots = (f"{one}/{found}" for one in layouts for found in self._digit_folders(one, deadline))
        return [path for path in roots if path.rpartition("/")[2].startswith(root.hex())]

    def _digit_folders(self, folder: str, deadline: float) -> list[str]:
        """The layouts of which there are objects, or the roots in the folder of a layout, in hexadecimal."""

        async def listed() -> Any:
            return await obstore.list_with_delimiter_async(self._store, (self._prefix + folder) or None)

        paths = self._loop.one(listed(), deadline)["common_prefixes"]
        names = (self._bucket.relative(path).strip("/").rpartition("/")[2] for path in paths)
        return [name for name in names if _DIGITS.fullmatch(name)]

    def _blocks(self, folder: str, deadline: float) -> Iterator[tuple[list[StoredBlock], list[Any]]]:
        """The blocks of the chunks below a path, a page of chunks at a time, and the objects of chunks with others, which their
        index does not tell. A block may be in several chunks."""
        for metas in self._pages(folder, deadline):
            chunks = [(chunk, meta) for meta in metas if (chunk := self._bucket.read_meta(meta)) is not None]
            reads = (self._bucket.read(chunk, 0, min(chunk.index_bytes, chunk.size)) for chunk, _ in chunks)
            indexes = self._loop.each(reads, deadline, light=True)
            blocks, unknown = list[StoredBlock](), list[Any]()
            for (chunk, meta), index in zip(chunks, indexes, strict=True):
                entries = list(read_index(chunk, bytes(index))) if isinstance(index, memoryview) else []
                unknown += [meta] if index is not None and len(entries) < len(chunk.tags) else []
                for place, entry in entries:
                    name = chunk.prefix + entry.key
                    self._heads.note(entry.key, chunk.head)
                    self._locations[name] = chunk, place
                    stored_at = meta["last_modified"].timestamp()
                    blocks.append(StoredBlock(name, entry.parent, entry.depth, entry.length, stored_at))
            yield blocks, unknown

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        self._loop.one(
            self._bucket.put(self._record_path(key), check_record(data), "overwrite"), deadline, StoreReadOnly
        )

        if key.startswith(_LASTING):
            _written[self._place, key] = bytes(data), time.monotonic()

    def _renew_records(self, deadline: float) -> None:
        """Write records of this process again that are old, unless others have written or deleted them since."""
        before = time.monotonic() - _RENEWED
        for (place, key), (data, at) in list(_written.items()):
            if place != self._place or at > before:
                continue
            _written[place, key] = data, time.monotonic()  # also if it fails: the next put shall not wait for it, too
            until = step_deadline(deadline)
            if self.get_record(key, deadline=until) == data:
                self.put_record(key, data, deadline=until)
            else:
                _written.pop((place, key), None)

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        return self._loop.one(self._bucket.read_whole(self._record_path(key)), deadline)

    def add_record(self, key: str, data: bytes, *, deadline: float) -> bytes:
        found = self.get_record(key, deadline=deadline)
        if found is not None:
            return found
        self._loop.one(self._bucket.put_new(self._record_path(key), check_record(data)), deadline, StoreReadOnly)
        return self.get_record(key, deadline=deadline) or data

    def delete_record(self, key: str, *, deadline: float) -> bool:
        return self._loop.one(self._bucket.remove(self._record_path(key)), deadline, StoreReadOnly)

    def records(self, prefix: str, *, deadline: float) -> list[str]:
        paths = [self._bucket.relative(meta["path"]) for metas in self._pages("records", deadline) for meta in metas]
        keys = [match[1].replace("!", "/") for match in map(_RECORD.fullmatch, paths) if match]
        return sorted(key for key in keys if key.startswith(prefix))

    def status(self) -> StoreStatus:
        """Blocks and bytes are unknown: a bucket reports them only in a listing. `notes`: conditional_put, renewed (chunks
        that `touch` has written again)."""
        return StoreStatus(notes={"conditional_put": int(self._bucket.conditional), "renewed": self._renewals.count})

    def close(self) -> None:
        self._loop.close()

    def _record_path(self, key: str) -> str:
        return f"{self._prefix}records/{check_record_key(key).replace('/', '!')}.record"

    # Finding blocks

    def _search(self, names: Sequence[Name], deadline: float, denied: type[StoreError] = StoreConfigError) -> Search:
        """Look for each of the blocks by itself."""
        self._check_open(deadline)
        search = Search(names)
        self._list(search, self._heads.sections(names), deadline, denied)
        self._follow(search, deadline)
        return search

    def _list(
        self,
        search: Search,
        sections: Sequence[Section],
        deadline: float,
        denied: type[StoreError] = StoreConfigError,
        *,
        first: bytes = b"",
        partly: bool = False,
    ) -> None:
        """List sections that were not listed yet.

        Args:
            denied: the exception if the service forbids it.
            first: list only chunks that begin with this key.
            partly: a failure ends the search instead of raising.
        """
        todo = [section for section in sections if first or section not in search.listed]
        calls = (self._bucket.list_section(section_path(*section, first)) for section in todo)
        for section, found in zip(todo, self._loop.results(calls, deadline, denied, light=True), strict=True):
            if isinstance(found, StoreError):
                if partly:
                    return
                raise copy_error(found)
            chunks, whole = found
            if not first:
                search.listed.add(section)
                search.incomplete.update([] if whole else [section])
            for chunk in chunks:
                for name in search.add(chunk):
                    self._heads.note(key_of(name), chunk.head)
                    self._locations[name] = search.found[name]

    def _follow(self, search: Search, deadline: float) -> None:
        """Look at the first gap for chunks that a listing has not shown, and for those stored outside of their section."""
        for _ in range(_ROUNDS):
            gap = search.gap
            if gap == len(search.names) or time.monotonic() >= deadline:
                return
            prefix, key = prefix_of(search.names[gap]), key_of(search.names[gap])
            hidden = [section for section in search.incomplete if section[0] == prefix]
            self._list(search, hidden, deadline, first=key, partly=True)
            if gap and search.gap == gap:
                self._list(search, [(prefix, key)], deadline, partly=True)
            if search.gap == gap:
                return

    def _plan(self, names: Sequence[Name], deadline: float) -> tuple[list[int], list[ChunkRead]]:
        """Results for the blocks that need no reading, and which parts of chunks to read for the others."""
        places = [self._locations.get(name) for name in names]
        if None in places:
            search = self._search(names, deadline)
            places = [search.found.get(name) or known for name, known in zip(names, places, strict=True)]
        lengths = [MISSING] * len(names)
        reads: list[ChunkRead] = []
        for index, place in enumerate(places):
            if place is None:
                continue
            chunk, at = place
            if not chunk.slot:
                lengths[index] = BAD
            elif reads and reads[-1].chunk.path == chunk.path and at == reads[-1].first + len(reads[-1].indexes):
                reads[-1].indexes.append(index)
            else:
                reads.append(ChunkRead(chunk, at, [index]))
        return lengths, reads

    def _present_frames(self, frames: Sequence[Frame], deadline: float) -> dict[Name, Location]:
        """The frames that are stored. Removes chunks that are damaged or cannot have them."""
        search = Search([frame.name for frame in frames])
        sections = dict.fromkeys(section for frame in frames for section in self._sections(frame))
        self._list(search, list(sections), deadline, StoreReadOnly)
        if search.incomplete:
            self._follow(search, deadline)
        by_name, by_chunk = {frame.name: frame for frame in frames}, defaultdict[str, list[Frame]](list)
        for name, (chunk, _) in search.found.items():
            by_chunk[chunk.path].append(by_name[name])
        damaged = [search.chunks[path] for path, known in by_chunk.items() if not search.chunks[path].fits(known)]
        self._remove_from(damaged, [name for name, (chunk, _) in search.found.items() if chunk in damaged], deadline)
        return {name: place for name, place in search.found.items() if place[0] not in damaged}

    def _sections(self, frame: Frame) -> list[Section]:
        """The sections in which a frame may be stored already."""
        heads = (self._section_of(frame), *self._heads.of_key(frame.header.key))
        return [(prefix_of(frame.name), head) for head in heads]

    def _section_of(self, frame: Frame) -> bytes:
        """The head of the section in which to store a frame."""
        head = self._heads.of_frame(frame)
        self._heads.note(frame.header.key, head)
        return head

    # Requests

    def _check_open(self, deadline: float) -> None:
        self._loop.check_open()
        time_left(deadline)

    def _pages(self, folder: str, deadline: float) -> Iterator[Sequence[Any]]:
        """Metadata of objects, as many at a time as an erasure removes in one step."""
        streams = [obstore.list(self._store, (self._prefix + folder) or None, chunk_size=_STEP_OBJECTS)]

        async def more() -> Sequence[Any] | None:
            return await anext(streams[0], None)

        try:
            while (metas := self._loop.one(more(), step_deadline(deadline))) is not None:
                yield metas
        finally:
            streams.clear()  # ends its request now, also if an exception keeps this frame alive


def _copied(data: memoryview | int | None, place: int, count: int, buffer: memoryview) -> int:
    """Copy a frame from its slot and return its length, or what `get` returns instead.

    Not on the loop: it must not write after the call has ended.
    """
    if not isinstance(data, memoryview):
        return MISSING if data is None else data
    slot = len(data) // count
    frame = read_slot(data[place * slot : (place + 1) * slot])
    if frame is None or len(frame) > len(buffer):
        return BAD
    buffer[: len(frame)] = frame
    return len(frame)


class Renewals:
    """Writes chunks again, one at a time, in the background.

    A chunk is written only if it is still the one that was read (`If-Match`): one that was erased meanwhile stays erased.

    Args:
        client: of obstore.
        prefix: of all paths.
        after: age in seconds from which chunks are written again; 0: never.

    Attributes:
        count: chunks that were written again.
    """

    def __init__(self, client: Any, prefix: str, loop: ClientLoop, after: float) -> None:
        self.count, self._client = 0, client
        self._prefix = prefix
        self._loop = loop
        self._after = after
        # Only coroutines of the loop change these two. They run one at a time until they wait.
        self._waiting: dict[str, ObjectChunk] = {}
        self._working = False
        self._renewed: Newest[str, float] = Newest(KNOWN)

    def used(self, chunks: Iterable[ObjectChunk]) -> None:
        """Note that these chunks were read."""
        if not self._after:
            return
        limit = time.time() - self._after
        old = [chunk for chunk in chunks if chunk.written < limit and self._is_due(chunk, limit)]
        if old:
            with contextlib.suppress(StoreError):  # the store is closed
                self._loop.start(self._work(old, limit), time.monotonic() + _WITHIN)

    def _is_due(self, chunk: ObjectChunk, limit: float) -> bool:
        waits = len(self._waiting) >= _WAITING or chunk.path in self._waiting
        return not waits and (self._renewed.get(chunk.path) or 0.0) < limit

    async def _work(self, old: Sequence[ObjectChunk], limit: float) -> None:
        """Let these chunks wait, and write all that wait, unless that is being done."""
        for chunk in old:
            if self._is_due(chunk, limit):  # it may have been written again since it was read
                self._waiting[chunk.path] = chunk
        if self._working:
            return
        self._working = True
        try:
            while self._waiting:
                chunk = self._waiting.pop(next(iter(self._waiting)))
                self._renewed[chunk.path] = time.time()  # also if it fails: it is tried again later
                # Gone, changed, or the service has no conditional writes.
                with contextlib.suppress(BaseError, OSError, NotImplementedError):
                    self.count += await self._renew(chunk)
        finally:
            self._working = False

    async def _renew(self, chunk: ObjectChunk) -> bool:
        path = self._prefix + chunk.path
        found = await obstore.get_async(self._client, path)
        data, tag = bytes(await found.bytes_async()), found.meta["e_tag"]
        if tag is None or len(data) != chunk.size:
            return False
        await obstore.put_async(self._client, path, data, mode={"e_tag": tag}, use_multipart=False)
        return True
