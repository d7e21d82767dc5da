"""Blocks in an object store: S3 and compatible services, Google Cloud Storage, Azure, or a folder.

Objects below the URL and the prefix:

    <layout in hex>/<key in hex>     a frame, written by one conditional PUT if the service supports it
    records/<key, / as !>.record     a record

The store never evicts. A lifecycle rule of the bucket removes old blocks. A rule by age removes the first blocks of a
chain before the later ones, which then cannot be found any more until the rule removes them too.

The requests of obstore run on an event loop in a background thread, so a call that passes its deadline is cancelled
there while its caller continues. A process that forks must open its stores after the fork.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from foreword.blocks.layout import FINGERPRINT_BYTES
from foreword.errors import StoreConfigError, StoreError, StoreReadOnly
from foreword.store.base import Name, Store, StoredBlock, StoreStatus, check_record, check_record_key
from foreword.store.frame import HEADER_BYTES, Frame
from foreword.store.object.client import ClientLoop, error_text, open_client, result_of

_PROBES: Final = 16  # names checked in one round of a lookup
_PREFIX = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)?")
_BLOCK = re.compile(r"[0-9a-f]{32}/[0-9a-f]{64}")
_UNKNOWN = re.compile("status code: 501")
_RECORD = re.compile(r"records/([^/]+)\.record")

T = TypeVar("T")


class ObjectStore(Store):
    """A store in a bucket. The module's docstring describes the objects.

    Args:
        url: `s3://bucket[/path]`, `gs://`, `az://account/container` or `file:///folder`. The query has options of
            obstore for the service, such as `endpoint=http://host:9000`, `region=` or `access_key_id=`, and for its
            HTTP client, such as `proxy_url=`. Defaults come from the environment (`AWS_ENDPOINT_URL`,
            `AWS_ACCESS_KEY_ID`, `GOOGLE_APPLICATION_CREDENTIALS`, ...).
        prefix: a path below that of the URL.
        exact_lookup: check every block in a lookup. Otherwise a long chain takes three rounds of 16 requests, and a
            lookup may count blocks behind a gap; loading then ends at the gap.
        parallel: concurrent requests per call. For requests without a body it is four times as many.
        options: as in the URL; they take precedence.
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
            raise StoreConfigError(f"a prefix is a path of letters, digits and ._-, not {prefix!r}")
        if parallel < 1:
            raise StoreConfigError(f"parallel is at least 1, not {parallel}")
        self.label = label
        self._store = open_client(url, options)
        self._prefix = prefix + "/" if prefix else ""
        self._exact = exact_lookup
        self._parallel = parallel
        self._conditional = True
        self._loop = ClientLoop(label)

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        # The blocks below `low` are probably present; the one at `high`, if any, is missing.
        low, high = 0, len(names)
        while low < high:
            # Check evenly spaced names: the gap is between the last one present and the first one missing.
            step = -(-(high - low) // _PROBES)  # rounded up, so there are at most _PROBES
            probes = range(low, high, step)
            sizes = list(self._each((self._size(names[index]) for index in probes), deadline, light=True))
            first = next((i for i, size in enumerate(sizes) if not size), len(sizes))
            if first < len(sizes):
                high = probes[first]
            low = probes[first - 1] + 1 if first else low
        if self._exact and low:
            exact = self._each((self._size(name) for name in names[:low]), deadline, light=True)
            return next((i for i, size in enumerate(exact) if not size), low)
        self._loop.check_open()
        return low

    def present(self, names: Sequence[Name], *, deadline: float) -> list[bool]:
        return [size > 0 for size in self._each((self._size(name) for name in names), deadline, light=True)]

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        views = [buffer.cast("B") for buffer in buffers]
        calls = (self._read(name, len(view)) for name, view in zip(names, views, strict=True))
        lengths = []
        for view, data in zip(views, self._each(calls, deadline), strict=True):
            view[: len(data)] = data  # not on the loop, which must not write after this call has ended
            lengths.append(len(data))
        return lengths

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        return sum(self._each((self._write(frame) for frame in frames), deadline, StoreReadOnly))

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        calls = (self._remove(self._path(name)) for name in dict.fromkeys(names))
        return sum(self._each(calls, deadline, StoreReadOnly, light=True))

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        """Count the blocks that are present. Pins have no effect: the store never evicts."""
        return sum(size > 0 for size in self._each((self._size(name) for name in names), deadline, light=True))

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        """List all blocks, with one request per block for its header."""
        for found in self._list("", deadline):
            metas = [meta for meta in found if _BLOCK.fullmatch(self._relative(meta["path"]))]
            yield from self._each((self._entry(meta) for meta in metas), deadline, light=True)

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        self._one(self._put(self._record_path(key), check_record(data), "overwrite"), deadline, StoreReadOnly)

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        return self._one(self._read_whole(self._record_path(key)), deadline)

    def delete_record(self, key: str, *, deadline: float) -> bool:
        return self._one(self._remove(self._record_path(key)), deadline, StoreReadOnly)

    def records(self, prefix: str, *, deadline: float) -> list[str]:
        paths = [self._relative(meta["path"]) for metas in self._list("records", deadline) for meta in metas]
        keys = [match[1].replace("!", "/") for match in map(_RECORD.fullmatch, paths) if match]
        return sorted(key for key in keys if key.startswith(prefix))

    def status(self) -> StoreStatus:
        """Blocks and bytes are unknown: a bucket reports them only in a listing. `notes`: conditional_put."""
        return StoreStatus(notes={"conditional_put": int(self._conditional)})

    def close(self) -> None:
        self._loop.close()

    def _path(self, name: Name) -> str:
        return f"{self._prefix}{name[:FINGERPRINT_BYTES].hex()}/{name[FINGERPRINT_BYTES:].hex()}"

    def _record_path(self, key: str) -> str:
        return f"{self._prefix}records/{check_record_key(key).replace('/', '!')}.record"

    def _relative(self, path: str) -> str:
        return path.removeprefix(self._prefix)

    def _each(
        self,
        calls: Iterable[Coroutine[Any, Any, T]],
        deadline: float,
        denied: type[StoreError] = StoreConfigError,
        *,
        light: bool = False,
    ) -> Iterator[T]:
        """Run calls with bounded concurrency and yield their results in order. Running calls are cancelled at the end.

        Args:
            denied: the exception to raise if the service forbids a call.
            light: the calls transfer no bodies.
        """
        width = self._parallel * 4 if light else self._parallel
        todo = iter(calls)
        running: deque[Future[T]] = deque()
        try:
            while True:
                while len(running) < width and (call := next(todo, None)) is not None:
                    running.append(self._loop.start(call, deadline))
                if not running:
                    return
                yield result_of(running[0], deadline, denied)
                running.popleft()
        finally:
            for future in running:
                future.cancel()

    def _one(self, call: Coroutine[Any, Any, T], deadline: float, denied: type[StoreError] = StoreConfigError) -> T:
        [result] = self._each([call], deadline, denied)
        return result

    def _list(self, folder: str, deadline: float) -> Iterator[Sequence[Any]]:
        """Metadata of objects, a thousand at a time."""
        stream = obstore.list(self._store, (self._prefix + folder) or None, chunk_size=1000)

        async def more() -> Sequence[Any] | None:
            return await anext(stream, None)

        while True:
            metas = self._one(more(), deadline)
            if metas is None:
                return
            yield metas

    async def _size(self, name: Name) -> int:
        """Length of a block, 0 if there is none."""
        try:
            return int((await obstore.head_async(self._store, self._path(name)))["size"])
        except FileNotFoundError:
            return 0

    async def _read(self, name: Name, limit: int) -> bytes | memoryview:
        try:
            found = await obstore.get_async(self._store, self._path(name))
            return memoryview(await found.bytes_async()) if found.meta["size"] <= limit else b""
        except FileNotFoundError:
            return b""

    async def _read_whole(self, path: str) -> bytes | None:
        try:
            return bytes(await (await obstore.get_async(self._store, path)).bytes_async())
        except FileNotFoundError:
            return None

    async def _write(self, frame: Frame) -> bool:
        if await self._size(frame.name):  # cheaper than a PUT that is refused after its body was sent
            return True
        data = bytes(frame.data)  # a cancelled request may continue for a moment after this call
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
            raise StoreConfigError(f"there is no such bucket: {error_text(error)}") from None

    async def _remove(self, path: str) -> bool:
        try:
            await obstore.head_async(self._store, path)
            await obstore.delete_async(self._store, path)
        except FileNotFoundError:
            return False
        return True

    async def _entry(self, meta: Any) -> StoredBlock:
        path, size = self._relative(meta["path"]), int(meta["size"])
        name = bytes.fromhex(path.replace("/", ""))
        stored_at = meta["last_modified"].timestamp()
        head = b""
        if size >= HEADER_BYTES:
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                head = bytes(await obstore.get_range_async(self._store, meta["path"], start=0, length=HEADER_BYTES))
        return StoredBlock.from_header(name, head, size, stored_at=stored_at)
