"""What an instance does when others call, and hears of its own transfers: the protocol that an engine implements.

Calls come on a connection's reader thread, one at a time per connection, and must be quick: while one runs, nothing else is
read from that peer. Copying a part where it belongs is quick; waiting for a step of the engine is not. Answers (`accept`,
`refuse`, `take` ...) may be given inside the call or later, from any thread. A call must not wait for a lock that is held by
somebody who calls into a transfer.

For one transfer, `part`, `finished` and `ended` exclude each other. So once `ended` was called, or `cancel` has returned, no
`part` of it is running or will come: blocks that parts were written into may be given back then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from foreword.blocks.layout import Layout
from foreword.transfer.link import Payload
from foreword.transfer.messages import Buffer, Part, Reason

if TYPE_CHECKING:
    from foreword.transfer.transfers import Destination, Source


class Service(Protocol):
    """See the module. An exception that leaves a call is logged and ends the transfer with the reason `failed`."""

    @property
    def layout(self) -> Layout | None:
        """Of this instance's blocks; None if it has none (then it can only fetch)."""
        ...

    def wanted(self, source: Source) -> None:
        """A peer wants `source.request` computed. Call `source.accept()` or `source.refuse()`, then `send`, then `finish`."""
        ...

    def offered(self, destination: Destination) -> None:
        """A peer offers the running request `destination.request`. Call `destination.accept(have)` or `refuse()`."""
        ...

    def accepted(self, transfer: Source | Destination) -> None:
        """The peer said yes to a transfer that began here; `transfer.have` is what it said with it."""
        ...

    def part(self, destination: Destination, part: Part, payload: Payload) -> None:
        """Checked KV. `payload.release()` must be called, now or later, when its bytes are not read any more; do not write
        to it. Until then they take room in the link, so hold few."""
        ...

    def finished(self, destination: Destination, result: bytes, tokens: int) -> None:
        """All of it is there. Call `destination.take()` when it can go on from here, or `cancel`."""
        ...

    def ended(self, transfer: Source | Destination) -> None:
        """Exactly once for every transfer, whoever ended it and how (`transfer.outcome`, `reason`, `message`); also from within
        this side's own `refuse`, `take` and `cancel`. Nothing of it is needed for the peer any more."""
        ...

    def locate(self, names: Sequence[bytes], deadline: float) -> int:
        """How many of these blocks (layout fingerprint and key), from the first on, could be given now. On its own thread."""
        ...

    def get(self, names: Sequence[bytes], longest: int, deadline: float) -> Iterator[Sequence[Buffer | None]]:
        """Whole sealed frames of at most `longest` bytes in the order of `names`, in batches; None for a missing one. A
        batch's memory is free again when the next one is asked for. On a thread of its own; ends early if the peer is gone."""
        ...


class Idle:
    """A service that refuses everything. Subclass it for what an instance does; alone it is a client that only fetches."""

    def __init__(self, layout: Layout | None = None) -> None:
        self._layout = layout

    @property
    def layout(self) -> Layout | None:
        return self._layout

    def wanted(self, source: Source) -> None:
        source.refuse(Reason.ROLE, "this instance does not compute for others")

    def offered(self, destination: Destination) -> None:
        destination.refuse(Reason.ROLE, "this instance takes no requests over")

    def accepted(self, transfer: Source | Destination) -> None:
        """Nothing to do."""

    def part(self, destination: Destination, part: Part, payload: Payload) -> None:
        payload.release()

    def finished(self, destination: Destination, result: bytes, tokens: int) -> None:
        destination.cancel(Reason.ROLE, "nobody is here who would take it")

    def ended(self, transfer: Source | Destination) -> None:
        """Nothing to do."""

    def locate(self, names: Sequence[bytes], deadline: float) -> int:
        return 0

    def get(self, names: Sequence[bytes], longest: int, deadline: float) -> Iterator[Sequence[Buffer | None]]:
        return iter(())
