"""MPA framing: checklist F (RFC 5044 3 to 6)."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest

from kbtp.errors import PeerMisbehaved
from kbtp.iwarp.crc32c import wire_crc
from kbtp.iwarp.fpdu import FpduDecoder, FpduEncoder, mulpdu_for_emss, runs
from kbtp.types import TerminateCause


def decode(octets: bytes, *, crc: bool = True, markers: bool = False, step: int | None = None) -> list[bytes]:
    decoder = FpduDecoder(crc=crc, markers=markers)
    step = step or len(octets)
    got = [bytes(u) for at in range(0, len(octets), step) for u in decoder.receive(octets[at : at + step])]
    assert not decoder.half_received
    return got


@pytest.mark.parametrize(
    ("octets", "crc"),
    [
        (bytes(32), "aa36918a"),
        (b"\xff" * 32, "43aba862"),
        (bytes(range(32)), "4e79dd46"),
        (bytes(range(31, -1, -1)), "5cdb3f11"),
        (b"123456789", "839206e3"),
    ],
)
def test_f4_crc_of_rfc_3720_b4(octets: bytes, crc: str) -> None:
    assert wire_crc(octets).hex() == crc
    assert wire_crc(memoryview(octets)).hex() == crc


def test_f5_f10_f15_figures_5_and_6_of_rfc_5044(wire: Any) -> None:
    figure_5 = FpduEncoder(crc=True, markers=True).encode((wire.send(1, bytes(24)),))
    assert (len(figure_5), figure_5[:4].hex(), figure_5[-4:].hex()) == (0x34, "00000000", "52239983")
    encoder = FpduEncoder(crc=True, markers=True)
    assert len(encoder.encode((wire.send(1, bytes(464)),))) == 492
    figure_6 = encoder.encode((wire.send(2, bytes(24)),))
    assert (figure_6[20:24].hex(), figure_6[-4:].hex()) == ("00000014", "84925898")


@pytest.mark.parametrize("length", range(1, 9))
def test_f1_f2_length_and_padding(length: int) -> None:
    fpdu = FpduEncoder(crc=True, markers=False).encode((b"\xff" * length,))
    assert struct.unpack_from(">H", fpdu) == (length,)
    pad = fpdu[2 + length : -4]
    assert len(fpdu) % 4 == 0 and pad == bytes(len(pad)) and len(pad) < 4


def test_f1_pieces_are_one_ulpdu() -> None:
    pieces = (b"head", memoryview(b"payload"), b"", bytearray(b"tail"))
    fpdu = FpduEncoder(crc=True, markers=False).encode(pieces)
    assert decode(fpdu) == [b"headpayloadtail"]


def test_f3_padding_content_is_ignored(wire: Any) -> None:
    assert decode(wire.fpdu(b"12345", pad=b"\xaa\xbb\xcc")) == [b"12345"]


@pytest.mark.parametrize("at", range(16))
def test_f6_any_bit_wrong_is_a_crc_error(wire: Any, at: int) -> None:
    fpdu = bytearray(wire.fpdu(bytes(10)))
    fpdu[at] ^= 1
    if at < 2:
        fpdu += bytes(512)
    with pytest.raises(PeerMisbehaved) as error:
        list(FpduDecoder(crc=True, markers=False).receive(fpdu))
    assert error.value.cause is TerminateCause.MPA_CRC


def test_m25_without_crc_the_field_is_zero_and_garbage_is_accepted() -> None:
    fpdu = FpduEncoder(crc=False, markers=False).encode((b"data",))
    assert fpdu[-4:] == bytes(4)
    assert decode(fpdu[:-4] + b"\xde\xad\xbe\xef", crc=False) == [b"data"]


@pytest.mark.parametrize("markers", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_f11_f13_f14_f16_f20_f21_every_size_in_any_split(marked_half: Any, wire: Any, markers: bool, seed: int) -> None:
    rnd = random.Random(seed)
    ulpdus = [rnd.randbytes(size) for size in range(1, 1101)]
    encoder = FpduEncoder(crc=True, markers=markers)
    stream = b""
    for ulpdu in ulpdus:
        fpdu = encoder.encode((ulpdu,))
        assert fpdu == (marked_half.fpdu(ulpdu) if markers else wire.fpdu(ulpdu))
        stream += fpdu
    decoder, got, at = FpduDecoder(crc=True, markers=markers), [], 0
    while at < len(stream):
        step = rnd.choice((1, 2, 3, 5, rnd.randrange(1, 700), rnd.randrange(1, 9000)))
        got += [bytes(u) for u in decoder.receive(stream[at : at + step])]
        at += step
    assert got == ulpdus and not decoder.half_received
    if markers:
        found = [struct.unpack_from(">HH", stream, at) for at in range(0, len(stream), 512)]
        assert all(reserved == 0 and pointer % 4 == 0 for reserved, pointer in found)


@pytest.mark.parametrize("markers", [False, True])
def test_f20_one_octet_at_a_time(markers: bool) -> None:
    encoder = FpduEncoder(crc=True, markers=markers)
    ulpdus = [bytes([n & 0xFF]) * n for n in (1, 2, 480, 484, 488, 492, 500, 508, 1020)]
    assert decode(b"".join(encoder.encode((u,)) for u in ulpdus), markers=markers, step=1) == ulpdus


@pytest.mark.parametrize("markers", [False, True])
def test_f22_the_largest_ulpdu(markers: bool) -> None:
    ulpdu = bytes(range(256)) * 253
    assert len(ulpdu) == 64768
    fpdu = FpduEncoder(crc=True, markers=markers).encode((ulpdu,))
    assert len(fpdu) <= 65535
    for step in (len(fpdu), 1448):
        assert decode(fpdu, markers=markers, step=step) == [ulpdu]


def test_f12_reserved_of_a_marker_is_ignored(marked_half: Any) -> None:
    ulpdus = [bytes(700), bytes(300)]
    stream = b"".join(marked_half.fpdu(u, reserved=0xFFFF) for u in ulpdus)
    assert decode(stream, markers=True) == ulpdus


def test_f17_low_bits_of_fpduptr_are_masked_off(marked_half: Any) -> None:
    assert decode(marked_half.fpdu(bytes(700), pointer_xor=3), markers=True) == [bytes(700)]


@pytest.mark.parametrize(("size", "pointer_xor"), [(20, 4), (700, 8), (700, 0xFFFC)])
def test_f19_wrong_fpduptr_with_a_good_crc(marked_half: Any, size: int, pointer_xor: int) -> None:
    fpdu = marked_half.fpdu(bytes(size), pointer_xor=pointer_xor)
    with pytest.raises(PeerMisbehaved) as error:
        decode(fpdu, markers=True)
    assert error.value.cause is TerminateCause.MPA_MARKER_MISMATCH


def test_f19_wrong_fpduptr_without_crc(marked_half: Any) -> None:
    with pytest.raises(PeerMisbehaved) as error:
        decode(marked_half.fpdu(bytes(20), pointer_xor=4), markers=True, crc=False)
    assert error.value.cause is TerminateCause.MPA_MARKER_MISMATCH


@pytest.mark.parametrize("markers", [False, True])
@pytest.mark.parametrize("octets", [1, 2, 5, 11])
def test_f26_half_received(markers: bool, octets: int) -> None:
    fpdu = FpduEncoder(crc=True, markers=markers).encode((b"abcd",))
    decoder = FpduDecoder(crc=True, markers=markers)
    assert not decoder.half_received
    assert list(decoder.receive(fpdu[:octets])) == []
    assert decoder.half_received
    assert [bytes(u) for u in decoder.receive(fpdu[octets:])] == [b"abcd"]
    assert not decoder.half_received


@pytest.mark.parametrize(
    ("emss", "without", "with_markers"),
    [
        (1460, 1454, 1442),
        (1448, 1442, 1430),
        (8948, 8942, 8870),
        (536, 530, 522),
        (1461, 1454, 1442),
        (100, 128, 128),
        (65535, 64768, 64768),
    ],
)
def test_f23_f24_f25_mulpdu_formula(emss: int, without: int, with_markers: int) -> None:
    assert mulpdu_for_emss(emss, markers=False) == without
    assert mulpdu_for_emss(emss, markers=True) == with_markers


@pytest.mark.parametrize("emss", range(536, 9001, 61))
def test_f23_an_fpdu_of_mulpdu_octets_fits_the_segment(emss: int) -> None:
    assert len(FpduEncoder(crc=True, markers=False).encode((bytes(mulpdu_for_emss(emss, markers=False)),))) <= emss
    encoder = FpduEncoder(crc=True, markers=True)
    ulpdu = bytes(mulpdu_for_emss(emss, markers=True))
    assert max(len(encoder.encode((ulpdu,))) for _ in range(200)) <= emss


@pytest.mark.parametrize(
    ("ulpdus", "expected"),
    [
        ([], []),
        ([18, 22, 26], [[18, 22, 26]]),
        ([19], [[19]]),
        ([18, 22, 19, 20, 26, 30, 21], [[18, 22], [19], [20], [26, 30], [21]]),
    ],
)
def test_an_fpdu_with_pad_has_a_sendmsg_of_its_own(ulpdus: list[int], expected: list[list[int]]) -> None:
    encoder = FpduEncoder(crc=True, markers=False)
    fpdus = [encoder.encode((bytes(size),)) for size in ulpdus]
    assert [[struct.unpack_from(">H", fpdu)[0] for fpdu in run] for run in runs(fpdus)] == expected
