"""Capture files of every kind read here, and TCP put back in order whatever the network did to it."""

from __future__ import annotations

import io
import itertools
import struct

import dpkt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.testing.capture import TcpRecording
from kbtp.testing.packets import (
    CAPTURE_MAGICS,
    CaptureError,
    Endpoint,
    HalfConnection,
    TcpSegment,
    parse_tcp,
    read_packets,
)

CLIENT, SERVER = Endpoint("10.0.0.1", 40000), Endpoint("10.0.0.2", 5287)
SYN, FIN, RST, ACK = 0x02, 0x01, 0x04, 0x10


def tcp(payload: bytes, sequence: int = 100, flags: int = ACK) -> bytes:
    return struct.pack(">HHIIBBHHH", CLIENT.port, SERVER.port, sequence, 0, 5 << 4, flags, 65535, 0, 0) + payload


def ipv4(segment: bytes, *, fragment: int = 0, total_bytes: int | None = None, protocol: int = 6) -> bytes:
    total_bytes = 20 + len(segment) if total_bytes is None else total_bytes
    header = struct.pack(">BBHHHBBH", 0x45, 0, total_bytes, 1, fragment, 64, protocol, 0)
    return header + bytes([10, 0, 0, 1, 10, 0, 0, 2]) + segment


def ipv6(segment: bytes, *, extensions: bytes = b"", first: int = 6) -> bytes:
    header = struct.pack(">IHBB", 6 << 28, len(extensions) + len(segment), first, 64)
    return header + bytes(15) + b"\x01" + bytes(15) + b"\x02" + extensions + segment


def ethernet(packet: bytes, ethertype: int = 0x0800, tags: bytes = b"") -> bytes:
    return bytes(12) + tags + struct.pack(">H", ethertype) + packet


SEGMENT = tcp(b"hello")
LINKS = {
    "ethernet": (1, ethernet(ipv4(SEGMENT))),
    "ethernet, IPv6": (1, ethernet(ipv6(SEGMENT), 0x86DD)),
    "ethernet, a VLAN": (1, ethernet(ipv4(SEGMENT), 0x0800, b"\x81\x00\x00\x05")),
    "ethernet, padded to 60": (1, ethernet(ipv4(SEGMENT)) + bytes(20)),
    "Linux cooked": (113, bytes(14) + b"\x08\x00" + ipv4(SEGMENT)),
    "Linux cooked 2": (276, b"\x86\xdd" + bytes(18) + ipv6(SEGMENT)),
    "BSD loopback": (0, bytes(4) + ipv4(SEGMENT)),
    "OpenBSD loopback": (108, bytes(4) + ipv6(SEGMENT)),
    "raw IP": (101, ipv4(SEGMENT)),
    "raw IPv6": (229, ipv6(SEGMENT)),
    "IPv6 hop-by-hop": (101, ipv6(SEGMENT, extensions=b"\x06\x00" + bytes(6), first=0)),
    "segmented by the interface": (101, ipv4(SEGMENT, total_bytes=0)),
}


@pytest.mark.parametrize("name", LINKS)
def test_link_layers(name: str) -> None:
    link_type, packet = LINKS[name]
    segment = parse_tcp(1.5, link_type, packet)
    assert segment is not None
    assert (segment.time_s, segment.source.port, segment.sink.port) == (1.5, 40000, 5287)
    assert segment.payload == b"hello"
    assert segment.sequence == 100


NOT_TCP = {
    "ARP": (1, ethernet(bytes(28), 0x0806)),
    "UDP": (101, ipv4(bytes(8), protocol=17)),
    "UDP over IPv6": (101, ipv6(bytes(8), first=17)),
    "first fragment": (101, ipv4(SEGMENT, fragment=0x2000)),
    "later fragment": (101, ipv4(SEGMENT, fragment=0x0010)),
    "IPv6 fragment": (101, ipv6(SEGMENT, extensions=b"\x06" + bytes(7), first=44)),
    "neither IPv4 nor IPv6": (101, b"\x25" + bytes(60)),
}


@pytest.mark.parametrize("name", NOT_TCP)
def test_other_packets_are_left_out(name: str) -> None:
    assert parse_tcp(0.0, *NOT_TCP[name]) is None


@pytest.mark.parametrize("name", LINKS)
def test_a_packet_cut_anywhere_is_left_out_or_short(name: str) -> None:
    link_type, packet = LINKS[name]
    for size in range(len(packet)):
        segment = parse_tcp(0.0, link_type, packet[:size])
        assert segment is None or b"hello".startswith(segment.payload)


def test_an_unknown_link_type_is_named() -> None:
    with pytest.raises(CaptureError, match="link type 195 is not known"):
        parse_tcp(0.0, 195, bytes(60))


@given(link_type=st.sampled_from([0, 1, 101, 108, 113, 228, 276]), packet=st.binary(max_size=120))
def test_no_packet_raises(link_type: int, packet: bytes) -> None:
    parse_tcp(0.0, link_type, packet)


# --- files ---


def recorded(file_kind: str) -> bytes:
    file = io.BytesIO()
    if file_kind == "pcapng":
        dpkt.pcapng.Writer(file).writepkts([(1.0, ethernet(ipv4(SEGMENT))), (2.0, ethernet(ipv4(SEGMENT)))])
    else:
        writer = dpkt.pcap.Writer(file, nano=file_kind == "pcap, nanoseconds")
        writer.writepkts([(1.0, ethernet(ipv4(SEGMENT))), (2.0, ethernet(ipv4(SEGMENT)))])
    return file.getvalue()


FILE_KINDS = ("pcap", "pcap, nanoseconds", "pcapng")


@pytest.mark.parametrize("file_kind", FILE_KINDS)
def test_files(file_kind: str) -> None:
    octets = recorded(file_kind)
    assert octets[:4] in CAPTURE_MAGICS
    packets = list(read_packets(octets))
    assert [(time_s, link_type) for time_s, link_type, _ in packets] == [(1.0, 1), (2.0, 1)]
    assert all(packet == ethernet(ipv4(SEGMENT)) for _, _, packet in packets)


@pytest.mark.parametrize("file_kind", FILE_KINDS)
def test_a_file_cut_anywhere_says_so_and_gives_what_is_whole(file_kind: str) -> None:
    octets = recorded(file_kind)
    whole = set()
    for size in range(4, len(octets)):
        packets = []
        try:
            for packet in read_packets(octets[:size]):
                packets.append(packet)
            whole.add(size)
        except CaptureError as error:
            assert str(error)
        assert all(packet == ethernet(ipv4(SEGMENT)) for _, _, packet in packets)
    # Only a cut between two packets cannot be noticed (and, in pcapng, one between two blocks).
    assert len(whole) <= 3


@given(st.sampled_from(sorted(CAPTURE_MAGICS)), st.binary(max_size=200))
def test_no_file_raises_anything_else(magic: bytes, rest: bytes) -> None:
    try:
        for packet in read_packets(magic + rest):
            assert packet
    except CaptureError as error:
        assert str(error)


@given(st.data())
def test_no_damage_to_a_file_raises_anything_else(data: st.DataObject) -> None:
    octets = bytearray(recorded(data.draw(st.sampled_from(FILE_KINDS))))
    for _ in range(data.draw(st.integers(1, 4))):
        octets[data.draw(st.integers(4, len(octets) - 1))] = data.draw(st.integers(0, 255))
    try:
        for time_s, _, packet in read_packets(bytes(octets)):
            parse_tcp(time_s, 1, packet)
    except CaptureError as error:
        assert str(error)


# --- reassembly ---


def segment(sequence: int, payload: bytes, flags: int = ACK) -> TcpSegment:
    return TcpSegment(0.0, CLIENT, SERVER, sequence & 0xFFFF_FFFF, flags, payload)


@given(
    octets=st.binary(max_size=400),
    first=st.sampled_from([0, 1000, 2**31 - 50, 2**32 - 100, 2**32 - 1]),
    data=st.data(),
)
def test_any_order_with_any_repetition_gives_the_octets_once(octets: bytes, first: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(octets)), max_size=8)) | {0, len(octets)})
    pieces = list(itertools.pairwise(cuts))
    again = data.draw(st.lists(st.tuples(st.integers(0, len(octets)), st.integers(0, 60)), max_size=5))
    pieces += [(start, min(start + size, len(octets))) for start, size in again]
    half = HalfConnection()
    half.receive(segment(first, b"", SYN))
    got = b"".join(
        half.receive(segment(first + 1 + start, octets[start:end])) for start, end in data.draw(st.permutations(pieces))
    )
    assert got == octets
    assert half.missing_bytes == 0
    assert half.waiting_bytes == 0


def test_a_capture_that_begins_late_begins_with_its_first_segment() -> None:
    half = HalfConnection()
    assert half.receive(segment(77, b"abc")) == b"abc"
    assert half.receive(segment(80, b"def")) == b"def"


def test_a_gap_that_never_closes_is_measured() -> None:
    half = HalfConnection()
    half.receive(segment(0, b"abc"))
    assert half.receive(segment(10, b"xyz")) == b""
    assert half.missing_bytes == 7


def test_what_waits_behind_a_gap_is_bounded() -> None:
    half = HalfConnection()
    half.receive(segment(0, b"", SYN))
    chunk = bytes(1 << 20)
    for index in range(1, 40):
        half.receive(segment(index << 20, chunk))
    assert half.lost
    assert half.waiting_bytes <= 17 << 20
    assert half.receive(segment(1, chunk)) == b""
    assert half.missing_bytes == (1 << 20) - 1


def test_a_recording_reads_back() -> None:
    recording = TcpRecording()
    connection = recording.connection(1.0, CLIENT, SERVER, first_sequence=2**32 - 20_000)
    question, answer = bytes(range(256)) * 200, b"no"
    connection.octets(1.25, question, from_client=True)
    connection.octets(1.5, answer, from_client=False)
    connection.finish(2.0, from_client=False)
    connection.reset(2.0, from_client=True)
    file = io.BytesIO()
    recording.write(file)

    halves = {CLIENT: HalfConnection(), SERVER: HalfConnection()}
    got = {CLIENT: b"", SERVER: b""}
    segments = [parse_tcp(*packet) for packet in read_packets(file.getvalue())]
    for each in segments:
        assert each is not None
        got[each.source] += halves[each.source].receive(each)
    assert got == {CLIENT: question, SERVER: answer}
    opening, *_, fin, rst = segments
    assert opening is not None and opening.opens
    assert fin is not None and fin.fin and fin.source == SERVER
    assert rst is not None and rst.rst and rst.source == CLIENT
    assert str(CLIENT) == "10.0.0.1:40000"
    assert str(Endpoint("::1", 5)) == "[::1]:5"
