"""What ends a stream whoever is under test: one segment, or a few, and the Terminate that answers them.

Each row of the table is a case. Everything that the row sends is as it should be but for what its title says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kbtp.conformance import segments
from kbtp.conformance.case import Group
from kbtp.conformance.deviation import Deviation
from kbtp.conformance.initiator_side import InitiatorSide
from kbtp.conformance.probe import Probe
from kbtp.conformance.rule import Level
from kbtp.conformance.session import Session
from kbtp.conformance.stream import Code, Message
from kbtp.conformance.target_side import TargetSide
from kbtp.iwarp.rdmap import (
    QN_ATOMIC_RESPONSE,
    QN_REQUEST,
    QN_SEND,
    QN_TERMINATE,
    AtomicOperation,
    AtomicRequest,
    AtomicResponse,
    RdmapOpcode,
    ReadRequest,
)
from kbtp.limits import COMPLETION_BYTES
from kbtp.types import TerminateCause as Cause

GROUP = Group("faults", needs=("iwarp",))

BOGUS_STAG = 0x0BADCAFE
LARGE_SEGMENT_BYTES = 1 << 15  # a ULPDU takes less than 64 KiB (RFC 5044 4.1)
PAYLOAD = bytes(COMPLETION_BYTES)
READ = ReadRequest(0x5111C, 0, 8, BOGUS_STAG, 0)
ATOMIC = AtomicRequest(AtomicOperation.FETCH_ADD, 1, BOGUS_STAG, 0, 1, 0)
NO_OPCODE = (Cause.RDMAP_UNEXPECTED_OPCODE, Cause.DDP_INVALID_QN)
OUT_OF_ORDER = (Cause.DDP_MSN_OUT_OF_RANGE, Cause.DDP_NO_BUFFER)
PROTECTION = tuple(Cause(cause) for cause in Cause if (cause.layer, cause.etype) in ((0, 1), (1, 1)))
NO_ATOMICS = (Cause.RDMAP_INVALID_STAG, Cause.RDMAP_UNEXPECTED_OPCODE)

Ulpdus = Callable[[Session], Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class Fault:
    """`causes`: the Terminates that may answer, the likeliest first; none: whatever ends the stream.

    `unclear`: the RFC names no code, or two, so that another one is only worth a warning.
    """

    name: str
    rules: tuple[str, ...]
    title: str
    ulpdus: Ulpdus
    causes: tuple[Cause | Code, ...] = ()
    unclear: bool = False

    def run(self, probe: Probe) -> None:
        session = probe.session()
        session.stream.send_ulpdus(*self.ulpdus(session))
        if self.causes and not self.unclear:
            session.stream.expect_terminate(*self.causes)
            return
        message = session.stream.expect_end(self.title)
        if self.causes:
            expect_unclear(message, *self.causes)


def expect_unclear(message: Message | None, *causes: Cause | Code) -> None:
    """The Terminate has one of the codes. Raises a `Deviation` that does not bind."""
    codes = [cause.value if isinstance(cause, Cause) else cause for cause in causes]
    info = None if message is None else message.terminate
    if info is None or (info.layer, info.etype, info.code) not in codes:
        what = " or ".join(f"{layer}/{etype}/{code:02x}" for layer, etype, code in codes)
        raise Deviation(f"a Terminate {what}", str(message or "none"), binding=False)


def _send(**fields: Any) -> Ulpdus:
    """A Send with the next MSN in which `fields` are wrong."""
    return lambda session: [segments.untagged(RdmapOpcode.SEND, session.stream.take_msn(), PAYLOAD, **fields)]


def _send_ahead(ahead: int) -> Ulpdus:
    """A Send whose MSN is `ahead` of the one that is due."""
    return lambda session: [segments.send(session.stream.next_msn[QN_SEND] + ahead, PAYLOAD)]


def _of_opcode(opcode: int) -> Ulpdus:
    return lambda session: [segments.untagged(opcode, session.stream.take_msn(), PAYLOAD)]


def _invalidating(opcode: int) -> Ulpdus:
    return lambda session: session.stream.ulpdus_of_send(PAYLOAD, opcode=opcode, invalidate_stag=BOGUS_STAG)


def largest_send(session: Session) -> int:
    """Octets of the largest Send that the peer takes."""
    if isinstance(session, TargetSide):
        return session.hello.max_message
    assert isinstance(session, InitiatorSide)
    return session.ack.max_message


def too_long(session: Session) -> list[bytes]:
    """A Send of one octet too many, its last segment the one that does not fit."""
    size = largest_send(session)
    return session.stream.ulpdus_of_send(bytes(size + 1), segment_bytes=min(size, LARGE_SEGMENT_BYTES))


def _request(payload: bytes) -> Ulpdus:
    return lambda _: [segments.untagged(RdmapOpcode.READ_REQUEST, 1, payload)]


def _atomic(aopcode: int) -> Ulpdus:
    payload = aopcode.to_bytes(4, "big") + ATOMIC.pack()[4:]
    return lambda _: [segments.untagged(RdmapOpcode.ATOMIC_REQUEST, 1, payload)]


def _alone(ulpdu: bytes) -> Ulpdus:
    return lambda _: [ulpdu]


def _immediate(size: int) -> Ulpdus:
    return lambda session: [segments.untagged(RdmapOpcode.IMMEDIATE, session.stream.take_msn(), bytes(size))]


DDP_FAULTS = (
    *(
        Fault(f"ddp-version-{dv}", ("D5",), f"DV {dv} in an untagged segment: 1/2/06",
              _send(ddp_version=dv), (Cause.DDP_UNTAGGED_INVALID_VERSION,))
        for dv in (0, 2, 3)
    ),
    *(
        Fault(f"ddp-version-{dv}-tagged", ("D5",), f"DV {dv} in a tagged segment: 1/1/04",
              _alone(segments.tagged(RdmapOpcode.WRITE, 0, 0, ddp_version=dv)), (Cause.DDP_TAGGED_INVALID_VERSION,))
        for dv in (0, 2, 3)
    ),
    *(
        Fault(f"queue-{qn:x}", ("D20",), f"A Send on queue {qn:#x}, which there is not: 1/2/01",
              _alone(segments.untagged(RdmapOpcode.SEND, 1, PAYLOAD, qn=qn)), (Cause.DDP_INVALID_QN,))
        for qn in (4, 7, 0xFFFF_FFFF)
    ),
    Fault("msn-again", ("D22",), "The MSN of the message before: 1/2/03",
          _send_ahead(-1), (Cause.DDP_MSN_OUT_OF_RANGE,)),
    Fault("msn-zero", ("D22",), "MSN 0, which is before the first: 1/2/03",
          _alone(segments.send(0, PAYLOAD)), (Cause.DDP_MSN_OUT_OF_RANGE,)),
    Fault("msn-ahead", ("D22", "D18"), "An MSN that leaves one out: 1/2/03",
          _send_ahead(1), OUT_OF_ORDER),
    Fault("msn-far-ahead", ("D22",), "An MSN 2^31 ahead: 1/2/03",
          _send_ahead(1 << 31), OUT_OF_ORDER),
    Fault("msn-zero-of-requests", ("D22", "D8"), "MSN 0 on queue 1: 1/2/03",
          _alone(segments.read_request(0, READ)), (Cause.DDP_MSN_OUT_OF_RANGE,)),
    Fault("mo-beyond-the-buffer", ("D23",), "An MO far beyond any buffer: 1/2/04",
          _send(mo=0xFFFF_FFF0), (Cause.DDP_INVALID_MO, Cause.DDP_MESSAGE_TOO_LONG)),
    Fault("too-long", ("D24", "R30"), "A Send one octet longer than its buffer: 1/2/05",
          too_long, (Cause.DDP_MESSAGE_TOO_LONG, Cause.DDP_NO_BUFFER)),
    Fault("unknown-stag", ("D25",), "An RDMA Write to an STag that there is not: 1/1/00",
          _alone(segments.write(BOGUS_STAG, 0, b"x")), (Cause.DDP_INVALID_STAG,)),
    *(
        Fault(f"short-ulpdu-{len(ulpdu)}", ("D33",), f"A ULPDU of {len(ulpdu)} octets, less than its header: 1/0/00",
              _alone(ulpdu), (Cause.DDP_LOCAL_CATASTROPHIC,), unclear=True)
        for ulpdu in (segments.write(0, 0)[:1], segments.write(0, 0)[:13], segments.send(2)[:2], segments.send(2)[:17])
    ),
)  # fmt: skip

RDMAP_FAULTS = (
    *(
        Fault(f"rdmap-version-{rv}", ("R2",), f"RV {rv}: 0/2/05",
              _send(rdmap_version=rv), (Cause.RDMAP_INVALID_VERSION,))
        for rv in (0, 2, 3)
    ),
    Fault("rdmap-version-0-tagged", ("R2",), "RV 0 in an RDMA Write: 0/2/05",
          _alone(segments.tagged(RdmapOpcode.WRITE, 0, 0, rdmap_version=0)), (Cause.RDMAP_INVALID_VERSION,)),
    *(
        Fault(f"opcode-{opcode:x}", ("R3",), f"Opcode {opcode:#x}, which there is not: 0/2/06",
              _of_opcode(opcode),
              (Cause.RDMAP_UNEXPECTED_OPCODE,))
        for opcode in (0xC, 0xD, 0xE, 0xF)
    ),
    *(
        Fault(f"{opcode.name.lower().replace('_', '-')}-tagged", ("R4",), f"{opcode.name} with T=1: 0/2/06",
              _alone(segments.tagged(opcode, BOGUS_STAG, 0, PAYLOAD)), NO_OPCODE, unclear=True)
        for opcode in (RdmapOpcode.SEND, RdmapOpcode.READ_REQUEST, RdmapOpcode.TERMINATE)
    ),
    *(
        Fault(f"{opcode.name.lower().replace('_', '-')}-untagged", ("R4",), f"{opcode.name} with T=0: 0/2/06",
              _of_opcode(opcode), NO_OPCODE, unclear=True)
        for opcode in (RdmapOpcode.WRITE, RdmapOpcode.READ_RESPONSE)
    ),
    *(
        Fault(f"{opcode.name.lower().replace('_', '-')}-on-queue-{qn}", ("R5",),
              f"{opcode.name} on queue {qn}: 1/2/01 or 0/2/06",
              _alone(segments.untagged(opcode, 2 if qn == QN_SEND else 1, payload, qn=qn)), NO_OPCODE, unclear=True)
        for opcode, qn, payload in (
            (RdmapOpcode.SEND, QN_REQUEST, PAYLOAD),
            (RdmapOpcode.SEND, QN_TERMINATE, PAYLOAD),
            (RdmapOpcode.SEND, QN_ATOMIC_RESPONSE, PAYLOAD),
            (RdmapOpcode.READ_REQUEST, QN_SEND, READ.pack()),
            (RdmapOpcode.TERMINATE, QN_SEND, bytes(4)),
        )
    ),
    Fault("read-unknown-stag", ("R17",), "A Read from an STag that there is not: 0/1/00",
          _request(READ.pack()), (Cause.RDMAP_INVALID_STAG,)),
    Fault("read-2-to-the-31", ("R16", "R17"), "A Read of 2^31 + 1 octets from an STag that there is not: 0/1/00",
          _request(ReadRequest(0x5111C, 0, 0x8000_0001, BOGUS_STAG, 0).pack()), PROTECTION),
    *(
        Fault(f"invalidate-unknown-stag-{opcode.name.lower().replace('_', '-')}", ("R32",),
              f"{opcode.name} of an STag that there is not: 0/1/09 or 0/2/09",
              _invalidating(opcode),
              (Cause.RDMAP_CANNOT_INVALIDATE, (0, 2, 9)))
        for opcode in (RdmapOpcode.SEND_INVALIDATE, RdmapOpcode.SEND_SOLICITED_INVALIDATE)
    ),
    Fault("read-request-short", ("R49",), "A Read Request of 27 octets", _request(READ.pack()[:27])),
    Fault("read-request-long", ("R49",), "A Read Request of 29 octets", _request(READ.pack() + b"\0")),
    Fault("read-request-of-two-segments", ("R49", "R8"), "A Read Request whose segment has L=0",
          lambda _: [segments.untagged(RdmapOpcode.READ_REQUEST, 1, READ.pack(), last=False),
                     segments.untagged(RdmapOpcode.READ_REQUEST, 1, b"", mo=28)]),
    Fault("read-response-unasked", ("R48",), "A Read Response that nobody asked for",
          _alone(segments.read_response(BOGUS_STAG, 0, b"x"))),
    Fault("read-response-unasked-empty", ("R48",), "A Read Response of no octets that nobody asked for",
          _alone(segments.read_response(0, 0))),
)  # fmt: skip

EXTENSION_FAULTS = (
    *(
        Fault(f"aopcode-{aopcode}", ("X5",), f"AOpCode {aopcode}, which there is not: 0/2/06",
              _atomic(aopcode), (*NO_ATOMICS, Cause.RDMAP_UNSPECIFIED), unclear=True)
        for aopcode in (1, 3, 15)
    ),
    Fault("atomic-unknown-stag", ("X18", "X28"), "An Atomic Request to an STag that there is not: 0/1/00, or 0/2/06",
          _alone(segments.atomic_request(1, ATOMIC)), NO_ATOMICS, unclear=True),
    Fault("atomic-request-short", ("X2",), "An Atomic Request of 51 octets",
          _alone(segments.untagged(RdmapOpcode.ATOMIC_REQUEST, 1, ATOMIC.pack()[:51]))),
    Fault("atomic-response-unasked", ("X29",), "An Atomic Response that nobody asked for",
          _alone(segments.atomic_response(1, AtomicResponse(7, 7)))),
    *(
        Fault(f"immediate-data-{size}", ("X24", "X28"), f"Immediate Data of {size} octets", _immediate(size))
        for size in (0, 7, 9)
    ),
)  # fmt: skip

FAULTS = (*DDP_FAULTS, *RDMAP_FAULTS, *EXTENSION_FAULTS)


def _register(fault: Fault) -> None:
    def run(probe: Probe) -> None:
        fault.run(probe)

    run.__name__, run.__doc__ = fault.name, f"{fault.title}."
    GROUP.either(*fault.rules, level=Level.MUST)(run)


for _fault in FAULTS:
    _register(_fault)
