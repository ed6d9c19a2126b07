"""Records: what is packed is parsed, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.cache.record import BadRecord, Copy, Record, block_lengths
from kbtp.types import BlockRef

RECORD = Record(
    owner=bytes(range(16)),
    length_bytes=100,
    checksum=0xDEADBEEF,
    block_bytes=64,
    copies=(
        Copy(7, (BlockRef(1, 2, 64), BlockRef(2**64 - 1, 65535, 36))),
        Copy(8, (BlockRef(3, 4, 64), BlockRef(5, 6, 36))),
    ),
)


@st.composite
def records(draw: st.DrawFn) -> Record:
    block_bytes = draw(st.integers(1, 1 << 20))
    length_bytes = draw(st.integers(0, 20 * block_bytes))
    lengths = block_lengths(length_bytes, block_bytes)
    refs = st.tuples(
        *(st.builds(BlockRef, st.integers(0, 2**64 - 1), st.integers(0, 65535), st.just(length)) for length in lengths)
    )
    copies = draw(st.lists(st.builds(Copy, st.integers(0, 2**64 - 1), refs), min_size=1, max_size=3)) if lengths else []
    return Record(
        draw(st.binary(min_size=16, max_size=16)),
        length_bytes,
        draw(st.integers(0, 2**32 - 1)),
        block_bytes,
        tuple(copies),
    )


@given(records())
def test_what_is_packed_is_parsed(record: Record) -> None:
    assert Record.parse(record.pack()) == record


@given(records(), st.data())
def test_a_record_that_is_cut_or_longer_is_refused(record: Record, data: st.DataObject) -> None:
    octets = record.pack()
    with pytest.raises(BadRecord):
        Record.parse(octets[: data.draw(st.integers(0, len(octets) - 1))])
    with pytest.raises(BadRecord):
        Record.parse(octets + b"\x00")


@given(st.binary(max_size=200))
def test_other_octets_are_refused_or_are_a_record(octets: bytes) -> None:
    try:
        record = Record.parse(octets)
    except BadRecord:
        return
    assert record.pack() == octets


@pytest.mark.parametrize(
    ("place", "octet", "why"),
    [(0, 2, "record version 2; this is 1"), (1, 17, "17 copies"), (1, 3, "for 3 copies"), (18, 1, "value of")],
)
def test_why_a_record_is_refused(place: int, octet: int, why: str) -> None:
    octets = bytearray(RECORD.pack())
    octets[place] = octet
    with pytest.raises(BadRecord, match=why):
        Record.parse(bytes(octets))


@given(st.integers(0, 10_000), st.integers(1, 500))
def test_a_value_is_cut_into_full_blocks_and_a_rest(length: int, block: int) -> None:
    lengths = block_lengths(length, block)
    assert sum(lengths) == length
    assert all(one == block for one in lengths[:-1])
    assert all(0 < one <= block for one in lengths)
