"""A server's or a router's traffic as a trace without any text: salted hashes of blocks, lengths and times
(docs/reference/formats.md).

`foreword simulate` reads it. Nothing of a prompt can be computed from it without the salt, which is drawn anew for each process
unless it is given, and is never written.
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
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Final

from foreword.errors import ConfigError
from foreword.events import Event, FirstToken, RequestFinished

logger = logging.getLogger(__name__)

# Numbers of this size are exact in every reader of JSON.
_ID_BITS: Final = 53
_WAITING: Final = 4096
_OPEN: Final = 65536
_FLUSH_SECONDS: Final = 1.0
_WANTED: Final = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request that ended well.

    Attributes:
        arrived: seconds of `time.monotonic()`.
        keys: of the full blocks of the prompt, and of the answer as far as they are known.
        cached_tokens, ttft, seconds: what became of it; None if that is not known.
        session: whatever says that requests belong together. It is hashed.
        replica: where it went.
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


class Recorder:
    """Appends a line of JSON per request to a file, on a thread of its own. Close it in the end.

    Args:
        path: the file; a new recording never overwrites another.
        salt: equal salts give equal hashes in the recordings of several processes; None draws one.
        max_bytes: where the recording ends.

    What comes faster than it can be written is dropped and counted. Raises ConfigError if the file cannot be made.
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
        self._begun = clock()
        self._left = max_bytes
        try:
            self._file: IO[str] = path.open("x", encoding="utf-8")
        except FileExistsError:
            raise ConfigError(f"the recording {path} is there already; name a new file") from None
        except OSError as error:
            raise ConfigError(f"cannot write the recording {path}: {error.strerror}") from error
        self._queue: queue.Queue[Recorded | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="foreword-recorder", daemon=True)
        self._thread.start()

    def record(self, request: Recorded) -> None:
        """Take note of a request. Never waits."""
        try:
            self._queue.put_nowait(request)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if self.dropped:
            logger.warning("%d requests are missing in the recording %s", self.dropped, self.path)

    def line(self, request: Recorded) -> dict[str, Any]:
        """What is written of a request."""
        size = request.block_size
        ids = [self._number(key) for key in request.keys]
        if len(ids) * size < request.prompt_tokens:
            # The last, partly filled block: nobody shares it.
            ids.append(secrets.randbits(_ID_BITS))
        fields: dict[str, Any] = {
            "timestamp": round((request.arrived - self._begun) * 1e3),
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

    def _write(self, file: IO[str], request: Recorded) -> None:
        if self._left <= 0:
            self.dropped += 1
            return
        text = json.dumps(self.line(request), separators=(",", ":")) + "\n"
        try:
            file.write(text)
        except OSError as error:
            self._end(str(error))
            return
        self.written += 1
        self._left -= len(text)
        if self._left <= 0:
            self._end("it has its full size")

    def _flush(self, file: IO[str]) -> None:
        try:
            file.flush()
        except OSError as error:
            self._end(str(error))

    def _end(self, reason: str) -> None:
        self._left = 0
        logger.warning("the recording %s ends: %s", self.path, reason)


class EngineRecorder:
    """An observer that records what an engine did (`--record`). Requests that were cut off are not recorded."""

    def __init__(self, recorder: Recorder, block_size: int) -> None:
        self.recorder = recorder
        self._block_size = block_size
        self._firsts: OrderedDict[str, float] = OrderedDict()

    def notify(self, event: Event) -> None:
        if isinstance(event, FirstToken):
            self._firsts[event.request_id] = event.seconds
            while len(self._firsts) > _OPEN:
                self._firsts.popitem(last=False)
        elif isinstance(event, RequestFinished):
            first = self._firsts.pop(event.request_id, None)
            if event.reason in _WANTED and event.prompt_tokens:
                self.recorder.record(
                    Recorded(
                        time.monotonic() - event.seconds,
                        event.keys,
                        self._block_size,
                        event.prompt_tokens,
                        max(event.output_tokens, 1),
                        event.cached_tokens,
                        first,
                        event.seconds,
                    )
                )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
