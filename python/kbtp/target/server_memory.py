"""The memory of the pool: in huge pages where the system has them, and nobody's but this process's."""

from __future__ import annotations

import contextlib
import mmap


def pool_memory(length_bytes: int) -> mmap.mmap:
    """`length_bytes` (> 0) octets, all 0. None of it is taken from the system before it is used.

    Raises `MemoryError` or `OSError` if the system will not give so much.
    """
    # Private: memory that is shared with nobody, but could be, gets huge pages in few systems.
    memory = mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A process that is forked while we go on writing would keep a copy of every block that changes.
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a system without huge pages
        # Blocks are read and written in no order, and most time of a small one's goes to finding out where its page is.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
