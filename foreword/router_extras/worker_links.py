"""Messages between the extras and the other workers of a router."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final


class Answers(list[Any]):
    """The answers to a question. `silent`: workers that gave none: they are late, not connected, or their handler raised."""

    def __init__(self, given: Iterable[Any] = (), silent: Iterable[int] = ()) -> None:
        super().__init__(given)
        self.silent = sorted(silent)


class Workers:
    """The other workers of a router, here of one that has none. Runs on the event loop."""

    def on(self, kind: str, handler: Callable[[Any], object], known: Callable[[], Iterable[Any]] = tuple) -> None:
        """Call `handler` with what others tell of this kind. A worker that joins hears all that is `known`."""

    def tell(self, kind: str, content: Any) -> None:
        """Tell the others, without waiting."""

    async def repeat(self, kind: str, content: Any) -> Answers:
        """Tell the others, and wait until they have handled it: what their handlers return, or what that gives when awaited."""
        return Answers()

    async def settle(self) -> None:
        """Wait until what the others have told until now has arrived."""


_NONE: Final = Workers()


def workers_of(router: object) -> Workers:
    """The other workers of this router's process."""
    found: Workers = getattr(router, "workers", _NONE)
    return found
