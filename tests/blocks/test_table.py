"""The block table (draft 3.2, 6.2 to 6.4, profile 5), looked at as octets in memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.blocks import BlockTable, Entry, HandleRange, next_generation
from kbtp.errors import ApiMisuse
from kbtp.types import EntryFlag

BASE = 7000


def a_table(base_handle: int = BASE) -> tuple[BlockTable, bytearray]:
    memory = bytearray(b"\xee" * (16 * 4))
    table = BlockTable(memory, base_handle, 4)
    table.initialize()
    return table, memory


class WatchedWords:
    """Stands in for the table's words and keeps every state of the memory between two stores."""

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self.states: list[bytes] = []

    def __getitem__(self, index: int) -> int:
        value: int = self.words[index]
        return value

    def __setitem__(self, index: int, value: int) -> None:
        self.words[index] = value
        self.states.append(bytes(self.words))


def test_entries_start_unbound_with_generation_one() -> None:
    table, memory = a_table()
    assert memory == bytes.fromhex("0000 0001 00000000 0000000000000000") * 4
    assert table.read(BASE + 3) == Entry(EntryFlag.NONE, 1, 0, 0)


def test_the_octets_of_a_bound_entry() -> None:
    table, memory = a_table()
    entry = table.bind(BASE + 2, block_offset=0x1122334455667788, data_length=0x1234, seal=True)
    assert memory[32:48] == bytes.fromhex("0003 0002 00001234 1122334455667788")
    assert entry == table.read(BASE + 2)
    assert (entry.valid, entry.sealed, entry.generation) == (True, True, 2)


def test_the_first_bind_makes_generation_two_and_each_free_and_bind_the_next() -> None:
    table, _ = a_table()
    generations = [table.bind(BASE, 64, 1, seal=False).generation, table.unbind(BASE).generation]
    generations.append(table.bind(BASE, 64, 1, seal=False).generation)
    assert generations == [2, 3, 4]


def test_a_generation_of_65535_is_followed_by_one() -> None:
    table, memory = a_table()
    memory[2:4] = b"\xff\xfe"
    assert table.bind(BASE, 64, 1, seal=False).generation == 65535
    assert table.unbind(BASE).generation == 1
    assert [next_generation(generation) for generation in (1, 65534, 65535)] == [2, 65535, 1]


def test_update_changes_data_length_and_sets_sealed_but_nothing_else() -> None:
    table, memory = a_table()
    table.bind(BASE, 0x40, 10, seal=False)
    table.update(BASE, 0, seal=False)
    assert memory[:16] == bytes.fromhex("0001 0002 00000000 0000000000000040")
    table.update(BASE, 0xFFFFFFFF, seal=True)
    assert memory[:16] == bytes.fromhex("0003 0002 ffffffff 0000000000000040")


def test_an_unbound_entry_keeps_its_generation_alone() -> None:
    table, memory = a_table()
    table.bind(BASE, 0x40, 10, seal=True)
    entry = table.unbind(BASE)
    assert memory[:16] == bytes.fromhex("0000 0003 00000000 0000000000000000")
    assert entry == Entry(EntryFlag.NONE, 3, 0, 0)


def test_a_reader_between_any_two_stores_sees_valid_only_with_the_block_it_means(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Draft 3.2: Block Offset before the rest; profile 5: the rest in one store."""
    table, _ = a_table()
    watched = WatchedWords(table._words)
    monkeypatch.setattr(table, "_words", watched)
    table.bind(BASE, 0xAB40, 10, seal=True)
    table.unbind(BASE)
    table.bind(BASE, 0xCD40, 20, seal=False)
    table.update(BASE, 30, seal=True)
    seen = [Entry.unpack(state[:16]) for state in watched.states]
    assert [(entry.valid, entry.generation) for entry in seen] == [
        (False, 1),
        (True, 2),
        (False, 3),
        (False, 3),
        (False, 3),
        (True, 4),
        (True, 4),
    ]
    assert [(entry.data_length, entry.block_offset) for entry in seen if entry.valid] == [
        (10, 0xAB40),
        (20, 0xCD40),
        (30, 0xCD40),
    ]


def test_the_range_test_is_unsigned_and_a_table_may_pass_two_to_the_sixty_four() -> None:
    table, memory = a_table(base_handle=2**64 - 2)
    assert [table.contains(handle) for handle in (2**64 - 3, 2**64 - 2, 0, 1, 2)] == [False, True, True, True, False]
    table.bind(1, 0x40, 10, seal=False)
    assert memory[48:50] == b"\x00\x01"
    assert table.bound_handles(HandleRange(2**64 - 1, 3)) == [1]


def test_bound_handles_of_a_range() -> None:
    table, _ = a_table()
    for handle in (BASE, BASE + 1, BASE + 3):
        table.bind(handle, 0x40, 0, seal=handle == BASE)
    assert table.bound_handles(HandleRange(BASE, 4)) == [BASE, BASE + 1, BASE + 3]
    assert table.bound_handles(HandleRange(BASE + 1, 2)) == [BASE + 1]
    with pytest.raises(ApiMisuse, match="not inside the table"):
        table.bound_handles(HandleRange(BASE + 1, 4))


def test_misuse_is_refused_and_changes_nothing() -> None:
    table, memory = a_table()
    with pytest.raises(ApiMisuse, match="not bound"):
        table.update(BASE, 0, seal=False)
    with pytest.raises(ApiMisuse, match="not bound"):
        table.unbind(BASE)
    with pytest.raises(ApiMisuse, match="32 bits"):
        table.bind(BASE, 0x40, 2**32, seal=False)
    table.bind(BASE, 0x40, 8, seal=True)
    before = bytes(memory)
    with pytest.raises(ApiMisuse, match="is bound"):
        table.bind(BASE, 0x80, 8, seal=True)
    with pytest.raises(ApiMisuse, match="is sealed"):
        table.update(BASE, 0, seal=False)
    for handle in (BASE - 1, BASE + 4, 0, 2**64 - 1):
        with pytest.raises(ApiMisuse, match="not in the table"):
            table.read(handle)
    assert memory == before


@pytest.mark.parametrize(
    ("memory", "base", "count", "words"),
    [
        (bytearray(48), 0, 4, "64 octets expected"),
        (memoryview(bytes(64)), 0, 4, "writable"),
        (memoryview(bytearray(72))[4:68], 0, 4, "aligned to 8"),
        (bytearray(0), 0, 0, "handle count"),
        (bytearray(64), -1, 4, "base handle"),
        (bytearray(64), 2**64, 4, "base handle"),
    ],
)
def test_memory_and_numbers_that_do_not_fit(memory: bytearray | memoryview, base: int, count: int, words: str) -> None:
    with pytest.raises(ApiMisuse, match=words):
        BlockTable(memory, base, count)


@given(st.binary(min_size=16, max_size=16))
def test_any_sixteen_octets_are_an_entry(octets: bytes) -> None:
    entry = Entry.unpack(octets)
    assert entry.pack() == octets
    assert entry.valid == bool(octets[1] & 1)
    assert entry.sealed == bool(octets[1] & 2)


def test_an_entry_is_sixteen_octets_with_values_that_fit() -> None:
    with pytest.raises(ApiMisuse, match="16 octets"):
        Entry.unpack(bytes(15))
    with pytest.raises(ApiMisuse, match="does not fit"):
        Entry(EntryFlag.VALID, 2**16, 0, 0).pack()
