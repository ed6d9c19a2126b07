"""MPA start-up by hand (RFC 5044 7.1, RFC 6581 9), from either end."""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass, field

from kbtp.conformance.deviation import Deviation, expect
from kbtp.conformance.tcp import Tcp
from kbtp.iwarp.mpa import REPLY_KEY, REQUEST_KEY, REVISION_ENHANCED, EnhancedWord, MpaFrame, RtrKind
from kbtp.limits import MPA_ENHANCED_WORD_BYTES, MPA_FRAME_BYTES, MPA_PRIVATE_DATA_MAX_BYTES
from kbtp.wire import ConnectionData

READ_DEPTH = 16
M_BIT, C_BIT, R_BIT, S_BIT = 0x80, 0x40, 0x20, 0x10
_FRAME = struct.Struct(">16sBBH")


def connection_data() -> bytes:
    """Profile 3: what begins the private data of both directions, with a fresh nonce."""
    return ConnectionData(secrets.token_bytes(16)).pack()


@dataclass(frozen=True, slots=True)
class Startup:
    """How we start a stream, as either end. `word` is None in the plain form of RFC 5044, `revision` 1 then."""

    crc: bool = True
    markers: bool = False
    revision: int = REVISION_ENHANCED
    word: EnhancedWord | None = field(default_factory=lambda: EnhancedWord(READ_DEPTH, READ_DEPTH))
    private_data: bytes = field(default_factory=connection_data)
    rejected: bool = False

    def frame(self, *, reply: bool) -> MpaFrame:
        return MpaFrame(reply, self.markers, self.crc, self.revision, self.private_data, self.rejected, self.word)

    @classmethod
    def plain(cls, *, crc: bool = True, markers: bool = False, private_data: bytes | None = None) -> Startup:
        """Revision 1, without IRD and ORD."""
        return cls(crc, markers, 1, None, connection_data() if private_data is None else private_data)

    @classmethod
    def peer_to_peer(cls, rtr: RtrKind, *, ird: int = READ_DEPTH, ord_: int = READ_DEPTH) -> Startup:
        """RFC 6581 9.2: an RTR message will be sent, or is asked for."""
        return cls(word=EnhancedWord(ird, ord_, True, rtr))

    @classmethod
    def of_depth(cls, ird: int, ord_: int) -> Startup:
        return cls(word=EnhancedWord(ird, ord_))


@dataclass(frozen=True, slots=True)
class CameFrame:
    """A frame of the peer, taken apart, and its octets for who looks closer."""

    octets: bytes
    frame: MpaFrame

    @property
    def flags(self) -> int:
        return self.octets[16]

    @property
    def private_data(self) -> bytes:
        return self.frame.private_data


def raw_frame(
    *, key: bytes = REQUEST_KEY, flags: int = C_BIT, revision: int = 1, private_data: bytes = b"",
    length: int | None = None,
) -> bytes:  # fmt: skip
    """A frame in which anything may be wrong; `length` is PD_Length."""
    return _FRAME.pack(key, flags, revision, len(private_data) if length is None else length) + private_data


def receive_frame(tcp: Tcp, *, reply: bool, within_s: float | None = None) -> CameFrame:
    """The peer's Request or Reply, exactly. Raises `Deviation` for one that is malformed, or none at all."""
    what = f"an MPA {'Reply' if reply else 'Request'}"
    octets = tcp.receive(MPA_FRAME_BYTES, what, within_s=within_s)
    key, flags, revision, length = _FRAME.unpack(octets)
    expect(key == (REPLY_KEY if reply else REQUEST_KEY), f"{what} with its key (RFC 5044 7.1.1)", key)
    limit = f"a PD_Length of at most {MPA_PRIVATE_DATA_MAX_BYTES} (RFC 5044 7.1.1)"
    expect(length <= MPA_PRIVATE_DATA_MAX_BYTES, limit, length)
    private_data = tcp.receive(length, f"the {length} octets of private data that PD_Length announces")
    octets += private_data
    word = None
    if flags & S_BIT and revision >= REVISION_ENHANCED:
        expect(length >= MPA_ENHANCED_WORD_BYTES, "S only with the word of IRD and ORD (RFC 6581 9)", octets.hex())
        word, private_data = EnhancedWord.parse(private_data), private_data[MPA_ENHANCED_WORD_BYTES:]
    frame = MpaFrame(reply, bool(flags & M_BIT), bool(flags & C_BIT), revision, private_data, bool(flags & R_BIT), word)
    return CameFrame(octets, frame)


def accepted(came: CameFrame) -> CameFrame:
    """Raises `Deviation` for a Reply with R=1."""
    if came.frame.rejected:
        raise Deviation("an accepting MPA Reply", f"a Reply with R=1: {came.octets.hex()}")
    return came
