"""Any sessions, any requests, any order of everything, against a model of the target made of dictionaries.

The model knows profile 3 (turns, read depth, identities), 6.1 (pins), 6.5 (failures), 8.4 and 8.8, draft 3.4 and 6; it
knows nothing of rings, offsets or messages. After every step the target has answered exactly what the model has, not
less and not earlier, and what was loaded is what one binding of the handle held.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kbtp.target.actions import Abort, Disconnect
from kbtp.types import HelloAckFlag, Status
from kbtp.verbs.api import RdmaRead

BLOCK, BLOCKS = 64 * 8, 4
TABLE_HANDLES = 32
"""Ranges of 4 handles each: more of them than identities can be there at once, so that ranges never run out."""
RANGE = 4
LINGER_S, DRAIN_S = 20.0, 5.0
READ_DEPTH = 2
INLINE, SEAL, INVALIDATE, ALLOW_UNSEALED = 1, 2, 8, 16
ANONYMOUS, ALICE, BOB = bytes(16), b"a" * 16, b"b" * 16


@dataclass(eq=False)
class Owner:
    """An identity: its range, quota and usage (draft 3.4)."""

    initiator_id: bytes
    first: int
    quota: int
    usage: int = 0
    live: bool = True
    expires_at_s: float = math.inf


@dataclass(eq=False)
class Binding:
    """What a handle was bound to, from ALLOC_STORE to FREE and as long as someone still loads it."""

    handle: int
    owner: Owner
    offset: int
    block: bytearray
    length: int
    sealed: bool
    pins: list[Asked] = field(default_factory=list)
    waiting_free: Asked | None = None
    freed: bool = False


@dataclass(eq=False)
class Asked:
    """One request on its way."""

    peer: Any
    what: str
    handle: int
    request_id: int
    stag: int
    length: int
    data: bytes
    flags: int
    generation: int
    started: bool = False
    binding: Binding | None = None
    first_half: bytes = b""


class Model:
    def __init__(self) -> None:
        self.owners: list[Owner] = []
        self.bindings: dict[int, Binding] = {}
        self.generations: dict[int, int] = {}
        self.queues: dict[tuple[Any, int], list[Asked]] = {}
        self.reads: dict[Any, list[Asked]] = {}
        self.answers: dict[tuple[Any, int], tuple[Status, int, int]] = {}
        """(Status, Generation, Data Length) of each completion, by peer and Request ID."""
        self.deadlines_s: dict[Binding, float] = {}
        self.owner_of: dict[Any, Owner] = {}
        self.now_s = 0.0

    # --- requests ---

    def ask(self, asked: Asked) -> None:
        self.queues.setdefault((asked.peer, asked.handle), []).append(asked)
        self.advance(asked.peer, asked.handle)

    def advance(self, peer: Any, handle: int) -> None:
        """Profile 3 "Same handle, same session"."""
        moved = True
        while moved:
            moved = False
            queue = self.queues.get((peer, handle), [])
            for i, asked in enumerate(queue):
                earlier = queue[:i]
                waits = earlier if asked.what != "LOAD" else [one for one in earlier if one.what != "LOAD"]
                if not asked.started and not waits:
                    asked.started = moved = True
                    self.start(asked)
                    break

    def answer(self, asked: Asked, status: Status, generation: int, length: int = 0) -> None:
        self.answers[asked.peer, asked.request_id] = (status, generation, length)

    def resolve(self, asked: Asked) -> None:
        self.queues[asked.peer, asked.handle].remove(asked)
        self.advance(asked.peer, asked.handle)

    def refusal(self, asked: Asked) -> tuple[Status, int] | None:
        """Profile 1; and the Data Length to tell."""
        owner, own = self.owner_of[asked.peer], self.owner_at(asked.handle)
        binding = self.bindings.get(asked.handle)
        load = asked.what == "LOAD"
        if own is None or (own is not owner and not load):
            return Status.HANDLE_OUT_OF_RANGE, 0
        if asked.what == "ALLOC_STORE" and binding:
            return Status.ALREADY_BOUND, 0
        if asked.what != "ALLOC_STORE" and not binding:
            return Status.NOT_BOUND, 0
        if asked.generation not in (0, self.generation(asked.handle)):
            return Status.GENERATION_MISMATCH, 0
        if asked.what == "STORE" and binding and binding.sealed:
            return Status.SEALED, 0
        if load and binding and not binding.sealed and not asked.flags & ALLOW_UNSEALED:
            return Status.NOT_SEALED, 0
        if load and binding and asked.length < binding.length:
            return Status.LENGTH_ERROR, binding.length
        if asked.what in ("STORE", "ALLOC_STORE") and len(asked.data) > BLOCK:
            return Status.LENGTH_ERROR, 0
        if asked.what == "ALLOC_STORE" and owner.usage >= owner.quota:
            return Status.NO_SPACE, 0
        return None

    def start(self, asked: Asked) -> None:
        refusal = self.refusal(asked)
        if refusal is not None:
            silent = refusal[0] is Status.HANDLE_OUT_OF_RANGE
            self.answer(asked, refusal[0], 0 if silent else self.generation(asked.handle), refusal[1])
            self.resolve(asked)
        elif asked.what == "LOAD":
            asked.binding = binding = self.bindings[asked.handle]
            asked.first_half = bytes(binding.block[: binding.length // 2])
            asked.length = binding.length
            self.answer(asked, Status.SUCCESS, self.generation(asked.handle), binding.length)
            if binding.length:
                binding.pins.append(asked)
            else:
                self.resolve(asked)
        elif asked.what == "FREE":
            self.free(self.bindings[asked.handle], asked)
        else:
            self.owner_of[asked.peer].usage += asked.what == "ALLOC_STORE"
            if asked.flags & INLINE or not asked.data:
                self.stored(asked)
            else:
                self.reads.setdefault(asked.peer, []).append(asked)

    def stored(self, asked: Asked) -> None:
        if asked.what == "ALLOC_STORE":
            self.generations[asked.handle] = self.generation(asked.handle) % 0xFFFF + 1
            owner = self.owner_of[asked.peer]
            self.bindings[asked.handle] = Binding(asked.handle, owner, -1, bytearray(BLOCK), 0, False)
        binding = self.bindings[asked.handle]
        binding.block[: len(asked.data)] = asked.data
        binding.length = len(asked.data)
        binding.sealed |= bool(asked.flags & SEAL)
        self.answer(asked, Status.SUCCESS, self.generation(asked.handle), binding.length)
        self.resolve(asked)

    def finished_read(self, asked: Asked) -> None:
        self.reads[asked.peer].remove(asked)
        self.stored(asked)

    def finished_write(self, asked: Asked) -> None:
        assert asked.binding is not None
        self.unpin(asked)
        self.resolve(asked)

    # --- FREE and pins ---

    def free(self, binding: Binding, asked: Asked | None) -> None:
        del self.bindings[binding.handle]
        self.generations[binding.handle] = self.generation(binding.handle) % 0xFFFF + 1
        binding.freed, binding.waiting_free = True, asked
        if binding.pins:
            self.deadlines_s[binding] = self.now_s + DRAIN_S
        else:
            self.block_returned(binding)

    def unpin(self, asked: Asked) -> None:
        binding, asked.binding = asked.binding, None
        if binding is None or asked not in binding.pins:
            return
        binding.pins.remove(asked)
        if binding.freed and not binding.pins:
            self.block_returned(binding)

    def block_returned(self, binding: Binding) -> None:
        self.deadlines_s.pop(binding, None)
        binding.owner.usage -= 1
        self.leave_if_settled(binding.owner)
        asked = binding.waiting_free
        if asked is not None and asked.peer in self.owner_of:
            self.answer(asked, Status.SUCCESS, self.generation(asked.handle))
            self.resolve(asked)

    # --- identities ---

    def generation(self, handle: int) -> int:
        return self.generations.get(handle, 1)

    def owner_at(self, handle: int) -> Owner | None:
        return next((one for one in self.owners if (handle - one.first) % (1 << 64) < RANGE), None)

    def known(self, initiator_id: bytes) -> Owner | None:
        """The identity that a HELLO with this Initiator ID would get back, or is refused for."""
        named = (one for one in self.owners if one.initiator_id == initiator_id != ANONYMOUS)
        return next((one for one in named if one.live or one.expires_at_s > self.now_s), None)

    def quota_left(self) -> int:
        return BLOCKS - sum(one.quota for one in self.owners)

    def decide_the_end(self, peer: Any) -> None:
        """Its stream is to end: what has not begun never will, whatever it waited for."""
        for (whose, _), queue in self.queues.items():
            if whose is peer:
                queue[:] = [asked for asked in queue if asked.started]

    def end(self, peer: Any) -> None:
        """Profile 3 "End of a stream": not done is not done; then what the identity owns lingers or goes."""
        owner = self.owner_of.pop(peer, None)
        gone = [asked for (whose, _), queue in self.queues.items() if whose is peer for asked in queue]
        self.queues = {key: queue for key, queue in self.queues.items() if key[0] is not peer}
        self.reads.pop(peer, None)
        for asked in gone:
            self.unpin(asked)
            if owner is not None and asked.started and asked.what == "ALLOC_STORE":
                owner.usage -= 1
        if owner is None:
            return
        owner.live = False
        owner.expires_at_s = self.now_s + (LINGER_S if owner.initiator_id != ANONYMOUS else 0)
        self.expire()

    def expire(self) -> None:
        for owner in [one for one in self.owners if not one.live and one.expires_at_s <= self.now_s]:
            for binding in [one for one in self.bindings.values() if one.owner is owner]:
                self.free(binding, None)
            self.leave_if_settled(owner)

    def leave_if_settled(self, owner: Owner) -> None:
        if not owner.live and owner.expires_at_s <= self.now_s and not owner.usage and owner in self.owners:
            self.owners.remove(owner)

    def overdue_readers(self) -> set[Any]:
        """Profile 6.1: who has kept a freeing waiting for too long."""
        overdue = [binding for binding, deadline_s in self.deadlines_s.items() if deadline_s <= self.now_s]
        readers = {asked.peer for binding in overdue for asked in binding.pins}
        for binding in overdue:
            del self.deadlines_s[binding]
        return readers


class Machine(RuleBasedStateMachine):
    new_world: ClassVar[Callable[..., Any]]

    def __init__(self) -> None:
        super().__init__()
        self.world = self.new_world(
            table_handles=TABLE_HANDLES,
            request_credits=6,
            linger_s=LINGER_S,
            drain_s=DRAIN_S,
            first_ticket=(1 << 32) - 3,
        )
        self.model = Model()
        self.model.now_s = self.world.now_s
        self.peers: list[Any] = []
        self.asked: dict[tuple[Any, int], Asked] = {}
        self.by_stag: dict[tuple[Any, int], Asked] = {}
        self.read_deadline_s: dict[Any, float] = {}
        self.draining: set[Any] = set()
        self.octet = 0

    # --- sessions ---

    @initialize(ids=st.sampled_from([(ALICE, ANONYMOUS), (ANONYMOUS, BOB), (ALICE, BOB)]))
    def two_at_once(self, ids: tuple[bytes, bytes]) -> None:
        for initiator_id in ids:
            self.connect(initiator_id, 2)

    @precondition(lambda self: len(self.peers) < 3)
    @rule(initiator_id=st.sampled_from([ANONYMOUS, ALICE, BOB]), quota=st.integers(0, 3))
    def say_hello(self, initiator_id: bytes, quota: int) -> None:
        self.connect(initiator_id, quota)

    def connect(self, initiator_id: bytes, quota: int) -> None:
        peer, model = self.world.open(READ_DEPTH), self.model
        ack = peer.hello(initiator_id=initiator_id, requested_quota=quota, requested_handles=RANGE)
        known, left = model.known(initiator_id), model.quota_left()
        if known is not None and known.live:
            assert ack.status == Status.ACCESS_DENIED
        elif known is not None:
            assert (ack.status, ack.flags) == (Status.SUCCESS, HelloAckFlag.RESUMED)
            assert (ack.first_handle, ack.allocation_quota) == (known.first, known.quota)
            assert ack.bound_blocks == sum(binding.owner is known for binding in model.bindings.values())
            known.live, known.expires_at_s = True, math.inf
            model.owner_of[peer] = known
        elif quota and not left:
            assert ack.status == Status.NO_SPACE
        else:
            assert (ack.status, ack.flags, ack.bound_blocks) == (Status.SUCCESS, HelloAckFlag.NONE, 0)
            assert (ack.handle_count, ack.allocation_quota) == (RANGE, min(quota or 2, left))
            assert all(model.owner_at(peer.handle(n)) is None for n in range(RANGE))
            owner = Owner(initiator_id, ack.first_handle, ack.allocation_quota)
            model.owners.append(owner)
            model.owner_of[peer] = owner
        if ack.status != Status.SUCCESS:
            peer.end()
            return
        self.peers.append(peer)

    def some_peer(self, n: int) -> Any:
        return self.peers[n % len(self.peers)]

    @precondition(lambda self: self.peers)
    @rule(n=st.integers(0, 2), how=st.sampled_from(["end", "end", "drain", "stay", "stay", "stay"]))
    def leave(self, n: int, how: str) -> None:
        peer = self.some_peer(n)
        if how == "end" or peer.end_action is not None:
            self.end_peer(peer)
        elif how == "drain":
            self.draining.add(peer)
            peer.session.drain()
            self.world.perform()

    def end_peer(self, peer: Any) -> None:
        self.peers.remove(peer)
        self.draining.discard(peer)
        self.read_deadline_s.pop(peer, None)
        self.model.end(peer)
        peer.end()

    @rule(seconds=st.sampled_from([0.5, 0.5, 2.0, 2.0, 5.0, 19.0]))
    def wait(self, seconds: float) -> None:
        """Profile 3 (linger), 6.1 (readers that do not drain), 8.8 (RDMA Reads that are not answered)."""
        model = self.model
        model.now_s += seconds
        late = {peer for peer, deadline_s in self.read_deadline_s.items() if deadline_s <= model.now_s}
        model.expire()
        late |= model.overdue_readers()
        self.world.advance(seconds)
        assert {peer for peer in self.peers if isinstance(peer.end_action, Abort)} == late - self.disconnecting()
        for peer in late:  # the end of one may let a request of another go on, unless that is to end too
            model.decide_the_end(peer)
        for peer in late:
            self.end_peer(peer)

    def disconnecting(self) -> set[Any]:
        return {peer for peer in self.peers if isinstance(peer.end_action, Disconnect)}

    # --- requests ---

    @precondition(lambda self: self.peers)
    @rule(
        n=st.integers(0, 2),
        what=st.sampled_from(["LOAD", "LOAD", "STORE", "ALLOC_STORE", "ALLOC_STORE", "FREE"]),
        own=st.booleans(),
        nth=st.integers(0, RANGE - 1),
        length=st.sampled_from([0, 2, 100, BLOCK, BLOCK, BLOCK + 1]),
        flags=st.sampled_from([0, INLINE, SEAL, SEAL, SEAL | INLINE, INVALIDATE]),
        unsealed=st.booleans(),
        stale=st.integers(0, 11),
    )
    def request(
        self, n: int, what: str, own: bool, nth: int, length: int, flags: int, unsealed: bool, stale: int
    ) -> None:
        """A request with anything in it, for any handle of anyone's range."""
        peer = self.some_peer(n)
        owners = self.model.owners
        first = peer.handle() if own else owners[nth % len(owners)].first
        self.ask(peer, what, (first + nth) % (1 << 64), length, flags, unsealed, stale)

    # Requests that mean something: for a handle that is bound.

    def some_binding(self, n: int) -> Binding:
        bindings = list(self.model.bindings.values())
        return bindings[n % len(bindings)]

    @precondition(lambda self: self.peers and self.model.bindings)
    @rule(n=st.integers(0, 2), which=st.integers(0, BLOCKS - 1), flags=st.sampled_from([0, INVALIDATE]))
    def load(self, n: int, which: int, flags: int) -> None:
        self.ask(self.some_peer(n), "LOAD", self.some_binding(which).handle, BLOCK, flags, True, 2)

    @precondition(lambda self: self.owned_bindings())
    @rule(
        which=st.integers(0, BLOCKS - 1),
        length=st.sampled_from([2, 100, BLOCK]),
        flags=st.sampled_from([0, 0, INLINE, SEAL, INVALIDATE]),
    )
    def store(self, which: int, length: int, flags: int) -> None:
        owned = self.owned_bindings()
        peer, binding = owned[which % len(owned)]
        self.ask(peer, "STORE", binding.handle, length, flags, False, 2)

    @precondition(lambda self: self.owned_bindings())
    @rule(which=st.integers(0, BLOCKS - 1))
    def free(self, which: int) -> None:
        owned = self.owned_bindings()
        peer, binding = owned[which % len(owned)]
        self.ask(peer, "FREE", binding.handle, 0, 0, False, 2)

    def owned_bindings(self) -> list[tuple[Any, Binding]]:
        """Bindings whose owners are there, unsealed ones last so that they are drawn as often."""
        model = self.model
        pairs = [
            (peer, one) for one in model.bindings.values() for peer in self.peers if model.owner_of[peer] is one.owner
        ]
        return sorted(pairs, key=lambda pair: not pair[1].sealed)

    @precondition(lambda self: self.peers)
    @rule(n=st.integers(0, 2), nth=st.integers(0, RANGE - 1), seal=st.sampled_from([0, 0, SEAL]), slow=st.booleans())
    def bind(self, n: int, nth: int, seal: int, slow: bool) -> None:
        peer = self.some_peer(n)
        self.ask(peer, "ALLOC_STORE", peer.handle(nth), BLOCK, seal | (0 if slow else INLINE), False, 2)

    def ask(self, peer: Any, what: str, handle: int, length: int, flags: int, unsealed: bool, stale: int) -> None:
        if not peer.lent or peer.end_action is not None:
            return
        current = self.model.generation(handle)
        generation = {0: current, 1: current + 1}.get(stale, 0)
        self.octet = self.octet % 255 + 1
        data = bytes([self.octet]) * length
        if what == "LOAD":
            flags = flags & INVALIDATE | (ALLOW_UNSEALED if unsealed else 0)
            length = BLOCK if stale != 3 else length
            request_id = peer.load(handle, length, generation=generation, flags=flags)
        elif what == "STORE":
            request_id = peer.store(handle, data, generation=generation, flags=flags)
        elif what == "ALLOC_STORE":
            request_id = peer.alloc_store(handle, data, generation=generation, flags=flags)
        else:
            flags, request_id = 0, peer.free(handle, generation=generation)
        asked = Asked(peer, what, handle, request_id, peer.next_stag, length, data, flags, generation)
        self.asked[peer, request_id] = asked
        if what != "FREE" and not flags & INLINE:
            self.by_stag[peer, peer.next_stag] = asked
        self.model.ask(asked)
        self.learn_offsets()

    @precondition(lambda self: any(peer.posted for peer in self.peers))
    @rule(n=st.integers(0, 2), which=st.integers(0, 5))
    def finish(self, n: int, which: int) -> None:
        """One RDMA Write or Read of one stream is done, in whatever order."""
        busy = [peer for peer in self.peers if peer.posted]
        peer = busy[n % len(busy)]
        operation = peer.posted[which % len(peer.posted)]
        asked = self.by_stag[peer, operation.remote_stag]
        read = isinstance(operation, RdmaRead)
        binding = asked.binding
        second_half = bytes(binding.block[asked.length // 2 : asked.length]) if binding else b""
        if read:
            self.model.finished_read(asked)
            self.read_deadline_s.pop(peer, None)  # `each_session_reads_as_deep_as_it_may` sets the next one
        else:
            self.model.finished_write(asked)
        peer.finish(operation)
        if not read:
            # A sealed block does not change, so this is the one content it had.
            assert peer.buffers[asked.stag][: asked.length] == asked.first_half + second_half
            if binding is not None and binding.sealed and not asked.flags & ALLOW_UNSEALED:
                assert asked.first_half + second_half == bytes(binding.block[: asked.length])
        self.learn_offsets()

    def learn_offsets(self) -> None:
        """A new binding's block is no one else's: not bound, not pinned."""
        for binding in self.model.bindings.values():
            if binding.offset == -1:
                binding.offset = self.world.store.read(binding.handle).block_offset
        pinned = {asked.binding for queue in self.model.queues.values() for asked in queue if asked.binding}
        used = [binding.offset for binding in {*self.model.bindings.values(), *pinned}]
        assert len(used) == len(set(used)) <= BLOCKS

    # --- what is true after every step ---

    @invariant()
    def answers_are_those_of_the_model(self) -> None:
        for peer in self.peers:
            got = {
                request_id: (answer.status, answer.generation, answer.data_length)
                for request_id, answer in peer.answers.items()
            }
            expected = {
                request_id: answer for (whose, request_id), answer in self.model.answers.items() if whose is peer
            }
            assert got == expected
            for request_id, answer in peer.answers.items():
                asked = self.asked[peer, request_id]
                assert answer.invalidated == (asked.stag if asked.flags & INVALIDATE else None)

    @invariant()
    def the_table_is_that_of_the_model(self) -> None:
        for n, entry in enumerate(self.world.table()):
            handle = (self.world.target.table_base_handle + n) % (1 << 64)
            binding = self.model.bindings.get(handle)
            assert entry.generation == self.model.generation(handle)
            assert entry.valid == (binding is not None)
            if binding is not None:
                assert (entry.sealed, entry.data_length) == (binding.sealed, binding.length)
                content = self.world.store.pool.view(entry.block_offset, binding.length)
                assert content == binding.block[: binding.length]

    @invariant()
    def each_session_reads_as_deep_as_it_may(self) -> None:
        """Profile 3 "RDMA Reads", 8.8."""
        for peer in self.peers:
            wanted = min(READ_DEPTH, len(self.model.reads.get(peer, ())))
            assert len(peer.reads) == wanted
            if wanted and peer not in self.read_deadline_s:
                self.read_deadline_s[peer] = self.model.now_s + DRAIN_S

    @invariant()
    def usage_is_that_of_the_model(self) -> None:
        model, store = self.model, self.world.store
        assert store.quotas.left == model.quota_left()
        assert store.free_blocks == BLOCKS - sum(owner.usage for owner in model.owners)

    @invariant()
    def a_draining_session_ends_when_nothing_is_outstanding(self) -> None:
        for peer in self.peers:
            idle = not any(queue for (whose, _), queue in self.model.queues.items() if whose is peer)
            assert (peer.end_action is not None) == (peer in self.draining and idle)

    def step(self, dice: random.Random) -> None:
        """One rule, those of requests and their progress more often than those that end something."""
        n, nth = dice.randrange(3), dice.randrange(RANGE)
        flags = dice.choice([0, 0, INLINE, SEAL, INVALIDATE])
        length = dice.choice([0, 2, 100, BLOCK])
        what = dice.choice(["bind", "bind", "load", "load", "load", "store", "free", "finish", "finish", "any", "rest"])
        if what == "bind" and self.peers:
            self.bind(n, nth, dice.choice([0, 0, SEAL]), dice.random() < 0.5)
        elif what == "load" and self.peers and self.model.bindings:
            self.load(n, nth, flags & INVALIDATE)
        elif what == "store" and self.owned_bindings():
            self.store(nth, length, flags)
        elif what == "free" and self.owned_bindings():
            self.free(nth)
        elif what == "finish" and any(peer.posted for peer in self.peers):
            self.finish(n, dice.randrange(6))
        elif what == "any" and self.peers:
            request = dice.choice(["LOAD", "STORE", "ALLOC_STORE", "FREE"])
            self.request(n, request, dice.random() < 0.5, nth, length, flags, dice.random() < 0.5, dice.randrange(12))
        elif dice.random() < 0.4 and len(self.peers) < 3:
            self.say_hello(dice.choice([ANONYMOUS, ALICE, BOB]), dice.randrange(4))
        elif dice.random() < 0.2 and self.peers:
            self.leave(n, dice.choice(["end", "end", "drain"]))
        else:
            self.wait(dice.choice([0.25, 0.25, 0.5, 2.0, 5.0, 19.0]))
        self.check()

    def check(self) -> None:
        self.answers_are_those_of_the_model()
        self.the_table_is_that_of_the_model()
        self.each_session_reads_as_deep_as_it_may()
        self.usage_is_that_of_the_model()
        self.a_draining_session_ends_when_nothing_is_outstanding()

    def teardown(self) -> None:
        for peer in list(self.peers):
            self.end_peer(peer)
        self.world.advance(LINGER_S)
        self.world.check_nothing_is_left()


@pytest.mark.untraced
@pytest.mark.parametrize("seed", range(12))
def test_long_lives(new_world_of_any_store: Callable[..., Any], seed: int) -> None:
    """The same rules, many more steps than a search for a short failure takes."""
    machine = type("Bound", (Machine,), {"new_world": staticmethod(new_world_of_any_store)})()
    dice = random.Random(seed)
    for _ in range(600):
        machine.step(dice)
    machine.teardown()


@pytest.mark.untraced
def test_any_sessions_any_order(new_world_of_any_store: Callable[..., Any]) -> None:
    """Profile 3, 6, 8: see the top of this file."""
    run_state_machine_as_test(
        type("Bound", (Machine,), {"new_world": staticmethod(new_world_of_any_store)}),
        settings=settings(
            max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
