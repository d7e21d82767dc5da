"""Errors of transfers between instances."""

from __future__ import annotations

from typing import ClassVar

from foreword.errors import ForewordError


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
