"""What one writer holds on one target: its quota, its values, and the blocks it still has to free. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from kbtp.atomics import MASK64
from kbtp.cache.eviction import Policy
from kbtp.cache.steps import Entry, Session
from kbtp.types import BlockRef, Handle


class Held(NamedTuple):
    """A value of ours that was published."""

    record: bytes
    refs: tuple[BlockRef, ...]
    expires_at_s: float | None = None


class Share:
    """The blocks of one identity on one target, as far as this process knows.

    `used_blocks` counts every block from before it is asked for until its FREE has been answered, so that
    the quota is never found out by being refused.
    """

    def __init__(self, incarnation: int, url: str, block_bytes: int, policy: Policy) -> None:
        self.incarnation = incarnation
        self.url = url
        self.block_bytes = block_bytes
        self.session: Session | None = None
        self.number = 0
        """That of the session; 0 before the first."""
        self.settled = False
        """What was left behind before this session is dealt with; nothing is stored in it until then."""
        self.settling = False
        """A plan is about it: of two at once one would free what the other has stored."""
        self.adopted = False
        """All that the identity has published here is held; before, nothing can be told from what was left behind."""
        self.used_blocks = 0
        self.orphans: list[BlockRef] = []
        """Bound, without a record: to be freed."""
        self._held: dict[bytes, Held] = {}
        self._expiries: list[tuple[float, bytes]] = []
        self._policy = policy

    @property
    def quota_blocks(self) -> int:
        return self.session.quota_blocks if self.session else 0

    @property
    def room_blocks(self) -> int:
        return self.quota_blocks - self.used_blocks

    def __contains__(self, name: bytes) -> bool:
        return name in self._held

    @property
    def value_count(self) -> int:
        return len(self._held)

    def entries(self) -> list[tuple[bytes, Held]]:
        return list(self._held.items())

    # --- sessions ------------------------------------------------------------------------------

    def opened(self, session: Session) -> None:
        """A session began. Nothing of an identity that was not resumed is left (profile 3)."""
        if self.session is not None and session.number <= self.session.number:
            return  # what a plan was told before another one had its turn may be late
        self.session, self.number = session, session.number
        self.settled = False
        if not session.resumed:
            for name in list(self._held):
                self.forget(name)
            self.orphans.clear()
            self.used_blocks = 0
            self.adopted = True

    def is_in(self, number: int) -> bool:
        """Whether the session of that number is still the one there is: a later one frees what it does not know."""
        return self.number == number

    def unknown_handles(self) -> Iterator[Handle]:
        """Every handle of the range that is not one of a value's: what a former session bound may be among them.

        So are all orphans, which are forgotten.
        """
        assert self.session is not None
        self.orphans.clear()
        known = {ref.handle for held in self._held.values() for ref in held.refs}
        first = self.session.first_handle
        handles = (first + place & MASK64 for place in range(self.session.handle_count))
        return (handle for handle in handles if handle not in known)

    @property
    def held_blocks(self) -> int:
        return sum(len(held.refs) for held in self._held.values())

    def settle(self, left_blocks: int) -> None:
        """All but the values' blocks have been freed, and `left_blocks` that were not found."""
        self.used_blocks = self.held_blocks + len(self.orphans) + left_blocks
        self.settled = True

    # --- values --------------------------------------------------------------------------------

    def hold(self, name: bytes, held: Held) -> None:
        """A value has been published, or adopted; its blocks are counted as used already. What was held under that
        name has lost its record, else this one would not have been the first."""
        if name in self._held:
            self.drop(name)
        self._held[name] = held
        self._policy.add(name)
        if held.expires_at_s is not None:
            heappush(self._expiries, (held.expires_at_s, name))

    def hold_all(self, values: Mapping[bytes, Held]) -> None:
        """As `hold` of each, in order, of such as do not expire."""
        for name in self._held.keys() & values.keys():
            self.drop(name)
        self._held.update(values)
        self._policy.add_all(values)

    def used(self, name: bytes) -> None:
        self._policy.used(name)

    def used_all(self, names: Iterable[bytes]) -> None:
        """As `used` of each, in order."""
        self._policy.used_all(names)

    def get(self, name: bytes) -> Held | None:
        return self._held.get(name)

    def forget(self, name: bytes) -> Held | None:
        """The value has no record any more; its blocks are for whoever asks to free."""
        self._policy.remove(name)
        return self._held.pop(name, None)

    def drop(self, name: bytes) -> None:
        """The value has no record any more: its blocks are orphans."""
        held = self.forget(name)
        if held is not None:
            self.orphans.extend(held.refs)

    def drop_all(self, entries: Iterable[Entry]) -> list[Entry]:
        """As `drop` of each that is held with that very record: those are returned."""
        values, orphans = self._held, self.orphans
        dropped = []
        for entry in entries:
            held = values.get(entry[0])
            if held is not None and held.record == entry[1]:
                dropped.append(entry)
        # First: what the policy does not have is never a victim, whatever interrupts us here.
        self._policy.remove_all([name for name, _ in dropped])
        for name, _ in dropped:
            gone = values.pop(name, None)  # one of them may be there twice
            if gone is not None:
                orphans.extend(gone.refs)
        return dropped

    def victims(self, blocks: int, now_s: float, spared: Container[bytes] = ()) -> list[tuple[bytes, Held]]:
        """Values to evict for `blocks` blocks, the expired first; still held, but no longer in the policy's order.

        Each is to be followed by `drop`, or by `keep` where it cannot go. Those of the names `spared` are none.
        """
        aside = []
        chosen = self._expired(now_s)
        freed = sum(len(held.refs) for _, held in chosen)
        while freed < blocks:
            name = self._policy.victim()
            if name is None:
                break
            if name in spared:
                aside.append(name)
                continue
            held = self._held[name]
            chosen.append((name, held))
            freed += len(held.refs)
        self.keep(aside)
        return chosen

    def _expired(self, now_s: float) -> list[tuple[bytes, Held]]:
        found = []
        while self._expiries and self._expiries[0][0] <= now_s:
            expires_at_s, name = heappop(self._expiries)
            held = self._held.get(name)
            if held is not None and held.expires_at_s == expires_at_s:  # else it has made way for another
                self._policy.remove(name)
                found.append((name, held))
        return found

    def keep(self, names: Sequence[bytes]) -> None:
        """These victims stay."""
        for name in names:
            if name in self._held:
                self._policy.add(name)

    # --- blocks --------------------------------------------------------------------------------

    def reserve(self, blocks: int) -> None:
        self.used_blocks += blocks

    def release(self, blocks: int, number: int) -> None:
        """Blocks reserved or bound in the session of that number are free again; a later one has counted anew."""
        if self.is_in(number):
            self.used_blocks = max(0, self.used_blocks - blocks)

    def give_up(self, refs: Sequence[BlockRef], number: int) -> None:
        """Blocks bound in the session of that number are orphans; a later one frees them in any case."""
        if self.is_in(number):
            self.orphans.extend(refs)

    def take_orphans(self) -> list[BlockRef]:
        taken, self.orphans = self.orphans, []
        return taken
