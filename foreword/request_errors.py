"""Errors that answer a request: what a server, an engine, a router or a picker says of it.

Each has its status and code (`foreword.errors`); `foreword.api.errors` makes the response.
"""

from __future__ import annotations

import os

from foreword.errors import BadRequest, ForewordError, NotFound, reason_of


class PromptTooLong(BadRequest, code="context_length_exceeded"):
    """The prompt and the requested tokens exceed the maximum length of the model or the size of the block pool."""


class ThreadUnsupported(BadRequest, code="thread_unsupported_request"):
    """The request wants its conversation kept here. Anthropic's client then sends all of it again."""


class GrammarTooComplex(BadRequest, code="grammar_too_complex"):
    """The format of the text cannot be followed within the limits of a step. Known only when the text has come so far."""


class Unauthorized(ForewordError, status=401, code="invalid_api_key", fault="client"):
    """The API key is missing or unknown."""


class UnknownModel(NotFound, code="model_not_found"):
    """The request names a model that this server does not serve."""


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


class ModelNotFound(ForewordError, code="model_unavailable", fault="operator"):
    """There is no model with this path or name, or it cannot be read."""


def connection_reason(error: OSError) -> str:
    """Why a connection could not be made, as the end of a sentence: "connection refused". asyncio repeats the address
    as Python writes it."""
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else reason_of(error)
