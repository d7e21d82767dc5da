"""Constructors that are written out: they do what those of `dataclass` do."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from foreword.sim.constructors import with_constructors
from foreword.sim.huge_pages import collapse

BASE = b"""
from __future__ import annotations
from dataclasses import dataclass, field
LARGE = 7

@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = LARGE
    names: list[str] = field(default_factory=list)

@dataclass(slots=True, eq=False, kw_only=True)
class Sent:
    size: int
    limit: int = LARGE
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.size + self.limit
"""
DERIVED = b"""
from __future__ import annotations
from dataclasses import dataclass
from base import Sent

@dataclass(slots=True, eq=False, kw_only=True)
class Placed(Sent):
    where: str
"""


@pytest.fixture
def classes() -> dict[str, Any]:
    """The classes of two modules, with their constructors written out."""
    sources = with_constructors({"base": BASE, "derived": DERIVED})
    found: dict[str, Any] = {"__name__": __name__}
    exec(sources["base"], found)
    exec(sources["derived"].replace(b"from base import Sent", b""), found)
    return found


def test_defaults_order_and_factories(classes: dict[str, Any]) -> None:
    """Arguments, defaults and factories set the fields, and two objects share no list."""
    point = classes["Point"](1)
    assert (point.x, point.y, point.names) == (1, 7, [])
    assert point.names is not classes["Point"](1).names
    assert classes["Point"](1, 2, names=["a"]) == classes["Point"](1, 2, ["a"])
    assert [one.name for one in fields(point)] == ["x", "y", "names"]


def test_hash_is_kept(classes: dict[str, Any]) -> None:
    """A frozen class can be a key as before."""
    names: Any = ("a",)
    assert len({classes["Point"](1, 2, names), classes["Point"](1, 2, names)}) == 1


def test_inherited_fields_come_first(classes: dict[str, Any]) -> None:
    """A derived class takes the fields of its base, with their defaults, and runs `__post_init__`."""
    placed = classes["Placed"](size=3, where="r1")
    assert (placed.size, placed.limit, placed.where) == (3, 7, "r1")
    with pytest.raises(TypeError):
        classes["Placed"](3, where="r1")


def test_memory_keeps_its_content_on_huge_pages() -> None:
    """Whatever the system can do, a collapse changes no byte."""
    blocks = [number.to_bytes(4, "little") * 100 for number in range(40_000)]
    assert collapse() >= 0
    assert all(block[:4] == number.to_bytes(4, "little") for number, block in enumerate(blocks))
