"""The usage ledger of a server or a router (`--usage-ledger`): a line of JSON for each request that counts against a tenant's
quota, however it ended, with its tokens. `foreword bill` reads it (docs/reference/formats.md).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import IO, Annotated

import msgspec

from foreword.line_file import LineFile, open_for_group
from foreword.usage import TokenUsage


class RequestUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request.

    Attributes:
        time: when it came, in seconds since 1970. seconds: until its end.
        id: as the client or the front named it. It may occur again: clients choose it.
        tenant: empty where no keys are asked for.
        route: method and path of the route.
        status: of the answer; 499 if the client left before its end.
    """

    time: Annotated[float, msgspec.Meta(ge=0, lt=1e11)]
    seconds: float
    id: str
    tenant: str
    route: str
    status: int
    usage: TokenUsage = TokenUsage()


_encode = msgspec.json.Encoder().encode


class UsageLedger(LineFile[RequestUsage]):
    """Appends to a file, which may be moved away meanwhile: a new one is begun.

    Lines that cannot be written are counted and reported; a request does not wait or fail for them. Raises ConfigError if the
    file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a", "usage ledger")

    def note(self, name: str, tenant: str, route: str, status: int, seconds: float, usage: TokenUsage) -> None:
        """A request has ended."""
        self.add(RequestUsage(round(time.time() - seconds, 3), round(seconds, 6), name, tenant, route, status, usage))

    def encode(self, item: RequestUsage) -> bytes:
        return _encode(item) + b"\n"

    def reopened(self, file: IO[bytes]) -> IO[bytes]:
        """The file of that name now. Raises OSError."""
        try:
            if os.stat(self.path).st_ino == os.fstat(file.fileno()).st_ino:
                return file
        except FileNotFoundError:
            pass
        fresh = open(self.path, "ab", buffering=0, opener=open_for_group)  # noqa: SIM115 - the thread closes it
        file.close()
        return fresh
