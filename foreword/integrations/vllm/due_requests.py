"""Requests that may fill a block in a step, found without a look at the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping


class DueRequests:
    """Requests by the step in which each may fill its next block.

    A step of decoding computes at most `per_step` tokens of a request. So a request that needs n more tokens is due after
    n / `per_step` steps, or in an earlier step that computes more of it. A step costs what is due in it, however many
    requests run or wait.

    Invariant: while a request is watched, no step fills a block of it in which it is not due.
    """

    def __init__(self, per_step: int) -> None:
        self._per_step = per_step
        self._step = 0
        self._due: dict[str, int] = {}
        # Entries of a request that has become due in another step stay until their own step, and are then ignored.
        self._buckets: dict[int, dict[str, None]] = {}

    def watch(self, request_id: str, tokens: int = 0) -> None:
        """A request fills a block when `tokens` more tokens of it are computed; 0: it is due in the next step."""
        step = self._step + max(-(-tokens // self._per_step), 1)
        if self._due.get(request_id) != step:
            self._due[request_id] = step
            self._buckets.setdefault(step, {})[request_id] = None

    def forget(self, request_id: str) -> None:
        """Do not watch a request any more."""
        self._due.pop(request_id, None)

    def take(self, scheduled: Mapping[str, int], total: int, others: Iterable[str] = ()) -> Iterable[str]:
        """The requests that are due in the next step, which computes `scheduled` tokens of each request, `total` in all.
        `others` are due for another reason."""
        self._step += 1
        bucket = self._buckets.pop(self._step, None)
        # A step that computes one token of each request has no larger count than that.
        small = total - len(scheduled) < self._per_step or max(scheduled.values()) <= self._per_step
        if small and bucket is None and not others:
            return ()
        return dict.fromkeys(self._found(bucket or {}, scheduled, others))

    def _found(self, bucket: Iterable[str], scheduled: Mapping[str, int], others: Iterable[str]) -> Iterator[str]:
        yield from (request_id for request_id in bucket if self._due.get(request_id) == self._step)
        yield from (
            request_id
            for request_id, tokens in scheduled.items()
            if tokens > self._per_step and request_id in self._due
        )
        yield from (request_id for request_id in others if request_id in scheduled)
