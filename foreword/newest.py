"""Tables that remember the newest of many things."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Newest(OrderedDict[K, V]):
    """A dictionary that keeps the `most` entries that were set last. Threads may set and remove entries at once, if hashes and
    comparisons of the keys are not written in Python."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        try:
            self.move_to_end(key)
            if len(self) > self.most:
                self.popitem(last=False)
        except KeyError:
            pass  # another thread has removed the entry since, or the last one

    def __reduce__(self) -> tuple[Any, ...]:
        """How `copy` makes another one."""
        return type(self), (self.most,), None, None, iter(self.items())
