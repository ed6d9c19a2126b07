"""vectors/iwarp.json, both ways: `fields` pack to `hex` and `hex` parses to `fields`; `expect` is what refuses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kbtp.iwarp.ddp import TaggedSegment, pack_tagged, pack_untagged, parse_segment
from kbtp.iwarp.fpdu import FpduDecoder, FpduEncoder
from kbtp.iwarp.mpa import (
    ActiveStartup,
    EnhancedWord,
    MpaFrame,
    MpaOptions,
    MpaRejected,
    MpaStartupError,
    Negotiated,
    PassiveStartup,
    RtrKind,
)
from kbtp.iwarp.rdmap import (
    AtomicOperation,
    AtomicRequest,
    AtomicResponse,
    RdmapOpcode,
    ReadRequest,
    control_octet,
    opcode_of,
)
from kbtp.iwarp.terminate import Offender, pack_terminate, parse_terminate
from kbtp.types import TerminateCause, TerminateInfo

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "iwarp.json").read_text())
GOOD_FRAMES = [v for v in VECTORS if "reply" in v.get("fields", ())]
GOOD_FPDUS = [v for v in VECTORS if "opcode" in v.get("fields", ())]
BAD_FRAMES = [v for v in VECTORS if v.get("expect") == "close"]
BAD_FPDUS = [v for v in VECTORS if isinstance(v.get("expect"), dict)]


def by_name(vectors: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", vectors, ids=[v["name"] for v in vectors])


def test_every_vector_is_used_and_has_its_length() -> None:
    assert len(GOOD_FRAMES) + len(GOOD_FPDUS) + len(BAD_FRAMES) + len(BAD_FPDUS) == len(VECTORS)
    assert all(len(bytes.fromhex(v["hex"])) == v["len"] for v in VECTORS)


def frame_of(fields: dict[str, Any]) -> MpaFrame:
    word = None
    if fields["word"] is not None:
        rtr = RtrKind.NONE
        for kind in fields["word"]["rtr"]:
            rtr |= RtrKind[kind]
        word = EnhancedWord(fields["word"]["ird"], fields["word"]["ord"], fields["word"]["peer_to_peer"], rtr)
    return MpaFrame(
        reply=fields["reply"],
        markers=fields["markers"],
        crc=fields["crc"],
        revision=fields["revision"],
        private_data=bytes.fromhex(fields["private_data"]),
        rejected=fields["rejected"],
        word=word,
    )


@by_name(GOOD_FRAMES)
def test_start_up_frame_packs(vector: dict[str, Any]) -> None:
    assert frame_of(vector["fields"]).pack().hex() == vector["hex"]


@by_name([v for v in GOOD_FRAMES if not v["fields"]["reply"]])
def test_request_parses(vector: dict[str, Any]) -> None:
    frame = frame_of(vector["fields"])
    request = PassiveStartup(MpaOptions()).receive_data(bytes.fromhex(vector["hex"]))
    assert request is not None
    assert request.private_data == frame.private_data
    assert (request.revision, request.wants_markers, request.wants_crc) == (frame.revision, frame.markers, frame.crc)
    assert request.enhanced == (frame.word is not None)
    if frame.word is not None:
        assert (request.peer_ird, request.peer_ord) == (frame.word.ird, frame.word.ord_)
        assert request.rtr_offered == frame.word.rtr


@by_name([v for v in GOOD_FRAMES if v["fields"]["reply"]])
def test_reply_parses(vector: dict[str, Any]) -> None:
    frame = frame_of(vector["fields"])
    startup = ActiveStartup(MpaOptions(revision=frame.revision), b"", ird=16, ord_=16)
    result = startup.receive_data(bytes.fromhex(vector["hex"]))
    if frame.rejected:
        assert result == MpaRejected(frame.private_data, peer_ird=0, peer_ord=0)
        return
    assert isinstance(result, Negotiated)
    assert (result.crc, result.tx_markers, result.private_data) == (True, frame.markers, frame.private_data)
    if frame.word is not None:
        assert (result.peer_ird, result.peer_ord) == (frame.word.ird, frame.word.ord_)


def message_of(fields: dict[str, Any]) -> bytes:
    """The octets after the DDP header, packed from the fields of whatever message it is."""
    if "read_request" in fields:
        return ReadRequest(**fields["read_request"]).pack()
    if "atomic_request" in fields:
        request = dict(fields["atomic_request"])
        return AtomicRequest(operation=AtomicOperation[request.pop("operation")], **request).pack()
    if "atomic_response" in fields:
        return AtomicResponse(**fields["atomic_response"]).pack()
    if "terminate" in fields:
        info = fields["terminate"]
        cause = TerminateCause((info["layer"], info["etype"], info["code"]))
        header, rdmap_header = bytes.fromhex(info["ddp_header"]), bytes.fromhex(info["rdmap_header"])
        offender = Offender(info["ddp_segment_length"], header, rdmap_header) if header else None
        return pack_terminate(cause, offender)
    return bytes.fromhex(fields["payload"])


@by_name(GOOD_FPDUS)
def test_fpdu_packs(vector: dict[str, Any]) -> None:
    fields = vector["fields"]
    control = control_octet(RdmapOpcode[fields["opcode"]])
    if "stag" in fields:
        header = pack_tagged(control, fields["stag"], fields["to"], last=fields["last"])
    else:
        numbers = (fields["ulp_word"], fields["qn"], fields["msn"], fields["mo"])
        header = pack_untagged(control, *numbers, last=fields["last"])
    encoder = FpduEncoder(crc=fields["crc"], markers=fields["markers"])
    assert encoder.encode((header, message_of(fields))).hex() == vector["hex"]


@by_name(GOOD_FPDUS)
def test_fpdu_parses(vector: dict[str, Any]) -> None:
    fields = vector["fields"]
    decoder = FpduDecoder(crc=fields["crc"], markers=fields["markers"])
    (ulpdu,) = decoder.receive(bytes.fromhex(vector["hex"]))
    segment = parse_segment(ulpdu)
    assert opcode_of(segment) is RdmapOpcode[fields["opcode"]]
    assert segment.last == fields["last"]
    if isinstance(segment, TaggedSegment):
        assert (segment.stag, segment.to) == (fields["stag"], fields["to"])
    else:
        numbers = (segment.ulp_word, segment.qn, segment.msn, segment.mo)
        assert numbers == (fields["ulp_word"], fields["qn"], fields["msn"], fields["mo"])
    if "read_request" in fields:
        assert ReadRequest.parse(segment.payload) == ReadRequest(**fields["read_request"])
    elif "atomic_request" in fields:
        request = dict(fields["atomic_request"])
        request["operation"] = AtomicOperation[request["operation"]]
        assert AtomicRequest.parse(segment.payload) == AtomicRequest(**request)
    elif "atomic_response" in fields:
        assert AtomicResponse.parse(segment.payload) == AtomicResponse(**fields["atomic_response"])
    elif "terminate" in fields:
        info = dict(fields["terminate"])
        info["ddp_header"], info["rdmap_header"] = map(bytes.fromhex, (info["ddp_header"], info["rdmap_header"]))
        assert parse_terminate(segment.payload) == TerminateInfo(**info)
    else:
        assert segment.payload == bytes.fromhex(fields["payload"])


@by_name(BAD_FRAMES)
def test_bad_request_closes(vector: dict[str, Any]) -> None:
    with pytest.raises(MpaStartupError):
        PassiveStartup(MpaOptions()).receive_data(bytes.fromhex(vector["hex"]))


@by_name(BAD_FPDUS)
def test_bad_fpdu_gets_its_terminate(vector: dict[str, Any], new_end: Any) -> None:
    end = new_end(active=False)
    end.receive(wr_id=1)
    before = bytes(next(iter(end.memory.regions.values())).octets)

    end.stream.receive_data(bytes.fromhex(vector["hex"]))

    expected = (vector["expect"]["layer"], vector["expect"]["etype"], vector["expect"]["code"])
    assert end.terminates() == expected
    (failed,) = end.events()
    assert (failed.error.cause.layer, failed.error.cause.etype, failed.error.cause.code) == expected
    assert bytes(next(iter(end.memory.regions.values())).octets) == before
