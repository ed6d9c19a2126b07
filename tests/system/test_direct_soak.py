"""One initiator in direct mode and an ordinary one on one target, for as long as KBTP_SOAK_S says, in seconds.

Both store, load and free at random, each loads the other's blocks too, and blocks are reused all the time. Every block
says what it is: handle, generation, and a digest of all of it. So whatever is returned as good can be judged alone,
also what a direct load has read while the block was freed and filled anew (draft 6.6, profile 6.1, 6.3).
"""

from __future__ import annotations

import hashlib
import os
import random
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import kbtp
from kbtp import BlockRef, Feature, Status

SOAK_S = float(os.environ.get("KBTP_SOAK_S", "5"))
BLOCK_BYTES = 16384
QUOTA = 6
DIRECT = Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC
GONE = (Status.NOT_BOUND, Status.GENERATION_MISMATCH)
HEADER = struct.Struct(">QHI16s")
DIGEST_BYTES = 16
REMEMBERED = 20
"""References, of both; the oldest are of blocks freed long ago. Far fewer than there are generations of a handle."""


def digest(handle: int, generation: int, body: bytes | memoryview) -> bytes:
    name = struct.pack(">QH", handle, generation)
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES, key=name).digest()


def self_describing(handle: int, generation: int, body: bytes) -> bytes:
    return HEADER.pack(handle, generation, len(body), digest(handle, generation, body)) + body


def check(ref: BlockRef, octets: memoryview) -> None:
    """`octets` were returned as the block of `ref`."""
    handle, generation, length, told = HEADER.unpack_from(octets)
    body = octets[HEADER.size :]
    assert (handle, generation, length) == (ref.handle, ref.generation, len(body)), "another block was returned as good"
    assert told == digest(handle, generation, body), "a mixture of blocks was returned as good"


class Initiator:
    """One client and its random operations until `stop`."""

    def __init__(self, url: str, direct: bool, everyones: deque[BlockRef], stop: threading.Event, seed: int) -> None:
        self._url = url
        self._modes: tuple[Any, ...] = ("request", "direct") if direct else ("request",)
        self._asked = "load,alloc" if direct else ""
        self._everyones = everyones
        self._stop = stop
        self._rng = random.Random(seed)
        self._buffers = [bytearray(BLOCK_BYTES) for _ in range(8)]
        self.counts: Counter[str] = Counter()

    def work(self) -> Counter[str]:
        """Raises what went wrong."""
        try:
            while not self._stop.is_set():
                with kbtp.connect(self._url, quota=QUOTA, direct=self._asked) as client:
                    self._session(client)
        finally:
            self._stop.set()
        return self.counts

    def _session(self, client: Any) -> None:
        if self._asked:
            assert client.features & DIRECT == DIRECT
        generations = self._generations(client)
        bound: list[BlockRef] = []
        for _ in range(2000):
            if self._stop.is_set():
                return
            step = self._rng.random()
            if step < 0.3 and len(bound) < QUOTA:
                self._store(client, generations, bound)
            elif step < 0.5 and bound:
                self._free(client, generations, bound)
            else:
                self._load(client)
        self.counts["sessions"] += 1

    def _generations(self, client: Any) -> dict[int, int]:
        """Of every handle of the session's own, now that nothing is bound: others may have had it before."""
        first, count = client.terms.first_handle, client.terms.handle_count
        generations = {}
        for handle in ((first + n) % (1 << 64) for n in range(count)):
            ref = client.alloc_store(b"", handle=handle)
            client.free(ref)
            generations[handle] = ref.generation % 0xFFFF + 1
        return generations

    def _store(self, client: Any, generations: dict[int, int], bound: list[BlockRef]) -> None:
        mode = self._rng.choice(self._modes)
        taken = {ref.handle for ref in bound}
        free = [handle for handle in generations if handle not in taken]
        handles = self._rng.sample(free, self._rng.randint(1, QUOTA - len(bound)))
        blocks = [
            self_describing(handle, generations[handle] % 0xFFFF + 1, self._rng.randbytes(self._length()))
            for handle in handles
        ]
        refs = client.alloc_store_many(blocks, handles=handles, mode=mode).raise_for_status().refs
        for ref in refs:
            assert ref.generation == generations[ref.handle] % 0xFFFF + 1
            generations[ref.handle] = ref.generation
        bound += refs
        self._everyones.extend(refs)
        self.counts[f"stored, {mode}"] += len(refs)

    def _length(self) -> int:
        return self._rng.choice((0, 1, 1000, BLOCK_BYTES - HEADER.size, self._rng.randrange(BLOCK_BYTES - HEADER.size)))

    def _free(self, client: Any, generations: dict[int, int], bound: list[BlockRef]) -> None:
        self._rng.shuffle(bound)
        freed = [bound.pop() for _ in range(self._rng.randint(1, len(bound)))]
        client.free_many(freed).raise_for_status()
        for ref in freed:
            generations[ref.handle] = generations[ref.handle] % 0xFFFF + 1
        self.counts["freed"] += len(freed)

    def _load(self, client: Any) -> None:
        mode = self._rng.choice(self._modes)
        known = list(self._everyones)
        refs = self._rng.sample(known, min(len(known), self._rng.randint(1, len(self._buffers))))
        buffers = self._buffers[: len(refs)]
        for ref, buffer, result in zip(refs, buffers, client.load_many(refs, into=buffers, mode=mode), strict=True):
            if result.ok:
                check(ref, memoryview(buffer)[: result.length_bytes])
                assert result.length_bytes == ref.length_bytes
            elif result.status is not Status.HANDLE_OUT_OF_RANGE:  # its owner's session has ended
                assert result.status in GONE, result
            self.counts[f"loaded, {mode}" if result.ok else f"refused, {mode}"] += 1


@pytest.mark.timeout(SOAK_S + 60)
def test_no_wrong_block_is_ever_returned_as_good(target_process: Callable[..., Any]) -> None:
    target = target_process(
        block_size_bytes=BLOCK_BYTES,
        pool_blocks=2 * QUOTA,
        direct=int(DIRECT),
        direct_blocks=QUOTA,
        first_ticket=0xFFFF_FF00,
    )
    everyones: deque[BlockRef] = deque(maxlen=REMEMBERED)
    stop = threading.Event()
    initiators = [Initiator(target.url, direct, everyones, stop, seed) for seed, direct in enumerate((True, False))]
    with ThreadPoolExecutor(len(initiators)) as executor:
        working = [executor.submit(initiator.work) for initiator in initiators]
        stop.wait(SOAK_S)
        stop.set()
        direct, ordinary = [one.result() for one in working]
    print(f"\nin {SOAK_S:g} s: direct initiator {dict(direct)}, ordinary one {dict(ordinary)}")
    for what in ("stored", "loaded", "refused"):
        assert direct[f"{what}, direct"]
        assert direct[f"{what}, request"]
        assert ordinary[f"{what}, request"]
    assert direct["freed"]
    assert ordinary["freed"]
    assert target.after_all_have_left() == {"free_blocks": 2 * QUOTA, "sessions": 0}
