"""Blocks in an object store: S3 and what speaks its protocol, Google Cloud Storage, Azure, or a folder.

What lies under the URL and the prefix:

    <layout in hex>/<key in hex>     a frame, written by one conditional PUT where the service has it
    records/<word, / as !>.record    a record

Nothing is ever evicted here: how long blocks stay is a lifecycle rule of the bucket's. A rule by age removes a chain's head
before its tail, which is then never found again and goes by the same rule.

obstore talks to the service. Its calls run on one event loop in a thread of the store's own, so that a call which passes its
deadline is cancelled there while the caller goes on. A process that forks must open its stores after that.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from foreword.blocks.layout import FINGERPRINT_BYTES
from foreword.errors import BadFrame, StoreConfigError, StoreError, StoreReadOnly
from foreword.store.base import Name, Store, StoredBlock, StoreStatus, check_record, check_record_key, time_left
from foreword.store.frame import HEADER_BYTES, Frame, read_header
from foreword.store.object.client import Loop, open_client, result_of, said

_PROBES: Final = 16  # names asked for in one round of a lookup
_PREFIX = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)?")
_BLOCK = re.compile(r"[0-9a-f]{32}/[0-9a-f]{64}")
_UNKNOWN = re.compile("status code: 501")
_RECORD = re.compile(r"records/([^/]+)\.record")

T = TypeVar("T")


class ObjectStore(Store):
    """A store in a bucket (the module's docstring says what lies where).

    Args:
        url: `s3://bucket[/path]`, `gs://`, `az://account/container` or `file:///folder`. What follows `?` are options of
            obstore's for that service, such as `endpoint=http://host:9000`, `region=`, `access_key_id=`, or for its HTTP
            client, such as `proxy_url=`; what is missing comes from the environment (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`,
            `GOOGLE_APPLICATION_CREDENTIALS`, ...).
        prefix: a path below the URL's.
        exact_lookup: whether a lookup asks for every block that it promises. Without it a long chain takes three rounds of
            16 requests and may be promised too far where it has a gap; loading then ends at the gap.
        parallel: blocks on their way at once, per call. Of requests without a body there are four times as many.
        options: as in the URL, and stronger.
    """

    def __init__(
        self,
        url: str,
        *,
        label: str = "objects",
        prefix: str = "",
        exact_lookup: bool = True,
        parallel: int = 16,
        **options: str,
    ) -> None:
        prefix = prefix.strip("/")
        if not _PREFIX.fullmatch(prefix):
            raise StoreConfigError(f"a prefix is a path of letters, digits and ._-, unlike {prefix!r}")
        if parallel < 1:
            raise StoreConfigError(f"at least one request at once, not {parallel}")
        self.label = label
        self.readers = 1
        self._store = open_client(url, options)
        self._start = prefix + "/" if prefix else ""
        self._exact = exact_lookup
        self._parallel = parallel
        self._conditional = True
        self._loop = Loop(label)

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        low, high = 0, len(names)  # the first `low` are there as far as is known; the one at `high`, if any, is not
        while low < high:
            step = max(1, -(-(high - low) // _PROBES))
            probes = range(low, high, step)
            there = list(self._each((self._size(names[number]) for number in probes), deadline, light=True))
            first = next((index for index, size in enumerate(there) if not size), len(there))
            if first < len(there):
                high = probes[first]
            low = probes[first - 1] + 1 if first else low
        if self._exact and low:
            sizes = self._each((self._size(name) for name in names[:low]), deadline, light=True)
            return next((index for index, size in enumerate(sizes) if not size), low)
        self._loop.check()
        return low

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        views = [buffer.cast("B") for buffer in buffers]
        calls = (self._read(name, len(view)) for name, view in zip(names, views, strict=True))
        lengths = []
        for view, data in zip(views, self._each(calls, deadline), strict=True):
            view[: len(data)] = data  # here and not in the loop, which must not write once this call has ended
            lengths.append(len(data))
        return lengths

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        return sum(self._each((self._write(frame) for frame in frames), deadline, StoreReadOnly))

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        calls = (self._remove(self._path(name)) for name in dict.fromkeys(names))
        return sum(self._each(calls, deadline, StoreReadOnly, light=True))

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        """How many are there. Nothing is noted: this store evicts nothing, and a bucket's rules know no names."""
        return sum(size > 0 for size in self._each((self._size(name) for name in names), deadline, light=True))

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        """All blocks, each with a request for its header."""
        for found in self._list("", deadline):
            metas = [meta for meta in found if _BLOCK.fullmatch(self._below(meta["path"]))]
            yield from self._each((self._entry(meta) for meta in metas), deadline, light=True)

    def put_record(self, word: str, data: bytes, *, deadline: float) -> None:
        path = self._record(word)
        check_record(data)
        self._one(lambda: self._put(path, data, "overwrite"), deadline, StoreReadOnly)

    def get_record(self, word: str, *, deadline: float) -> bytes | None:
        path = self._record(word)
        return self._one(lambda: self._read_whole(path), deadline)

    def delete_record(self, word: str, *, deadline: float) -> bool:
        path = self._record(word)
        return self._one(lambda: self._remove(path), deadline, StoreReadOnly)

    def records(self, start: str, *, deadline: float) -> list[str]:
        paths = [self._below(meta["path"]) for metas in self._list("records", deadline) for meta in metas]
        words = [match[1].replace("!", "/") for match in map(_RECORD.fullmatch, paths) if match]
        return sorted(word for word in words if word.startswith(start))

    def status(self) -> StoreStatus:
        """Says nothing of blocks and bytes: a bucket does not know them without being listed."""
        return StoreStatus(notes={"conditional_put": int(self._conditional)})

    def close(self) -> None:
        self._loop.close()

    def _path(self, name: Name) -> str:
        return f"{self._start}{name[:FINGERPRINT_BYTES].hex()}/{name[FINGERPRINT_BYTES:].hex()}"

    def _record(self, word: str) -> str:
        return f"{self._start}records/{check_record_key(word).replace('/', '!')}.record"

    def _below(self, path: str) -> str:
        return path.removeprefix(self._start)

    def _each(
        self,
        calls: Iterable[Coroutine[Any, Any, T]],
        deadline: float,
        denied: type[StoreError] = StoreConfigError,
        *,
        light: bool = False,
    ) -> Iterator[T]:
        """The results of calls in their order, a bounded number of them at work. What is at work when it ends is cancelled.

        Args:
            denied: what is raised where the service forbids it.
            light: the calls bring no bodies.
        """
        time_left(deadline)
        width = self._parallel * 4 if light else self._parallel
        todo = iter(calls)
        working: deque[Future[T]] = deque()
        try:
            while True:
                while len(working) < width and (call := next(todo, None)) is not None:
                    working.append(self._loop.start(call))
                if not working:
                    return
                yield result_of(working[0], deadline, denied)
                working.popleft()
        finally:
            for future in working:
                future.cancel()

    def _one(
        self, call: Callable[[], Coroutine[Any, Any, T]], deadline: float, denied: type[StoreError] = StoreConfigError
    ) -> T:
        [result] = self._each((call() for _ in range(1)), deadline, denied)
        return result

    def _list(self, below: str, deadline: float) -> Iterator[Sequence[Any]]:
        """Descriptions of the objects, a thousand at a time."""
        stream = obstore.list(self._store, (self._start + below) or None, chunk_size=1000)

        async def more() -> Sequence[Any] | None:
            return await anext(stream, None)

        while True:
            metas = self._one(more, deadline)
            if metas is None:
                return
            yield metas

    async def _size(self, name: Name) -> int:
        """Bytes of a block, 0 where there is none."""
        try:
            return int((await obstore.head_async(self._store, self._path(name)))["size"])
        except FileNotFoundError:
            return 0

    async def _read(self, name: Name, room: int) -> bytes | memoryview:
        try:
            found = await obstore.get_async(self._store, self._path(name))
            return memoryview(await found.bytes_async()) if found.meta["size"] <= room else b""
        except FileNotFoundError:
            return b""

    async def _read_whole(self, path: str) -> bytes | None:
        try:
            return bytes(await (await obstore.get_async(self._store, path)).bytes_async())
        except FileNotFoundError:
            return None

    async def _write(self, frame: Frame) -> bool:
        if await self._size(frame.name):  # a request of no bytes, where a PUT would send the block to be told the same
            return True
        data = bytes(frame.data)  # a cancelled request may go on for a moment, and the buffer is the caller's
        if self._conditional:
            try:
                await self._put(self._path(frame.name), data, "create")
            except (AlreadyExistsError, PreconditionError):
                return True
            except (NotImplementedError, BaseError) as error:
                if isinstance(error, BaseError) and not _UNKNOWN.search(str(error)):
                    raise
                self._conditional = False
            else:
                return True
        await self._put(self._path(frame.name), data, "overwrite")
        return True

    async def _put(self, path: str, data: bytes, mode: Any) -> None:
        try:
            await obstore.put_async(self._store, path, data, mode=mode, use_multipart=False)
        except FileNotFoundError as error:
            raise StoreConfigError(f"there is no such bucket: {said(error)}") from None

    async def _remove(self, path: str) -> bool:
        try:
            await obstore.head_async(self._store, path)
            await obstore.delete_async(self._store, path)
        except FileNotFoundError:
            return False
        return True

    async def _entry(self, meta: Any) -> StoredBlock:
        path, size = self._below(meta["path"]), int(meta["size"])
        name = bytes.fromhex(path.replace("/", ""))
        stored_at = meta["last_modified"].timestamp()
        head = b""
        if size >= HEADER_BYTES:
            with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                head = bytes(await obstore.get_range_async(self._store, meta["path"], start=0, length=HEADER_BYTES))
        try:
            header = read_header(head)
        except BadFrame:
            return StoredBlock(name, size=size, stored_at=stored_at)
        if header.name != name:
            return StoredBlock(name, size=size, stored_at=stored_at)
        return StoredBlock(name, header.parent, header.depth, size, stored_at=stored_at)
