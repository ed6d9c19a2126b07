"""The memory that we lend to the peer under test: what it reads and writes there by RDMA, watched octet by octet."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from kbtp.conformance.deviation import Deviation
from kbtp.iwarp.rdmap import ReadRequest


@dataclass(slots=True)
class Lent:
    """`octets` under `stag`, the first at tagged offset `to`. `touched`: offset and length of every access."""

    stag: int
    to: int
    octets: bytearray
    readable: bool
    writable: bool
    touched: list[tuple[int, int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.octets)

    @property
    def unwritten(self) -> bool:
        """The peer wrote nothing."""
        return not self.touched

    def _span(self, to: int, length: int, doing: str) -> slice:
        offset = to - self.to
        if offset < 0 or offset + length > len(self.octets):
            raise Deviation(
                f"{doing} within the {len(self.octets)} octets at {self.to:#x} of STag {self.stag:#010x}",
                f"{length} octets at {to:#x}",
            )
        self.touched.append((offset, length))
        return slice(offset, offset + length)


class Memory:
    """All that one connection has lent."""

    def __init__(self) -> None:
        self._lent: dict[int, Lent] = {}

    def lend(
        self, octets: bytes | int, *, readable: bool = True, writable: bool = True, atomic: bool = False,
        to: int = 0x1000,
    ) -> Lent:  # fmt: skip
        """Lend a copy of `octets`, or that many zero octets, under a new STag. Who answers atomics by hand knows where
        they may go; `atomic` is for RNICs."""
        return self._lend(bytearray(octets), readable, writable, to)

    def lend_again(self, lent: Lent, *, readable: bool = True, writable: bool = True) -> Lent:
        """The same octets at the same tagged offset, under another STag."""
        return self._lend(lent.octets, readable, writable, lent.to)

    def _lend(self, octets: bytearray, readable: bool, writable: bool, to: int) -> Lent:
        stag = 0
        while stag == 0 or stag in self._lent:
            stag = secrets.randbits(32)
        self._lent[stag] = lent = Lent(stag, to, octets, readable, writable)
        return lent

    def take_back(self, lent: Lent) -> None:
        """Whoever touches it from now on breaks a rule."""
        del self._lent[lent.stag]

    def lent_as(self, stag: int) -> Lent | None:
        return self._lent.get(stag)

    def read(self, request: ReadRequest) -> bytes:
        """What a Read Request of the peer asks for. Raises `Deviation` for one that may not be."""
        if request.size == 0:
            return b""
        lent = self._known(request.source_stag, "an RDMA Read")
        if not lent.readable:
            raise Deviation("an RDMA Read of a buffer that was lent for reading", f"one of STag {lent.stag:#010x}")
        return bytes(lent.octets[lent._span(request.source_to, request.size, "an RDMA Read")])

    def write(self, stag: int, to: int, payload: bytes) -> None:
        """What a Write of the peer brings. Raises `Deviation` for one that may not be."""
        if not payload:
            return
        lent = self._known(stag, "an RDMA Write")
        if not lent.writable:
            raise Deviation("an RDMA Write to a buffer that was lent for writing", f"one to STag {stag:#010x}")
        lent.octets[lent._span(to, len(payload), "an RDMA Write")] = payload

    def _known(self, stag: int, doing: str) -> Lent:
        lent = self._lent.get(stag)
        if lent is None:
            raise Deviation(f"{doing} with an STag that is lent", f"one with STag {stag:#010x}")
        return lent
