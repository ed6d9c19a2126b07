"""MPA start-up: checklist M (RFC 5044 7.1) and E (RFC 6581). The frames are written out by hand here."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from kbtp.errors import ApiMisuse
from kbtp.iwarp.mpa import (
    ALL_RTR_KINDS,
    ActiveStartup,
    MpaOptions,
    MpaRejected,
    MpaStartupError,
    Negotiated,
    PassiveStartup,
    PeerRequest,
    RtrKind,
)
from kbtp.types import TerminateCause

REQUEST, REPLY = b"MPA ID Req Frame", b"MPA ID Rep Frame"
M, C, R, S = 0x80, 0x40, 0x20, 0x10
A, B, C_WRITE, D_READ = 0x80000000, 0x40000000, 0x00008000, 0x00004000
REV1, REV2 = MpaOptions(revision=1), MpaOptions(revision=2)
P2P = MpaOptions(peer_to_peer=ALL_RTR_KINDS)


def frame(key: bytes, flags: int, revision: int, private_data: bytes = b"") -> bytes:
    return key + struct.pack(">BBH", flags, revision, len(private_data)) + private_data


def word(ird: int, ord_: int, bits: int = 0) -> bytes:
    return struct.pack(">I", bits | ird << 16 | ord_)


def parts(octets: bytes) -> tuple[bytes, int, int, bytes]:
    key, flags, revision, length = struct.unpack_from(">16sBBH", octets)
    assert len(octets) == 20 + length
    return key, flags, revision, octets[20:]


def word_of(octets: bytes) -> tuple[int, int, int]:
    """(control bits, IRD, ORD)"""
    (value,) = struct.unpack_from(">I", octets, 20)
    return value & 0xC000C000, value >> 16 & 0x3FFF, value & 0x3FFF


def accepted(
    request: bytes, options: MpaOptions = REV2, ird: int = 8, ord_: int = 8, private_data: bytes = b""
) -> tuple[bytes, Negotiated]:
    passive = PassiveStartup(options)
    assert passive.receive_data(request) is not None
    return passive.accept(private_data, ird, ord_)


def active_result(reply: bytes, options: MpaOptions = REV2, ird: int = 8, ord_: int = 8) -> Negotiated:
    result = ActiveStartup(options, b"", ird, ord_).receive_data(reply)
    assert isinstance(result, Negotiated)
    return result


# --- the frames ---


def test_m1_m8_m9_m12_request_octets() -> None:
    request = ActiveStartup(REV1, b"data", 0, 0).request
    assert parts(request) == (REQUEST, C, 1, b"data")


def test_m10_revision_1_when_no_enhanced_feature_is_wanted_e24() -> None:
    assert parts(ActiveStartup(REV1, b"", 5, 5).request) == (REQUEST, C, 1, b"")


def test_m3_reply_octets() -> None:
    reply, _ = accepted(frame(REQUEST, C, 1), private_data=b"yes")
    assert parts(reply) == (REPLY, C, 1, b"yes")


@pytest.mark.parametrize("at", range(16))
def test_m4_wrong_request_key_closes_as_soon_as_it_is_seen(at: int) -> None:
    request = bytearray(frame(REQUEST, C, 1))
    request[at] ^= 0x80
    with pytest.raises(MpaStartupError, match="MPA Request"):
        PassiveStartup(REV2).receive_data(request[: at + 1])


def test_m5_reply_where_a_request_was_due_closes() -> None:
    with pytest.raises(MpaStartupError, match="Reply came where a Request was due"):
        PassiveStartup(REV2).receive_data(frame(REPLY, C, 1))


def test_m6_request_where_a_reply_was_due_closes() -> None:
    with pytest.raises(MpaStartupError, match="Request came where a Reply was due"):
        ActiveStartup(REV1, b"", 0, 0).receive_data(frame(REQUEST, C, 1))


def test_m7_wrong_reply_key_closes() -> None:
    with pytest.raises(MpaStartupError, match="MPA Reply"):
        ActiveStartup(REV1, b"", 0, 0).receive_data(b"HTTP/1.1 400 Bad Request")


def test_m8_r_in_a_request_is_ignored() -> None:
    assert PassiveStartup(REV2).receive_data(frame(REQUEST, C | R, 1)) is not None


@pytest.mark.parametrize("reserved", [0x10, 0x08, 0x0F, 0x1F])
def test_m9_reserved_bits_of_revision_1_are_ignored(reserved: int) -> None:
    request = PassiveStartup(REV2).receive_data(frame(REQUEST, C | reserved, 1, b"private"))
    assert request is not None and request.private_data == b"private" and not request.enhanced
    result = active_result(frame(REPLY, C | reserved, 1, b"private"), REV1)
    assert result.private_data == b"private"


@pytest.mark.parametrize("revision", [0, 3, 9, 255])
def test_m11_unknown_revision_closes(revision: int) -> None:
    with pytest.raises(MpaStartupError, match=f"revision {revision} came"):
        PassiveStartup(REV2).receive_data(frame(REQUEST, C, revision))
    with pytest.raises(MpaStartupError, match=f"revision {revision} came"):
        ActiveStartup(REV2, b"", 0, 0).receive_data(frame(REPLY, C | S, revision, word(0, 0)))


@pytest.mark.parametrize("length", [0, 1, 512])
def test_m13_private_data_of_any_legal_length(length: int) -> None:
    data = bytes(i & 0xFF for i in range(length))
    request = PassiveStartup(REV2).receive_data(frame(REQUEST, C, 1, data))
    assert request is not None and request.private_data == data
    assert active_result(frame(REPLY, C, 1, data), REV1).private_data == data
    assert parts(ActiveStartup(REV1, data, 0, 0).request)[3] == data


def test_m14_pd_length_over_512_closes_before_the_data_comes() -> None:
    with pytest.raises(MpaStartupError, match="513"):
        PassiveStartup(REV2).receive_data(REQUEST + struct.pack(">BBH", C, 1, 513))


@pytest.mark.parametrize("together", [True, False])
def test_m15_octets_after_the_request_before_the_reply_close(together: bool) -> None:
    passive = PassiveStartup(REV2)
    request = frame(REQUEST, C, 1, b"hi")
    if not together:
        assert passive.receive_data(request) is not None
        request = b""
    with pytest.raises(MpaStartupError, match="1 octets came after the Request"):
        passive.receive_data(request + b"x")


def test_m16_m2_any_segmentation() -> None:
    passive, request = PassiveStartup(P2P), ActiveStartup(P2P, b"ping", 3, 5).request
    *first, last = [passive.receive_data(request[i : i + 1]) for i in range(len(request))]
    assert first == [None] * len(first)
    assert isinstance(last, PeerRequest) and last.private_data == b"ping"

    reply, _ = passive.accept(b"pong", 9, 9)
    active = ActiveStartup(P2P, b"ping", 3, 5)
    *before, result = [active.receive_data(reply[i : i + 1]) for i in range(len(reply))]
    assert before == [None] * len(before)
    assert isinstance(result, Negotiated) and result.private_data == b"pong"


def test_m17_octets_after_the_reply_are_not_lost() -> None:
    active = ActiveStartup(REV1, b"", 0, 0)
    assert active.receive_data(frame(REPLY, C, 1, b"pd") + b"first FPDU") is not None
    assert active.surplus == b"first FPDU"


def test_m18_reject_carries_private_data() -> None:
    passive = PassiveStartup(REV2)
    passive.receive_data(frame(REQUEST, C, 1))
    assert parts(passive.reject(b"no")) == (REPLY, C | R, 1, b"no")


def test_m19_rejected_reply_leaves_mpa() -> None:
    result = ActiveStartup(REV1, b"", 4, 4).receive_data(frame(REPLY, C | R, 1, b"no"))
    assert result == MpaRejected(b"no", peer_ird=0, peer_ord=0)


def test_m23_crc_is_offered_by_default() -> None:
    assert parts(ActiveStartup(MpaOptions(), b"", 0, 0).request)[1] & C
    assert parts(accepted(frame(REQUEST, 0, 1), MpaOptions())[0])[1] & C


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("theirs", [True, False])
def test_m24_crc_is_used_if_either_side_wants_it(ours: bool, theirs: bool) -> None:
    options, flags = MpaOptions(crc=ours, revision=1), C if theirs else 0
    assert active_result(frame(REPLY, flags, 1), options).crc == (ours or theirs)
    assert accepted(frame(REQUEST, flags, 1), options)[1].crc == (ours or theirs)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("theirs", [True, False])
def test_f9_f18_markers_go_to_the_side_that_asked(ours: bool, theirs: bool) -> None:
    options, flags = MpaOptions(want_markers=ours, revision=1), C | (M if theirs else 0)
    for settled in (active_result(frame(REPLY, flags, 1), options), accepted(frame(REQUEST, flags, 1), options)[1]):
        assert (settled.tx_markers, settled.rx_markers) == (theirs, ours)
    assert bool(parts(ActiveStartup(options, b"", 0, 0).request)[1] & M) == ours
    assert bool(parts(accepted(frame(REQUEST, flags, 1), options)[0])[1] & M) == ours


# --- RFC 6581 ---


def test_e1_e2_enhanced_request_octets() -> None:
    request = ActiveStartup(P2P, b"hi", 16, 17).request
    assert parts(request) == (REQUEST, C | S, 2, word(16, 17, A | B | C_WRITE | D_READ) + b"hi")


@pytest.mark.parametrize("length", [0, 1, 3])
def test_e3_no_room_for_the_word_closes(length: int) -> None:
    with pytest.raises(MpaStartupError, match="IRD and ORD"):
        PassiveStartup(REV2).receive_data(frame(REQUEST, C | S, 2, bytes(length)))
    with pytest.raises(MpaStartupError, match="IRD and ORD"):
        ActiveStartup(REV2, b"", 0, 0).receive_data(frame(REPLY, C | S, 2, bytes(length)))


def test_e4_ulp_private_data_is_508_octets_at_most() -> None:
    assert len(ActiveStartup(REV2, bytes(508), 0, 0).request) == 532
    with pytest.raises(ApiMisuse, match="508"):
        ActiveStartup(REV2, bytes(509), 0, 0)
    with pytest.raises(ApiMisuse, match="512"):
        ActiveStartup(REV1, bytes(513), 0, 0)
    passive = PassiveStartup(REV2)
    passive.receive_data(frame(REQUEST, C | S, 2, word(0, 0)))
    with pytest.raises(ApiMisuse, match="508"):
        passive.accept(bytes(509), 0, 0)
    with pytest.raises(ApiMisuse, match="508"):
        passive.reject(bytes(509))


def test_e5_enhanced_request_gets_an_enhanced_reply() -> None:
    reply, _ = accepted(frame(REQUEST, C | S, 2, word(3, 4)), ird=5, ord_=2, private_data=b"ok")
    assert parts(reply) == (REPLY, C | S, 2, word(5, 2) + b"ok")
    rejecting = PassiveStartup(REV2)
    rejecting.receive_data(frame(REQUEST, C | S, 2, word(3, 4)))
    assert parts(rejecting.reject(b"no")) == (REPLY, C | S | R, 2, word(0, 0) + b"no")


def test_e5_revision_2_without_s_gets_a_plain_reply() -> None:
    reply, settled = accepted(frame(REQUEST, C, 2, b"data"))
    assert parts(reply) == (REPLY, C, 2, b"")
    assert (settled.ird, settled.ord_, settled.private_data) == (0, 0, b"data")


def test_e6_revision_1_request_is_served_with_depth_0() -> None:
    reply, settled = accepted(frame(REQUEST, C, 1, b"data"))
    assert parts(reply) == (REPLY, C, 1, b"")
    assert (settled.revision, settled.ird, settled.ord_) == (1, 0, 0)


def test_e6_revision_1_depth_can_be_configured() -> None:
    options = MpaOptions(revision=1, revision1_depth=3)
    _, passive = accepted(frame(REQUEST, C, 1), options, ird=8, ord_=2)
    assert (passive.ird, passive.ord_, passive.peer_ird, passive.peer_ord) == (3, 2, 3, 3)
    active = active_result(frame(REPLY, C, 1), options, ird=8, ord_=2)
    assert (active.ird, active.ord_, active.peer_ird, active.peer_ord) == (3, 2, 3, 3)
    assert active.failure is None


def test_e7_unenhanced_responder_closes_on_revision_2() -> None:
    with pytest.raises(MpaStartupError, match="revision 2 came"):
        PassiveStartup(REV1).receive_data(frame(REQUEST, C | S, 2, word(0, 0)))


@pytest.mark.parametrize("reply", [frame(REPLY, C, 2, bytes(8)), frame(REPLY, C | S, 1, bytes(8)), frame(REPLY, C, 1)])
def test_e8_plain_reply_to_an_enhanced_request_closes(reply: bytes) -> None:
    with pytest.raises(MpaStartupError, match="without IRD and ORD"):
        ActiveStartup(REV2, b"", 0, 0).receive_data(reply)


@pytest.mark.parametrize(("asked_ird", "our_ord", "expected"), [(4, 8, 4), (8, 4, 4), (0, 8, 0), (0x3FFE, 5, 5)])
def test_e9_reply_ord_is_at_most_request_ird(asked_ird: int, our_ord: int, expected: int) -> None:
    reply, settled = accepted(frame(REQUEST, C | S, 2, word(asked_ird, 0)), ord_=our_ord)
    assert word_of(reply)[2] == settled.ord_ == expected


@pytest.mark.parametrize(("our_ord", "reply_ird", "expected"), [(8, 8, 8), (8, 3, 3), (2, 8, 2), (8, 0, 0)])
def test_e10_initiator_ord_is_at_most_reply_ird(our_ord: int, reply_ird: int, expected: int) -> None:
    result = active_result(frame(REPLY, C | S, 2, word(reply_ird, 0)), ord_=our_ord)
    assert (result.ord_, result.failure) == (expected, None)


def test_e10_reply_ird_is_what_this_side_serves() -> None:
    for asked_ord in (2, 16):
        reply, settled = accepted(frame(REQUEST, C | S, 2, word(0, asked_ord)), ird=8)
        assert word_of(reply)[1] == settled.ird == 8


def test_e11_reply_ord_over_our_ird_is_2_0_06() -> None:
    assert active_result(frame(REPLY, C | S, 2, word(8, 8)), ird=8).failure is None
    result = active_result(frame(REPLY, C | S, 2, word(8, 9)), ird=8)
    assert result.failure is TerminateCause.MPA_INSUFFICIENT_IRD
    p2p = active_result(frame(REPLY, C | S, 2, word(8, 9, A | B)), P2P, ird=8)
    assert (p2p.failure, p2p.rtr) == (TerminateCause.MPA_INSUFFICIENT_IRD, RtrKind.NONE)


def test_e12_reject_can_say_which_ord_was_needed() -> None:
    passive = PassiveStartup(REV2)
    passive.receive_data(frame(REQUEST, C | S, 2, word(1, 1)))
    reply = passive.reject(b"", ord_=7)
    result = ActiveStartup(REV2, b"", 1, 1).receive_data(reply)
    assert result == MpaRejected(b"", peer_ird=0, peer_ord=7)


def test_e13_all_ones_are_answered_crosswise() -> None:
    reply, settled = accepted(frame(REQUEST, C | S, 2, word(5, 0x3FFF)), ird=8, ord_=3)
    assert word_of(reply) == (0, 0x3FFF, 3)
    assert (settled.ird, settled.ord_) == (8, 3)
    reply, settled = accepted(frame(REQUEST, C | S, 2, word(0x3FFF, 5)), ird=8, ord_=3)
    assert word_of(reply) == (0, 8, 0x3FFF)
    assert (settled.ird, settled.ord_) == (8, 3)


def test_e13_initiator_leaves_its_depths_alone_on_all_ones() -> None:
    result = active_result(frame(REPLY, C | S, 2, word(0x3FFF, 0x3FFF)), ird=6, ord_=7)
    assert (result.ird, result.ord_, result.failure) == (6, 7, None)


@pytest.mark.parametrize("offered", [0, B, C_WRITE, D_READ, B | C_WRITE, B | C_WRITE | D_READ])
def test_e14_e16_reply_repeats_a_and_offers_a_kind(offered: int) -> None:
    reply, settled = accepted(frame(REQUEST, C | S, 2, word(4, 4, A | offered)))
    bits, _, _ = word_of(reply)
    assert bits & A and bits & (B | C_WRITE | D_READ)
    in_common = {
        RtrKind.SEND: bool(offered & B),
        RtrKind.WRITE: bool(offered & C_WRITE),
        RtrKind.READ: bool(offered & D_READ),
    }
    assert {kind: kind in settled.rtr for kind in in_common} == in_common


def test_e15_client_server_has_no_kinds_and_ignores_the_peers() -> None:
    assert word_of(ActiveStartup(REV2, b"", 1, 1).request)[0] == 0
    reply, settled = accepted(frame(REQUEST, C | S, 2, word(4, 4, B | C_WRITE | D_READ)))
    assert word_of(reply)[0] == 0 and settled.rtr is RtrKind.NONE
    result = active_result(frame(REPLY, C | S, 2, word(4, 4, B | C_WRITE | D_READ)))
    assert (result.rtr, result.failure) == (RtrKind.NONE, None)


@pytest.mark.parametrize(
    ("ours", "theirs", "chosen"),
    [
        (ALL_RTR_KINDS, B | C_WRITE | D_READ, RtrKind.WRITE),
        (ALL_RTR_KINDS, B | D_READ, RtrKind.READ),
        (ALL_RTR_KINDS, B, RtrKind.SEND),
        (RtrKind.SEND, B | C_WRITE | D_READ, RtrKind.SEND),
        (RtrKind.READ | RtrKind.SEND, C_WRITE | B, RtrKind.SEND),
    ],
)
def test_e17_initiator_chooses_a_kind_that_both_set(ours: RtrKind, theirs: int, chosen: RtrKind) -> None:
    options = MpaOptions(peer_to_peer=ours)
    result = active_result(frame(REPLY, C | S, 2, word(4, 4, A | theirs)), options)
    assert (result.rtr, result.failure) == (chosen, None)


@pytest.mark.parametrize("bits", [0, A | C_WRITE, A])
def test_e18_no_common_kind_is_2_0_07(bits: int) -> None:
    options = MpaOptions(peer_to_peer=RtrKind.SEND)
    result = active_result(frame(REPLY, C | S, 2, word(4, 4, bits)), options)
    assert (result.rtr, result.failure) == (RtrKind.NONE, TerminateCause.MPA_NO_MATCHING_RTR)


def test_e18_read_rtr_needs_a_place_at_the_responder() -> None:
    options = MpaOptions(peer_to_peer=RtrKind.READ)
    result = active_result(frame(REPLY, C | S, 2, word(0, 0, A | D_READ)), options)
    assert result.failure is TerminateCause.MPA_NO_MATCHING_RTR
    result = active_result(frame(REPLY, C | S, 2, word(1, 0, A | D_READ)), options, ord_=0)
    assert (result.rtr, result.ord_) == (RtrKind.READ, 0)


def test_e10_responder_raises_its_ird_for_a_read_rtr_or_does_not_offer_it() -> None:
    reply, settled = accepted(frame(REQUEST, C | S, 2, word(0, 0, A | D_READ)), ird=0)
    assert word_of(reply)[1] == settled.ird == 1 and settled.rtr is RtrKind.READ
    reply, settled = accepted(frame(REQUEST, C | S, 2, word(0, 0, A | D_READ | C_WRITE)), ird=0)
    assert word_of(reply) == (A | B | C_WRITE, 0, 0) and settled.rtr is RtrKind.WRITE


def test_e20_peer_depths_reach_the_ulp() -> None:
    request = PassiveStartup(REV2).receive_data(frame(REQUEST, C | S, 2, word(11, 12)))
    assert request is not None and (request.peer_ird, request.peer_ord) == (11, 12)
    result = active_result(frame(REPLY, C | S, 2, word(6, 5)))
    assert (result.peer_ird, result.peer_ord) == (6, 5)
    rejected = ActiveStartup(REV2, b"", 8, 8).receive_data(frame(REPLY, C | S | R, 2, word(6, 5) + b"pd"))
    assert rejected == MpaRejected(b"pd", 6, 5)


def test_both_halves_agree() -> None:
    active, passive = ActiveStartup(P2P, b"ping", 3, 9), PassiveStartup(MpaOptions(want_markers=True))
    assert passive.receive_data(active.request) is not None
    reply, theirs = passive.accept(b"pong", 7, 5)
    ours: Any = active.receive_data(reply)
    assert (ours.ird, ours.ord_, ours.private_data, ours.rtr) == (3, 7, b"pong", RtrKind.WRITE)
    assert (theirs.ird, theirs.ord_, theirs.private_data, theirs.rtr) == (7, 3, b"ping", ALL_RTR_KINDS)
    assert ours.tx_markers and theirs.rx_markers and not ours.rx_markers and not theirs.tx_markers


@pytest.mark.parametrize("depth", [-1, 0x3FFF])
def test_depths_out_of_range_are_misuse(depth: int) -> None:
    with pytest.raises(ApiMisuse):
        ActiveStartup(REV2, b"", depth, 0)
    with pytest.raises(ApiMisuse):
        ActiveStartup(REV2, b"", 0, depth)
    with pytest.raises(ApiMisuse):
        MpaOptions(revision1_depth=depth)
    passive = PassiveStartup(REV2)
    passive.receive_data(frame(REQUEST, C, 1))
    with pytest.raises(ApiMisuse):
        passive.accept(b"", depth, 0)
    with pytest.raises(ApiMisuse):
        passive.reject(b"", ord_=depth)


def test_options_that_cannot_be_are_misuse() -> None:
    with pytest.raises(ApiMisuse, match="1 or 2"):
        MpaOptions(revision=3)
    with pytest.raises(ApiMisuse, match="revision 2"):
        MpaOptions(revision=1, peer_to_peer=RtrKind.SEND)
    with pytest.raises(ApiMisuse, match="no complete MPA Request"):
        PassiveStartup(REV2).accept(b"", 0, 0)
