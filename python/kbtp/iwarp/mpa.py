"""MPA start-up: the Request and Reply frames and what they settle (RFC 5044 7.1, RFC 6581 9).

    octet 0..15  16           17   18..19     20..
          Key    M C R S Res  Rev  PD_Length  private data

    With S and Rev 2 the private data begins with the enhanced word of RFC 6581 9:
          A B IRD(14)  C D ORD(14)

`ActiveStartup` is the side that sends the Request, `PassiveStartup` the one that answers it. Both take octets in any
split. What breaks the rules of the start-up is `MpaStartupError`: the TCP connection is then closed without
a further word, neither Reply nor Terminate (RFC 5044 7.1.2).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntFlag

from kbtp.errors import ApiMisuse, KbtpError
from kbtp.limits import (
    IRD_ORD_MAX,
    IRD_ORD_ULP_MANAGED,
    MPA_ENHANCED_WORD_BYTES,
    MPA_FRAME_BYTES,
    MPA_PRIVATE_DATA_MAX_BYTES,
)
from kbtp.types import TerminateCause

REQUEST_KEY = b"MPA ID Req Frame"
REPLY_KEY = b"MPA ID Rep Frame"
REVISION_PLAIN = 1  # RFC 5044
REVISION_ENHANCED = 2  # RFC 6581

_FIXED = struct.Struct(">16sBBH")
_WORD = struct.Struct(">HH")
_M, _C, _R, _S = 0x80, 0x40, 0x20, 0x10
_A, _B, _C_WRITE, _D_READ = 0x8000, 0x4000, 0x8000, 0x4000


class MpaStartupError(KbtpError):
    """The peer's start-up frame is not one to go on with: close the TCP connection, send nothing (RFC 5044 7.1.2)."""


class RtrKind(IntFlag):
    """RFC 6581 9.2: the zero-length messages that may serve as the initiator's Ready To Receive indication."""

    NONE = 0
    SEND = 1
    WRITE = 2
    READ = 4


ALL_RTR_KINDS = RtrKind.SEND | RtrKind.WRITE | RtrKind.READ


@dataclass(frozen=True, slots=True)
class MpaOptions:
    """How this side starts a stream.

    `revision` is the highest MPA revision spoken. `peer_to_peer` are the RTR kinds the active side offers, NONE
    for the client-server model (A=0); a passive side serves every kind whatever stands here.
    `revision1_depth` is the read depth either way when the peer speaks revision 1, which cannot tell it (profile 3).
    """

    crc: bool = True
    want_markers: bool = False
    revision: int = REVISION_ENHANCED
    peer_to_peer: RtrKind = RtrKind.NONE
    revision1_depth: int = 0

    def __post_init__(self) -> None:
        if self.revision not in (REVISION_PLAIN, REVISION_ENHANCED):
            raise ApiMisuse(f"MPA revision must be 1 or 2, not {self.revision}")
        _check_depth("revision1_depth", self.revision1_depth)
        if self.revision == REVISION_PLAIN and self.peer_to_peer:
            raise ApiMisuse("the peer-to-peer model needs MPA revision 2 (RFC 6581)")


@dataclass(frozen=True, slots=True)
class Negotiated:
    """What both frames together settled, from this side's view.

    `ird` and `ord_` are in force here; `peer_ird` and `peer_ord` are what the peer's frame said. `private_data` is
    the peer's, without the enhanced word. `rtr`: on the active side the kind to send, on the passive side
    the kinds that may come, NONE in the client-server model. `failure` (active side only): the stream must send this
    Terminate and nothing else (RFC 6581 9.1, 9.2).
    """

    crc: bool
    tx_markers: bool
    rx_markers: bool
    ird: int
    ord_: int
    peer_ird: int
    peer_ord: int
    revision: int
    private_data: bytes = b""
    rtr: RtrKind = RtrKind.NONE
    failure: TerminateCause | None = None

    @property
    def pad_stands_alone(self) -> bool:
        """An FPDU with PAD starts and ends a TCP segment.

        Linux siw takes a CRC for wrong if a segment ends between PAD and CRC. It knows no markers.
        """
        return self.crc and not self.tx_markers


@dataclass(frozen=True, slots=True)
class MpaRejected:
    """A Reply with R=1: MPA is left, the TCP connection is still open (RFC 5044 7.1.2)."""

    private_data: bytes
    peer_ird: int
    peer_ord: int


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """A valid Request. `peer_ird` and `peer_ord` are the configured depth if the Request could not tell them."""

    private_data: bytes
    peer_ird: int
    peer_ord: int
    revision: int
    wants_markers: bool
    wants_crc: bool
    rtr_offered: RtrKind
    enhanced: bool


@dataclass(frozen=True, slots=True)
class EnhancedWord:
    """RFC 6581 9: the 4 octets before the private data."""

    ird: int
    ord_: int
    peer_to_peer: bool = False
    rtr: RtrKind = RtrKind.NONE

    def pack(self) -> bytes:
        first, second = self.ird, self.ord_
        if self.peer_to_peer:  # A=0 is sent with B=C=D=0 (RFC 6581 9.2)
            first |= _A | (_B if RtrKind.SEND in self.rtr else 0)
            second |= (_C_WRITE if RtrKind.WRITE in self.rtr else 0) | (_D_READ if RtrKind.READ in self.rtr else 0)
        return _WORD.pack(first, second)

    @classmethod
    def parse(cls, octets: bytes) -> EnhancedWord:
        """`octets` has at least 4. B, C and D mean nothing when A is 0 (RFC 6581 9.2)."""
        first, second = _WORD.unpack_from(octets)
        peer_to_peer = bool(first & _A)
        rtr = RtrKind.NONE
        if peer_to_peer:
            rtr |= RtrKind.SEND if first & _B else RtrKind.NONE
            rtr |= RtrKind.WRITE if second & _C_WRITE else RtrKind.NONE
            rtr |= RtrKind.READ if second & _D_READ else RtrKind.NONE
        return cls(first & IRD_ORD_ULP_MANAGED, second & IRD_ORD_ULP_MANAGED, peer_to_peer, rtr)


@dataclass(frozen=True, slots=True)
class MpaFrame:
    """A Request or Reply frame; `word` is None in the plain form of RFC 5044."""

    reply: bool
    markers: bool
    crc: bool
    revision: int
    private_data: bytes = b""
    rejected: bool = False
    word: EnhancedWord | None = None

    def pack(self) -> bytes:
        private_data = self.private_data if self.word is None else self.word.pack() + self.private_data
        if len(private_data) > MPA_PRIVATE_DATA_MAX_BYTES:
            limit = MPA_PRIVATE_DATA_MAX_BYTES - (0 if self.word is None else MPA_ENHANCED_WORD_BYTES)
            raise ApiMisuse(f"private data may have {limit} octets here, not {len(self.private_data)} (RFC 6581 9)")
        flags = (
            (_M if self.markers else 0)
            | (_C if self.crc else 0)
            | (_R if self.rejected else 0)
            | (_S if self.word is not None else 0)
        )
        key = REPLY_KEY if self.reply else REQUEST_KEY
        return _FIXED.pack(key, flags, self.revision, len(private_data)) + private_data


class _FrameReader:
    """Collects one frame from octets in any split and judges it as early as it can (RFC 5044 7.1.2)."""

    def __init__(self, *, reply: bool, highest_revision: int) -> None:
        self._reply = reply
        self._highest_revision = highest_revision
        self._octets = bytearray()

    def receive(self, data: bytes | bytearray | memoryview) -> MpaFrame | None:
        self._octets += data
        self._check_key()
        if len(self._octets) < MPA_FRAME_BYTES:
            return None
        _, flags, revision, pd_length = _FIXED.unpack_from(self._octets)
        if not REVISION_PLAIN <= revision <= self._highest_revision:
            raise MpaStartupError(f"MPA revision {revision} came, this side speaks 1 to {self._highest_revision}")
        if pd_length > MPA_PRIVATE_DATA_MAX_BYTES:
            raise MpaStartupError(f"PD_Length {pd_length} came, at most {MPA_PRIVATE_DATA_MAX_BYTES} is allowed")
        # In a frame of RFC 5044 the S bit is one of Res and is not looked at.
        enhanced = revision >= REVISION_ENHANCED and bool(flags & _S)
        if enhanced and pd_length < MPA_ENHANCED_WORD_BYTES:
            raise MpaStartupError(f"S is set but PD_Length {pd_length} leaves no room for IRD and ORD (RFC 6581 9)")
        end = MPA_FRAME_BYTES + pd_length
        if len(self._octets) < end:
            return None
        private_data = bytes(self._octets[MPA_FRAME_BYTES:end])
        del self._octets[:end]
        return MpaFrame(
            reply=self._reply,
            markers=bool(flags & _M),
            crc=bool(flags & _C),
            revision=revision,
            private_data=private_data[MPA_ENHANCED_WORD_BYTES:] if enhanced else private_data,
            rejected=self._reply and bool(flags & _R),  # R of a Request is not checked (RFC 5044 7.1.1)
            word=EnhancedWord.parse(private_data) if enhanced else None,
        )

    @property
    def surplus(self) -> bytes:
        return bytes(self._octets)

    def _check_key(self) -> None:
        key, other = (REPLY_KEY, REQUEST_KEY) if self._reply else (REQUEST_KEY, REPLY_KEY)
        came = bytes(self._octets[: len(key)])
        if key.startswith(came):
            return
        what = "Reply" if self._reply else "Request"
        if came == other:
            # Both ends of the connection play the same role (RFC 5044 7.1.2 rule 8).
            raise MpaStartupError(f"an MPA {'Request' if self._reply else 'Reply'} came where a {what} was due")
        if not other.startswith(came):
            raise MpaStartupError(f"no MPA {what}: the key {key!r} was due, {came!r} came")


def _check_depth(name: str, depth: int) -> None:
    if not 0 <= depth <= IRD_ORD_MAX:
        raise ApiMisuse(f"{name} must be 0 to {IRD_ORD_MAX}, not {depth}")


class ActiveStartup:
    """The initiator's half. Send `request`, then feed `receive_data` until it returns a result."""

    def __init__(self, options: MpaOptions, private_data: bytes, ird: int, ord_: int) -> None:
        """`ird` is the most this side can serve, `ord_` what it would like to use.

        Raises ApiMisuse for private data over 508 octets (512 in revision 1) or a depth over 0x3FFE.
        """
        _check_depth("ird", ird)
        _check_depth("ord_", ord_)
        self._options = options
        self._enhanced = options.revision >= REVISION_ENHANCED
        depth = options.revision1_depth
        self._ird = ird if self._enhanced else min(ird, depth)
        self._ord = ord_ if self._enhanced else min(ord_, depth)
        word = EnhancedWord(ird, ord_, bool(options.peer_to_peer), options.peer_to_peer) if self._enhanced else None
        self._request = MpaFrame(
            reply=False,
            markers=options.want_markers,
            crc=options.crc,
            revision=options.revision,
            private_data=private_data,
            word=word,
        ).pack()
        self._reader = _FrameReader(reply=True, highest_revision=options.revision)

    @property
    def request(self) -> bytes:
        return self._request

    @property
    def surplus(self) -> bytes:
        """Octets that came after the Reply: they belong to the stream."""
        return self._reader.surplus

    def receive_data(self, data: bytes | bytearray | memoryview) -> Negotiated | MpaRejected | None:
        """None while the Reply is not complete. Raises MpaStartupError."""
        reply = self._reader.receive(data)
        if reply is None:
            return None
        if self._enhanced and reply.word is None:
            # RFC 6581 10: an enhanced Request gets an enhanced Reply; a new connection may try revision 1.
            raise MpaStartupError("a Reply without IRD and ORD came to a Request of MPA revision 2 (RFC 6581 10)")
        depth = self._options.revision1_depth
        peer_ird, peer_ord = (reply.word.ird, reply.word.ord_) if reply.word else (depth, depth)
        if reply.rejected:
            return MpaRejected(reply.private_data, peer_ird, peer_ord)
        # RFC 6581 9.1; a depth of all ones leaves ours alone.
        ord_ = self._ord if peer_ird == IRD_ORD_ULP_MANAGED else min(self._ord, peer_ird)
        rtr, failure = RtrKind.NONE, None
        if reply.word and self._ird < peer_ord != IRD_ORD_ULP_MANAGED:
            failure = TerminateCause.MPA_INSUFFICIENT_IRD
        elif self._options.peer_to_peer:
            rtr = self._choose_rtr(reply.word, peer_ird)
            failure = None if rtr else TerminateCause.MPA_NO_MATCHING_RTR
        return Negotiated(
            crc=self._options.crc or reply.crc,
            tx_markers=reply.markers,
            rx_markers=self._options.want_markers,
            ird=self._ird,
            ord_=ord_,
            peer_ird=peer_ird,
            peer_ord=peer_ord,
            revision=reply.revision,
            private_data=reply.private_data,
            rtr=rtr,
            failure=failure,
        )

    def _choose_rtr(self, word: EnhancedWord | None, peer_ird: int) -> RtrKind:
        """One kind that both sides set; cheapest first: a Write uses up nothing at the peer (RFC 6581 9.2)."""
        common = self._options.peer_to_peer & (word.rtr if word else RtrKind.NONE)
        if RtrKind.WRITE in common:
            return RtrKind.WRITE
        if RtrKind.READ in common and peer_ird >= 1:
            return RtrKind.READ
        return common & RtrKind.SEND


class PassiveStartup:
    """The responder's half. Feed `receive_data` until it returns the Request, then `accept` or `reject` it."""

    def __init__(self, options: MpaOptions) -> None:
        self._options = options
        self._reader = _FrameReader(reply=False, highest_revision=options.revision)
        self._frame: MpaFrame | None = None

    def receive_data(self, data: bytes | bytearray | memoryview) -> PeerRequest | None:
        """None while the Request is not complete.

        Raises MpaStartupError, also for any octet after the Request and before `accept` or `reject`: the
        initiator has to wait for the Reply (RFC 5044 7.1.2 rule 9).
        """
        if self._frame is None:
            self._frame = self._reader.receive(data)
            surplus_bytes = len(self._reader.surplus) if self._frame else 0
        else:
            surplus_bytes = len(data)
        if self._frame is None:
            return None
        if surplus_bytes:
            raise MpaStartupError(f"{surplus_bytes} octets came after the Request and before its Reply")
        word = self._frame.word
        depth = self._options.revision1_depth
        return PeerRequest(
            private_data=self._frame.private_data,
            peer_ird=word.ird if word else depth,
            peer_ord=word.ord_ if word else depth,
            revision=self._frame.revision,
            wants_markers=self._frame.markers,
            wants_crc=self._frame.crc,
            rtr_offered=word.rtr if word else RtrKind.NONE,
            enhanced=word is not None,
        )

    def accept(self, private_data: bytes, ird: int, ord_: int) -> tuple[bytes, Negotiated]:
        """The Reply to send and what holds from then on; `ird` is the most this side can serve.

        The initiator lowers its ORD to `ird` if it wanted more (RFC 6581 9.1). Raises ApiMisuse for too long private
        data or a depth over 0x3FFE.
        """
        _check_depth("ird", ird)
        _check_depth("ord_", ord_)
        request = self._request()
        word, rtr = None, RtrKind.NONE
        if request.word is None:
            depth = self._options.revision1_depth
            ird, ord_, peer_ird, peer_ord = min(ird, depth), min(ord_, depth), depth, depth
        else:
            peer_ird, peer_ord = request.word.ird, request.word.ord_
            if peer_ird != IRD_ORD_ULP_MANAGED:
                ord_ = min(ord_, peer_ird)
            if request.word.rtr == RtrKind.READ:
                ird = max(ird, 1)  # the RTR itself needs a place (RFC 6581 9.1)
            offered = ALL_RTR_KINDS if ird else ALL_RTR_KINDS & ~RtrKind.READ
            word = EnhancedWord(
                # RFC 6581 9.1: all ones are answered crosswise with all ones.
                ird=IRD_ORD_ULP_MANAGED if peer_ord == IRD_ORD_ULP_MANAGED else ird,
                ord_=IRD_ORD_ULP_MANAGED if peer_ird == IRD_ORD_ULP_MANAGED else ord_,
                peer_to_peer=request.word.peer_to_peer,
                rtr=offered,
            )
            rtr = offered & request.word.rtr
        negotiated = Negotiated(
            crc=self._options.crc or request.crc,
            tx_markers=request.markers,
            rx_markers=self._options.want_markers,
            ird=ird,
            ord_=ord_,
            peer_ird=peer_ird,
            peer_ord=peer_ord,
            revision=request.revision,
            private_data=request.private_data,
            rtr=rtr,
        )
        return self._reply(private_data, word, rejected=False), negotiated

    def reject(self, private_data: bytes, *, ird: int = 0, ord_: int = 0) -> bytes:
        """A Reply with R=1; the depths may tell the initiator what would have been needed (RFC 6581 9.1)."""
        _check_depth("ird", ird)
        _check_depth("ord_", ord_)
        request = self._request()
        word = EnhancedWord(ird, ord_, request.word.peer_to_peer, ALL_RTR_KINDS) if request.word else None
        return self._reply(private_data, word, rejected=True)

    def _request(self) -> MpaFrame:
        if self._frame is None:
            raise ApiMisuse("there is no complete MPA Request to answer yet")
        return self._frame

    def _reply(self, private_data: bytes, word: EnhancedWord | None, *, rejected: bool) -> bytes:
        return MpaFrame(
            reply=True,
            markers=self._options.want_markers,
            crc=self._options.crc,
            revision=self._request().revision,
            private_data=private_data,
            rejected=rejected,
            word=word,
        ).pack()
