"""What the pool is made of."""

from __future__ import annotations

import ctypes
from pathlib import Path

from kbtp.target.server_memory import pool_memory


def flags_of(address: int) -> set[str]:
    """What the system says of the mapping that holds `address` (proc(5), VmFlags)."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            found = begin <= address < end
        elif found and first == "VmFlags:":
            return set(rest)
    return set()


def test_the_pool_is_private_in_huge_pages_and_not_inherited() -> None:
    memory = pool_memory(4 << 20)
    flags = flags_of(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    assert "dc" in flags  # a forked process does not have it
    assert "sh" not in flags
    assert ("hg" in flags) == Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert bytes(memory) == bytes(4 << 20)
