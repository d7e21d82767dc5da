"""What carries messages between two processes: the contract of every link (`foreword.conformance.links.LinkContract`).

A link is one connection that has been opened, authenticated and agreed upon. Messages arrive in the order in which they were
sent, whole or not at all. One thread sends, another one receives; `close` may be called by any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from foreword.transfer.messages import NO_TRANSFER, Buffer, Head, Message, payload_checksum

# Payloads up to about this length together are worth one wake-up of the peer.
TOGETHER: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a link can do.

    Attributes:
        name: `tcp`, `shm`, ...; the word in configuration and counters.
        same_host: both ends are on one machine.
        largest: the longest payload of one message, in bytes.
        copies: how often a payload is copied between the sender's buffer and what the receiver sees, the kernel's copies
            included.
        device: payloads may lie in a device's memory.
    """

    name: str
    same_host: bool
    largest: int
    copies: int
    device: bool = False


class Payload:
    """The bytes that came with a message, in memory of the link's. Whoever gets it calls `release`, once, on any thread; then
    the bytes may change. The link receives no more than a bounded number of bytes that nobody released."""

    __slots__ = ("_release", "view")

    def __init__(self, view: memoryview, release: Callable[[], None] | None = None) -> None:
        self.view = view
        self._release = release

    def release(self) -> None:
        """More calls do nothing."""
        release, self._release = self._release, None
        self.view = memoryview(b"")
        if release is not None:
            release()

    def __len__(self) -> int:
        return len(self.view)

    def __enter__(self) -> memoryview:
        return self.view

    def __exit__(self, *_: object) -> None:
        self.release()


EMPTY = Payload(memoryview(b""))


@dataclass(frozen=True, slots=True)
class Received:
    """A message as it came. Its payload has not been checked: `sound` says whether it fits its checksum."""

    head: Head
    message: Message
    payload: Payload

    def sound(self) -> bool:
        """Reads every byte. True also where the message has no checksum."""
        return self.head.payload_sum is None or payload_checksum([self.payload.view]) == self.head.payload_sum


class Link(Protocol):
    """Deadlines are times of `time.monotonic()`.

    Raises TransferTimeout when a deadline passes, TransferUnavailable once the peer or this side has closed, BadMessage for
    bytes that are no message. After any of them, except a TransferTimeout of `receive`, the link is of no use.
    """

    capabilities: Capabilities

    @property
    def heard(self) -> float:
        """When the last bytes came, whole message or not; before the first ones, when the link was made."""
        ...

    def send(
        self,
        message: Message,
        transfer: bytes = NO_TRANSFER,
        buffers: Sequence[Buffer] = (),
        *,
        deadline: float,
        checksum: bool = True,
        more: bool = False,
    ) -> None:
        """Send a message and, as its payload, the bytes of `buffers` (contiguous, in units of a byte) in a row. When it
        returns, they may change.

        Args:
            more: another call follows at once, so this message may wait for it; the peer is then woken for both together.

        The deadline is for the next sign that bytes move: a long payload on a slow link does not fail while it goes on.
        """
        ...

    def receive(self, *, deadline: float) -> Received:
        """The next message. A TransferTimeout loses nothing: call again."""
        ...

    def close(self) -> None:
        """Wakes both threads; may be called twice. Payloads that nobody has released stay readable until they are."""
        ...
