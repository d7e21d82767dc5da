"""What an instance does for its peers: the base class that an engine's service extends.

Calls come on a connection's reader thread, one at a time per connection, and must be quick: nothing else is read from that peer
meanwhile. Copying a part is quick; waiting for a step of the engine is not. Answers (`accept`, `refuse`, `take` ...) may be
given inside the call or later, from any thread. A call must not wait for a lock whose holder calls into a transfer.

For one transfer `part`, `finished` and `ended` exclude each other. So after `ended` was called or `cancel` has returned, no
`part` of it is running or will come: its blocks can be freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foreword.blocks.layout import Layout
from foreword.transfer.transfers import KVDestination, KVSource, TransferListener
from foreword.transfer.wire_format import Buffer, Reason


class TransferService(TransferListener):
    """Refuses every request and has no blocks; on its own it serves an instance that only fetches.

    Args:
        layout: of this instance's blocks; None if it has none.
    """

    def __init__(self, layout: Layout | None = None) -> None:
        self.layout = layout

    def pull_requested(self, source: KVSource) -> None:
        """A peer requests the KV of `source.request`.

        Call `source.accept()` or `source.refuse()`, then `send` for each part, then `finish`.
        """
        source.refuse(Reason.ROLE, "this instance does not compute for others")

    def push_requested(self, destination: KVDestination) -> None:
        """A peer migrates the running request `destination.request`. Call `destination.accept(have)` or `refuse()`."""
        destination.refuse(Reason.ROLE, "this instance takes no requests over")

    def locate(self, names: Sequence[bytes], deadline: float) -> int:
        """How many of these blocks (layout fingerprint and key), from the first on, can be sent now. On its own thread."""
        return 0

    def get(self, names: Sequence[bytes], longest: int, deadline: float) -> Iterator[Sequence[Buffer | None]]:
        """Whole sealed frames of at most `longest` bytes in the order of `names`, in batches; None for a missing one.

        A batch's memory may be reused when the next batch is requested. Runs on its own thread; ends early if the peer is gone.
        """
        return iter(())
