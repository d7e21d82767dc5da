"""One tree of errors.

Every error that leaves a public function of Foreword is a `ForewordError`. It says whose fault it is, whether the same
call may succeed later, and which HTTP status answers it, so no caller has to keep a table of its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar, Literal

Fault = Literal["client", "operator", "server"]


class ForewordError(Exception):
    """Base of all errors.

    Attributes:
        fault: who can mend it: the `client` that called, the `operator` who set things up, or the `server` itself.
        status: the HTTP status that answers it.
        retry: whether the same call may succeed later without a change.
        code: a stable word for programs; OpenAI's own where one exists.
        param: the name of the offending parameter, where there is one.
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
    """The prompt, or the prompt and the tokens asked for, exceed the model's or the pool's length."""

    code = "context_length_exceeded"


class Unauthorized(ForewordError):
    """The server asks for an API key and got none, or one it does not know."""

    fault = "client"
    status = 401
    code = "invalid_api_key"


class NotFound(ForewordError):
    """The thing named does not exist."""

    fault = "client"
    status = 404
    code = "not_found"


class UnknownModel(NotFound):
    """The request names a model that is not served here."""

    code = "model_not_found"


class UnknownPrefix(NotFound):
    """The request names a prefix that was never registered, or was removed (R17)."""

    code = "prefix_not_found"

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"No prefix named {name!r} is registered{did_you_mean(name, known)}", param="prefix")


class PrefixBudgetExceeded(ForewordError):
    """A named prefix does not fit into the bytes that named prefixes may pin (R18)."""

    fault = "client"
    status = 409
    code = "prefix_budget_exceeded"


class QueueFull(ForewordError):
    """More requests wait than the server was told to hold."""

    status = 429
    retry = True
    code = "queue_full"


class ShuttingDown(ForewordError):
    """The server drains and takes no new requests."""

    status = 503
    retry = True
    code = "shutting_down"


class NoReplica(ForewordError):
    """No replica takes the request at this moment."""

    status = 503
    retry = True
    code = "no_replica"


class ReplicaFailed(ForewordError):
    """The replicas that a request was sent to failed it, or the one that answered it is gone and nobody can go on exactly where
    it was."""

    status = 502
    retry = True
    code = "replica_failed"


class DeadlineExceeded(ForewordError):
    """The request's time is over."""

    status = 504
    retry = True
    code = "deadline_exceeded"


class Forbidden(ForewordError):
    """The caller may not do this."""

    fault = "client"
    status = 403
    code = "forbidden"


class NotReady(ForewordError):
    """The model is still being loaded."""

    status = 503
    retry = True
    code = "not_ready"


class EngineFailed(ForewordError):
    """A step of the engine failed; the requests in it were ended and their blocks withdrawn."""

    code = "engine_error"


class ConfigError(ForewordError):
    """A configuration key is unknown, or its value is of the wrong type or out of range."""

    fault = "operator"
    code = "configuration_error"


class ModelNotFound(ForewordError):
    """There is no model at the given place, or it cannot be read."""

    fault = "operator"
    code = "model_unavailable"


class ModelUnsupported(ForewordError):
    """The engine would not compute this model correctly, so it refuses to run it."""

    fault = "operator"
    code = "model_unsupported"


class IntegrityError(ForewordError):
    """An invariant of the block pool does not hold. This is a defect in Foreword."""

    code = "integrity_error"


class StoreError(ForewordError):
    """A store could not do what it was asked. Never reaches a user of the engine: there it is a miss."""

    retry = True
    code = "store_error"


class StoreUnavailable(StoreError):
    """The store cannot be reached, refuses, or answers nonsense."""

    code = "store_unavailable"


class StoreTimeout(StoreError):
    """The deadline passed."""

    code = "store_timeout"


class StoreFull(StoreError):
    """There is no room: the disk is full, or everything that could be evicted is pinned."""

    code = "store_full"


class StoreReadOnly(StoreError):
    """The store takes no writes."""

    retry = False
    code = "store_read_only"


class StoreConfigError(StoreError):
    """A store's URL is wrong."""

    fault = "operator"
    retry = False
    code = "store_configuration_error"


class BadFrame(ForewordError):
    """Bytes that are not the frame they should be. `reason` is a stable word for counters."""

    code = "bad_frame"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class TransferError(ForewordError):
    """A transfer between instances did not come about. `reason` is a stable word (`transfer.messages.Reason`)."""

    status = 503
    retry = True
    code = "transfer_error"

    def __init__(self, message: str, *, reason: str = "failed") -> None:
        super().__init__(message)
        self.reason = reason


class TransferRefused(TransferError):
    """The peer said no, in so many words."""

    code = "transfer_refused"


class TransferUnavailable(TransferError):
    """The peer cannot be reached, or the connection to it broke."""

    code = "transfer_unavailable"

    def __init__(self, message: str, *, reason: str = "lost") -> None:
        super().__init__(message, reason=reason)


class PeerGone(TransferUnavailable):
    """Nobody listens at the peer's address: its process has ended."""

    code = "peer_gone"


class TransferTimeout(TransferError):
    """A deadline passed."""

    code = "transfer_timeout"

    def __init__(self, message: str, *, reason: str = "deadline") -> None:
        super().__init__(message, reason=reason)


class PeerRejected(TransferError):
    """The two instances do not fit: another secret, another version, another layout. Trying again changes nothing."""

    fault = "operator"
    retry = False
    code = "peer_rejected"


class ProtocolViolation(TransferError):
    """The peer sent what the protocol does not allow there. The connection ends."""

    retry = False
    code = "protocol_violation"

    def __init__(self, message: str, *, reason: str = "violation") -> None:
        super().__init__(message, reason=reason)


class BadMessage(ProtocolViolation):
    """Bytes that are not a message."""

    code = "bad_message"


class CannotMove(TransferError):
    """A request cannot be moved to another instance, or not now. It goes on where it is."""

    fault = "client"
    status = 409
    retry = False
    code = "cannot_move"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error sentence: close names if there are any, else what is known, else nothing."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f". Did you mean {' or '.join(repr(n) for n in close)}?"
    if names:
        shown = ", ".join(repr(n) for n in names[:8])
        return f". Known: {shown}{', ...' if len(names) > 8 else ''}"
    return ". None is known yet"
