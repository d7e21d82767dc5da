"""Open stores from URLs: `memory://?size=4GiB`, `disk:///var/cache/foreword?size=200GiB`, `redis://host`,
`s3://bucket/prefix`.

The scheme names the type of the store (`store/types.py`). Every URL accepts the options `codec=` (store/codecs; default raw)
and `label=` (name in metrics), and `admit=`, `min_tokens=`, `write_rate=` and `hold=` (store/tier_admission.py). Several URLs
make a tiered store, fastest first.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote, urlunsplit

from foreword.blocks.layout import Layout
from foreword.errors import StoreConfigError, StoreError, StoreUnavailable
from foreword.plugins import Plugins, of_product
from foreword.store.base import Store
from foreword.store.builtin import BuiltinTypes
from foreword.store.frame import HEADER_BYTES
from foreword.store.redact import redacted, split_url
from foreword.store.tier_rules import TierRule
from foreword.store.tiered import HOLD_NEEDS, TieredStore
from foreword.store.types import RULE_OPTIONS, Codecs, Opener, Reach, StoreType, StoreUrl, read_options
from foreword.texts import readable

if TYPE_CHECKING:
    from foreword.store.key_interfaces import StoreKeys

_LOCATION: Final = "location/id"
_LOCATION_SECONDS: Final = 5.0
_OPTION: Final = re.compile(r"&(\w+)=")
# Zero bytes, and surrogates but those that stand for bytes which are no text.
_NO_NAME: Final = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
_RAW: Final = "raw"  # no codec
_CODECS: Final = "foreword.store.codec:CODECS"
_RULE: Final = "foreword.store.tier_admission:AdmissionRule"
TYPES: Final = Plugins("foreword.stores", "store type", StoreType, BuiltinTypes(), StoreConfigError)


def parse(url: str) -> StoreUrl:
    """Parse a store URL. Raises StoreConfigError."""
    parts = split_url(url)
    if _NO_NAME.search(unquote(url, errors="surrogateescape")) or set("\t\r\n") & set(url.strip()):
        raise StoreConfigError(f"{redacted(url)!r} has a character that no URL has; %09 is a tab, %0A a line end")
    if not parts.scheme:
        raise StoreConfigError(
            f"{redacted(url)!r} is not the URL of a store; write for example disk:///var/cache/foreword?size=20GiB "
            f"(store types: {', '.join(TYPES)})"
        )
    try:
        kind = TYPES[parts.scheme]
    except StoreConfigError as error:
        raise StoreConfigError(f"{redacted(url)!r}: {error.message}") from None
    if option := _OPTION.search(parts.path):
        where = redacted(url)[: redacted(url).index("&")]
        raise StoreConfigError(f"{where}: options begin with '?', so write ?{option[1]}=")
    given = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(given)
    if len(options) < len(given):
        raise StoreConfigError(f"{redacted(url)!r} has an option twice")
    codec, label = options.pop("codec", _RAW), readable(options.pop("label", kind.label))
    if not label:
        raise StoreConfigError(f"{redacted(url)!r}: label= takes a name")
    bare, path = urlunsplit((*parts[:3], "", "")), unquote(parts.path, errors="surrogateescape")
    shown = redacted(url).partition("?")[0]
    rules = {key: options.pop(key) for key in RULE_OPTIONS if key in options}
    found = StoreUrl(parts.scheme, bare, path, options, codec, label, shown, kind)
    return replace(found, rule=_rule(found, rules)) if rules else found


def _rule(url: StoreUrl, options: dict[str, str]) -> TierRule:
    values = read_options(replace(url, options=options), RULE_OPTIONS)
    if not url.writable:
        raise StoreConfigError(f"{url.shown}: nothing is written to this store; remove {', '.join(options)}")
    rule: Callable[..., TierRule] | None = of_product(_RULE)
    if rule is None:
        raise StoreConfigError(f"{url.shown}: {', '.join(options)} needs foreword-stores: pip install foreword-stores")
    try:
        return rule(**values)
    except StoreConfigError as error:
        raise StoreConfigError(f"{url.shown}: {error.message}") from None


def check_stores(urls: Sequence[str]) -> list[StoreUrl]:
    """Find what is wrong with URLs without connecting to anything, so that it is said before a model is loaded.

    Raises StoreError.
    """
    parsed = [parse(url) for url in urls]
    for url in parsed:
        url.type.check(url)
        if url.codec != _RAW:
            _codecs(url.codec).check(url.codec)
    places = [os.path.realpath(url.path) if url.scheme in ("disk", "file") else url.url for url in parsed]
    if twice := [url for url, place in zip(parsed, places, strict=True) if url.persistent and places.count(place) > 1]:
        raise StoreConfigError(f"{twice[0].shown} is given twice")
    if parsed and parsed[0].rule is not None and parsed[0].rule.hold:
        raise StoreConfigError(f"{parsed[0].shown}: {HOLD_NEEDS}")
    return parsed


def open_store(
    urls: Sequence[str],
    layout: Layout | None = None,
    openers: Mapping[Reach, Opener] | None = None,
    *,
    more_layouts: Sequence[Layout] = (),
    keys: StoreKeys | None = None,
    must_exist: bool = False,
    only_read: bool = False,
    device: str = "cpu",
) -> TieredStore:
    """Open a tiered store, fastest tier first.

    Args:
        layout: layout of the blocks. Without it (tools), encoded blocks stay encoded.
        more_layouts: of further blocks, which codecs encode too.
        keys: seal what is in stores that other processes can read or write. Peers are authenticated by their connection.
        openers: functions that open stores of this reach in place of their types: other instances
            (`foreword.transfer.peer.opener`), and the memory of other processes.
        must_exist: refuse what does not exist instead of creating it: for tools.
        only_read: open stores read-only where they can be.
        device: the type of the device on which the engine's KV is: stores have other defaults where it is no processor.

    Raises:
        StoreError: a URL is wrong, or a store cannot be opened. StoreUnavailable if one must exist and does not.
    """
    if not urls:
        raise StoreConfigError("no store is given; add for example disk:///var/cache/foreword?size=20GiB")
    parsed = [parse(url) for url in urls]
    for url in parsed:
        if must_exist and not url.type.exists(url):
            raise StoreUnavailable(f"no store at {url.shown}")
    if only_read:
        parsed = [
            replace(url, options={**url.options, "read_only": "1"}) if "read_only" in url.type.options else url
            for url in parsed
        ]
    if device != "cpu":
        parsed = [url.type.for_device(url) for url in parsed]
    opened: list[Store] = []
    locations: list[str] = []
    try:
        for url in _with_distinct_labels(parsed):
            store = (openers or {}).get(url.reach, url.type.open)(url, layout)
            opened.append(store)
            locations.append(_location(url, store))
            if keys is not None and url.persistent:
                store = keys.sealed(store)
            opened[-1] = store if layout is None else _with_codec(store, url.codec, (layout, *more_layouts))
            if layout is not None:
                _check_room(url, opened[-1], max(one.block_bytes for one in (layout, *more_layouts)))
    except BaseException:
        for store in opened:
            store.close()
        raise
    persistent = [index for index, url in enumerate(parsed) if url.persistent]
    writable = [index for index, url in enumerate(parsed) if url.writable]
    rules = [url.rule for url in parsed]
    if layout is None and rules[0] is not None:  # tools name some of an engine's stores
        rules[0] = rules[0].at_once()
    return TieredStore(opened, persistent, writable=writable, rules=rules, locations=locations)


def _location(url: StoreUrl, store: Store) -> str:
    """Names a store to all instances that have it, whatever label it has there; "" for one that ends with its process. A folder
    of one host carries its name itself: paths and names of hosts, such as pods, come and go."""
    if not url.persistent:
        return ""
    if url.reach is Reach.NETWORK:
        return url.shown
    deadline = time.monotonic() + _LOCATION_SECONDS
    try:
        if url.writable:
            found: bytes | None = store.add_record(_LOCATION, os.urandom(16).hex().encode(), deadline=deadline)
        else:
            found = store.get_record(_LOCATION, deadline=deadline)
    except StoreError:
        found = None
    return f"folder {bytes(found).decode('ascii', 'replace')}" if found else f"{socket.gethostname()} {url.shown}"


def _check_room(url: StoreUrl, store: Store, block_bytes: int) -> None:
    """Raise StoreConfigError if the store has no room for one block: it would never have anything."""
    budget, needed = store.status().budget, HEADER_BYTES + block_bytes
    if 0 < budget < needed:
        raise StoreConfigError(
            f"{url.shown} has {budget:,} bytes, and a block of this model takes {needed:,}: give it more, for example size=4GiB"
        )


def loss_of(urls: Sequence[str]) -> str:
    """The value of `Layout.loss` for blocks in these stores: "" unless a codec is lossy."""
    coded = [url.codec for url in map(parse, urls) if url.codec != _RAW]
    return _codecs(coded[0]).loss(coded) if coded else ""


def labels_of(urls: Sequence[str]) -> list[str]:
    """The labels of the tiers of a tiered store. Raises StoreConfigError."""
    return [url.label for url in _with_distinct_labels([parse(url) for url in urls])]


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
    return store if codec == _RAW else _codecs(codec).coded(store, codec, layouts)


def _codecs(name: str) -> Codecs:
    """The codecs, for that of this name. Raises StoreConfigError where they are not installed."""
    found: Codecs | None = of_product(_CODECS)
    if found is None:
        raise StoreConfigError(
            f"The codec {name!r} needs foreword-stores: pip install 'foreword[compression]'", param="codec"
        )
    return found
