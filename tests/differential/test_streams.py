"""Both iWARP streams, told the same, do the same: exchanges of two ends, and one end that hears anything."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbtp.iwarp.crc32c import wire_crc
from kbtp.iwarp.fpdu import FpduEncoder
from kbtp.types import TerminateCause

# The first use of `native_stack` may have to build it.
pytestmark = pytest.mark.timeout(600)

STAG_STEP, FIRST_STAG = 0x1111, 0xABCD_0001
REGION_BYTES, BASE_TO = 96, 0x1000
M64 = (1 << 64) - 1
ALL_RIGHTS = 7

POSTS = ("receive", "send", "write", "read", "fetch_add", "compare_swap", "immediate")

Move: TypeAlias = tuple[Any, ...]


def _region(scope: str, access: int = ALL_RIGHTS, base_to: int = BASE_TO, length_bytes: int = REGION_BYTES) -> Any:
    octets = bytes(at & 0xFF for at in range(length_bytes)).hex()
    return {"octets": octets, "access": access, "base_to": base_to, "scope": scope}


# Their STags are FIRST_STAG and so on, since nothing was drawn before.
REGIONS = [
    _region("stream", length_bytes=12_000),
    _region("domain"),
    _region("stream", access=1),
    _region("stream", access=2),
    _region("stream", access=0),
    _region("other_stream"),
    _region("other_domain"),
    _region("stream", base_to=M64 + 1 - REGION_BYTES),
    _region("stream", base_to=0),
]

MASKS = st.sampled_from([0, 1, 0xFF, 1 << 63, M64])
STAGS = st.one_of(
    st.just(FIRST_STAG),
    st.integers(0, len(REGIONS) + 6).map(lambda n: FIRST_STAG + n * STAG_STEP),
    st.sampled_from([0, 1, 0xFFFF_FFFF]),
)
OFFSETS = st.one_of(
    st.integers(BASE_TO - 2, BASE_TO + REGION_BYTES + 2),
    st.integers(0, 12).map(lambda n: BASE_TO + 8 * n),
    st.integers(M64 - REGION_BYTES - 2, M64),
    st.integers(0, 9),
)
SIZES = st.one_of(st.integers(0, 40), st.integers(0, 700), st.sampled_from([2048, 5000, 9000]))
PIECES = st.lists(SIZES.map(lambda size: bytes(at * 7 & 0xFF for at in range(size)).hex()), max_size=3)
BOOLEANS = st.booleans()

WORK = st.one_of(
    st.builds(dict, do=st.just("send"), pieces=PIECES, invalidate_stag=st.none() | STAGS, solicited=BOOLEANS),
    st.builds(dict, do=st.just("write"), pieces=PIECES, stag=STAGS, to=OFFSETS),
    st.builds(dict, do=st.just("read"), length_bytes=SIZES, stag=STAGS, to=OFFSETS),
    st.builds(dict, do=st.just("fetch_add"), stag=STAGS, to=OFFSETS, operands=st.lists(MASKS, min_size=2, max_size=2)),
    st.builds(
        dict, do=st.just("compare_swap"), stag=STAGS, to=OFFSETS, operands=st.lists(MASKS, min_size=4, max_size=4)
    ),
    st.builds(dict, do=st.just("immediate"), data=st.binary(min_size=8, max_size=8).map(bytes.hex), solicited=BOOLEANS),
)
# Work that an honest peer, with rights to the first region, lets succeed.
HONEST_STAGS, HONEST_OFFSETS = st.just(FIRST_STAG), st.integers(0, 12).map(lambda n: BASE_TO + 8 * n)
HONEST_WORK = st.one_of(
    st.builds(dict, do=st.just("send"), pieces=PIECES, invalidate_stag=st.none(), solicited=BOOLEANS),
    st.builds(dict, do=st.just("write"), pieces=PIECES.map(lambda p: p[:1]), stag=HONEST_STAGS, to=HONEST_OFFSETS),
    st.builds(dict, do=st.just("read"), length_bytes=SIZES, stag=HONEST_STAGS, to=HONEST_OFFSETS),
    st.builds(
        dict,
        do=st.just("fetch_add"),
        stag=HONEST_STAGS,
        to=HONEST_OFFSETS,
        operands=st.lists(MASKS, min_size=2, max_size=2),
    ),
    st.builds(dict, do=st.just("immediate"), data=st.just("0102030405060708"), solicited=BOOLEANS),
)

OPTIONS = st.fixed_dictionaries(
    {
        "crc": st.sampled_from([True, True, False]),
        "tx_markers": BOOLEANS,
        "rx_markers": BOOLEANS,
        "ird": st.integers(0, 3),
        "ord": st.integers(0, 3),
        "rtr": st.sampled_from([0, 0, 1, 2, 4]),
        "failure": st.none(),
    }
)
MULPDUS = st.sampled_from([128, 1454, 4000, 64768])
FIRST_MSNS = st.none() | st.just([0xFFFF_FFFF] * 4)
SIDES = st.integers(0, 1)
CAUSES = st.sampled_from([list(cause.value) for cause in TerminateCause])

# What the owner of an end does, apart from posting work.
LOCAL = st.one_of(
    st.builds(dict, do=st.just("revoke"), region=st.integers(0, len(REGIONS) - 1)),
    st.builds(dict, do=st.just("close_other_stream")),
    st.builds(dict, do=st.just("set_mulpdu"), mulpdu=MULPDUS),
)
ENDING = st.one_of(
    st.builds(dict, do=st.just("terminate"), cause=CAUSES),
    st.builds(dict, do=st.just("eof")),
    st.builds(dict, do=st.just("flush")),
)
RECEIVE = st.builds(dict, do=st.just("receive"), length_bytes=st.sampled_from([0, 64, 700, 27_000]))
OUT = st.builds(dict, do=st.just("out"), limit_bytes=st.sampled_from([1, 500, 1 << 20]))
CARRY = st.tuples(st.just("carry"), SIDES, st.sampled_from([1, 3, 20, 300, 5000, 1 << 20]))


def own(*steps: Any) -> st.SearchStrategy[Move]:
    return st.tuples(st.just("own"), SIDES, st.one_of(*steps))


@st.composite
def weighted(draw: st.DrawFn, *choices: tuple[int, st.SearchStrategy[Move]]) -> Move:
    """One of the strategies, each as often as its number says: hypothesis would take all of them alike."""
    bag = [strategy for weight, strategy in choices for _ in range(weight)]
    return draw(bag[draw(st.integers(0, len(bag) - 1))])


HONEST_MOVES = weighted((6, own(HONEST_WORK)), (2, own(RECEIVE)), (4, own(OUT)), (5, CARRY))
HOSTILE_MOVES = weighted(
    (20, own(HONEST_WORK)),
    (4, own(WORK)),
    (6, own(RECEIVE)),
    (14, own(OUT)),
    (20, CARRY),
    (2, own(LOCAL)),
    (1, own(ENDING)),
    (1, st.tuples(st.just("flip"), SIDES, st.integers(0, 400), st.integers(1, 255))),
    (1, st.tuples(st.just("drop"), SIDES, st.integers(0, 400), st.integers(1, 5))),
    (4, st.tuples(st.just("forge"), SIDES, st.integers(1, 3), st.integers(0, 60), st.integers(1, 255))),
)


def _end(end: Any) -> None:
    end.do({"do": "out", "limit_bytes": 1 << 20})
    for step in ("eof", "flush"):
        end.do({"do": step})
    end.do({"do": "out", "limit_bytes": 1 << 20})


class Connection:
    """Two recorded ends, and the FPDUs between them; what is half delivered lies in front."""

    def __init__(self, ends: tuple[Any, Any]) -> None:
        self.ends = ends
        self.in_flight: tuple[list[bytearray], list[bytearray]] = ([], [])
        self._wr_id = 0

    def move(self, kind: str, side: int, *how: Any) -> None:
        if kind == "own":
            self._own(side, how[0])
        elif kind == "carry":
            self._carry(side, how[0])
        elif kind == "forge":
            self._forge(side, *how)
        else:
            self._damage(kind, side, *how)

    def _own(self, side: int, step: dict[str, Any]) -> None:
        end = self.ends[side]
        # While a longer FPDU is half there, this comes before it in Python and behind its header in Rust.
        if end.in_long_fpdu and step["do"] in ("receive", "out", "revoke", "close_other_stream"):
            return
        if step["do"] in POSTS:
            self._wr_id += 1
            step = {**step, "wr_id": self._wr_id}
        result = end.do(step)
        if step["do"] == "out":
            self.in_flight[side].extend(bytearray.fromhex(fpdu) for fpdu in result)

    def _carry(self, side: int, size_bytes: int) -> None:
        flight, octets = self.in_flight[side], bytearray()
        while flight and len(octets) < size_bytes:
            part = flight[0][: size_bytes - len(octets)]
            octets += part
            del flight[0][: len(part)]
            if not flight[0]:
                del flight[0]
        if octets:
            self.ends[1 - side].do({"do": "hear", "octets": octets.hex()})

    def _damage(self, kind: str, side: int, at: int, how: int) -> None:
        for fpdu in self.in_flight[side]:
            if at < len(fpdu):
                if kind == "flip":
                    fpdu[at] ^= how
                else:
                    del fpdu[at : at + how]
                return
            at -= len(fpdu)

    def _forge(self, side: int, which: int, at: int, xor: int) -> None:
        """Another ULPDU under a right CRC."""
        flight, options = self.in_flight[side], self.ends[side].script["options"]
        if which >= len(flight) or options["tx_markers"]:
            return
        fpdu = flight[which]
        at = 2 + at % max(1, len(fpdu) - 6)
        fpdu[at] ^= xor
        if options["crc"]:
            fpdu[-4:] = wire_crc(bytes(fpdu[:-4]))

    def finish(self) -> None:
        for _ in range(4):
            for side in (0, 1):
                self._own(side, {"do": "out", "limit_bytes": 1 << 20})
                self._carry(side, 1 << 20)
        for end in self.ends:
            _end(end)


def _ends(recorded_end: Callable[..., Any], options: dict[str, Any], how: list[dict[str, Any]]) -> tuple[Any, Any]:
    """`options` are those of the active side; the other's are what they leave it."""
    theirs = {
        **options,
        "tx_markers": options["rx_markers"],
        "rx_markers": options["tx_markers"],
        "ird": max(options["ord"], int(options["rtr"] == 4)),
        "ord": options["ird"],
    }
    return recorded_end(options, REGIONS, active=True, **how[0]), recorded_end(theirs, REGIONS, active=False, **how[1])


HOW = st.fixed_dictionaries({"mulpdu": MULPDUS, "still": BOOLEANS, "direct": BOOLEANS})
BOTH = st.lists(HOW, min_size=2, max_size=2)


@pytest.mark.parametrize("moves_of", [HONEST_MOVES, HOSTILE_MOVES], ids=["honest", "hostile"])
@settings(max_examples=80, deadline=None)
@given(options=OPTIONS, how=BOTH, first_msn=FIRST_MSNS, data=st.data())
def test_two_ends_and_the_octets_between_them(
    native_stack: Any,
    recorded_end: Callable[..., Any],
    moves_of: st.SearchStrategy[Move],
    options: dict[str, Any],
    how: list[dict[str, Any]],
    first_msn: list[int] | None,
    data: st.DataObject,
) -> None:
    moves = data.draw(st.lists(moves_of, min_size=20, max_size=60))
    ends = _ends(recorded_end, options, [{**one, "first_msn": first_msn} for one in how])
    connection = Connection(ends)
    for side in (0, 1):
        for _ in range(3):
            connection.move("own", side, {"do": "receive", "length_bytes": 9000})
    # Without a first FPDU the passive side may not speak.
    connection.move("own", 0, {"do": "write", "pieces": [], "stag": 0, "to": 0})
    connection.move("own", 0, {"do": "out", "limit_bytes": 1})
    connection.move("carry", 0, 1 << 20)
    for move in moves:
        connection.move(*move)
    connection.finish()
    for end in ends:
        end.check(native_stack)


# --- one end that hears anything ---

NUMBERS = st.one_of(st.integers(0, 4), st.sampled_from([0x7FFF_FFFF, 0xFFFF_FFFF]))
QUEUES = st.integers(0, 3) | NUMBERS
PAYLOADS = st.one_of(
    st.binary(max_size=60),
    st.builds(lambda *fields: struct.pack(">IQIIQ", *fields), STAGS, OFFSETS, NUMBERS | SIZES, STAGS, OFFSETS),
    st.builds(lambda *fields: struct.pack(">IIIQ4Q", *fields), NUMBERS, NUMBERS, STAGS, OFFSETS, *[MASKS] * 4),
    st.builds(lambda *fields: struct.pack(">IQ", *fields), NUMBERS, OFFSETS),
    st.builds(lambda *fields: struct.pack(">BBH", *fields), st.integers(0, 99), st.integers(0, 9), st.integers(0, 9)),
    SIZES.map(bytes),
)
VERSIONS = st.sampled_from([1] * 15 + [0, 2, 3])
RARELY = st.sampled_from([False] * 20 + [True])
QUEUE_OF = {3: 0, 4: 0, 5: 0, 6: 0, 8: 0, 9: 0, 1: 1, 10: 1, 7: 2, 11: 3}


@st.composite
def ulpdus(draw: st.DrawFn) -> bytes:
    """A segment that looks right enough to get past some of the checks."""
    # An opcode's right T bit and queue, most often.
    opcode = draw(st.integers(0, 15) | st.sampled_from([0, 1, 2, 3, 10, 11]))
    tagged, queue = opcode in (0, 2), QUEUE_OF.get(opcode, 0)
    if draw(RARELY):
        tagged, queue = draw(BOOLEANS), draw(QUEUES)
    first = tagged << 7 | draw(st.sampled_from([1, 1, 1, 0])) << 6 | draw(VERSIONS)
    second = draw(VERSIONS) << 6 | opcode
    if tagged:
        header = struct.pack(">BBIQ", first, second, draw(STAGS), draw(OFFSETS))
    else:
        msn, mo = draw(st.sampled_from([1, 1, 2, 3]) | NUMBERS), draw(st.sampled_from([0, 0, 0, 40]) | SIZES)
        header = struct.pack(">BBIIII", first, second, draw(STAGS), queue, msn, mo)
    ulpdu = header + draw(PAYLOADS)
    return ulpdu[: draw(st.integers(0, 20))] if draw(RARELY) else ulpdu


class Speaker:
    """What a peer that knows the protocol may say next; not all of it is allowed."""

    def __init__(self) -> None:
        self._msn = [1, 1, 1, 1]
        self._send_bytes = 0
        self._answered = 0
        self._answered_bytes = 0

    def say(self, kind: str, number: int, last: bool) -> bytes:
        """`number` is a length, an offset or a choice; `last`: it is the last segment of its message."""
        to = BASE_TO + 8 * (number % 8)
        if kind == "send":
            return self._send(bytes(number), last)
        if kind == "write":
            return self._tagged(0, FIRST_STAG, to, bytes(number), last)
        if kind == "write elsewhere":
            return self._tagged(0, FIRST_STAG + STAG_STEP, to, bytes(number % 16), last)
        if kind == "read request":
            return self._untagged(1, 1, struct.pack(">IQIIQ", 9, 0, number, FIRST_STAG, to))
        if kind == "atomic request":
            return self._untagged(10, 1, struct.pack(">IIIQ4Q", number & 1, number, FIRST_STAG, to, 1, M64, 0, M64))
        if kind == "atomic response":
            return self._untagged(11, 3, struct.pack(">IQ", self._msn[3] - 1, number))
        if kind == "read response":
            return self._response(bytes(number), last)
        return self._untagged(8 + number % 2, 0, bytes(8))

    def _send(self, payload: bytes, last: bool) -> bytes:
        mo, self._send_bytes = self._send_bytes, 0 if last else self._send_bytes + len(payload)
        return self._untagged(3, 0, payload, mo, last)

    def _response(self, payload: bytes, last: bool) -> bytes:
        stag = FIRST_STAG + (len(REGIONS) + self._answered) * STAG_STEP
        to, self._answered_bytes = self._answered_bytes, 0 if last else self._answered_bytes + len(payload)
        self._answered += last
        return self._tagged(2, stag, to, payload, last)

    def _untagged(self, opcode: int, queue: int, payload: bytes, mo: int = 0, last: bool = True) -> bytes:
        msn = self._msn[queue]
        self._msn[queue] += last
        return struct.pack(">BBIIII", last << 6 | 1, 1 << 6 | opcode, 0, queue, msn, mo) + payload

    @staticmethod
    def _tagged(opcode: int, stag: int, to: int, payload: bytes, last: bool) -> bytes:
        return struct.pack(">BBIQ", 0x80 | last << 6 | 1, 1 << 6 | opcode, stag, to) + payload


KINDS = st.sampled_from(
    [
        "send",
        "write",
        "write elsewhere",
        "read request",
        "read request",
        "atomic request",
        "atomic response",
        *["read response"] * 3,
        "immediate",
    ]
)
# A Read of 16 octets, so that a response may fit it.
NUMBERS_SAID = st.sampled_from([16, 16, 16, 0, 8, 17, 40, 3000])
SAID = st.tuples(st.just("say"), KINDS, NUMBERS_SAID, st.sampled_from([True, True, False]))
READ_16 = st.just(("own", {"do": "read", "length_bytes": 16, "stag": 5, "to": 0}))
ADD_ONE = st.just(("own", {"do": "fetch_add", "stag": 5, "to": 0, "operands": [1, 0]}))
TALK = weighted(
    (12, SAID),
    (4, READ_16),
    (2, ADD_ONE),
    (2, st.tuples(st.just("own"), WORK)),
    (2, st.tuples(st.just("own"), RECEIVE)),
    (6, st.tuples(st.just("own"), OUT)),
    (1, st.tuples(st.just("own"), LOCAL)),
)


@settings(max_examples=150, deadline=None)
@given(options=OPTIONS, how=HOW, active=BOOLEANS, moves=st.lists(TALK, min_size=8, max_size=30))
def test_one_end_and_a_peer_that_knows_the_protocol(
    native_stack: Any,
    recorded_end: Callable[..., Any],
    options: dict[str, Any],
    how: dict[str, Any],
    active: bool,
    moves: list[Move],
) -> None:
    end, speaker = recorded_end(options, REGIONS, active=active, **how), Speaker()
    encoder = FpduEncoder(crc=options["crc"], markers=options["rx_markers"])
    connection = Connection((end, None))
    for _ in range(4):
        connection.move("own", 0, {"do": "receive", "length_bytes": 700})
    for kind, *what in moves:
        if kind == "own":
            connection.move("own", 0, what[0])
        else:
            end.do({"do": "hear", "octets": encoder.encode([speaker.say(*what)]).hex()})
    _end(end)
    end.check(native_stack)


HEARD = st.tuples(st.just("frame"), ulpdus(), st.lists(st.integers(1, 3000), min_size=1, max_size=3))
LONE_MOVES = weighted(
    (12, HEARD),
    (3, st.tuples(st.just("own"), WORK)),
    (2, st.tuples(st.just("own"), RECEIVE)),
    (3, st.tuples(st.just("own"), OUT)),
    (2, st.tuples(st.just("own"), LOCAL)),
    (1, st.tuples(st.just("own"), ENDING)),
)


@settings(max_examples=150, deadline=None)
@given(
    options=OPTIONS,
    how=HOW,
    active=BOOLEANS,
    failure=st.sampled_from([None] * 9 + [[2, 0, 6]]),
    moves=st.lists(LONE_MOVES, min_size=6, max_size=20),
)
def test_one_end_hears_segments_of_any_kind(
    native_stack: Any,
    recorded_end: Callable[..., Any],
    options: dict[str, Any],
    how: dict[str, Any],
    active: bool,
    failure: list[int] | None,
    moves: list[Move],
) -> None:
    options = {**options, "failure": failure if active else None}
    end = recorded_end(options, REGIONS, active=active, **how)
    encoder = FpduEncoder(crc=options["crc"], markers=options["rx_markers"])
    connection = Connection((end, None))
    connection.move("own", 0, {"do": "receive", "length_bytes": 700})
    for kind, *what in moves:
        if kind == "own":
            connection.move("own", 0, what[0])
            continue
        octets, sizes = encoder.encode([what[0]]), what[1]
        while octets:
            size = sizes[len(octets) % len(sizes)]
            end.do({"do": "hear", "octets": octets[:size].hex()})
            octets = octets[size:]
    _end(end)
    end.check(native_stack)


@settings(max_examples=100, deadline=None)
@given(options=OPTIONS, active=BOOLEANS, pieces=st.lists(st.binary(max_size=400), min_size=1, max_size=8))
def test_one_end_hears_any_octets(
    native_stack: Any, recorded_end: Callable[..., Any], options: dict[str, Any], active: bool, pieces: list[bytes]
) -> None:
    end = recorded_end(options, REGIONS, active=active)
    for piece in pieces:
        end.do({"do": "hear", "octets": piece.hex()})
    end.do({"do": "eof"})
    end.do({"do": "out", "limit_bytes": 1 << 20})
    end.check(native_stack)
