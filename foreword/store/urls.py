"""Open stores from URLs: `memory://?size=4GiB`, `disk:///var/cache/foreword?size=200GiB`, `redis://host`,
`s3://bucket/prefix`.

Every URL accepts the options `codec=` (store/codecs; default raw) and `label=` (name in metrics), and `admit=`,
`min_tokens=` and `write_rate=` (store/admission). Several URLs make a tiered store, fastest first. Client libraries are
imported only when a URL needs them.

`peer://host:port` reads the device and memory of another instance. The package `foreword.transfer` opens such URLs; it
lies above this one, so its callers pass the function that opens them to `open_store`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlunsplit

from foreword.blocks.layout import Layout
from foreword.config import parse_bytes
from foreword.errors import ConfigError, StoreConfigError, did_you_mean
from foreword.store.admission import AdmissionRule
from foreword.store.base import Store
from foreword.store.redact import redacted, split_url
from foreword.store.tiered import TieredStore

if TYPE_CHECKING:
    from foreword.store.integrity import KeyRing

Options = Mapping[str, Callable[[str], Any]]

_MEMORY_SIZE: Final = 4 << 30
_DISK_SIZE: Final = 64 << 30
_REDIS: Final = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")
_OBJECTS: Final = ("s3", "gs", "az", "file")
_SCHEMES: Final = ("memory", "disk", *_REDIS, *_OBJECTS, "peer")


def parse_flag(text: str) -> bool:
    return {"1": True, "true": True, "0": False, "false": False}[text.lower()]


def parse_quota(text: str) -> float:
    """A number of bytes, or the share that "25%" says."""
    return float(text[:-1]) / 100 if text.endswith("%") else parse_bytes(text)


# The options of the stores and how their values are read. The names are those of the constructors' arguments.
_MEMORY_OPTIONS: Final[Options] = {"size": parse_bytes, "pin_share": float, "tenant_quota": parse_quota}
_DISK_OPTIONS: Final[Options] = {**_MEMORY_OPTIONS, "read_only": parse_flag, "journal": str}
_REDIS_OPTIONS: Final[Options] = {"prefix": str, "ttl": lambda text: float(text) or None}
_RULE_OPTIONS: Final[Options] = {"admit": str, "min_tokens": int, "write_rate": parse_bytes}
_OBJECT_OPTIONS: Final[Options] = {"prefix": str, "chunk": int, "parallel": int, "touch": float}


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A parsed URL.

    Attributes:
        url: the URL without its query.
        options: the query without `codec`, `label` and the options of `rule`.
        shown: `url` without secrets, for messages.
        rule: which blocks are written; None: all.
    """

    scheme: str
    url: str = field(repr=False)
    path: str
    options: dict[str, str] = field(repr=False)
    codec: str
    label: str
    shown: str
    rule: AdmissionRule | None = None

    @property
    def persistent(self) -> bool:
        """Whether the store outlives this process."""
        return self.scheme not in ("memory", "peer")

    @property
    def writable(self) -> bool:
        """Whether blocks are written to the store."""
        return self.scheme != "peer" and self.options.get("read_only", "0").lower() in ("0", "false")


# Opens a URL. The layout is that of the engine's blocks, None for tools.
Opener = Callable[[StoreUrl, Layout | None], Store]


def parse(url: str) -> StoreUrl:
    """Parse a store URL. Raises StoreConfigError."""
    parts = split_url(url)
    if not parts.scheme:
        raise StoreConfigError(
            f"{redacted(url)!r} is not the URL of a store; write for example disk:///var/cache/foreword?size=20GiB "
            f"(store types: {', '.join(_SCHEMES)})"
        )
    if parts.scheme not in _SCHEMES:
        suggestion = did_you_mean(parts.scheme, _SCHEMES, most=len(_SCHEMES))
        raise StoreConfigError(f"{redacted(url)!r}: there is no store type {parts.scheme!r}{suggestion}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    codec = options.pop("codec", "raw")
    family = "redis" if parts.scheme in _REDIS else "objects" if parts.scheme in _OBJECTS else parts.scheme
    label = options.pop("label", family)
    bare = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    if family in ("memory", "disk") and parts.netloc:
        example = "disk:///var/cache/foreword?size=20GiB" if family == "disk" else "memory://?size=4GiB"
        raise StoreConfigError(f"{redacted(url)!r} names a host; write for example {example}")
    shown = redacted(url).partition("?")[0]
    rules = {key: options.pop(key) for key in _RULE_OPTIONS if key in options}
    found = StoreUrl(parts.scheme, bare, unquote(parts.path), options, codec, label, shown)
    return replace(found, rule=_rule(found, rules)) if rules else found


def _rule(url: StoreUrl, options: dict[str, str]) -> AdmissionRule:
    values = read_options(replace(url, options=options), _RULE_OPTIONS)
    if not url.writable:
        raise StoreConfigError(f"{url.shown}: nothing is written to this store; remove {', '.join(options)}")
    try:
        return AdmissionRule(**values)
    except StoreConfigError as error:
        raise StoreConfigError(f"{url.shown}: {error.message}") from None


def open_store(
    urls: Sequence[str],
    layout: Layout | None = None,
    openers: Mapping[str, Opener] | None = None,
    *,
    more_layouts: Sequence[Layout] = (),
    keys: KeyRing | None = None,
) -> TieredStore:
    """Open a tiered store, fastest tier first.

    Args:
        layout: layout of the blocks. Without it (tools), encoded blocks stay encoded.
        more_layouts: of further blocks, which codecs encode too.
        keys: authenticate what is in stores that other processes can write to. Peers are authenticated by their connection.
        openers: functions that open URLs of further schemes, by scheme (`foreword.transfer.peer.opener`).

    Raises:
        StoreError: a URL is wrong, or a store cannot be opened.
    """
    if not urls:
        raise StoreConfigError("no store is given; add for example disk:///var/cache/foreword?size=20GiB")
    parsed = [parse(url) for url in urls]
    opened: list[Store] = []
    try:
        for url in _with_distinct_labels(parsed):
            store = _open(url, layout, openers or {})
            if keys is not None and url.scheme not in ("memory", "peer"):
                from foreword.store.integrity import AuthenticatedStore

                store = AuthenticatedStore(store, keys)
            opened.append(store if layout is None else _with_codec(store, url.codec, (layout, *more_layouts)))
    except BaseException:
        for store in opened:
            store.close()
        raise
    persistent = [index for index, url in enumerate(parsed) if url.persistent]
    writable = [index for index, url in enumerate(parsed) if url.writable]
    return TieredStore(opened, persistent, writable=writable, rules=[url.rule for url in parsed])


def loss_of(urls: Sequence[str]) -> str:
    """The value of `Layout.loss` for blocks in these stores: "" unless a codec is lossy."""
    from foreword.store.codecs.base import codec_named
    from foreword.store.codecs.coded_store import named_loss

    return named_loss(*(codec_named(parse(url).codec) for url in urls))


def _with_distinct_labels(urls: Sequence[StoreUrl]) -> list[StoreUrl]:
    """Number labels that occur more than once: metrics and receipts identify tiers by label."""
    seen: dict[str, int] = {}
    named = []
    for url in urls:
        seen[url.label] = count = seen.get(url.label, 0) + 1
        label = url.label if count == 1 else f"{url.label}-{count}"
        named.append(replace(url, label=label))
    return named


def _with_codec(store: Store, codec: str, layouts: Sequence[Layout]) -> Store:
    if codec == "raw":
        return store
    from foreword.store.codecs.base import codec_named
    from foreword.store.codecs.coded_store import CodedStore

    return CodedStore(store, codec_named(codec), *layouts)


def _open(url: StoreUrl, layout: Layout | None, openers: Mapping[str, Opener]) -> Store:
    if url.scheme in openers:
        return openers[url.scheme](url, layout)
    if url.scheme == "peer":
        raise StoreConfigError(f"{url.shown}: only an engine can read from another instance; omit this store here")
    if url.scheme == "memory":
        return _open_memory(url)
    if url.scheme == "disk":
        return _open_disk(url)
    return _open_redis(url) if url.scheme in _REDIS else _open_objects(url)


def _open_memory(url: StoreUrl) -> Store:
    from foreword.store.memory.memory_store import MemoryStore

    if url.codec != "raw":
        raise StoreConfigError(
            f"{url.shown}: a memory store has no codec, since its slots have one length; remove codec={url.codec}"
        )

    return MemoryStore(label=url.label, **{"size": _MEMORY_SIZE, **read_options(url, _MEMORY_OPTIONS)})


def _open_disk(url: StoreUrl) -> Store:
    from foreword.store.disk.disk_store import DiskStore
    from foreword.store.disk.striped_store import StripedStore, folders_of

    options = {"size": _DISK_SIZE, **read_options(url, _DISK_OPTIONS)}
    if not url.path:
        raise StoreConfigError("a disk store needs a folder: disk:///var/cache/foreword?size=20GiB")
    folders = folders_of(url.path)
    if len(folders) > 1:
        return StripedStore(folders, label=url.label, **options)
    return DiskStore(url.path, label=url.label, **options)


def _open_redis(url: StoreUrl) -> Store:
    try:
        from foreword.store.redis.redis_store import RedisStore
    except ModuleNotFoundError as error:
        raise _missing(error, "redis") from None
    query = urlencode({key: value for key, value in url.options.items() if key not in _REDIS_OPTIONS})
    options = read_options(url, _REDIS_OPTIONS, others=True)
    return RedisStore(url.url + (f"?{query}" if query else ""), label=url.label, **options)


def _open_objects(url: StoreUrl) -> Store:
    try:
        from foreword.store.object.object_store import ObjectStore
    except ModuleNotFoundError as error:
        raise _missing(error, "s3") from None
    return ObjectStore(url.url, label=url.label, **{**url.options, **read_options(url, _OBJECT_OPTIONS, others=True)})


def _missing(error: ModuleNotFoundError, extra: str) -> StoreConfigError:
    return StoreConfigError(f"this store needs {error.name}: pip install 'foreword[{extra}]'")


def read_options(url: StoreUrl, known: Options, *, others: bool = False) -> dict[str, Any]:
    """Convert the options of a URL that are in `known`, each with its function.

    Raises StoreConfigError for a wrong value, and for an option that is not in `known` unless `others` is set.
    """
    options = {}
    for key, text in url.options.items():
        try:
            if key in known:
                options[key] = known[key](text)
            elif not others:
                suggestion = did_you_mean(key, ["codec", "label", *_RULE_OPTIONS, *known])
                raise StoreConfigError(f"{url.shown}: unknown option {key!r}{suggestion}")
        except (ConfigError, ValueError, KeyError):
            raise StoreConfigError(f"{url.shown}: {text!r} is not a value for {key!r}") from None
    return options
