"""64 initiators at once, each doing 500 random operations on one target, contents checked octet for octet.

What may come of an operation is known beforehand but for one thing: whether a block that another initiator is freeing
at that moment is still there. Then it is either refused or whole, and never anything else.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import pytest

import kbtp
from kbtp import BlockRef, Result, Status

SEED = 5040
INITIATORS = 64
OPERATIONS = 500
QUOTA = 4
BLOCK_BYTES = 8192
POOL_BLOCKS = INITIATORS * QUOTA
TIMEOUT_S = 150.0
"""Ten times what two idle cores take."""

GONE = (Status.NOT_BOUND, Status.GENERATION_MISMATCH)


class Life(Enum):
    LIVE = auto()
    FREEING = auto()
    GONE = auto()


@dataclass(eq=False)
class Block:
    """One binding, as all initiators know it."""

    ref: BlockRef
    owner: int
    octets: bytes
    sealed: bool
    being_sealed: bytes | None = None
    """What its owner has just stored with SEAL and has no completion for yet."""
    life: Life = Life.LIVE


@dataclass
class Initiator:
    """One client and its random operations."""

    number: int
    client: kbtp.AsyncClient
    everyones: list[Block]
    rng: random.Random = field(init=False)
    own: list[Block] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{SEED}/{self.number}")

    async def work(self) -> None:
        steps = {
            self.alloc_store: 26, self.store: 12, self.load: 36, self.free: 18, self.load_batch: 4,
            self.store_too_much: 2, self.touch_anothers: 2,
        }  # fmt: skip
        done = 0
        while done < OPERATIONS:
            step = self.rng.choices(list(steps), list(steps.values()))[0]
            done += await step()

    def count(self, result: Result) -> Result:
        assert result.error is None or result.status is not None, result.error
        assert result.status is not None
        self.counts[result.status.name] = self.counts.get(result.status.name, 0) + 1
        return result

    def octets(self) -> bytes:
        """Inline, through a descriptor, or none at all."""
        return self.rng.randbytes(self.rng.choice((0, 1, 200, 4096, 4097, 8000, BLOCK_BYTES)))

    def recent(self) -> list[Block]:
        """Everybody's latest blocks: most are live, some freed, some freed and bound again."""
        return self.everyones[-POOL_BLOCKS:]

    async def alloc_store(self) -> int:
        octets, sealed = self.octets(), self.rng.random() < 0.7
        full = len(self.own) == QUOTA
        result = self.count((await self.client.alloc_store_many([octets], seal=sealed))[0])
        assert result.status is (Status.NO_SPACE if full else Status.SUCCESS)
        if result.ok:
            assert result.length_bytes == len(octets)
            block = Block(result.ref, self.number, octets, sealed)
            self.own.append(block)
            self.everyones.append(block)
        return 1

    async def store(self) -> int:
        if not self.own:
            return 0
        block, octets, seal = self.rng.choice(self.own), self.octets(), self.rng.random() < 0.3
        was_sealed = block.sealed
        block.being_sealed = octets if seal and not was_sealed else None
        result = self.count((await self.client.store_many([block.ref], [octets], seal=seal))[0])
        assert result.status is (Status.SEALED if was_sealed else Status.SUCCESS)
        if result.ok:
            block.octets, block.sealed = octets, seal
        return 1

    async def free(self) -> int:
        if not self.own:
            return 0
        block = self.own.pop(self.rng.randrange(len(self.own)))
        block.life = Life.FREEING
        result = self.count((await self.client.free_many([block.ref]))[0])
        assert result.ok
        block.life = Life.GONE
        if self.rng.random() < 0.8:
            self.everyones.remove(block)
        again = self.count((await self.client.free_many([block.ref]))[0])
        assert again.status in GONE
        return 2

    async def load(self) -> int:
        if not self.everyones:
            return 0
        await self.load_and_check([self.rng.choice(self.recent())])
        return 1

    async def load_batch(self) -> int:
        blocks = self.rng.choices(self.recent(), k=10) if self.everyones else []
        await self.load_and_check(blocks)
        return len(blocks)

    async def load_and_check(self, blocks: list[Block]) -> None:
        before = [(block.life, block.sealed, block.octets) for block in blocks]
        allow_unsealed = self.rng.random() < 0.5
        short = self.rng.random() < 0.1
        buffers = [bytearray(b"\xa5" * (max(0, len(octets) - 1) if short else BLOCK_BYTES)) for _, _, octets in before]
        results = await self.client.load_many([b.ref for b in blocks], buffers, allow_unsealed=allow_unsealed)
        for block, (life, was_sealed, octets), buffer, result in zip(blocks, before, buffers, results, strict=True):
            self.count(result)
            if life is Life.GONE:
                assert result.status in GONE
            elif block.life is Life.LIVE and was_sealed:
                assert result.status is (Status.LENGTH_ERROR if len(octets) > len(buffer) else Status.SUCCESS)
            if result.ok and was_sealed:
                assert result.length_bytes == len(octets)
                assert buffer[: len(octets)] == octets
                assert buffer[len(octets) :] == b"\xa5" * (len(buffer) - len(octets))
            elif result.ok:
                if block.owner == self.number:
                    assert buffer[: len(octets)] == octets
                elif not allow_unsealed:
                    assert buffer[: result.length_bytes] == (block.octets if block.sealed else block.being_sealed)
            else:
                assert buffer == b"\xa5" * len(buffer)
                assert result.status is not Status.NOT_SEALED or not (was_sealed or allow_unsealed)

    async def store_too_much(self) -> int:
        result = self.count((await self.client.alloc_store_many([bytes(BLOCK_BYTES + 1)]))[0])
        assert result.status is Status.LENGTH_ERROR
        return 1

    async def touch_anothers(self) -> int:
        """Only loads reach into the ranges of others."""
        others = [block for block in self.recent() if block.owner != self.number]
        if not others:
            return 0
        ref = self.rng.choice(others).ref
        freed = await self.client.free_many([ref])
        stored = await self.client.store_many([ref], [b"x"])
        allocated = await self.client.alloc_store_many([b"x"], handles=[ref.handle])
        for result in (*freed, *stored, *allocated):
            assert self.count(result).status is Status.HANDLE_OUT_OF_RANGE
        return 3


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_64_initiators_at_once(target_process: Callable[..., Any]) -> None:
    target = target_process(block_size_bytes=BLOCK_BYTES, pool_blocks=POOL_BLOCKS, request_credits=8)
    print(f"seed {SEED}")
    everyones: list[Block] = []

    async def scenario() -> list[Initiator]:
        clients = await asyncio.gather(
            *(kbtp.connect_async(target.url, quota=QUOTA, name=f"initiator {n}") for n in range(INITIATORS))
        )
        initiators = [Initiator(number, client, everyones) for number, client in enumerate(clients)]
        await asyncio.gather(*(initiator.work() for initiator in initiators))
        await asyncio.gather(*(client.close() for client in clients))
        return initiators

    initiators = asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
    totals: dict[str, int] = {}
    for initiator in initiators:
        for status, count in initiator.counts.items():
            totals[status] = totals.get(status, 0) + count
    print(f"statuses {totals}")
    assert sum(totals.values()) >= INITIATORS * OPERATIONS
    assert set(totals) >= {
        "SUCCESS", "NOT_BOUND", "NOT_SEALED", "SEALED", "GENERATION_MISMATCH", "HANDLE_OUT_OF_RANGE", "LENGTH_ERROR",
        "NO_SPACE",
    }  # fmt: skip
    assert target.after_all_have_left() == {"free_blocks": target.free_blocks, "sessions": 0}
    assert target.free_blocks == POOL_BLOCKS
