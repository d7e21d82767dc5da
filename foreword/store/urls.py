"""From text to stores: `memory://?size=4GiB`, `disk:///var/cache/foreword?size=200GiB`, `redis://host`, `s3://bucket/prefix`.

Every URL may say `codec=` (store/codec.py; raw by default) and `label=` (its name in metrics). Several URLs are a tiered
store, the fastest first. Libraries of clients are imported when a URL asks for them.

`peer://host:port`, another instance's device and memory, is read through `foreword.transfer`, a room above this one: whoever
can use it gives `open_store` what opens it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeVar, cast
from urllib.parse import parse_qsl, unquote, urlencode, urlunsplit

from foreword.blocks.layout import Layout
from foreword.config import parse_bytes
from foreword.errors import ConfigError, StoreConfigError, did_you_mean
from foreword.store.base import Store
from foreword.store.redact import redacted, split_url
from foreword.store.tiered import TieredStore

Value = TypeVar("Value")

_DEFAULT_SIZE: Final = {"memory": "4GiB", "disk": "64GiB"}
_REDIS: Final = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
_OBJECTS: Final = ("s3", "gs", "az", "file")
_ABOVE: Final = ("peer",)


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A URL taken apart. `options` are what the backend itself understands, `url` is what is left without them, and `shown` is
    that without secrets, for messages."""

    scheme: str
    url: str = field(repr=False)
    path: str
    options: dict[str, str] = field(repr=False)
    codec: str
    label: str
    shown: str

    @property
    def persistent(self) -> bool:
        """Whether what is written there outlives the process."""
        return self.scheme not in ("memory", "peer")

    @property
    def writable(self) -> bool:
        """Whether blocks are written there at all."""
        return self.scheme != "peer" and self.options.get("read_only", "0").lower() in ("0", "false")


# Opens a URL of a scheme that another room knows; the layout is that of the engine's blocks, None for tools.
Opener = Callable[[StoreUrl, Layout | None], Store]


def parse(url: str) -> StoreUrl:
    """Raises StoreConfigError with a sentence that helps."""
    parts = split_url(url)
    schemes = ("memory", "disk", *_REDIS, *_OBJECTS, *_ABOVE)
    if parts.scheme not in schemes:
        raise StoreConfigError(
            f"{redacted(url)!r}: no store is called {parts.scheme!r}{did_you_mean(parts.scheme, schemes)}"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    codec = options.pop("codec", "raw")
    family = "redis" if parts.scheme in _REDIS else "objects" if parts.scheme in _OBJECTS else parts.scheme
    label = options.pop("label", family)
    bare = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    if family in ("memory", "disk") and parts.netloc:
        example = "disk:///var/cache/foreword?size=20GiB" if family == "disk" else "memory://?size=4GiB"
        raise StoreConfigError(f"{redacted(url)!r} names a host; write for example {example}")
    shown = redacted(url).partition("?")[0]
    return StoreUrl(parts.scheme, bare, unquote(parts.path), options, codec, label, shown)


def open_store(
    urls: Sequence[str], layout: Layout | None = None, openers: Mapping[str, Opener] | None = None
) -> TieredStore:
    """Open every store of a composition, the fastest first. Without a layout (tools) encoded blocks stay encoded.

    Args:
        openers: what opens URLs of schemes that rooms above this one know, by scheme (`foreword.transfer.peer.opener`).

    Raises StoreError: a wrong URL, or a store that cannot be opened.
    """
    if not urls:
        raise StoreConfigError("no store is named; give for example disk:///var/cache/foreword?size=20GiB")
    parsed = [parse(url) for url in urls]
    opened: list[Store] = []
    try:
        for place in _labelled(parsed):
            opened.append(_encoded(_open(place, layout, openers or {}), place.codec, layout))
    except BaseException:
        for store in opened:
            store.close()
        raise
    persistent = [number for number, place in enumerate(parsed) if place.persistent]
    writable = [number for number, place in enumerate(parsed) if place.writable]
    return TieredStore(opened, persistent, writable=writable)


def loss_of(urls: Sequence[str]) -> str:
    """What the layout of blocks in this composition must name as its loss: "" unless a codec is lossy."""
    from foreword.store.codecs.base import codec_named
    from foreword.store.codecs.coded_store import named_loss

    return named_loss(*(codec_named(parse(url).codec) for url in urls))


def _labelled(places: Sequence[StoreUrl]) -> list[StoreUrl]:
    """Labels made distinct: metrics and receipts tell tiers apart by them."""
    seen: dict[str, int] = {}
    named = []
    for place in places:
        seen[place.label] = count = seen.get(place.label, 0) + 1
        label = place.label if count == 1 else f"{place.label}-{count}"
        named.append(replace(place, label=label))
    return named


def _encoded(store: Store, codec: str, layout: Layout | None) -> Store:
    if codec == "raw" or layout is None:
        return store
    from foreword.store.codecs.base import codec_named
    from foreword.store.codecs.coded_store import CodedStore

    return CodedStore(store, codec_named(codec), layout)


def _open(place: StoreUrl, layout: Layout | None, openers: Mapping[str, Opener]) -> Store:
    if place.scheme in openers:
        return openers[place.scheme](place, layout)
    if place.scheme in _ABOVE:
        raise StoreConfigError(f"{place.shown}: only an engine reads from another instance; leave this store out here")
    if place.scheme == "memory":
        return _open_memory(place)
    if place.scheme == "disk":
        return _open_disk(place)
    if place.scheme in _REDIS:
        return _open_redis(place)
    return _open_objects(place)


def _open_memory(place: StoreUrl) -> Store:
    from foreword.store.memory.store import MemoryStore

    given = Options(place)
    size = given.size("memory")
    share = given.number("pin_share", 0.5)
    given.done()
    return MemoryStore(size, label=place.label, pin_share=share)


def _open_disk(place: StoreUrl) -> Store:
    from foreword.store.disk.store import DiskStore

    given = Options(place)
    size = given.size("disk")
    share = given.number("pin_share", 0.5)
    read_only = given.flag("read_only")
    journal = given.text("journal", "wal")
    given.done()
    if journal not in ("wal", "delete"):
        raise StoreConfigError(f"{place.shown}: journal is wal or delete, not {journal!r}")
    if not place.path:
        raise StoreConfigError("a disk store needs a folder: disk:///var/cache/foreword?size=20GiB")
    return DiskStore(
        place.path,
        size,
        label=place.label,
        pin_share=share,
        read_only=read_only,
        journal=cast("Literal['wal', 'delete']", journal),
    )


def _open_redis(place: StoreUrl) -> Store:
    try:
        from foreword.store.redis.store import RedisStore
    except ModuleNotFoundError as error:
        raise _missing(error, "redis") from None
    given = Options(place)
    prefix = given.text("prefix", "foreword")
    ttl = given.number("ttl", 0.0)
    left = urlencode(given.rest())
    return RedisStore(place.url + (f"?{left}" if left else ""), label=place.label, prefix=prefix, ttl=ttl or None)


def _open_objects(place: StoreUrl) -> Store:
    try:
        from foreword.store.object.store import ObjectStore
    except ModuleNotFoundError as error:
        raise _missing(error, "s3") from None
    given = Options(place)
    prefix = given.text("prefix", "")
    parallel = int(given.number("parallel", 16))
    exact = given.text("exact_lookup", "1") not in ("0", "false")
    return ObjectStore(
        place.url, label=place.label, prefix=prefix, parallel=parallel, exact_lookup=exact, **given.rest()
    )


def _missing(error: ModuleNotFoundError, extra: str) -> StoreConfigError:
    return StoreConfigError(f"this store needs {error.name}: pip install 'foreword[{extra}]'")


class Options:
    """A URL's options, taken one after the other; what is left over is an error, or the client's business."""

    def __init__(self, place: StoreUrl) -> None:
        self._left = dict(place.options)
        self._known: list[str] = ["codec", "label"]
        self._shown = place.shown

    def text(self, key: str, default: str) -> str:
        self._known.append(key)
        return self._left.pop(key, default)

    def size(self, kind: str) -> int:
        return self._read("size", _DEFAULT_SIZE[kind], parse_bytes)

    def number(self, key: str, default: float) -> float:
        return self._read(key, str(default), float)

    def flag(self, key: str) -> bool:
        return self._read(key, "0", lambda text: {"1": True, "true": True, "0": False, "false": False}[text.lower()])

    def _read(self, key: str, default: str, convert: Callable[[str], Value]) -> Value:
        text = self.text(key, default)
        try:
            return convert(text)
        except (ConfigError, ValueError, KeyError):
            raise StoreConfigError(f"{self._shown}: {text!r} is not a value for {key!r}") from None

    def rest(self) -> dict[str, str]:
        return self._left

    def done(self) -> None:
        for key in self._left:
            raise StoreConfigError(f"{self._shown}: unknown option {key!r}{did_you_mean(key, self._known)}")
