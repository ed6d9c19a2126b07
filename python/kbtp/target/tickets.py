"""What becomes of the tickets that an initiator takes itself (draft 3.4 and 6.6, profile 6.9 to 6.11, 8.10).

    taken --look--> seen --BIND--> bound
                      |
                      +--the Ticket Timeout--> overdue --next tick--> reclaimed: a BIND of it is TICKET_ABANDONED
                      +--the end of the stream----------------------> reclaimed

Only `look` sees what the initiator did to Head, and it looks at least every quarter of the Ticket Timeout. A ticket's
time begins when it is seen, which is not before a block lies in its slot. The first reclaim of a session ends its
direct allocation, in the order of profile 6.11:

1. BINDs that were received are served: an overdue ticket waits for one more tick, and for a BIND of it that waits for
   its turn.
2. The Head STag is invalidated: no ticket is taken any more.
3. Head is looked at for the last time that the initiator may have moved it.
4. The Partition STag is invalidated: no RDMA Write of the initiator reaches a block any more.
5. The overdue tickets are reclaimed. Those that are still in time may be bound, and are reclaimed when theirs is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable

from kbtp.blocks import Entry
from kbtp.blocks.owner import BlockOwner, Partition
from kbtp.limits import TICKET_LOOKS_PER_TIMEOUT
from kbtp.types import RequestFlag, Status, Ticket
from kbtp.wire import Bind


class Tickets:
    """The tickets of one session on its holder's own ring.

    `invalidate_head` and `invalidate_partition` invalidate that STag: nothing of the initiator gets through it after
    they return. What the initiator did to Head against the rules comes out of `tick` and `bind` as `PeerMisbehaved`
    (Terminate 0/2/07).
    """

    def __init__(
        self,
        store: BlockOwner,
        holder: Hashable,
        partition: Partition,
        *,
        timeout_s: float,
        now_s: float,
        head_of_device: bool = False,
        invalidate_head: Callable[[], None],
        invalidate_partition: Callable[[], None],
    ) -> None:
        self._store = store
        self._holder = holder
        self._partition = partition
        self._timeout_s = timeout_s
        self.head_is_the_devices = head_of_device
        """The peer moves Head in a way that is not atomic with a ticket taken here (IBTA: among a device's own)."""
        self._invalidate_head = invalidate_head
        self._invalidate_partition = invalidate_partition
        self._seen_at_s: dict[Ticket, float] = {}
        self._overdue: set[Ticket] = set()
        self._abandoned: set[Ticket] = set()
        self._next_tick_s = now_s + self._look_every_s

    @property
    def _look_every_s(self) -> float:
        return self._timeout_s / TICKET_LOOKS_PER_TIMEOUT

    def bind(self, request: Bind) -> Entry | Status:
        """Draft 6.6: the entry as bound, or the status that refuses a BIND which passed every check before NO_SPACE.

        Refused, it leaves its ticket outstanding (profile 6.11).
        """
        seal = bool(request.flags & RequestFlag.SEAL)
        bound = self._store.bind_ticket(
            request.handle, self._holder, request.ticket, request.block_offset, request.data_length, seal
        )
        if bound is Status.TICKET_MISMATCH and request.ticket in self._abandoned:
            return Status.TICKET_ABANDONED
        return bound

    def next_deadline_s(self) -> float:
        """When `tick` must be called next."""
        return self._next_tick_s

    def tick(self, now_s: float, received: Collection[Ticket]) -> None:
        """Look at Head, and reclaim what is overdue. `received`: tickets of BINDs that wait for their turn."""
        self._look(now_s)
        overdue = {ticket for ticket, seen_at_s in self._seen_at_s.items() if seen_at_s + self._timeout_s <= now_s}
        served = self._overdue & overdue  # whatever was received when they became overdue
        if served.difference(received):
            self._reclaim(served.difference(received), now_s)
        self._overdue = overdue & self._seen_at_s.keys()
        if self._overdue - served:
            self._next_tick_s = now_s
            return
        due_s = (at_s + self._timeout_s for ticket, at_s in self._seen_at_s.items() if ticket not in self._overdue)
        self._next_tick_s = min(now_s + self._look_every_s, min(due_s, default=math.inf))

    def _look(self, now_s: float) -> None:
        outstanding = self._partition.outstanding_tickets()
        self._seen_at_s = {ticket: self._seen_at_s.get(ticket, now_s) for ticket in outstanding}

    def _reclaim(self, tickets: set[Ticket], now_s: float) -> None:
        self._invalidate_head()
        self.head_is_the_devices = False
        self._look(now_s)
        self._invalidate_partition()
        for ticket in sorted(tickets & self._seen_at_s.keys(), key=self._seen_at_s.__getitem__):
            self._store.reclaim_ticket(self._holder, ticket)
            self._abandoned.add(ticket)
            del self._seen_at_s[ticket]

    def end(self) -> None:
        """The stream has ended, and nothing of the initiator's is placed any more: all tickets that it took and did not
        bind are reclaimed (profile 3 "End of a stream")."""
        self._partition.restore_head()
        while tickets := self._partition.outstanding_tickets():
            for ticket in tickets:
                self._store.reclaim_ticket(self._holder, ticket)  # a free that waited for its slot may follow
