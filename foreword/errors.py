"""Errors. Every error that a public function of Foreword raises is a `ForewordError`.

An error knows its HTTP status, whether a retry may succeed, and whether the client, the operator or the server caused it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar, Literal

Fault = Literal["client", "operator", "server"]


class ForewordError(Exception):
    """Base class of all errors.

    Attributes:
        fault: who can fix the cause: the `client`, the `operator` of the server, or the `server` itself.
        status: HTTP status of the response.
        retry: whether the same call may succeed later.
        code: stable identifier for programs; OpenAI's code where one exists.
        param: name of the wrong parameter, if there is one.
    """

    fault: ClassVar[Fault] = "server"
    status: ClassVar[int] = 500
    retry: ClassVar[bool] = False
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(ForewordError):
    """A parameter is missing, malformed or out of range."""

    fault = "client"
    status = 400
    code = "invalid_request"


class PromptTooLong(BadRequest):
    """The prompt and the requested tokens exceed the maximum length of the model or the size of the block pool."""

    code = "context_length_exceeded"


class Unauthorized(ForewordError):
    """The API key is missing or unknown."""

    fault = "client"
    status = 401
    code = "invalid_api_key"


class NotFound(ForewordError):
    """The named object does not exist."""

    fault = "client"
    status = 404
    code = "not_found"


class UnknownModel(NotFound):
    """The request names a model that this server does not serve."""

    code = "model_not_found"


class UnknownPrefix(NotFound):
    """The request names a prefix that is not registered."""

    code = "prefix_not_found"

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"No prefix named {name!r} is registered{did_you_mean(name, known)}", param="prefix")


class PrefixBudgetExceeded(ForewordError):
    """A named prefix does not fit into the memory that named prefixes may pin."""

    fault = "client"
    status = 409
    code = "prefix_budget_exceeded"


class QueueFull(ForewordError):
    """The server's queue is full."""

    status = 429
    retry = True
    code = "queue_full"


class ShuttingDown(ForewordError):
    """The server is draining and accepts no new requests."""

    status = 503
    retry = True
    code = "shutting_down"


class NoReplica(ForewordError):
    """No replica can accept the request now."""

    status = 503
    retry = True
    code = "no_replica"


class ReplicaFailed(ForewordError):
    """All replicas that were tried failed, or a replica failed during its response and no other can continue it exactly."""

    status = 502
    retry = True
    code = "replica_failed"


class DeadlineExceeded(ForewordError):
    """The request exceeded its time limit."""

    status = 504
    retry = True
    code = "deadline_exceeded"


class Forbidden(ForewordError):
    """The caller is not allowed to do this."""

    fault = "client"
    status = 403
    code = "forbidden"


class NotReady(ForewordError):
    """The model is not loaded yet."""

    status = 503
    retry = True
    code = "not_ready"


class EngineFailed(ForewordError):
    """A step of the engine failed. Its requests were ended and their blocks retracted."""

    code = "engine_error"


class ConfigError(ForewordError):
    """A configuration key is unknown, or its value is of the wrong type or out of range."""

    fault = "operator"
    code = "configuration_error"


class ModelNotFound(ForewordError):
    """There is no model with this path or name, or it cannot be read."""

    fault = "operator"
    code = "model_unavailable"


class ModelUnsupported(ForewordError):
    """The engine refuses the model because it would not compute it correctly."""

    fault = "operator"
    code = "model_unsupported"


class IntegrityError(ForewordError):
    """An invariant of the block pool is broken. This is a bug in Foreword."""

    code = "integrity_error"


class StoreError(ForewordError):
    """An operation of a store failed. For requests to the engine it counts as a cache miss."""

    retry = True
    code = "store_error"


class StoreUnavailable(StoreError):
    """The store cannot be reached, refuses access, or returns an invalid response."""

    code = "store_unavailable"


class StoreTimeout(StoreError):
    """A store did not respond before the deadline."""

    code = "store_timeout"


class StoreFull(StoreError):
    """The store is full: no space on the disk, or all blocks are pinned."""

    code = "store_full"


class StoreReadOnly(StoreError):
    """The store is read-only."""

    retry = False
    code = "store_read_only"


class StoreConfigError(StoreError):
    """The URL of a store is wrong."""

    fault = "operator"
    retry = False
    code = "store_configuration_error"


class BadFrame(ForewordError):
    """Bytes are not the expected frame. `reason` is a stable word for counters."""

    code = "bad_frame"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class TransferError(ForewordError):
    """A transfer between instances failed. `reason` is a stable word (`transfer.messages.Reason`)."""

    status = 503
    retry = True
    code = "transfer_error"

    def __init__(self, message: str, *, reason: str = "failed") -> None:
        super().__init__(message)
        self.reason = reason


class TransferRefused(TransferError):
    """The peer refused the transfer."""

    code = "transfer_refused"


class TransferUnavailable(TransferError):
    """The peer cannot be reached, or the connection was lost."""

    code = "transfer_unavailable"

    def __init__(self, message: str, *, reason: str = "lost") -> None:
        super().__init__(message, reason=reason)


class PeerGone(TransferUnavailable):
    """The peer's address refuses connections: its process has ended."""

    code = "peer_gone"


class TransferTimeout(TransferError):
    """A transfer did not end before its deadline."""

    code = "transfer_timeout"

    def __init__(self, message: str, *, reason: str = "deadline") -> None:
        super().__init__(message, reason=reason)


class PeerRejected(TransferError):
    """The two instances do not match: different secrets, versions or layouts. A retry fails again."""

    fault = "operator"
    retry = False
    code = "peer_rejected"


class ProtocolViolation(TransferError):
    """The peer sent a message that the protocol does not allow. The connection ends."""

    retry = False
    code = "protocol_violation"

    def __init__(self, message: str, *, reason: str = "violation") -> None:
        super().__init__(message, reason=reason)


class BadMessage(ProtocolViolation):
    """Received bytes are not a message."""

    code = "bad_message"


class CannotMove(TransferError):
    """A request cannot be migrated, or not now. It continues on its instance."""

    fault = "client"
    status = 409
    retry = False
    code = "cannot_move"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: similar names if there are any, else the known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f". Did you mean {' or '.join(repr(n) for n in close)}?"
    if names:
        shown = ", ".join(repr(n) for n in names[:8])
        return f". Known: {shown}{', ...' if len(names) > 8 else ''}"
    return ". None is known yet"
