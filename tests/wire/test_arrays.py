"""Arrays of messages are the messages of the dataclasses, octet for octet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.errors import ApiMisuse, WireFormatError
from kbtp.types import Opcode, RequestFlag, Status
from kbtp.wire import (
    AllocStore,
    Bind,
    CommonHeader,
    Completion,
    CompletionDescriptor,
    CompletionRecord,
    DataDescriptor,
    Free,
    Load,
    Store,
    arrays,
)

RECORD, INLINE, INVALIDATE = RequestFlag.RECORD, RequestFlag.INLINE, RequestFlag.INVALIDATE
U16, U32, U64 = st.integers(0, 0xFFFF), st.integers(0, 0xFFFF_FFFF), st.integers(0, (1 << 64) - 1)
HEADER_COLUMNS = (U64, U64, U16)
DATA_COLUMNS = (U32, U64, U32)
SLOT_COLUMNS = (U32, U64)
TRANSFERS = [
    (arrays.pack_loads, Load, [0, 0x08, 0x10, 0x18]),
    (arrays.pack_stores, Store, [0, 0x02, 0x08, 0x0A]),
    (arrays.pack_alloc_stores, AllocStore, [0, 0x02, 0x08, 0x0A]),
]
EACH_TRANSFER = pytest.mark.parametrize(("pack", "request_type", "flags"), TRANSFERS)


def rows_of(*columns: st.SearchStrategy[int]) -> st.SearchStrategy[list[tuple[int, ...]]]:
    return st.lists(st.tuples(*columns), min_size=1, max_size=8)


def columns_of(rows: list[tuple[int, ...]], *dtypes: type[np.unsignedinteger]) -> list[Any]:
    return [np.array(column, dtype=dtype) for column, dtype in zip(zip(*rows, strict=True), dtypes, strict=True)]


HEADER_DTYPES = (np.uint64, np.uint64, np.uint16, np.uint16)
DATA_DTYPES = (np.uint32, np.uint64, np.uint32)
SLOT_DTYPES = (np.uint32, np.uint64)


@pytest.mark.parametrize(
    ("dtype", "size_bytes"),
    [
        (arrays.HEADER, 24),
        (arrays.DATA_DESCRIPTOR, 16),
        (arrays.COMPLETION_DESCRIPTOR, 16),
        (arrays.LOAD, 40),
        (arrays.LOAD_RECORD, 56),
        (arrays.STORE, 40),
        (arrays.STORE_RECORD, 56),
        (arrays.FREE, 24),
        (arrays.FREE_RECORD, 40),
        (arrays.BIND, 40),
        (arrays.BIND_RECORD, 56),
        (arrays.COMPLETION, 40),
        (arrays.COMPLETION_RECORD, 24),
        (arrays.TABLE_ENTRY, 16),
        (arrays.RING_SLOT, 16),
    ],
)
def test_an_item_has_the_octets_of_its_message_and_no_holes(dtype: np.dtype[np.void], size_bytes: int) -> None:
    assert dtype.itemsize == size_bytes
    assert sum(dtype[name].itemsize for name in dtype.names or ()) == size_bytes
    assert all(dtype[name].byteorder == ">" for name in dtype.names or () if dtype[name].itemsize > 1)


def test_the_dtypes_read_what_the_dataclasses_pack() -> None:
    slot = CompletionDescriptor(0x51, 0x52)
    for dtype, packed, expected in (
        (arrays.HEADER, CommonHeader(3, 4, 5, 6, 7, 8).pack(), (1, 3, 4, 5, 6, 7, 8)),
        (arrays.DATA_DESCRIPTOR, DataDescriptor(1, 2, 3).pack(), (1, 2, 3)),
        (arrays.COMPLETION_DESCRIPTOR, slot.pack(), (0x51, 0x52, 0)),
        (arrays.BIND, Bind(1, 2, 3, RequestFlag.SEAL, 4, 5, 6).pack(), (1, 7, 2, 1, 2, 3, 0, 4, 5, 6)),
        (
            arrays.BIND_RECORD,
            Bind(1, 2, 3, RECORD, 4, 5, 6, slot).pack(),
            (1, 7, 4, 1, 2, 3, 0, 4, 5, 6, 0x51, 0x52, 0),
        ),
        (arrays.COMPLETION, Completion(1, 2, 3, Status.SEALED, 5, 6).pack(), (1, 8, 0, 1, 2, 3, 3, 5, 0, 6)),
        (arrays.COMPLETION_RECORD, CompletionRecord(1, Status.SEALED, 2, 5, 6).pack(), (1, 3, 2, 5, 6)),
    ):
        assert np.frombuffer(packed, dtype)[0].item() == expected


def test_table_entry_and_ring_slot_are_as_drawn() -> None:
    octets = bytes(range(16))

    # Draft 3.2: Flags, Generation, Data Length, Block Offset.
    assert np.frombuffer(octets, arrays.TABLE_ENTRY)[0].item() == (0x0001, 0x0203, 0x04050607, 0x08090A0B0C0D0E0F)
    # Draft 3.3: Sequence, Reserved, Block Offset.
    assert np.frombuffer(octets, arrays.RING_SLOT)[0].item() == (0x00010203, 0x04050607, 0x08090A0B0C0D0E0F)


@EACH_TRANSFER
@given(data=st.data())
def test_transfers_equal_the_dataclasses(pack: Any, request_type: Any, flags: list[int], data: st.DataObject) -> None:
    rows = data.draw(rows_of(*HEADER_COLUMNS, st.sampled_from(flags), *DATA_COLUMNS))

    packed = pack(*columns_of(rows, *HEADER_DTYPES, *DATA_DTYPES))

    assert packed.dtype.itemsize == 40
    assert [row.tobytes() for row in packed] == [
        request_type(*row[:3], RequestFlag(row[3]), DataDescriptor(*row[4:])).pack() for row in rows
    ]


@EACH_TRANSFER
@given(data=st.data())
def test_transfers_with_record_equal_the_dataclasses(
    pack: Any, request_type: Any, flags: list[int], data: st.DataObject
) -> None:
    record_flags = st.sampled_from([flag | RECORD for flag in flags if not flag & INVALIDATE])
    rows = data.draw(rows_of(*HEADER_COLUMNS, record_flags, *DATA_COLUMNS, *SLOT_COLUMNS))

    packed = pack(*columns_of(rows, *HEADER_DTYPES, *DATA_DTYPES, *SLOT_DTYPES))

    assert packed.dtype.itemsize == 56
    assert [row.tobytes() for row in packed] == [
        request_type(*row[:3], RequestFlag(row[3]), DataDescriptor(*row[4:7]), CompletionDescriptor(*row[7:])).pack()
        for row in rows
    ]


@given(rows_of(*HEADER_COLUMNS), rows_of(*HEADER_COLUMNS, *SLOT_COLUMNS))
def test_frees_equal_the_dataclasses(plain: list[tuple[int, ...]], with_record: list[tuple[int, ...]]) -> None:
    ids = columns_of(plain, *HEADER_DTYPES[:3])
    packed = arrays.pack_frees(*ids, 0)
    assert [row.tobytes() for row in packed] == [Free(*row, RequestFlag.NONE).pack() for row in plain]

    *ids, stags, tos = columns_of(with_record, *HEADER_DTYPES[:3], *SLOT_DTYPES)
    packed = arrays.pack_frees(*ids, RECORD, stags, tos)
    assert [row.tobytes() for row in packed] == [
        Free(*row[:3], RECORD, CompletionDescriptor(*row[3:])).pack() for row in with_record
    ]


@pytest.mark.parametrize(("pack", "store"), [(arrays.pack_stores, Store), (arrays.pack_alloc_stores, AllocStore)])
def test_inline_rows_are_what_stands_before_the_data(pack: Any, store: Any) -> None:
    rows = pack([1, 2], [3, 4], 0, INLINE, 0, 0, [5, 6])

    for row, (request_id, handle, data) in zip(rows, ((1, 3, b"first"), (2, 4, b"second")), strict=True):
        message = store(request_id, handle, 0, INLINE, DataDescriptor(0, 0, len(data)), inline_data=data)
        assert row.tobytes() + data == message.pack()


@pytest.mark.parametrize(("stags", "tos"), [(1, 0), (0, [0, 1])])
def test_inline_rows_have_neither_stag_nor_tagged_offset(stags: Any, tos: Any) -> None:
    with pytest.raises(ApiMisuse, match=r"^stag and to: "):
        arrays.pack_stores([1, 2], 3, 0, INLINE, stags, tos, 4)


def test_one_number_stands_for_all_rows() -> None:
    packed = arrays.pack_loads(np.arange(3), np.arange(3) + 10, 0, 0, 0x77, np.arange(3) * 4096, 4096)

    assert packed.tobytes() == b"".join(
        Load(n, n + 10, 0, RequestFlag.NONE, DataDescriptor(0x77, n * 4096, 4096)).pack() for n in range(3)
    )
    assert arrays.pack_loads(1, 2, 3, 0, 5, 6, 7).shape == (1,)


def test_no_rows() -> None:
    assert arrays.pack_loads([], [], 0, 0, 0, [], 0).shape == (0,)
    assert arrays.pack_frees(np.empty(0, np.uint64), [], [], []).shape == (0,)


def test_rows_can_be_copied_with_their_reserved_octets() -> None:
    packed = arrays.pack_frees([1, 2, 3], 4, 5, RECORD, 6, 7)

    assert packed[[2, 0]].tobytes() == packed[2].tobytes() + packed[0].tobytes()


COLUMN_BITS = {
    "request_id": 64,
    "handle": 64,
    "generation": 16,
    "flags": 16,
    "stag": 32,
    "to": 64,
    "length": 32,
}


@pytest.mark.parametrize("field", COLUMN_BITS)
@given(data=st.data())
def test_a_value_that_does_not_fit_its_field_is_misuse(field: str, data: st.DataObject) -> None:
    beyond = data.draw(st.integers(max_value=-1) | st.integers(min_value=1 << COLUMN_BITS[field]))
    columns = {name: [0, 0, 0] for name in COLUMN_BITS}
    columns[field] = data.draw(st.permutations([0, beyond, (1 << COLUMN_BITS[field]) - 1]))

    with pytest.raises(ApiMisuse, match=rf"^{field}: "):
        arrays.pack_loads(*columns.values())


@pytest.mark.parametrize("values", [[1.5], [True], ["1"], [None], [[1, 2], [3, 4]], [[1], [2, 3]]])
def test_only_numbers_in_one_dimension(values: Any) -> None:
    with pytest.raises(ApiMisuse, match=r"^handle: "):
        arrays.pack_frees(1, values, 0, 0)


def test_columns_of_different_lengths_are_misuse() -> None:
    with pytest.raises(ApiMisuse, match=r"^the arrays differ in length"):
        arrays.pack_frees([1, 2], [1, 2, 3], 0, 0)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([0, RequestFlag.SEAL], "0x0002 is not allowed with LOAD"),
        ([0, INVALIDATE | RECORD], "INVALIDATE goes with neither"),
        ([0, RECORD], "RECORD and Completion Descriptors come together"),
    ],
)
def test_flags_are_judged_row_by_row(flags: list[int], reason: str) -> None:
    with pytest.raises(ApiMisuse, match=rf"^flags: {reason}"):
        arrays.pack_loads(1, 2, 3, flags, 5, 6, 7)


def test_record_and_completion_descriptors_come_together() -> None:
    with pytest.raises(ApiMisuse, match=r"^flags: RECORD and Completion Descriptors"):
        arrays.pack_loads(1, 2, 3, [RECORD, 0], 5, 6, 7, 8, 9)
    with pytest.raises(ApiMisuse, match=r"^completion_stags and completion_tos: both or neither"):
        arrays.pack_loads(1, 2, 3, RECORD, 5, 6, 7, 8)
    with pytest.raises(ApiMisuse, match=r"^completion_stags and completion_tos: both or neither"):
        arrays.pack_frees(1, 2, 3, RECORD, None, 9)
    with pytest.raises(ApiMisuse, match=r"^completion_stag: "):
        arrays.pack_frees(1, 2, 3, RECORD, 1 << 32, 9)


COMPLETIONS = st.builds(Completion, U64, U64, U16, st.sampled_from(Status), U32, U64)


@given(st.lists(COMPLETIONS, max_size=8))
def test_completions_equal_the_dataclasses(completions: list[Completion]) -> None:
    octets = b"".join(completion.pack() for completion in completions)

    for buffer in (octets, bytearray(octets), np.frombuffer(octets, np.uint8).reshape(-1, 40) if octets else b""):
        parsed = arrays.parse_completions(buffer)

        assert parsed.shape == (len(completions),)
        for row, completion in zip(parsed, completions, strict=True):
            assert row["request_id"] == completion.request_id
            assert row["handle"] == completion.handle
            assert row["generation"] == completion.generation
            assert row["status"] == completion.status
            assert row["data_length"] == completion.data_length
            assert row["block_offset"] == completion.block_offset


def test_completions_are_a_view() -> None:
    buffer = bytearray(Completion(1, 2, 3, Status.SUCCESS).pack())

    parsed = arrays.parse_completions(buffer)
    buffer[11] = 9

    assert parsed["request_id"].tolist() == [9]


@pytest.mark.parametrize("length", [1, 39, 41, 79])
def test_completions_are_whole(length: int) -> None:
    with pytest.raises(WireFormatError, match=rf"^message: {length} octets are no multiple of 40"):
        arrays.parse_completions(bytes(length))


@pytest.mark.parametrize(
    ("at", "octet", "field", "status"),
    [
        (0, 2, "version", Status.UNSUPPORTED),
        (1, Opcode.LOAD, "opcode", Status.UNSUPPORTED),
        (3, 1, "flags", Status.UNSUPPORTED),
        (23, 16, "status", Status.MALFORMED),
    ],
)
def test_a_bad_completion_is_named(at: int, octet: int, field: str, status: Status) -> None:
    octets = bytearray(Completion(1, 2, 3, Status.SUCCESS).pack() * 3)
    octets[80 + at] = octet

    with pytest.raises(WireFormatError, match=rf"^{field}: row 2: ") as refusal:
        arrays.parse_completions(octets)
    assert (refusal.value.field, refusal.value.status) == (field, status)


@given(rows=st.lists(st.binary(min_size=40, max_size=40) | COMPLETIONS.map(Completion.pack), max_size=4))
def test_any_octets_are_refused_when_the_dataclass_refuses_them(rows: list[bytes]) -> None:
    try:
        for row in rows:
            Completion.parse(row)
    except WireFormatError as fault:
        with pytest.raises(WireFormatError) as refusal:
            arrays.parse_completions(b"".join(rows))
        assert (refusal.value.field, refusal.value.status) == (fault.field, fault.status)
    else:
        assert arrays.parse_completions(b"".join(rows)).tobytes() == b"".join(rows)


def test_completions_with_gaps_are_misuse() -> None:
    buffers = np.zeros((4, 64), np.uint8)

    with pytest.raises(ApiMisuse, match=r"^buffer: "):
        arrays.parse_completions(buffers[:, :40])
