"""One incarnation of a target: the structures its sessions share, and the deadlines that cross sessions."""

from __future__ import annotations

import math

from kbtp.blocks.owner import BlockOwner
from kbtp.errors import ApiMisuse
from kbtp.keys import Keys
from kbtp.target.actions import SessionMemory
from kbtp.target.config import TargetConfig
from kbtp.target.hello import RDMAP_FEATURES
from kbtp.target.identity import Identities, Identity
from kbtp.target.session import Session
from kbtp.types import Feature
from kbtp.wire import Nonces


class Target:
    """Owns the block store and the identities; `sessions` come and go.

    `incarnation` and `table_base_handle` are random numbers of the caller's. Handles of an earlier incarnation
    then fall outside the table, where a request for one is refused rather than served from a block that
    happens to have the same handle and generation. `masked_atomics`: what the RNIC can do, and so the form of the
    counters in `store` (draft 3.3, else 9.2). `binding`: what the RNIC lets be granted (`kbtp.target.hello`).
    `head_of_device`: peers' atomics are not atomic with what is done here, so no ticket is taken here while they may.
    """

    def __init__(
        self,
        config: TargetConfig,
        store: BlockOwner,
        *,
        incarnation: int,
        table_base_handle: int,
        masked_atomics: bool = True,
        binding: Feature = RDMAP_FEATURES,
        head_of_device: bool = False,
    ) -> None:
        self.config = config
        self.keys = config.keys
        self.store = store
        self.incarnation = incarnation
        self.table_base_handle = table_base_handle
        self.masked_atomics = masked_atomics
        self.binding = binding
        self.head_of_device = head_of_device
        self.identities = Identities(config, store, self.watch_free, self.free_done)
        self.sessions: set[Session] = set()
        self.has_actions: set[Session] = set()
        self.now_s = 0.0
        self._successors: dict[Identity, Session] = {}
        """Whose HELLO is answered once the session that has the identity is gone, unless it is gone itself."""
        self._free_deadlines_s: dict[int, float] = {}

    def open_session(
        self,
        memory: SessionMemory,
        *,
        nonces: Nonces,
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
            nonces=nonces,
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
            successor = self._successors.pop(session.identity, None)
            if successor is None or not self._succeed(successor, session.identity):
                self.identities.depart(session.identity, now_s)

    @staticmethod
    def _succeed(successor: Session, identity: Identity) -> bool:
        try:
            return successor.succeed(identity)
        except Exception as error:  # a fault of ours in one session must not be charged to another
            successor.fail(error)
            return True

    def replace(self, identity: Identity, successor: Session) -> None:
        """End the session that has `identity`, or waits for it; `successor` has it once that is over (profile 3)."""
        waiting = self._successors.get(identity)
        present = waiting or next(session for session in self.sessions if session.identity is identity)
        present.abort("replaced by a new session of the same identity")
        self._successors[identity] = successor

    def replace_keys(self, keys: Keys) -> None:
        """Other keys from now on; sessions whose key is not one of them, as it was, are ended.

        Raises `ApiMisuse` if a target that was made for the keys of its configuration cannot go on with `keys`.
        """
        self._check_keys(keys)
        self.keys = keys
        for session in self.sessions:
            if session.key is not None and keys.get(session.key.key_id) != session.key:
                session.abort("its key is not valid any more")

    def _check_keys(self, keys: Keys) -> None:
        domains = self.config.keys.domains
        if not keys or not domains:
            raise ApiMisuse("a target has keys from its start to its end, or never; start it anew")
        if len(domains) == 1 and keys.domains != domains:
            # Its blocks were not cleared so far, and sessions may read the whole pool (profile 6.4).
            raise ApiMisuse(
                f"the target was started for the trust domain {min(domains)!r} alone; start it anew to have others"
            )

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
            try:
                session.tick(now_s)
            except Exception as error:  # as in `_succeed`
                session.fail(error)
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
