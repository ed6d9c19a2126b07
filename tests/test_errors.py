"""The exceptions: who is to blame, and what each says."""

from __future__ import annotations

import pytest

import kbtp
from kbtp import errors
from kbtp.types import Status, TerminateCause, TerminateInfo


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.SUCCESS])
def test_every_status_has_its_exception(status: Status) -> None:
    error = errors.refused(status, "why")
    assert error.status is status
    assert str(error) == f"{status.name}: why"
    assert type(error).__name__.upper() == status.name.replace("_", "")
    assert isinstance(error, errors.OperationRefused)


def test_success_is_no_exception() -> None:
    with pytest.raises(KeyError):
        errors.refused(Status.SUCCESS, "why")


def test_blame_can_be_told_apart_with_the_classes_python_has() -> None:
    """Callers that know nothing of kbtp catch these."""
    assert issubclass(errors.ApiMisuse, ValueError)
    assert issubclass(errors.ConnectionLost, ConnectionError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
    assert issubclass(errors.DeadlineExceeded, errors.ConnectionLost)
    for name in kbtp.__all__:
        kind = getattr(kbtp, name)
        if isinstance(kind, type) and issubclass(kind, Exception):
            assert issubclass(kind, errors.KbtpError)


def test_a_misbehaving_peer_is_told_with_its_terminate() -> None:
    error = errors.PeerMisbehaved(TerminateCause.DDP_NO_BUFFER, "a Send too many")
    assert error.cause is TerminateCause.DDP_NO_BUFFER
    assert str(error) == "a Send too many [DDP_NO_BUFFER (1/2/02)]"


def test_a_format_error_says_which_field_and_why() -> None:
    error = errors.WireFormatError("version", "2, spoken here is 1", Status.UNSUPPORTED)
    assert (error.field, error.reason, error.status) == ("version", "2, spoken here is 1", Status.UNSUPPORTED)
    assert str(error) == "version: 2, spoken here is 1"
    assert errors.WireFormatError("message", "short").status is Status.MALFORMED


@pytest.mark.parametrize(
    ("info", "text"),
    [
        (TerminateInfo(1, 2, 2), "DDP_NO_BUFFER (1/2/02)"),
        (TerminateInfo(0, 2, 0xFF), "RDMAP_UNSPECIFIED (0/2/ff)"),
        (TerminateInfo(3, 1, 0x42), "unknown code (3/1/42)"),
    ],
)
def test_a_lost_connection_keeps_the_peers_terminate(info: TerminateInfo, text: str) -> None:
    error = errors.ConnectionLost("gone", info)
    assert error.terminate is info
    assert str(info) == text
    assert errors.ConnectionLost("gone").terminate is None
