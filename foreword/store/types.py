"""Types of stores: how the URLs of one type are read, checked and opened.

`store/builtin.py` has the types of this package. Another package adds one as an entry point of the group `foreword.stores`,
named after its scheme (docs/guides/stores.md, "Writing a backend").
"""

from __future__ import annotations

import os
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Final

from foreword.blocks.layout import Layout
from foreword.config import parse_bytes
from foreword.errors import ConfigError, StoreConfigError, did_you_mean
from foreword.store.base import Store
from foreword.store.tier_rules import TierRule

Options = Mapping[str, Callable[[str], Any]]

# Options of every URL.
RULE_OPTIONS: Final[Options] = {"admit": str, "min_tokens": int, "write_rate": parse_bytes, "hold": parse_bytes}
COMMON_OPTIONS: Final = ("codec", "label", *RULE_OPTIONS)
_ERASE_SECONDS: Final = 60.0


class Reach(Enum):
    """Who can read what a store keeps."""

    PROCESS = "process"  # it is in the memory of this process
    HOST = "host"  # processes of this host
    NETWORK = "network"  # other hosts too
    INSTANCE = "instance"  # a view of another instance's blocks, which ends with that instance; never written to

    @property
    def locality(self) -> str:
        """The place, as events name it."""
        return "LOCAL" if self in (Reach.PROCESS, Reach.HOST) else "REMOTE"


def parse_flag(text: str) -> bool:
    """`1`, `true`, `0` or `false`. Raises KeyError."""
    return {"1": True, "true": True, "0": False, "false": False}[text.lower()]


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
    type: StoreType = field(repr=False, compare=False)
    rule: TierRule | None = None

    @property
    def reach(self) -> Reach:
        return self.type.reach

    @property
    def persistent(self) -> bool:
        """Whether the store outlives this process."""
        return self.reach in (Reach.HOST, Reach.NETWORK)

    @property
    def writable(self) -> bool:
        """Whether blocks are written to the store."""
        return self.reach is not Reach.INSTANCE and self.options.get("read_only", "0").lower() in ("0", "false")


# Opens a URL. The layout is that of the engine's blocks, None for tools.
Opener = Callable[[StoreUrl, Layout | None], Store]


class StoreType:
    """A type of store. Subclasses set the attributes, implement `open`, and override what differs.

    Attributes:
        label: the default name of such a store in metrics.
        reach: who can read what it keeps.
        pins: whether `pin` protects blocks.
        options: the options of its URLs, and how their values are read: functions that raise ConfigError, ValueError or
            KeyError for a wrong value. A type with the option `read_only` is opened with it by tools that only read.
    """

    label: str
    reach: Reach = Reach.NETWORK
    pins: ClassVar[bool] = False
    options: ClassVar[Options] = {}

    def check(self, url: StoreUrl) -> None:
        """Find what is wrong before anything slow begins: options, libraries, folders. It connects to nothing and leaves
        nothing behind. Raises StoreError."""
        read_options(url, self.options)

    def for_device(self, url: StoreUrl) -> StoreUrl:
        """The URL for an engine whose KV is on a device, which computes it faster than processors do: with other defaults."""
        return url

    def exists(self, url: StoreUrl) -> bool:
        """Whether there is a store, as far as that can be told without a connection. Tools do not create one. Raises
        StoreError."""
        return True

    def open(self, url: StoreUrl, layout: Layout | None) -> Store:
        """Open the store, and create it if it does not exist. `layout`: of the engine's blocks, None for tools. Raises
        StoreError."""
        raise NotImplementedError

    def empty_part(self, url: StoreUrl, name: str) -> StoreUrl:
        """A store in which tests find nothing, in the place of this URL: a folder below it, or another prefix."""
        return url

    def remove_part(self, part: StoreUrl) -> None:
        """Remove what tests have left in an `empty_part`. Raises StoreError."""
        with closing(self.open(part, None)) as store:
            deadline = time.monotonic() + _ERASE_SECONDS
            store.erase(deadline=deadline)
            for key in store.records("", deadline=deadline):
                store.delete_record(key, deadline=deadline)


class Codecs(ABC):
    """Calls to the codecs (`store/codec.py`), which are of another product. It has no state."""

    @abstractmethod
    def check(self, name: str) -> None:
        """Raises StoreConfigError if there is no codec of that name, or if its libraries are not installed."""

    @abstractmethod
    def loss(self, names: Sequence[str]) -> str:
        """The value of `Layout.loss` for blocks that have passed these codecs. Raises StoreConfigError."""

    @abstractmethod
    def coded(self, store: Store, name: str, layouts: Sequence[Layout]) -> Store:
        """A store that encodes blocks of these layouts on their way into this one. Raises StoreConfigError."""


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
                suggestion = did_you_mean(key, [*COMMON_OPTIONS, *known])
                raise StoreConfigError(f"{url.shown}: unknown option {key!r}{suggestion}")
        except (ConfigError, ValueError, KeyError, ArithmeticError):
            raise StoreConfigError(f"{url.shown}: {text!r} is not a value for {key!r}") from None
    return options


def parse_owner(text: str) -> str:
    """`me` or `any`. Raises KeyError."""
    return {"me": "me", "any": "any"}[text]


def check_owner(folder: str) -> None:
    """Raises StoreConfigError for a folder into which another user of this host could put blocks, or has: blocks are served as
    they are found. A folder that is not there is one of ours.

    The folder is this user's or the superuser's and not open to all; a link in its place is one of theirs too. A folder above
    it that is open to all must be sticky, such as /tmp, so that no other user can put another one in its place.
    """
    if not hasattr(os, "geteuid"):
        return
    place, allowed = os.path.abspath(folder), {0, os.geteuid()}
    try:
        for path in (place, os.path.realpath(place)):
            found = os.lstat(path)
            if found.st_uid not in allowed:
                raise StoreConfigError(
                    f"the folder {folder} belongs to user {found.st_uid}, who could put other blocks into it: use a folder of "
                    "your own, or add owner=any to the URL if you trust that user"
                )
        if found.st_mode & stat.S_IWOTH:
            raise StoreConfigError(
                f"every user can put blocks into the folder {folder}: chmod o-w {folder}, or add owner=any to the URL if "
                "you trust them all"
            )
        while (path := os.path.dirname(path)) != os.path.dirname(path):
            mode = os.stat(path).st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise StoreConfigError(
                    f"every user can put another folder in the place of {folder}, because {path} is open to all: chmod o-w "
                    f"{path}, or add owner=any to the URL if you trust them all"
                )
    except OSError:
        return  # it cannot be looked at: to open it will say why
