"""The peer by hand notices what a peer under test does wrong, whatever the case looks at."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kbtp.conformance import segments
from kbtp.conformance.deviation import Deviation
from kbtp.conformance.memory import Memory
from kbtp.iwarp.rdmap import AtomicOperation, AtomicRequest, RdmapOpcode, ReadRequest
from tests.conformance.conftest import Pair


@pytest.mark.parametrize("markers", [False, True])
def test_messages_of_every_size_arrive(pair: Callable[..., Pair], markers: bool) -> None:
    ours, theirs = pair(markers=markers)
    for size in (0, 1, 1400, 1401, 5000):
        theirs.send(bytes(range(256)) * (size // 256) + bytes(size % 256))
        message = ours.next_send("a Send")
        assert (message.opcode, len(message.payload)) == (RdmapOpcode.SEND, size)


def test_reads_writes_and_atomics_of_both_sides(pair: Callable[..., Pair]) -> None:
    ours, theirs = pair()
    lent = ours.memory.lend(b"0123456789")
    request = theirs.request_read(lent.stag, lent.to + 2, 5)
    theirs.send(b"behind the Read")
    assert ours.next_send("a Send").payload == b"behind the Read"
    assert theirs.read_response(request) == b"23456"
    theirs.write(lent.stag, lent.to + 8, b"ab")
    theirs.send(b"")
    ours.next_send("a Send")
    assert lent.octets == b"01234567ab"
    assert lent.touched == [(2, 5), (8, 2)]


WRONG = {
    "MSN": segments.send(2, b"x"),
    "MO": segments.send(1, b"x", mo=4),
    "DDP version": segments.untagged(RdmapOpcode.SEND, 1, b"x", ddp_version=2),
    "RDMAP version": segments.untagged(RdmapOpcode.SEND, 1, b"x", rdmap_version=0),
    "opcode": segments.untagged(0xD, 1, b"x"),
    "queue": segments.untagged(RdmapOpcode.SEND, 1, b"x", qn=1),
    "Invalidate STag": segments.untagged(RdmapOpcode.SEND, 1, b"x", ulp_word=7),
    "size of a Read Request": segments.untagged(RdmapOpcode.READ_REQUEST, 1, bytes(27)),
    "Read Response that nothing asked for": segments.read_response(1, 0, b"x"),
    "short": b"\x41\x43",
}


@pytest.mark.parametrize("what", WRONG)
def test_what_no_message_may_be_is_noticed(pair: Callable[..., Pair], what: str) -> None:
    ours, theirs = pair()
    theirs.send_ulpdus(WRONG[what])
    with pytest.raises(Deviation):
        ours.message("a message")


def test_a_wrong_crc_is_noticed(pair: Callable[..., Pair]) -> None:
    ours, theirs = pair()
    fpdu = bytearray(theirs.fpdu(segments.send(1, b"x")))
    fpdu[-1] ^= 1
    theirs.send_octets(bytes(fpdu))
    with pytest.raises(Deviation, match="CRC"):
        ours.message("a message")


def test_terminates_and_what_follows_them(pair: Callable[..., Pair]) -> None:
    ours, theirs = pair(timeout_s=1.0)
    theirs.send_terminate(1, 2, 5)
    with pytest.raises(Deviation, match="0/0/00"):
        ours.expect_terminate((0, 0, 0))
    ours, theirs = pair()
    theirs.send_terminate(1, 2, 5)
    theirs.tcp.finish()
    assert ours.expect_terminate((0, 0, 0), (1, 2, 5)).terminate.code == 5
    ours, theirs = pair()
    theirs.send_terminate(1, 2, 5)
    theirs.send(b"x")
    with pytest.raises(Deviation, match="nothing after a Terminate"):
        ours.expect_terminate((1, 2, 5))


def test_no_wait_outlives_the_deadline(pair: Callable[..., Pair]) -> None:
    ours, _ = pair(timeout_s=0.05)
    with pytest.raises(Deviation, match="nothing within"):
        ours.next_send("a COMPLETION")
    with pytest.raises(Deviation, match="stopped reading"):
        ours.tcp.send(bytes(1 << 24))


def test_a_peer_that_goes_on_sending_does_not_keep_the_case(pair: Callable[..., Pair]) -> None:
    ours, theirs = pair(timeout_s=0.0)
    theirs.send_ulpdus(*(segments.write(0, 0) for _ in range(10)))
    for waits in (ours.expect_end, ours.tcp.expect_close, ours.next_send):
        with pytest.raises(Deviation, match="the end of the time of the case"):
            waits("what never comes")
    with pytest.raises(Deviation, match="octets"):
        ours.tcp.expect_no_octets("nothing may come", for_s=0.1)
    with pytest.raises(Deviation, match="the end of the time of the case"):
        ours.tcp.expect_no_octets("nothing may come", for_s=0.1)


def test_what_came_in_the_same_octets_is_no_silence(pair: Callable[..., Pair]) -> None:
    ours, theirs = pair()
    theirs.send_ulpdus(segments.send(1, b"allowed"), segments.send(2, b"forbidden"))
    ours.next_send("the first one")
    with pytest.raises(Deviation, match="silence"):
        ours.expect_silence("nothing may follow", for_s=0.05)


def test_half_an_fpdu_is_no_silence(pair: Callable[..., Pair]) -> None:
    ours, theirs = pair()
    allowed, forbidden = theirs.fpdu(segments.send(1, b"allowed")), theirs.fpdu(segments.send(2, b"forbidden"))
    theirs.send_octets(allowed + forbidden[:9])
    ours.next_send("the first one")
    with pytest.raises(Deviation, match="silence"):
        ours.expect_silence("nothing may follow", for_s=0.05)


def test_a_silence_that_there_is_no_time_for_was_not_seen(pair: Callable[..., Pair]) -> None:
    ours, _ = pair(timeout_s=0.05)
    with pytest.raises(Deviation, match="time of the case"):
        ours.expect_silence("nothing is sent", for_s=0.1)
    ours.tcp.expect_silence("nothing is sent", for_s=0.001)


def test_octets_behind_a_frame_are_kept_when_none_are_asked_for(pair: Callable[..., Pair]) -> None:
    ours, theirs = pair()
    theirs.send_octets(b"frame and more")
    assert (ours.tcp.receive(5, "a frame"), ours.tcp.receive(0, "nothing")) == (b"frame", b"")
    assert ours.tcp.receive(9, "the rest") == b" and more"


def test_an_atomic_without_its_response(pair: Callable[..., Pair]) -> None:
    ours, theirs = pair()
    theirs.send(b"instead")
    with pytest.raises(Deviation, match="an Atomic Response"):
        ours.fetch_add(1, 0, 1, 0)
    message = theirs.message("the Atomic Request")
    assert message is not None
    assert AtomicRequest.parse(message.payload).operation is AtomicOperation.FETCH_ADD


@pytest.mark.parametrize(("stag", "to", "size"), [(1, 0, 1), (0, 0xFFF, 1), (0, 0x1000, 11), (0, 0x1009, 2)], ids=str)
def test_memory_that_was_not_lent_is_not_touched(stag: int, to: int, size: int) -> None:
    memory = Memory()
    lent = memory.lend(10)
    with pytest.raises(Deviation):
        memory.read(ReadRequest(0, 0, size, lent.stag ^ stag, to))
    with pytest.raises(Deviation):
        memory.write(lent.stag ^ stag, to, bytes(size))
    assert lent.octets == bytes(10)


def test_memory_has_the_rights_it_was_lent_with() -> None:
    memory = Memory()
    to_read, to_write = memory.lend(4, writable=False), memory.lend(4, readable=False)
    with pytest.raises(Deviation):
        memory.write(to_read.stag, to_read.to, b"x")
    with pytest.raises(Deviation):
        memory.read(ReadRequest(0, 0, 1, to_write.stag, to_write.to))
    memory.take_back(to_read)
    with pytest.raises(Deviation):
        memory.read(ReadRequest(0, 0, 1, to_read.stag, to_read.to))
