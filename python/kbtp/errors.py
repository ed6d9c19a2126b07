"""Every exception kbtp raises, grouped by who is to blame.

| class | blame |
|---|---|
| `PeerMisbehaved` | the peer broke the protocol; carries the Terminate that says so |
| `WireFormatError` | octets that are not the message they claim to be; carries field, reason and status |
| `PeerIncompatible` | the peer speaks something this side cannot or must not talk to |
| `ApiMisuse` | the caller used the API wrongly |
| `OperationRefused` | the target answered with a status; one subclass a status |
| `ConnectionLost` | the stream ended; `DeadlineExceeded` when this side ended it because time ran out |
"""

from __future__ import annotations

from kbtp.types import Status, TerminateCause, TerminateInfo


class KbtpError(Exception):
    """Base of everything kbtp raises on purpose."""


class PeerMisbehaved(KbtpError):
    """The peer broke the protocol; its stream ends with `cause`."""

    def __init__(self, cause: TerminateCause, message: str) -> None:
        super().__init__(f"{message} [{cause}]")
        self.cause = cause


class WireFormatError(KbtpError):
    """Octets that do not parse: which `field`, why, and the `status` a target answers with."""

    def __init__(self, field: str, reason: str, status: Status = Status.MALFORMED) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason
        self.status = status


class PeerIncompatible(KbtpError):
    """The peer is not one this side can or may talk to (magic, version, features)."""


class ApiMisuse(KbtpError, ValueError):
    """The caller asked for something that can never work; says what would."""


class ConnectionLost(KbtpError, ConnectionError):
    """The stream ended. `terminate` is what the peer's Terminate said, if it sent one."""

    def __init__(self, message: str, terminate: TerminateInfo | None = None) -> None:
        super().__init__(message)
        self.terminate = terminate


class DeadlineExceeded(ConnectionLost, TimeoutError):
    """Time ran out; whatever was outstanding has been ended so that no buffer is touched later."""


class OperationRefused(KbtpError):
    """The target answered with a status other than SUCCESS."""

    status: Status = Status.TARGET_ERROR

    def __init__(self, message: str) -> None:
        super().__init__(f"{self.status.name}: {message}")


class NotBound(OperationRefused):
    status = Status.NOT_BOUND


class NotSealed(OperationRefused):
    status = Status.NOT_SEALED


class Sealed(OperationRefused):
    status = Status.SEALED


class AlreadyBound(OperationRefused):
    status = Status.ALREADY_BOUND


class GenerationMismatch(OperationRefused):
    status = Status.GENERATION_MISMATCH


class HandleOutOfRange(OperationRefused):
    status = Status.HANDLE_OUT_OF_RANGE


class LengthError(OperationRefused):
    status = Status.LENGTH_ERROR


class NoSpace(OperationRefused):
    status = Status.NO_SPACE


class TicketAbandoned(OperationRefused):
    status = Status.TICKET_ABANDONED


class TicketMismatch(OperationRefused):
    status = Status.TICKET_MISMATCH


class Malformed(OperationRefused):
    status = Status.MALFORMED


class Unsupported(OperationRefused):
    status = Status.UNSUPPORTED


class AccessDenied(OperationRefused):
    status = Status.ACCESS_DENIED


class NoSession(OperationRefused):
    status = Status.NO_SESSION


class TargetError(OperationRefused):
    status = Status.TARGET_ERROR


_BY_STATUS: dict[Status, type[OperationRefused]] = {
    refused.status: refused
    for refused in (
        NotBound,
        NotSealed,
        Sealed,
        AlreadyBound,
        GenerationMismatch,
        HandleOutOfRange,
        LengthError,
        NoSpace,
        TicketAbandoned,
        TicketMismatch,
        Malformed,
        Unsupported,
        AccessDenied,
        NoSession,
        TargetError,
    )
}


def refused(status: Status, message: str) -> OperationRefused:
    """The exception for `status` (never SUCCESS)."""
    return _BY_STATUS[status](message)
