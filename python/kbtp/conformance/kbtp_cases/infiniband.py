"""What a target does on InfiniBand and RoCEv2 streams alone: completion records (draft 6.5, 9.2; profile 2, 7)."""

from __future__ import annotations

from dataclasses import replace

from kbtp.conformance.case import Group
from kbtp.conformance.deviation import expect
from kbtp.conformance.initiator_side import InitiatorSide
from kbtp.conformance.kbtp_cases.blocks import pattern
from kbtp.conformance.kbtp_cases.hello import patched
from kbtp.conformance.memory import Lent
from kbtp.conformance.probe import TargetProbe
from kbtp.iwarp.rdmap import RdmapOpcode
from kbtp.limits import COMPLETION_RECORD_BYTES
from kbtp.types import Feature, RequestFlag, Status
from kbtp.wire import AllocStore, Completion, CompletionDescriptor, CompletionRecord, Free, Load, Store

GROUP = Group("records", needs=("infiniband",))

FEATURES = Feature.RECORD_COMPLETION | Feature.INVALIDATE
Recorded = Load | Store | AllocStore | Free
UNTOUCHED = b"\xee" * COMPLETION_RECORD_BYTES


def recording(probe: TargetProbe) -> InitiatorSide:
    side = probe.session(requested_features=FEATURES)
    granted = side.ack.granted_features
    expect(bool(granted & Feature.RECORD_COMPLETION), "RECORD_COMPLETION granted (draft 6.5)", granted)
    return side


def with_record(request: Recorded, place: Lent) -> Recorded:
    return replace(
        request, flags=request.flags | RequestFlag.RECORD, completion=CompletionDescriptor(place.stag, place.to)
    )


def record_of(side: InitiatorSide, request: Recorded) -> CompletionRecord:
    """Sent with RECORD, and answered by a record. Raises `Deviation`."""
    place = side.stream.memory.lend(UNTOUCHED, readable=False)
    asked = with_record(request, place)
    side.stream.send(asked.pack())
    what = "an RDMA Write with Immediate (draft 9.2)"
    message = side.stream.next_send(what)
    expect(message.opcode is RdmapOpcode.IMMEDIATE, what, message)
    low = (request.request_id & 0xFFFF_FFFF).to_bytes(4, "big")
    expect(message.payload[-4:] == low, f"{low.hex()}, the low 32 bits of the Request ID (profile 7)", message.payload)
    record = CompletionRecord.parse(bytes(place.octets))
    side.note_completion(Completion(record.request_id, request.handle, record.generation, record.status))
    return record


@GROUP.target("KY2", "KY5")
def every_request_has_its_record(probe: TargetProbe) -> None:
    """With RECORD each request gets a record, written with its immediate, that says what a COMPLETION would."""
    side = recording(probe)
    handle, octets = side.handle(0), pattern(5000)
    bound = record_of(side, side.alloc_store(handle, side.stream.memory.lend(octets), flags=RequestFlag.NONE))
    expect(bound.status is Status.SUCCESS and bound.data_length == 5000, "SUCCESS, 5000 octets", bound)
    stored = record_of(side, side.store(handle, side.stream.memory.lend(octets[:300]), flags=RequestFlag.SEAL))
    told = (stored.status, stored.data_length, stored.generation)
    expect(told == (Status.SUCCESS, 300, bound.generation), "SUCCESS, 300 octets, the same Generation", told)
    into = side.stream.memory.lend(300)
    loaded = record_of(side, side.load(handle, into))
    expect(replace(loaded, request_id=stored.request_id) == stored, "what the STORE's record said", loaded)
    expect(bytes(into.octets) == octets[:300], "the data before its record (draft 6.5)", into.octets.hex())
    freed = record_of(side, side.free(handle))
    told = (freed.status, freed.data_length, freed.block_offset)
    expect(told == (Status.SUCCESS, 0, 0), "SUCCESS of the FREE, zeros else", told)


@GROUP.target("KY2", "KY5")
def errors_have_their_record(probe: TargetProbe) -> None:
    """A status that is no SUCCESS is recorded too."""
    side = recording(probe)
    side.bind(0, b"bound")
    handle, unbound = side.handle(0), side.handle(1)
    for request, status in (
        (side.load(unbound, None), Status.NOT_BOUND),
        (side.load(side.nowhere, None), Status.HANDLE_OUT_OF_RANGE),
        (side.load(handle, None), Status.LENGTH_ERROR),
        (side.alloc_store_inline(handle, b"x"), Status.ALREADY_BOUND),
        (side.store_inline(handle, b"x"), Status.SEALED),
        (side.free(handle, generation=7777), Status.GENERATION_MISMATCH),
    ):
        record = record_of(side, request)
        expect(record.status is status, status.name, record.status.name)


@GROUP.target("KY6")
def no_record_of_what_makes_no_sense(probe: TargetProbe) -> None:
    """A MALFORMED or UNSUPPORTED request gets a COMPLETION even with RECORD; INVALIDATE with RECORD is UNSUPPORTED."""
    side = recording(probe)
    lent, place = side.stream.memory.lend(64), side.stream.memory.lend(UNTOUCHED, readable=False)
    load = with_record(side.load(side.first, lent), place).pack()
    for what, octets, status in (
        ("one octet less", load[:-1], Status.MALFORMED),
        ("one octet more", load + b"?", Status.MALFORMED),
        ("no Completion Descriptor", load[:40], Status.MALFORMED),
        ("version 3", patched(load, 0, b"\x03"), Status.UNSUPPORTED),
        ("INVALIDATE with RECORD", patched(load, 3, bytes([load[3] | RequestFlag.INVALIDATE])), Status.UNSUPPORTED),
    ):
        side.send(octets)
        came = side.answer().status
        expect(came is status, f"a COMPLETION with {status.name}: {what}", came.name)
    expect(place.unwritten, "no record", place.octets.hex())


@GROUP.target("KY7")
def no_record_that_was_not_granted(probe: TargetProbe) -> None:
    """RECORD in a session that did not ask for RECORD_COMPLETION is UNSUPPORTED."""
    side = probe.session(requested_features=Feature.INVALIDATE)
    expect(not side.ack.granted_features & Feature.RECORD_COMPLETION, "what was asked for", side.ack.granted_features)
    place = side.stream.memory.lend(UNTOUCHED, readable=False)
    side.send(with_record(side.load(side.first, None), place).pack())
    came = side.answer().status
    expect(came is Status.UNSUPPORTED, "a COMPLETION with UNSUPPORTED", came.name)
    expect(place.unwritten, "no record", place.octets.hex())


@GROUP.target("KY8", needs=("direct-alloc",))
def head_has_the_unmasked_form(probe: TargetProbe) -> None:
    """DIRECT_ALLOC is granted without MASKED_ATOMICS; Head has the Ticket above and zero in its low 32 bits."""
    side = probe.session(requested_features=Feature.DIRECT_ALLOC, requested_quota=2)
    granted = side.ack.granted_features
    expect(bool(granted & Feature.DIRECT_ALLOC), "DIRECT_ALLOC granted (draft 9.2)", granted)
    stream, ack = side.stream, side.ack
    for ticket in range(2):
        value = stream.fetch_add(ack.head_stag, ack.head_offset, 1 << 32, 0)
        expect(value & 0xFFFF_FFFF == 0, "zero in the low 32 bits", hex(value))
        expect(value >> 32 == ticket, f"Ticket {ticket}", hex(value))
