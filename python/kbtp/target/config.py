"""What an operator decides about a target. The one source of its defaults: for code, flags, environment and file."""

from __future__ import annotations

from dataclasses import dataclass, field

from kbtp import limits
from kbtp.blocks import ring_order_for
from kbtp.errors import ApiMisuse
from kbtp.keys import Keys
from kbtp.types import DIRECT_MODES, Feature


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """All sizes in octets, all times in seconds. Raises `ApiMisuse` naming the field that cannot work.

    `quota` is what an initiator gets that asks for no particular one; one that asks may get up to `max_quota`.
    Zero means a share derived from the pool: see `default_quota`, `quota_cap` and `handle_count`.
    """

    block_size_bytes: int = limits.DEFAULT_BLOCK_SIZE_BYTES
    pool_blocks: int = limits.DEFAULT_POOL_BLOCKS
    quota: int = 0
    max_quota: int = 0
    table_handles: int = 0
    request_credits: int = limits.DEFAULT_REQUEST_CREDITS
    max_message_bytes: int = limits.DEFAULT_TARGET_MAX_MESSAGE_BYTES
    read_depth: int = limits.DEFAULT_READ_DEPTH
    max_sessions: int = limits.DEFAULT_MAX_SESSIONS
    namespace: bytes = b""
    name: str = ""
    linger_s: float = limits.LINGER_S
    """How long an identity's range, quota and blocks outlive its stream; `math.inf` keeps them (profile 3)."""
    drain_s: float = limits.DRAIN_S
    hello_timeout_s: float = limits.HELLO_TIMEOUT_S
    keys: Keys = field(default_factory=Keys)
    """Who may open a session; without any, everybody (profile 4)."""
    clear_on_free: bool = False
    """Clear every block before it returns to the ring, also where all are of one trust domain: see `clears_blocks`."""
    pool_base: int = limits.DEFAULT_POOL_BASE
    direct: Feature = Feature.NONE
    """Direct modes that initiators may use, DIRECT_LOAD and DIRECT_ALLOC: for those that are trusted with all blocks
    these reach (draft 6.6, profile 6.12)."""
    direct_blocks: int = 0
    """How many blocks of the pool are set aside for initiators that allocate directly; each gets its quota of them."""
    ticket_timeout_s: float = limits.TICKET_TIMEOUT_S
    first_ticket: int = 0
    """Where the tickets of every ring start; anything but zero only to test their wrap."""

    def __post_init__(self) -> None:
        size = self.block_size_bytes
        if not limits.BLOCK_SIZE_MIN_BYTES <= size <= limits.BLOCK_SIZE_MAX_BYTES or size % 64:
            raise ApiMisuse(f"block size of {size} octets: must be 512 to 1073741824, a multiple of 64")
        self._within("pool blocks", self.pool_blocks, 1, 1 << limits.RING_ORDER_MAX)
        self._within("quota", self.quota, 0, self.pool_blocks)
        self._within("max quota", self.max_quota, 0, self.pool_blocks)
        self._within("table handles", self.table_handles, 0, limits.TABLE_HANDLES_MAX)
        self._within("request credits", self.request_credits, 1, limits.CREDITS_MAX)
        self._within("max message", self.max_message_bytes, limits.MIN_MAX_MESSAGE_BYTES, limits.MAX_MESSAGE_MAX_BYTES)
        self._within("read depth", self.read_depth, 0, limits.IRD_ORD_MAX)
        self._within("max sessions", self.max_sessions, 1, limits.TABLE_HANDLES_MAX)
        self._check_direct()
        if len(self.namespace) > limits.NAMESPACE_MAX_BYTES:
            raise ApiMisuse(f"namespace of {len(self.namespace)} octets: at most {limits.NAMESPACE_MAX_BYTES}")
        if len(self.name.encode()) > limits.NAME_MAX_BYTES:
            raise ApiMisuse(f"name of {len(self.name.encode())} octets: at most {limits.NAME_MAX_BYTES}")
        for label, seconds in (("linger", self.linger_s), ("drain", self.drain_s), ("HELLO", self.hello_timeout_s)):
            if not seconds >= 0:
                raise ApiMisuse(f"{label} time of {seconds} s: must not be negative")

    def _check_direct(self) -> None:
        if self.direct & ~DIRECT_MODES:
            raise ApiMisuse(f"direct modes {self.direct!r}: DIRECT_LOAD and DIRECT_ALLOC are the ones there are")
        self._within("direct blocks", self.direct_blocks, 0, self.pool_blocks - 1)
        if bool(self.direct & Feature.DIRECT_ALLOC) != bool(self.direct_blocks):
            raise ApiMisuse("direct allocation needs direct blocks, and nothing else does: give both or none")
        if not 0.001 <= self.ticket_timeout_s <= limits.TICKET_TIMEOUT_MAX_S:
            raise ApiMisuse(
                f"ticket timeout of {self.ticket_timeout_s} s: must be 0.001 to {limits.TICKET_TIMEOUT_MAX_S:g}"
            )

    @staticmethod
    def _within(label: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            raise ApiMisuse(f"{label} of {value}: must be {low} to {high}")

    @property
    def pool_bytes(self) -> int:
        return self.block_size_bytes * self.pool_blocks

    @property
    def shared_blocks(self) -> int:
        """Blocks in the ring of all initiators that do not allocate directly."""
        return self.pool_blocks - self.direct_blocks

    @property
    def ticket_timeout_ms(self) -> int:
        """As HELLO_ACK says it: never more than the target waits."""
        return int(self.ticket_timeout_s * 1000)

    @property
    def one_trust_domain(self) -> bool:
        """Whether all blocks there can be are of one trust domain (profile 6.4)."""
        return len(self.keys.domains) <= 1

    @property
    def default_quota(self) -> int:
        """Blocks for an initiator that asks for none in particular: a sixteenth of the pool, so that many fit."""
        return self.quota or max(1, self.pool_blocks // 16)

    @property
    def default_direct_quota(self) -> int:
        """As `default_quota`, for one that allocates directly: no more than is set aside for all of them."""
        return min(self.default_quota, self.direct_blocks)

    @property
    def quota_cap(self) -> int:
        return self.max_quota or self.pool_blocks

    @property
    def handle_count(self) -> int:
        """Entries in the block table (Table Handles); 16 octets each."""
        if self.table_handles:
            return self.table_handles
        return max(limits.DEFAULT_TABLE_HANDLES, limits.DEFAULT_TABLE_HANDLES_PER_BLOCK * self.pool_blocks)

    @property
    def ring_order(self) -> int:
        """n of the shared ring: N = 2^n is at least the number of its blocks and at least 2 (draft 3.3, profile 5)."""
        return ring_order_for(self.shared_blocks)

    @property
    def clears_blocks(self) -> bool:
        """Whether blocks are cleared before they return to the ring. With several trust domains each of them may change
        its domain there (profile 3)."""
        return self.clear_on_free or not self.one_trust_domain

    def default_handles(self, granted_quota: int) -> int:
        """Handles for an initiator that asks for none in particular: two a block, so that a spare one is at hand."""
        return max(1, 2 * granted_quota)
