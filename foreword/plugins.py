"""Parts that installed packages add to Foreword: types of stores, formats of tool calls, placement policies; and the parts of
Foreword's own products that may not be installed.

A package names its parts as entry points in its `pyproject.toml`:

    [project.entry-points."foreword.stores"]
    sqlite = "foreword_sqlite:SQLITE"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from foreword.errors import ConfigError, ForewordError, did_you_mean

T = TypeVar("T")


class Plugins(Generic[T]):
    """The parts of one kind by name: built-in ones, then those of packages. No package can replace a built-in one.

    Packages are searched when a name is not built in, and when all names are listed. A part is imported when it is used.

    Args:
        group: the group of the entry points.
        what: the kind in words, for errors.
        kind: the class of which the entry points name instances.
        error: what is raised for an unknown name, and for a part that cannot be imported or is of another class.
    """

    def __init__(
        self, group: str, what: str, kind: type[T], builtin: Mapping[str, T], error: type[ForewordError] = ConfigError
    ) -> None:
        self._group, self._what, self._kind, self._error = group, what, kind, error
        self._builtin = builtin
        self._parts: dict[str, T] = {}
        self._added: dict[str, EntryPoint] | None = None

    def __getitem__(self, name: str) -> T:
        if name in self._builtin:
            return self._builtin[name]
        if name not in self._parts:
            if name not in self._entries():
                names = list(self)
                raise self._error(f"unknown {self._what} {name!r}{did_you_mean(name, names, most=len(names))}")
            self._parts[name] = self._load(self._entries()[name])
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._builtin, *self._entries())))

    def _entries(self) -> Mapping[str, EntryPoint]:
        if self._added is None:
            self._added = {one.name: one for one in entry_points(group=self._group)}
        return self._added

    def _load(self, entry: EntryPoint) -> T:
        where = (
            f"the {self._what} {entry.name!r} ({entry.value} of the package {entry.dist.name if entry.dist else '?'})"
        )
        try:
            part = entry.load()
        except (ImportError, AttributeError) as error:
            raise self._error(f"{where} cannot be imported: {error}") from error
        if not isinstance(part, self._kind):
            raise self._error(f"{where} must be of the class {self._kind.__module__}.{self._kind.__name__}")
        return part


def of_product(place: str) -> Any:
    """Import `module:name` of another product of this repository; None where that product is not installed.

    It is named in the code and not by an entry point, so that it is found in a checkout, too. Raises ModuleNotFoundError for
    another module that it needs.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # another one, that it imports
            raise
        return None
