"""The Terminate header: checklist R36 to R39 (RFC 5040 4.8)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.errors import PeerMisbehaved
from kbtp.iwarp.terminate import Offender, pack_terminate, parse_terminate
from kbtp.types import TerminateCause, TerminateInfo

UNTAGGED, TAGGED, READ = bytes([0x41]) + bytes(17), bytes([0xC1]) + bytes(13), bytes(range(28))


@pytest.mark.parametrize("cause", TerminateCause)
def test_r36_r38_r39_which_headers_a_cause_quotes(cause: TerminateCause) -> None:
    payload = pack_terminate(cause, Offender(46, UNTAGGED, READ))
    assert payload[:2] == bytes([cause.layer << 4 | cause.etype, cause.code])
    if cause.layer == 2 or cause is TerminateCause.LOCAL_CATASTROPHIC:
        assert payload[2:] == bytes(2)
    elif (cause.layer, cause.etype) == (0, 1):
        assert payload[2:] == b"\xe0\x00" + b"\x00\x2e" + UNTAGGED + READ
    else:
        assert payload[2:] == b"\xc0\x00" + b"\x00\x2e" + UNTAGGED


def test_r36_r_is_clear_unless_a_read_request_is_to_blame() -> None:
    assert pack_terminate(TerminateCause.RDMAP_INVALID_STAG, Offender(70, UNTAGGED))[2:4] == b"\xc0\x00"
    assert len(pack_terminate(TerminateCause.RDMAP_INVALID_STAG, None)) == 4


@pytest.mark.parametrize("header", [UNTAGGED, TAGGED])
def test_r38_the_quoted_header_is_cut_by_its_t_bit(header: bytes) -> None:
    assert Offender.of(header + b"payload") == Offender(len(header) + 7, header)
    assert Offender.of(header[:-1]) is None
    assert Offender.of(b"") is None


@pytest.mark.parametrize("cause", TerminateCause)
@pytest.mark.parametrize("offender", [None, Offender(19, TAGGED), Offender(46, UNTAGGED, READ)])
def test_what_is_packed_is_parsed(cause: TerminateCause, offender: Offender | None) -> None:
    info = parse_terminate(pack_terminate(cause, offender))
    assert (info.layer, info.etype, info.code) == cause.value
    if info.ddp_header:
        assert offender is not None
        assert (info.ddp_segment_length, info.ddp_header) == (offender.segment_bytes, offender.ddp_header)
        assert info.rdmap_header in (b"", offender.read_request)


def test_r37_reserved_bits_and_trailing_octets_are_ignored() -> None:
    assert parse_terminate(bytes.fromhex("12031fff") + bytes(48)) == TerminateInfo(1, 2, 3)


def test_the_length_can_come_without_a_header() -> None:
    assert parse_terminate(bytes.fromhex("1203800000ff")) == TerminateInfo(1, 2, 3, 255)


def test_a_length_that_m_does_not_vouch_for_is_skipped() -> None:
    assert parse_terminate(bytes.fromhex("120340000000") + UNTAGGED) == TerminateInfo(1, 2, 3, None, UNTAGGED)


def test_headers_that_are_not_all_there_are_left_out() -> None:
    whole = pack_terminate(TerminateCause.RDMAP_INVALID_STAG, Offender(46, UNTAGGED, READ))
    assert parse_terminate(whole[:-1]) == TerminateInfo(0, 1, 0, 46, UNTAGGED)
    assert parse_terminate(whole[: 6 + 17]) == TerminateInfo(0, 1, 0, 46)
    assert parse_terminate(whole[:5]) == TerminateInfo(0, 1, 0)


@given(st.binary(max_size=80))
def test_arbitrary_octets_parse_or_are_too_short(payload: bytes) -> None:
    if len(payload) >= 4:
        parse_terminate(payload)
    else:
        with pytest.raises(PeerMisbehaved) as error:
            parse_terminate(payload)
        assert error.value.cause is TerminateCause.RDMAP_UNSPECIFIED


def test_an_unknown_code_is_delivered_as_it_is(end: Any, wire: Any) -> None:
    (event,) = end.hears(wire.terminate(0xF, 0xE, 0xDD))
    assert (event.info.layer, event.info.etype, event.info.code) == (0xF, 0xE, 0xDD)
