"""The iWARP cases find faults: with a rule taken out of the reference stack those that look at it fail.

What is replaced is a name in the module that uses it, so that the peer by hand, which is made of the same parts, is not
broken with it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kbtp import atomics
from kbtp.conformance.result import Outcome
from kbtp.conformance.setup import BY_HAND
from kbtp.errors import PeerMisbehaved
from kbtp.iwarp import fpdu, inbound, mpa, outbound, state
from kbtp.iwarp.ddp import UntaggedSegment
from kbtp.iwarp.inbound import Inbound
from kbtp.iwarp.terminate import Offender
from kbtp.rnic.reference import operation
from kbtp.types import Feature, TerminateCause
from kbtp.verbs import stag_table
from kbtp.verbs.stag_table import Region, StreamView
from tests.conformance.conftest import cases_named, run_against
from tests.conformance.test_broken_initiators import WORKLOAD, run, script

DIRECT = {"pool_blocks": 64, "direct_blocks": 32, "direct": Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC}
PATIENCE_S = 1.5  # with what never comes
HAS = frozenset({"no-keys", "direct-load", "direct-alloc"})


class LaxDecoder(fpdu.FpduDecoder):
    def __init__(self, *, crc: bool, markers: bool) -> None:
        super().__init__(crc=False, markers=markers)


class Encoder(fpdu.FpduEncoder):
    """Makes FPDUs as it should, and then `spoil` has its way with them."""

    spoil: Callable[[bytearray], None]

    def encode(self, pieces: Any) -> bytes:
        octets = bytearray(super().encode(pieces))
        type(self).spoil(octets)
        return bytes(octets)


def encoder(spoil: Callable[[bytearray], None]) -> type[Encoder]:
    return type("Spoilt", (Encoder,), {"spoil": staticmethod(spoil)})


def big_endian_crc(octets: bytearray) -> None:
    octets[-4:] = octets[:-5:-1]


def with_pad_of_ones(octets: bytearray) -> None:
    pad = -(2 + int.from_bytes(octets[:2], "big")) % 4
    if pad:
        octets[-4 - pad : -4] = b"\xff" * pad
        octets[-4:] = fpdu.wire_crc(bytes(octets[:-4]))


def with_ddp_reserved_bits(octets: bytearray) -> None:
    octets[2] |= 0x3C
    octets[-4:] = fpdu.wire_crc(bytes(octets[:-4]))


def with_rdmap_reserved_bits(octets: bytearray) -> None:
    octets[3] |= 0x30
    octets[-4:] = fpdu.wire_crc(bytes(octets[:-4]))


class UnmarkedEncoder(fpdu.FpduEncoder):
    def __init__(self, *, crc: bool, markers: bool) -> None:
        super().__init__(crc=crc, markers=False)


class PointlessEncoder(fpdu.FpduEncoder):
    """Its markers all have FPDUPTR 0."""

    def _with_markers(self, body: bytes) -> bytes:
        start = self._position
        marked = bytearray(super()._with_markers(body))
        for at in range(-start % 512, len(marked), 512):
            marked[at : at + 4] = bytes(4)
        return bytes(marked)


def any_msn(self: Inbound, segment: UntaggedSegment, opcode: Any, ulpdu: memoryview) -> None:
    self._expected_msn[segment.qn] = segment.msn
    UNTAGGED(self, segment, opcode, ulpdu)


UNTAGGED = Inbound._untagged


def terminate_too(self: state.StreamState, info: Any) -> None:
    """A Terminate is answered with another."""
    ENDED_BY_PEER(self, info)
    self.end_with(TerminateCause.LOCAL_CATASTROPHIC, None)


ENDED_BY_PEER = state.StreamState.ended_by_peer


def quoting_nothing(cause: TerminateCause, offender: Offender | None) -> bytes:
    return PACK_TERMINATE(cause, None)


PACK_TERMINATE = state.pack_terminate


def always_lost(cause: TerminateCause, offender: Offender | None) -> bytes:
    return PACK_TERMINATE(TerminateCause.RDMAP_UNSPECIFIED, offender)


EnhancedWord = mpa.EnhancedWord


class GreedyWord(mpa.EnhancedWord):
    """ORD is one more than it should be."""

    def pack(self) -> bytes:
        return EnhancedWord.pack(EnhancedWord(self.ird, self.ord_ + 1, self.peer_to_peer, self.rtr))


class WordWithoutRtr(mpa.EnhancedWord):
    def pack(self) -> bytes:
        return EnhancedWord.pack(EnhancedWord(self.ird, self.ord_, False))


def without_bounds(self: StreamView, stag: int, to: int, length: int, causes: Any) -> Region:
    """An STag is good for the whole of memory: what is outside comes from its beginning."""
    region = self.table.region(stag)
    if region is None:
        raise PeerMisbehaved(causes.unknown, "no STag")
    if not region.reachable_from(self):
        raise PeerMisbehaved(causes.foreign, "not of this stream")
    return region


def around(region: Region, to: int, length: int) -> memoryview:
    start = max(0, min(to - region.base_to, region.length - length))
    return region.view[start : start + length]


def whatever_the_rights(causes: str) -> Callable[..., memoryview]:
    def reach(self: StreamView, stag: int, to: int, length: int) -> memoryview:
        return stag_table._slice(self._reach(stag, to, length, getattr(stag_table, causes)), to, length)

    return reach


def counting() -> Callable[[int], int]:
    numbers = count(0x1000, 0x100)
    return lambda _bits: next(numbers)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is replaced in the stack, and the cases that have to fail for it."""

    replaced: tuple[tuple[Any, str, Any], ...]
    caught_by: tuple[str, ...]


FAULTS = {
    # --- MPA ---
    "any key": Fault(
        ((mpa._FrameReader, "_check_key", lambda self: None),),
        ("mpa-startup/wrong-request-key", "mpa-startup/reply-where-a-request-is-due"),
    ),
    "any revision": Fault(
        (
            (mpa, "REVISION_PLAIN", 0),
            (mpa.MpaOptions, "__post_init__", lambda self: object.__setattr__(self, "revision", 255)),
        ),
        ("mpa-startup/revision-that-nobody-speaks",),
    ),
    "private data of any length": Fault(
        ((mpa, "MPA_PRIVATE_DATA_MAX_BYTES", 1 << 16),), ("mpa-startup/too-much-private-data",)
    ),
    "S ignored": Fault(
        ((mpa, "_S", 0),),
        ("rfc6581/no-room-for-the-word", "rfc6581/enhanced-request-gets-an-enhanced-reply"),
    ),
    "ORD beyond IRD": Fault(((mpa, "EnhancedWord", GreedyWord),), ("rfc6581/ord-of-the-reply",)),
    "A of the Request ignored": Fault(((mpa, "EnhancedWord", WordWithoutRtr),), ("rfc6581/kinds-of-rtr-in-the-reply",)),
    "CRC unchecked": Fault(
        ((inbound, "FpduDecoder", LaxDecoder),),
        (
            "mpa-framing/one-wrong-bit",
            "mpa-framing/nothing-is-delivered-after-a-wrong-crc",
            "mpa-startup/crc-whatever-the-peer-wants",
            "terminates/llp-error",
        ),
    ),
    "CRC in the other order": Fault(
        ((outbound, "FpduEncoder", encoder(big_endian_crc)),), ("mpa-framing/crc-of-every-message",)
    ),
    "PAD": Fault(((outbound, "FpduEncoder", encoder(with_pad_of_ones)),), ("mpa-framing/messages-of-every-size",)),
    "MULPDU": Fault(
        ((operation, "mulpdu_for_emss", lambda emss_bytes, *, markers: 64768),),
        ("mpa-framing/segments-fit-the-emss", "mpa-framing/smallest-mulpdu"),
    ),
    "no markers": Fault(((outbound, "FpduEncoder", UnmarkedEncoder),), ("mpa-markers/marker-at-every-512th-octet",)),
    "FPDUPTR": Fault(
        (
            (outbound, "FpduEncoder", PointlessEncoder),
            (fpdu.FpduDecoder, "_without_markers", fpdu.FpduDecoder._without_markers),
        ),
        ("mpa-markers/pointers-of-markers",),
    ),
    # --- DDP and RDMAP ---
    "DDP reserved bits": Fault(
        ((outbound, "FpduEncoder", encoder(with_ddp_reserved_bits)),), ("ddp-messages/ddp-control-of-all",)
    ),
    "RDMAP reserved bits": Fault(
        ((outbound, "FpduEncoder", encoder(with_rdmap_reserved_bits)),), ("ddp-messages/rdmap-control-of-all",)
    ),
    "any MSN": Fault(((Inbound, "_untagged", any_msn),), ("faults/msn-again", "faults/msn-ahead", "faults/msn-zero")),
    "IRD unchecked": Fault(((Inbound, "_check_ird", lambda self: None),), ("direct-access/flood-of-reads",)),
    # --- Terminate ---
    "nothing quoted": Fault(
        ((state, "pack_terminate", quoting_nothing),),
        ("terminates/tagged-error", "terminates/untagged-error", "terminates/read-error"),
    ),
    "one code for all": Fault(
        ((state, "pack_terminate", always_lost),),
        ("faults/rdmap-version-0", "faults/queue-7", "faults/unknown-stag", "terminates/only-the-first-error"),
    ),
    "Terminate answered": Fault(
        ((state.StreamState, "ended_by_peer", terminate_too),), ("terminates/terminate-is-not-answered",)
    ),
    # --- memory ---
    "no bounds": Fault(
        ((StreamView, "_reach", without_bounds), (stag_table, "_slice", around)),
        (
            "direct-access/reads-outside-by-one-octet",
            "direct-access/writes-across-the-ends-of-a-partition",
            "direct-access/read-that-wraps",
            "atomics/outside-of-head",
        ),
    ),
    "no streams": Fault(
        ((Region, "reachable_from", lambda self, view: True),),
        (
            "direct-access/reads-through-stags-of-another-stream",
            "direct-access/write-to-a-partition-of-another-stream",
            "direct-access/invalidate-of-another-stream",
            "atomics/head-of-another-stream",
        ),
    ),
    "all rights": Fault(
        (
            (StreamView, "place", whatever_the_rights("_WRITE_CAUSES")),
            (StreamView, "read_source", whatever_the_rights("_READ_CAUSES")),
        ),
        (
            "direct-access/reads-of-what-may-be-written",
            "direct-access/writes-to-ring-and-head",
            "direct-access/writes-to-what-may-be-read",
        ),
    ),
    "nothing invalidated": Fault(
        ((StreamView, "invalidate", lambda self, stag: None),),
        ("direct-access/send-with-invalidate", "faults/invalidate-unknown-stag-send-invalidate"),
    ),
    "STags counted": Fault(((secrets, "randbits", counting()),), ("security/stags-of-sinks",)),
    # --- atomics ---
    "Add Mask ignored": Fault(
        ((inbound, "fetch_add", lambda old, add_data, add_mask: atomics.fetch_add(old, add_data, 0)),),
        ("atomics/add-of-two-words", "atomics/add-without-carry", "atomics/add-under-any-mask"),
    ),
    "Compare Mask ignored": Fault(
        (
            (
                inbound,
                "compare_swap",
                lambda old, swap_data, swap_mask, compare_data, compare_mask: atomics.compare_swap(
                    old, swap_data, swap_mask, compare_data, (1 << 64) - 1 if compare_mask else 0
                ),
            ),
        ),
        ("atomics/compare-and-swap-under-masks",),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault = FAULTS[name]
    looking = cases_named(*fault.caught_by)
    right = run_against(serve(**DIRECT), looking, has=BY_HAND | HAS)
    assert {result.outcome for result in right.values()} == {Outcome.PASSED}, right
    for where, attribute, by in fault.replaced:
        monkeypatch.setattr(where, attribute, by)
    wrong = run_against(serve(**DIRECT), [replace(case, timeout_s=PATIENCE_S) for case in looking], has=BY_HAND | HAS)
    assert {case: result.outcome for case, result in wrong.items()} == dict.fromkeys(fault.caught_by, Outcome.FAILED)
    assert all(result.expected and result.saw for result in wrong.values())


# What an initiator does before it starts its workload.
OF_INITIATORS = {
    "CRC unchecked": (
        """
from kbtp.iwarp import fpdu, inbound
inbound.FpduDecoder = lambda *, crc, markers: fpdu.FpduDecoder(crc=False, markers=markers)
""",
        ("mpa-framing/no-completion-is-delivered-after-a-wrong-crc", "terminates/llp-error"),
    ),
    "no bounds": (
        """
from kbtp.verbs import stag_table
stag_table.StreamView._reach = lambda self, stag, to, length, causes: self.table.region(stag)
stag_table._slice = lambda region, to, length: region.view[:length]
""",
        ("placement/write-behind-the-buffer", "placement/write-that-wraps", "reads/read-one-octet-behind"),
    ),
    "no rights": (
        """
from kbtp.verbs import stag_table
from kbtp.verbs.api import Access
stag_table.Region.access = property(lambda self: Access.REMOTE_READ | Access.REMOTE_WRITE)
stag_table.StagTable._grant_change = lambda self, start, end: None
stag_table.bisect_left = lambda starts, address: slice(0, 0)
""",
        ("placement/write-to-what-may-be-read", "reads/read-of-what-may-be-written"),
    ),
    "speaks first": (
        """
from kbtp.iwarp import mpa
mpa.ActiveStartup.request = property(lambda self: self._request + bytes(4))
""",
        ("mpa-startup/nothing-behind-the-request",),
    ),
}


@pytest.mark.parametrize("name", OF_INITIATORS)
def test_a_fault_of_an_initiator_is_caught(tmp_path: Path, name: str) -> None:
    fault, caught_by = OF_INITIATORS[name]
    right = run(WORKLOAD, caught_by)
    assert {result.outcome for result in right.values()} == {Outcome.PASSED}, right
    program = f"import sys\nfrom kbtp.conformance import workload\n{fault}\nsys.exit(workload.main())\n"
    wrong = run([*script(tmp_path, program), "--rnic", "reference"], caught_by, timeout_s=2 * PATIENCE_S)
    assert {case: result.outcome for case, result in wrong.items()} == dict.fromkeys(caught_by, Outcome.FAILED)
