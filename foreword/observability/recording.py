"""Traffic recording of a server or a router (`--record`): a trace without text, of salted block hashes, lengths and
times.

`foreword simulate` reads it (docs/reference/formats.md). Nothing of a prompt can be computed from it without the salt,
which is never written, and random for each process unless it is given.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from foreword.line_file import LineFile
from foreword.usage import MissExplained

# Integers of this size are exact in every JSON reader.
_ID_BITS: Final = 53


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A complete request.

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


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
