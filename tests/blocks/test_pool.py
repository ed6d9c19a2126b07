"""The block pool (draft 3.1, profile 5)."""

from __future__ import annotations

import pytest

from kbtp.blocks import Pool
from kbtp.errors import ApiMisuse

BASE = 0x10040


def a_pool(block_count: int = 3, block_size_bytes: int = 576, pool_base: int = BASE) -> Pool:
    return Pool(bytearray(block_count * block_size_bytes), block_size_bytes, block_count, pool_base)


def test_block_offsets_are_pool_base_plus_multiples_of_block_size() -> None:
    pool = a_pool()
    assert [pool.offset_of(k) for k in range(3)] == [BASE, BASE + 576, BASE + 1152]
    assert [pool.index_of(pool.offset_of(k)) for k in range(3)] == [0, 1, 2]
    assert [pool.position(pool.offset_of(k)) for k in range(3)] == [0, 576, 1152]


@pytest.mark.parametrize("offset", [0, BASE - 576, BASE + 1, BASE + 575, BASE + 3 * 576, 2**64 - 1, -576])
def test_other_offsets_are_no_blocks(offset: int) -> None:
    pool = a_pool()
    assert not pool.contains(offset)
    for use in (pool.index_of, pool.position, pool.clear, lambda o: pool.view(o, 1)):
        with pytest.raises(ApiMisuse, match="not a block of this pool"):
            use(offset)


def test_a_view_is_the_memory_itself() -> None:
    memory = bytearray(3 * 512)
    pool = Pool(memory, 512, 3, 0)
    pool.view(512, 4)[:] = b"KBTP"
    assert memory[512:516] == b"KBTP"
    assert len(pool.view(512, 0)) == 0
    assert len(pool.view(512, 512)) == 512


def test_clear_overwrites_the_block_and_no_other() -> None:
    memory = bytearray(b"\xee" * (3 * 512))
    Pool(memory, 512, 3, 0).clear(512)
    assert memory == b"\xee" * 512 + bytes(512) + b"\xee" * 512


@pytest.mark.parametrize("length", [-1, 577])
def test_a_view_stays_inside_its_block(length: int) -> None:
    with pytest.raises(ApiMisuse, match="0 to 576 octets"):
        a_pool().view(BASE, length)


@pytest.mark.parametrize("index", [-1, 3])
def test_there_are_block_count_blocks(index: int) -> None:
    with pytest.raises(ApiMisuse, match="0 to 2"):
        a_pool().offset_of(index)


@pytest.mark.parametrize(
    ("size", "count", "base", "words"),
    [
        (448, 1, 0, "block size 448"),
        (2**30 + 64, 1, 0, "block size"),
        (520, 1, 0, "multiple of 64"),
        (512, 0, 0, "block count 0"),
        (512, 2**28 + 1, 0, "block count"),
        (512, 1, 32, "pool base 0x20"),
        (512, 1, -64, "pool base"),
        (512, 2, 2**64 - 512, "below 2\\^64"),
    ],
)
def test_numbers_outside_the_profile_are_refused(size: int, count: int, base: int, words: str) -> None:
    with pytest.raises(ApiMisuse, match=words):
        Pool(bytearray(1024), size, count, base)


def test_the_last_octets_below_two_to_the_sixty_four_can_be_a_pool() -> None:
    pool = a_pool(block_count=2, block_size_bytes=512, pool_base=2**64 - 1024)
    assert pool.offset_of(1) == 2**64 - 512
    assert not pool.contains(0)


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (memoryview(bytearray(1023)), "1024 octets expected, 1023"),
        (memoryview(bytearray(1025)), "1024 octets expected, 1025"),
        (memoryview(bytes(1024)), "writable"),
        (memoryview(bytearray(2048))[::2], "contiguous"),
    ],
)
def test_memory_must_be_exactly_that_large_writable_and_contiguous(memory: memoryview, words: str) -> None:
    with pytest.raises(ApiMisuse, match=words):
        Pool(memory, 512, 2, 0)
