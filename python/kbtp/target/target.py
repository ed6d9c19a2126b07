"""One incarnation of a target: the structures its sessions share, and the deadlines that cross sessions."""

from __future__ import annotations

import math

from kbtp.blocks.owner import BlockOwner
from kbtp.target.actions import SessionMemory
from kbtp.target.config import TargetConfig
from kbtp.target.identity import Identities
from kbtp.target.session import Session


class Target:
    """Owns the block store and the identities; `sessions` come and go.

    `incarnation` and `table_base_handle` are random numbers of the caller's. Handles of an earlier incarnation
    then fall outside the table, where a request for one is refused rather than served from a block that
    happens to have the same handle and generation. `masked_atomics`: what the RNIC can do, and so the form of the
    counters in `store` (draft 3.3, else 9.2).
    """

    def __init__(
        self,
        config: TargetConfig,
        store: BlockOwner,
        *,
        incarnation: int,
        table_base_handle: int,
        masked_atomics: bool = True,
    ) -> None:
        self.config = config
        self.store = store
        self.incarnation = incarnation
        self.table_base_handle = table_base_handle
        self.masked_atomics = masked_atomics
        self.identities = Identities(config, store, self.watch_free, self.free_done)
        self.sessions: set[Session] = set()
        self.has_actions: set[Session] = set()
        self.now_s = 0.0
        self._free_deadlines_s: dict[int, float] = {}

    def open_session(
        self,
        memory: SessionMemory,
        *,
        read_depth: int,
        peer_read_depth: int,
        peer: str,
        now_s: float,
        offloads: bool = False,
    ) -> Session:
        """A session for a stream whose HELLO is yet to come."""
        session = Session(
            self,
            memory,
            read_depth=read_depth,
            peer_read_depth=peer_read_depth,
            peer=peer,
            now_s=now_s,
            offloads=offloads,
        )
        self.sessions.add(session)
        return session

    def end_session(self, session: Session, now_s: float) -> None:
        """The stream of `session` has ended and all its work completions have been seen."""
        self.now_s = now_s
        self.sessions.discard(session)
        session.end()
        self.has_actions.discard(session)
        if session.identity is not None:
            self.identities.depart(session.identity, now_s)

    def watch_free(self, block_offset: int) -> None:
        """The return of this block to the ring waits for pins: its readers have `drain_s` to let go (profile 6.1)."""
        self._free_deadlines_s[block_offset] = self.now_s + self.config.drain_s

    def free_done(self, block_offset: int) -> None:
        """It has returned: a later FREE of the same block has a time of its own."""
        self._free_deadlines_s.pop(block_offset, None)

    def tick(self, now_s: float) -> None:
        """Act on every deadline that has passed."""
        self.now_s = now_s
        for session in list(self.sessions):
            session.tick(now_s)
        self.identities.expire(now_s)
        self._end_readers_that_do_not_drain(now_s)

    def _end_readers_that_do_not_drain(self, now_s: float) -> None:
        if not self._free_deadlines_s:
            return
        waiting = dict(self.store.pinned_frees())
        for block_offset, deadline_s in list(self._free_deadlines_s.items()):
            if block_offset not in waiting:
                del self._free_deadlines_s[block_offset]
            elif deadline_s <= now_s:
                for pin in waiting[block_offset]:
                    if isinstance(pin.owner, Session):
                        pin.owner.abort(f"a LOAD did not drain within {self.config.drain_s:g} s of a FREE")
                del self._free_deadlines_s[block_offset]

    def next_deadline_s(self) -> float:
        """When `tick` must be called next; `math.inf` if no deadline runs."""
        return min(
            min((session.next_deadline_s() for session in self.sessions), default=math.inf),
            min(self._free_deadlines_s.values(), default=math.inf),
            self.identities.next_deadline_s(),
        )
