"""A peer for the iWARP tests that builds and reads its octets by itself, and a small registered memory.

`Wire` follows the figures of RFC 5040, 5041, 5044 and 7306 word by word and shares no code with the package, so that an
error there cannot hide on both sides.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kbtp.errors import PeerMisbehaved
from kbtp.iwarp.mpa import Negotiated
from kbtp.iwarp.stream import IwarpStream
from kbtp.types import TerminateCause

M64 = (1 << 64) - 1


def _crc_table() -> Iterator[int]:
    for octet in range(256):
        crc = octet
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        yield crc


_CRC_TABLE = list(_crc_table())


@dataclass(frozen=True)
class Seen:
    """One FPDU taken apart; the fields its header does not have are None."""

    ulpdu: bytes
    opcode: int
    last: bool
    payload: bytes
    stag: int | None = None
    to: int | None = None
    ulp_word: int | None = None
    qn: int | None = None
    msn: int | None = None
    mo: int | None = None


class Wire:
    WRITE, READ_REQUEST, READ_RESPONSE, SEND, SEND_INV, SEND_SE, SEND_SE_INV, TERMINATE = range(8)
    IMM, IMM_SE, ATOMIC_REQUEST, ATOMIC_RESPONSE = range(8, 12)

    @staticmethod
    def crc(octets: bytes) -> bytes:
        crc = 0xFFFFFFFF
        for octet in octets:
            crc = (crc >> 8) ^ _CRC_TABLE[(crc ^ octet) & 0xFF]
        return struct.pack("<I", crc ^ 0xFFFFFFFF)

    @classmethod
    def fpdu(cls, ulpdu: bytes, pad: bytes | None = None) -> bytes:
        pad_bytes = -(2 + len(ulpdu)) % 4
        body = struct.pack(">H", len(ulpdu)) + ulpdu + (bytes(pad_bytes) if pad is None else pad[:pad_bytes])
        return body + cls.crc(body)

    @staticmethod
    def control(tagged: bool, last: bool, opcode: int) -> bytes:
        return bytes((tagged << 7 | last << 6 | 1, 1 << 6 | opcode))

    @classmethod
    def untagged(
        cls, opcode: int, qn: int, msn: int, payload: bytes = b"", mo: int = 0, last: bool = True, ulp_word: int = 0
    ) -> bytes:
        return cls.control(False, last, opcode) + struct.pack(">IIII", ulp_word, qn, msn, mo) + payload

    @classmethod
    def tagged(cls, opcode: int, stag: int, to: int, payload: bytes = b"", last: bool = True) -> bytes:
        return cls.control(True, last, opcode) + struct.pack(">IQ", stag, to) + payload

    @classmethod
    def send(cls, msn: int, payload: bytes = b"", mo: int = 0, last: bool = True) -> bytes:
        return cls.untagged(cls.SEND, 0, msn, payload, mo, last)

    @classmethod
    def write(cls, stag: int, to: int, payload: bytes = b"", last: bool = True) -> bytes:
        return cls.tagged(cls.WRITE, stag, to, payload, last)

    @staticmethod
    def read_header(sink_stag: int, sink_to: int, size: int, source_stag: int, source_to: int) -> bytes:
        return struct.pack(">IQIIQ", sink_stag, sink_to, size, source_stag, source_to)

    @classmethod
    def read_request(cls, msn: int, sink_stag: int, sink_to: int, size: int, source_stag: int, source_to: int) -> bytes:
        header = cls.read_header(sink_stag, sink_to, size, source_stag, source_to)
        return cls.untagged(cls.READ_REQUEST, 1, msn, header)

    @classmethod
    def read_response(cls, stag: int, to: int, payload: bytes = b"", last: bool = True) -> bytes:
        return cls.tagged(cls.READ_RESPONSE, stag, to, payload, last)

    @classmethod
    def atomic_request(cls, msn: int, first_word: int, request_id: int, stag: int, to: int, *operands: int) -> bytes:
        """`operands`: data, mask and, if wanted, compare data and compare mask."""
        data, mask, compare, compare_mask = (*operands, 0, M64)[:4] if len(operands) == 2 else operands
        header = struct.pack(">IIIQQQQQ", first_word, request_id, stag, to, data, mask, compare, compare_mask)
        return cls.untagged(cls.ATOMIC_REQUEST, 1, msn, header)

    @classmethod
    def atomic_response(cls, msn: int, request_id: int, value: int) -> bytes:
        return cls.untagged(cls.ATOMIC_RESPONSE, 3, msn, struct.pack(">IQ", request_id, value))

    @classmethod
    def terminate(cls, layer: int, etype: int, code: int, rest: bytes = b"", bits: int = 0) -> bytes:
        return cls.untagged(cls.TERMINATE, 2, 1, struct.pack(">BBH", layer << 4 | etype, code, bits) + rest)

    @classmethod
    def see(cls, fpdu: bytes, *, crc: bool = True) -> Seen:
        """Checks length, padding and CRC of an unmarked FPDU and takes it apart."""
        (length,) = struct.unpack_from(">H", fpdu)
        ulpdu, pad = fpdu[2 : 2 + length], fpdu[2 + length : -4]
        assert len(fpdu) % 4 == 0 and len(pad) < 4 and not any(pad)
        assert fpdu[-4:] == (cls.crc(fpdu[:-4]) if crc else bytes(4))
        ddp, control = ulpdu[0], ulpdu[1]
        assert ddp & 0x3F == 1, "Rsvd is 0 and DV is 1"
        assert control & 0xF0 == 0x40, "RV is 1 and Rsv is 0"
        opcode, last = control & 0xF, bool(ddp & 0x40)
        if ddp & 0x80:
            stag, to = struct.unpack_from(">IQ", ulpdu, 2)
            return Seen(ulpdu, opcode, last, ulpdu[14:], stag=stag, to=to)
        ulp_word, qn, msn, mo = struct.unpack_from(">IIII", ulpdu, 2)
        return Seen(ulpdu, opcode, last, ulpdu[18:], ulp_word=ulp_word, qn=qn, msn=msn, mo=mo)


class MarkedHalf:
    """A half connection with markers, sent and received word by word (RFC 5044 4.3)."""

    def __init__(self) -> None:
        self.position = 0

    def fpdu(self, ulpdu: bytes, pointer_xor: int = 0, reserved: int = 0) -> bytes:
        body = struct.pack(">H", len(ulpdu)) + ulpdu
        body += bytes(-len(body) % 4)
        out, start = bytearray(), None

        def marker() -> None:
            if self.position % 512 == 0:
                pointer = 0 if start is None else self.position - start
                out.extend(struct.pack(">HH", reserved, pointer ^ pointer_xor))
                self.position += 4

        for at in range(0, len(body), 4):
            marker()
            start = self.position if start is None else start
            out.extend(body[at : at + 4])
            self.position += 4
        marker()
        out.extend(Wire.crc(bytes(out)))
        self.position += 4
        return bytes(out)


@dataclass
class Region:
    octets: bytearray
    base_to: int = 0
    rights: frozenset[str] = frozenset({"read", "write", "atomic"})
    associated: bool = True
    valid: bool = True
    can_be_invalidated: bool = True


@dataclass
class RegionMemory:
    """`StreamMemory` over a dict of regions; counts the sink STags that are out."""

    regions: dict[int, Region] = field(default_factory=dict)
    lent: set[int] = field(default_factory=set)
    next_sink_stag: int = 0xABCD0001

    def _find(self, layer: str, stag: int, to: int, length: int, right: str) -> memoryview:
        causes = TerminateCause
        region = self.regions.get(stag)
        if region is None or not region.valid:
            raise PeerMisbehaved(causes[f"{layer}_INVALID_STAG"], f"no STag {stag:#x}")
        if not region.associated:
            raise PeerMisbehaved(causes[f"{layer}_STAG_NOT_ASSOCIATED"], f"STag {stag:#x} is not of this stream")
        if to + length > 1 << 64:
            raise PeerMisbehaved(causes[f"{layer}_TO_WRAP"], f"{length} octets at {to:#x} wrap")
        start = to - region.base_to
        if start < 0 or start + length > len(region.octets):
            raise PeerMisbehaved(causes[f"{layer}_BASE_OR_BOUNDS"], f"{length} octets at {to:#x} are outside")
        if right not in region.rights:
            no_right = causes.RDMAP_ACCESS_RIGHTS if layer == "RDMAP" else causes.DDP_INVALID_STAG
            raise PeerMisbehaved(no_right, f"no right to {right}")
        return memoryview(region.octets)[start : start + length]

    def place(self, stag: int, to: int, length: int) -> memoryview:
        return self._find("DDP", stag, to, length, "write")

    def read_source(self, stag: int, to: int, length: int) -> memoryview:
        return self._find("RDMAP", stag, to, length, "read").toreadonly()

    def atomic(self, stag: int, to: int, operate: Callable[[int], int]) -> int:
        view = self._find("RDMAP", stag, to, 8, "atomic")
        if to % 8:
            raise PeerMisbehaved(TerminateCause.RDMAP_CATASTROPHIC_STREAM, f"{to:#x} is not 8-aligned")
        (old,) = struct.unpack("=Q", view)
        view[:] = struct.pack("=Q", operate(old))
        return old

    def invalidate(self, stag: int) -> None:
        region = self.regions.get(stag)
        if region is None or not region.valid or not region.can_be_invalidated:
            raise PeerMisbehaved(TerminateCause.RDMAP_CANNOT_INVALIDATE, f"STag {stag:#x} cannot be invalidated")
        region.valid = False

    def lend_sink_stag(self) -> int:
        stag, self.next_sink_stag = self.next_sink_stag, self.next_sink_stag + 0x1111
        self.lent.add(stag)
        return stag

    def return_sink_stag(self, stag: int) -> None:
        self.lent.remove(stag)


@dataclass
class End:
    """A stream under test and what its peer, `Wire`, says to it and sees of it."""

    stream: IwarpStream
    memory: RegionMemory
    crc: bool = True

    def hears(self, *ulpdus: bytes) -> list[Any]:
        for ulpdu in ulpdus:
            self.stream.receive_data(Wire.fpdu(ulpdu))
        return self.events()

    def says(self, limit_bytes: int = 1 << 30) -> list[Seen]:
        return [Wire.see(fpdu, crc=self.crc) for fpdu in self.stream.data_to_send(limit_bytes)]

    def events(self) -> list[Any]:
        events = []
        while (event := self.stream.next_event()) is not None:
            events.append(event)
        return events

    def receive(self, wr_id: int = 0, length: int = 64) -> bytearray:
        buffer = bytearray(length)
        self.stream.post_receive(wr_id, memoryview(buffer))
        return buffer

    def refuses(self, *ulpdus: bytes) -> tuple[int, int, int]:
        """What the Terminate says that is the only answer to `ulpdus`."""
        for ulpdu in ulpdus:
            self.stream.receive_data(Wire.fpdu(ulpdu))
        return self.terminates()

    def terminates(self) -> tuple[int, int, int]:
        seen = self.says()
        assert [message.opcode for message in seen] == [Wire.TERMINATE]
        (terminate,) = seen
        assert (terminate.qn, terminate.msn, terminate.mo, terminate.last, terminate.ulp_word) == (2, 1, 0, True, 0)
        assert self.stream.failed and self.stream.terminate_sent and self.stream.ended
        return terminate.payload[0] >> 4, terminate.payload[0] & 0xF, terminate.payload[1]


STAG = 0x11223344
BASE_TO = 0x1000


def negotiated_as(**changes: Any) -> Negotiated:
    values: dict[str, Any] = {
        "crc": True,
        "tx_markers": False,
        "rx_markers": False,
        "ird": 4,
        "ord_": 4,
        "peer_ird": 4,
        "peer_ord": 4,
        "revision": 2,
    }
    return Negotiated(**(values | changes))


@pytest.fixture(scope="session")
def wire() -> type[Wire]:
    return Wire


@pytest.fixture(scope="session")
def new_memory() -> Callable[..., RegionMemory]:
    """Memory with one region of `length` octets, counting up, at STAG and BASE_TO."""

    def build(length: int = 256, **region: Any) -> RegionMemory:
        octets = bytearray(i & 0xFF for i in range(length))
        return RegionMemory({STAG: Region(octets, **({"base_to": BASE_TO} | region))})

    return build


@pytest.fixture(scope="session")
def new_end(new_memory: Callable[..., RegionMemory]) -> Callable[..., End]:
    """A stream over fresh memory (or `memory`), the active side unless told, with `negotiated` changes."""

    def build(
        *,
        active: bool = True,
        memory: RegionMemory | None = None,
        mulpdu: int | None = None,
        initial_msn: dict[int, int] | None = None,
        **negotiated: Any,
    ) -> End:
        memory = memory or new_memory()
        settled = negotiated_as(**negotiated)
        stream = IwarpStream(settled, memory, active=active, mulpdu=mulpdu, initial_msn=initial_msn)
        return End(stream, memory, crc=settled.crc)

    return build


@pytest.fixture
def end(new_end: Callable[..., End]) -> End:
    return new_end()


@pytest.fixture
def marked_half() -> MarkedHalf:
    return MarkedHalf()


@pytest.fixture(scope="session")
def new_marked_half() -> type[MarkedHalf]:
    return MarkedHalf


@pytest.fixture(scope="session")
def stag() -> int:
    return STAG


@pytest.fixture(scope="session")
def base_to() -> int:
    return BASE_TO


@pytest.fixture(scope="session")
def new_region() -> type[Region]:
    return Region
