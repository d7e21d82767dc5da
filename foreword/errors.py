"""Errors. Every error that a public function of Foreword raises is a `ForewordError`.

An error knows its HTTP status, whether a retry may succeed, and whether the client, the operator or the server caused it.
"""

from __future__ import annotations

import difflib
import os
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


class PromptTooLong(BadRequest, code="context_length_exceeded"):
    """The prompt and the requested tokens exceed the maximum length of the model or the size of the block pool."""


class ThreadUnsupported(BadRequest, code="thread_unsupported_request"):
    """The request wants its conversation kept here. Anthropic's client then sends all of it again."""


class GrammarTooComplex(BadRequest, code="grammar_too_complex"):
    """The format of the text cannot be followed within the limits of a step. Known only when the text has come so far."""


class Unauthorized(ForewordError, status=401, code="invalid_api_key", fault="client"):
    """The API key is missing or unknown."""


class NotFound(ForewordError, status=404, code="not_found", fault="client"):
    """The named object does not exist."""


class UnknownModel(NotFound, code="model_not_found"):
    """The request names a model that this server does not serve."""


class UnknownPrefix(NotFound, code="prefix_not_found"):
    """The request names a prefix that is not registered."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"No prefix named {name!r} is registered{did_you_mean(name, known)}", param="prefix")


class PrefixBudgetExceeded(ForewordError, status=409, code="prefix_budget_exceeded", fault="client"):
    """A named prefix does not fit into the memory that named prefixes may pin."""


class QueueFull(ForewordError, status=429, code="queue_full", retry=True):
    """The server's queue is full."""


class RateLimited(ForewordError, status=429, code="rate_limit_exceeded", retry=True):
    """The tenant has used up its quota of requests or tokens per minute, or of requests at a time."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(f"Rate limit: {message}; retry later")
        self.retry_after = retry_after


class ShuttingDown(ForewordError, status=503, code="shutting_down", retry=True):
    """The server is draining and accepts no new requests."""


class NoReplica(ForewordError, status=503, code="no_replica", retry=True):
    """No replica can accept the request now."""


class ReplicaFailed(ForewordError, status=502, code="replica_failed", retry=True):
    """All replicas that were tried failed, or a replica failed during its response and no other can continue it exactly."""


class ReplicaError(ReplicaFailed):
    """A replica answered with an error, of which the request may be the cause."""


class RequestLost(ReplicaFailed):
    """A request, or its answer, was lost on the way to or from a replica, which answers others."""


class RequestEnded(ReplicaError, status=500, code="request_failed", retry=False):
    """A replica failed at this request alone, and serves on. Another one would fail at it, too."""


class DeadlineExceeded(ForewordError, status=504, code="deadline_exceeded", retry=True):
    """The request exceeded its time limit."""


class Forbidden(ForewordError, status=403, code="forbidden", fault="client"):
    """The caller is not allowed to do this."""


class NotReady(ForewordError, status=503, code="not_ready", retry=True):
    """The model is not loaded yet."""


class EngineFailed(ForewordError, code="engine_error"):
    """A step of the engine failed. Its requests were ended and their blocks retracted."""


class RequestFailed(EngineFailed, code="request_failed"):
    """The engine failed at one request, and ended it. Other requests continue. This is a bug in Foreword or in a plug-in."""


class ConfigError(ForewordError, code="configuration_error", fault="operator"):
    """A configuration key is unknown, or its value is of the wrong type or out of range."""


class ModelNotFound(ForewordError, code="model_unavailable", fault="operator"):
    """There is no model with this path or name, or it cannot be read."""


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


class TransferError(ForewordError, status=503, code="transfer_error", retry=True):
    """A transfer between instances failed. `reason` is a stable word (`transfer.messages.Reason`)."""

    default_reason: ClassVar[str] = "failed"

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or self.default_reason


class TransferRefused(TransferError, code="transfer_refused"):
    """The peer refused the transfer."""


class TransferUnavailable(TransferError, code="transfer_unavailable"):
    """The peer cannot be reached, or the connection was lost."""

    default_reason = "lost"


class PeerGone(TransferUnavailable, code="peer_gone"):
    """The peer's address refuses connections: its process has ended."""


class TransferTimeout(TransferError, code="transfer_timeout"):
    """A transfer did not end before its deadline."""

    default_reason = "deadline"


class PeerRejected(TransferError, code="peer_rejected", fault="operator", retry=False):
    """The two instances do not match: different secrets, versions or layouts. A retry fails again."""


class ProtocolViolation(TransferError, code="protocol_violation", retry=False):
    """The peer sent a message that the protocol does not allow. The connection ends."""

    default_reason = "violation"


class BadMessage(ProtocolViolation, code="bad_message"):
    """Received bytes are not a message."""


class CannotMigrate(TransferError, status=409, code="cannot_move", fault="client", retry=False):
    """A request cannot be migrated, or not now. It continues on its instance."""


def reason_of(error: Exception) -> str:
    """The reason that the system or a library gives for an error, as the end of a sentence: without the number and the path
    that Python adds."""
    said = (
        error.strerror
        if isinstance(error, OSError) and error.strerror
        else re.sub(r"^\[Errno -?\d+\] ", "", str(error))
    )
    return said or type(error).__name__


def connection_reason(error: OSError) -> str:
    """Why a connection could not be made, as the end of a sentence: "connection refused". asyncio repeats the address
    as Python writes it."""
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else reason_of(error)


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
