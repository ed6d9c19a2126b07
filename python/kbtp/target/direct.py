"""Direct modes at the target (draft 6.6): to whom they are granted, through which STags (profile 2, 6.4, 6.10, 8.3).

| STag | covers | right | granted with |
|---|---|---|---|
| Table | all entries | read | DIRECT_LOAD |
| Pool | all blocks, at their Block Offsets | read | DIRECT_LOAD |
| Partition | the blocks of the own partition, at their Block Offsets | write | DIRECT_ALLOC |
| Ring | the slots of the own ring | read | DIRECT_ALLOC |
| Head | the 8 octets of its Head | atomic | DIRECT_ALLOC |

Each is for one stream alone and goes with it.
"""

from __future__ import annotations

from typing import Any

from kbtp.blocks.owner import BlockOwner, Partition
from kbtp.target.actions import SessionMemory
from kbtp.target.config import TargetConfig
from kbtp.target.identity import Identity
from kbtp.target.tickets import Tickets
from kbtp.types import DIRECT_MODES, Feature
from kbtp.verbs.api import Access, MemoryRegion
from kbtp.wire import Hello


def offered_features(
    config: TargetConfig,
    trusted: Feature,
    hello: Hello,
    *,
    binding: Feature = DIRECT_MODES,
    masked_atomics: bool,
    peer_read_depth: int,
) -> Feature:
    """Direct modes that `hello` asks for and that may be granted, and MASKED_ATOMICS if Head is to have that form.

    `trusted`: what whoever sent it may use. `binding`: what the RNIC lets be granted.
    `peer_read_depth`: RDMA Reads and atomics it may have outstanding here.
    """
    features = hello.requested_features & config.direct & trusted & binding & DIRECT_MODES
    if peer_read_depth == 0:  # profile 3 "RDMA Reads": both modes read
        return Feature.NONE
    if not config.one_trust_domain:  # profile 6.4: the pool holds octets of others
        features &= ~Feature.DIRECT_LOAD
    if features & Feature.DIRECT_ALLOC and masked_atomics:
        if not hello.requested_features & Feature.MASKED_ATOMICS:  # profile 8.3: RDMAP, whose atomics are masked
            return features & ~Feature.DIRECT_ALLOC
        features |= Feature.MASKED_ATOMICS
    return features


class DirectModes:
    """The direct modes of one session: its regions, and its tickets if it allocates directly."""

    def __init__(
        self,
        features: Feature,
        config: TargetConfig,
        store: BlockOwner,
        identity: Identity,
        memory: SessionMemory,
        now_s: float,
        *,
        head_of_device: bool = False,
    ) -> None:
        """`identity` has a partition if `features` has DIRECT_ALLOC."""
        self._config = config
        self._regions: dict[str, MemoryRegion] = {}
        self._ring_order = 0
        self.tickets: Tickets | None = None
        if features & Feature.DIRECT_LOAD:
            self._regions["table"] = memory.expose(store.table_memory, Access.REMOTE_READ)
            self._regions["pool"] = memory.expose(memory.pool.view, Access.REMOTE_READ, config.pool_base)
        if features & Feature.DIRECT_ALLOC:
            partition = store.partition_of(identity)
            assert partition is not None
            self._ring_order = partition.order
            self._expose_partition(partition, memory)
            self.tickets = Tickets(
                store,
                identity,
                partition,
                timeout_s=config.ticket_timeout_s,
                now_s=now_s,
                head_of_device=head_of_device,
                invalidate_head=self._regions["head"].revoke,
                invalidate_partition=self._regions["partition"].revoke,
            )

    def _expose_partition(self, partition: Partition, memory: SessionMemory) -> None:
        start = partition.first - self._config.pool_base
        blocks = memory.pool.view[start : start + partition.block_count * self._config.block_size_bytes]
        self._regions["partition"] = memory.expose(blocks, Access.REMOTE_WRITE, partition.first)
        self._regions["ring"] = memory.expose(partition.slots, Access.REMOTE_READ)
        self._regions["head"] = memory.expose(partition.head, Access.REMOTE_ATOMIC)

    def ack_fields(self) -> dict[str, Any]:
        """What HELLO_ACK says of them (profile 2): STags and offsets zero where nothing is granted."""
        fields = {f"{name}_stag": region.stag for name, region in self._regions.items()}
        fields |= {
            f"{name}_offset": self._regions[name].base_to for name in ("table", "ring", "head") if name in self._regions
        }
        if self.tickets is not None:
            fields |= {"ring_order": self._ring_order, "ticket_timeout_ms": self._config.ticket_timeout_ms}
        return fields

    def end(self) -> None:
        """The stream has ended: nothing gets through its STags any more, then its tickets are reclaimed."""
        for region in self._regions.values():
            region.revoke()
        if self.tickets is not None:
            self.tickets.end()
