"""Traffic recording of a server or a router (`--record`): a trace without text, of salted block hashes, lengths and
times.

`foreword simulate` reads it (docs/reference/formats.md). Nothing of a prompt can be computed from it without the salt,
which is never written, and random for each process unless it is given.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Final

from foreword.errors import ConfigError
from foreword.events import Event, FirstToken, MissExplained, RequestFinished

logger = logging.getLogger(__name__)

# Integers of this size are exact in every JSON reader.
_ID_BITS: Final = 53
_QUEUE_LENGTH: Final = 4096
# First-token times of unfinished requests.
_MAX_UNFINISHED: Final = 65536
# Records that wait for the cause of their miss.
_MAX_PENDING: Final = 1024
_FLUSH_SECONDS: Final = 1.0
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


class TraceRecorder:
    """Appends a line of JSON per request to a file, on its own thread, until `close`.

    Args:
        path: the file; an existing file is not overwritten.
        salt: equal salts give equal hashes in the recordings of several processes; None: a random one.
        max_bytes: size at which the recording ends.

    Requests are dropped and counted when the queue to the thread is full. Raises ConfigError if the file cannot be
    created.
    """

    def __init__(
        self,
        path: Path,
        *,
        salt: str | None = None,
        max_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.written = 0
        self.dropped = 0
        self._salt = blake2b((salt or secrets.token_hex(32)).encode(), digest_size=32).digest()
        self._started = clock()
        self._bytes_left = max_bytes
        try:
            self._file: IO[str] = path.open("x", encoding="utf-8")
        except FileExistsError:
            raise ConfigError(f"the recording {path} exists already; name a new file") from None
        except OSError as error:
            raise ConfigError(f"cannot write the recording {path}: {error.strerror}") from error
        self._queue: queue.Queue[RequestRecord | None] = queue.Queue(_QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._write_all, name="foreword-recorder", daemon=True)
        self._thread.start()

    def record(self, request: RequestRecord) -> None:
        """Add a request to the queue. Never blocks."""
        try:
            self._queue.put_nowait(request)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what is queued and close the file."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if self.dropped:
            logger.warning("%d requests are missing in the recording %s", self.dropped, self.path)

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

    def _write_all(self) -> None:
        with self._file as file:
            while True:
                try:
                    request = self._queue.get(timeout=_FLUSH_SECONDS)
                except queue.Empty:
                    self._flush(file)
                    continue
                if request is None:
                    self._flush(file)
                    return
                self._write(file, request)

    def _write(self, file: IO[str], request: RequestRecord) -> None:
        if self._bytes_left <= 0:
            self.dropped += 1
            return
        text = json.dumps(self.line(request), separators=(",", ":")) + "\n"
        try:
            file.write(text)
        except OSError as error:
            self._end(str(error))
            return
        self.written += 1
        self._bytes_left -= len(text)
        if self._bytes_left <= 0:
            self._end("it has reached its maximum size")

    def _flush(self, file: IO[str]) -> None:
        try:
            file.flush()
        except OSError as error:
            self._end(str(error))

    def _end(self, reason: str) -> None:
        self._bytes_left = 0
        logger.warning("the recording %s ends: %s", self.path, reason)


class EngineRecorder:
    """An observer that records an engine's complete requests; aborted requests are not recorded.

    Args:
        explained: misses of requests are explained (`MissExplained`): a record waits for that.
    """

    def __init__(self, recorder: TraceRecorder, block_size: int, *, explained: bool = False) -> None:
        self.recorder = recorder
        self._most_pending = _MAX_PENDING if explained else 0
        self._block_size = block_size
        self._ttft: OrderedDict[str, float] = OrderedDict()
        self._misses: OrderedDict[str, MissExplained] = OrderedDict()
        self._pending: OrderedDict[str, RequestRecord] = OrderedDict()

    def close(self) -> None:
        """Record what is pending, and close the recorder. The engine has ended."""
        self._record_pending(0)
        self.recorder.close()

    def notify(self, event: Event) -> None:
        if isinstance(event, FirstToken):
            self._ttft[event.request_id] = event.seconds
            while len(self._ttft) > _MAX_UNFINISHED:
                self._ttft.popitem(last=False)
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
            self.recorder.record(record)
            return
        self._pending[event.request_id] = record
        self._record_pending(self._most_pending)

    def _explained(self, event: MissExplained) -> None:
        record = self._pending.pop(event.request_id, None)
        if record is not None:
            self.recorder.record(replace(record, miss=event))
            return
        self._misses[event.request_id] = event
        while len(self._misses) > _MAX_UNFINISHED:
            self._misses.popitem(last=False)

    def _record_pending(self, most: int) -> None:
        while len(self._pending) > most:
            self.recorder.record(self._pending.popitem(last=False)[1])


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
