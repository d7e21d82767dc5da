"""Errors. Every error that a public function of Foreword raises is a `ForewordError`.

An error knows its HTTP status, whether a retry may succeed, and whether the client, the operator or the server caused it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import ClassVar, Literal

from foreword.texts import readable

Fault = Literal["client", "operator", "server"]


class ForewordError(Exception):
    """Base class of all errors.

    Attributes:
        fault: who can fix the cause: the `client`, the `operator` of the server, or the `server` itself.
        status: HTTP status of the response.
        retry: whether the same call may succeed later.
        code: stable identifier for programs; OpenAI's code where one exists.
        param: name of the wrong parameter, if there is one.
        retry_after: seconds after which a retry makes sense, where they are known.
    """

    fault: ClassVar[Fault] = "server"
    status: ClassVar[int] = 500
    retry: ClassVar[bool] = False
    code: ClassVar[str] = "internal_error"

    def __init_subclass__(
        cls,
        *,
        status: int | None = None,
        code: str | None = None,
        fault: Fault | None = None,
        retry: bool | None = None,
    ) -> None:
        """A subclass gives what differs from its base class as keywords of its class statement."""
        for name, value in (("status", status), ("code", code), ("fault", fault), ("retry", retry)):
            if value is not None:
                setattr(cls, name, value)

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.message = readable(message)
        super().__init__(self.message)
        self.param = param
        self.retry_after: float | None = None


class BadRequest(ForewordError, status=400, code="invalid_request", fault="client"):
    """A parameter is missing, malformed or out of range."""


class NotFound(ForewordError, status=404, code="not_found", fault="client"):
    """The named object does not exist."""


class ConfigError(ForewordError, code="configuration_error", fault="operator"):
    """A configuration key is unknown, or its value is of the wrong type or out of range."""


class ModelUnsupported(ForewordError, code="model_unsupported", fault="operator"):
    """The engine refuses the model because it would not compute it correctly."""


class IntegrityError(ForewordError, code="integrity_error"):
    """An invariant of the block pool is broken. This is a bug in Foreword."""


class StoreError(ForewordError, code="store_error", retry=True):
    """An operation of a store failed. For requests to the engine it counts as a cache miss."""


class StoreUnavailable(StoreError, status=503, code="store_unavailable"):
    """The store cannot be reached, refuses access, or returns an invalid response."""


class StoreUnreadable(StoreUnavailable, code="store_unreadable"):
    """A part of the store was reached and cannot be read: a folder without permission, a bad sector, an incomplete list."""


class BadRecord(StoreError, code="bad_record", retry=False):
    """Bytes are not the expected record."""


class StoreTimeout(StoreError, status=503, code="store_timeout"):
    """A store did not respond before the deadline."""


class StoreHung(StoreTimeout, code="store_hung"):
    """A call of a store had not returned shortly after its deadline. It may still return."""


class StoreFull(StoreError, status=507, code="store_full"):
    """The store is full: no space on the disk, or all blocks are pinned."""


class StoreReadOnly(StoreError, code="store_read_only", retry=False):
    """The store takes no changes: it is a replica, a file system became read-only, permission is missing."""


class StoreWithoutKeys(StoreReadOnly, code="store_without_keys"):
    """Blocks cannot be encrypted, because the key store does not answer."""


class StoreOpenedReadOnly(StoreReadOnly, code="store_opened_read_only", retry=False):
    """This process has opened the store to read only, which stays so."""


class StoreConfigError(StoreError, code="store_configuration_error", fault="operator", retry=False):
    """The URL of a store is wrong."""


class BadFrame(ForewordError, code="bad_frame"):
    """Bytes are not the expected frame. `reason` is a stable word for counters."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def reason_of(error: Exception) -> str:
    """The reason that the system or a library gives for an error, as the end of a sentence: without the number and the path
    that Python adds."""
    said = (
        error.strerror
        if isinstance(error, OSError) and error.strerror
        else re.sub(r"^\[Errno -?\d+\] ", "", str(error))
    )
    return said or type(error).__name__


def did_you_mean(name: str, known: Iterable[str], *, most: int = 8) -> str:
    """The end of an error message: similar names if there are any, else the known names, `most` of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f". Did you mean {' or '.join(repr(n) for n in close)}?"
    if names:
        shown = ", ".join(repr(n) for n in names[:most])
        return f". Known: {shown}{', ...' if len(names) > most else ''}"
    return ". None is known yet"
