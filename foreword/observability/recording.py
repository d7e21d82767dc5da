"""Traffic recording of a server or a router (`--record`): a trace without text, of salted block hashes, lengths and
times.

`foreword simulate` reads it (docs/reference/formats.md). Nothing of a prompt can be computed from it without the salt,
which is never written, and random for each process unless it is given.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from foreword.events import Event, FirstToken, MissExplained, RequestFinished
from foreword.newest import Newest
from foreword.observability.line_file import LineFile

# Integers of this size are exact in every JSON reader.
_ID_BITS: Final = 53
# First-token times of unfinished requests.
_MAX_UNFINISHED: Final = 65536
# Records that wait for the cause of their miss.
_MAX_PENDING: Final = 1024
# Finish reasons of requests that are recorded.
_COMPLETE: Final = ("stop", "length")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One complete request.

    Attributes:
        arrived: seconds of `time.monotonic()`.
        keys: block keys of the prompt's full blocks, and of the output's where they are known.
        cached_tokens, ttft, seconds: prefix hit, time to first token and duration; None if unknown.
        session: an identifier that requests of one session have in common. Only its hash is written.
        replica: the replica that served the request.
        miss: why part of the prompt was not cached; None if unknown.
    """

    arrived: float
    keys: Sequence[bytes]
    block_size: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    ttft: float | None = None
    seconds: float | None = None
    session: str | None = None
    replica: str | None = None
    miss: MissExplained | None = None


class TraceRecorder(LineFile[RequestRecord]):
    """A line of JSON per request in a new file, until `close`.

    Args:
        salt: equal salts give equal hashes in the recordings of several processes; None: a random one.
        max_bytes: size at which the recording ends.

    Raises ConfigError if the file exists or cannot be created.
    """

    def __init__(
        self,
        path: Path,
        *,
        salt: str | None = None,
        max_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._salt = blake2b((salt or secrets.token_hex(32)).encode(), digest_size=32).digest()
        self._started = clock()
        super().__init__(path, "x", "recording", max_bytes)

    def encode(self, item: RequestRecord) -> bytes:
        return json.dumps(self.line(item), separators=(",", ":")).encode() + b"\n"

    def line(self, request: RequestRecord) -> dict[str, Any]:
        """A request as a JSON object."""
        size = request.block_size
        ids = [self._number(key) for key in request.keys]
        if len(ids) * size < request.prompt_tokens:
            # The last, partial block has a random hash: it is shared with no other request.
            ids.append(secrets.randbits(_ID_BITS))
        fields: dict[str, Any] = {
            "timestamp": round((request.arrived - self._started) * 1e3),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "block_size": size,
            "hash_ids": ids,
        }
        if request.session is not None:
            fields["session"] = f"{self._number(request.session.encode()):x}"
        for name, value in (
            ("cached_tokens", request.cached_tokens),
            ("ttft", _rounded(request.ttft)),
            ("seconds", _rounded(request.seconds)),
            ("replica", request.replica),
        ):
            if value is not None:
                fields[name] = value
        if request.miss is not None:
            fields |= {
                "cause": request.miss.cause,
                "where": request.miss.where,
                "tokens_lost": request.miss.tokens_lost,
            }
        return fields

    def _number(self, key: bytes) -> int:
        return int.from_bytes(blake2b(key, key=self._salt, digest_size=8).digest()) >> (64 - _ID_BITS)


class EngineRecorder:
    """An observer that records an engine's complete requests; aborted requests are not recorded.

    Args:
        explained: misses of requests are explained (`MissExplained`): a record waits for that.
    """

    def __init__(self, recorder: TraceRecorder, block_size: int, *, explained: bool = False) -> None:
        self.recorder = recorder
        self._most_pending = _MAX_PENDING if explained else 0
        self._block_size = block_size
        self._ttft: Newest[str, float] = Newest(_MAX_UNFINISHED)
        self._misses: Newest[str, MissExplained] = Newest(_MAX_UNFINISHED)
        self._pending: OrderedDict[str, RequestRecord] = OrderedDict()

    def close(self) -> None:
        """Record what is pending, and close the recorder. The engine has ended."""
        self._record_pending(0)
        self.recorder.close()

    def notify(self, event: Event) -> None:
        if isinstance(event, FirstToken):
            self._ttft[event.request_id] = event.seconds
        elif isinstance(event, RequestFinished):
            self._finished(event)
        elif isinstance(event, MissExplained):
            self._explained(event)

    def _finished(self, event: RequestFinished) -> None:
        ttft = self._ttft.pop(event.request_id, None)
        miss = self._misses.pop(event.request_id, None)
        if event.reason not in _COMPLETE or not event.prompt_tokens:
            return
        record = RequestRecord(
            time.monotonic() - event.seconds,
            event.keys,
            self._block_size,
            event.prompt_tokens,
            max(event.output_tokens, 1),
            event.cached_tokens,
            ttft,
            event.seconds,
            miss=miss,
        )
        if miss is not None or event.request_id in self._pending:
            self.recorder.add(record)
            return
        self._pending[event.request_id] = record
        self._record_pending(self._most_pending)

    def _explained(self, event: MissExplained) -> None:
        record = self._pending.pop(event.request_id, None)
        if record is not None:
            self.recorder.add(replace(record, miss=event))
            return
        self._misses[event.request_id] = event

    def _record_pending(self, most: int) -> None:
        while len(self._pending) > most:
            self.recorder.add(self._pending.popitem(last=False)[1])


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
