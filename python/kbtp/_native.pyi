"""The native RNIC as `kbtp.rnic.native` sees it: numbers, octets and tuples.

What is wrong raises as `kbtp.verbs.api` says. A `_Piece` is a region with an offset and a length in it.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

from kbtp.types import BlockRef
from kbtp.verbs.requester import Taken, TakenOne

__all__ = [
    "BlockStore",
    "Channel",
    "ConnectRequest",
    "Device",
    "Listener",
    "Octets",
    "Pd",
    "Region",
    "Requester",
    "Stream",
    "build",
    "joined_checksum",
    "limits",
]

_Piece: TypeAlias = tuple[Region, int, int]
_Receive: TypeAlias = tuple[int, _Piece]

@final
class Pd: ...

@final
class Region:
    @property
    def stag(self) -> int: ...
    @property
    def base_to(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def access(self) -> int: ...
    @property
    def valid(self) -> bool: ...
    def revoke(self) -> None: ...

_Entry: TypeAlias = tuple[int, int, int, int]
_Pin: TypeAlias = tuple[int, int, int, int, int]

@final
class BlockStore:
    """Holders, owners and domains are numbers of the caller's; the owner of a pin is a stream, by its id.

    An `_Entry` is (flags, generation, data_length, block_offset), a `_Pin` is (number, block_offset, data_length,
    generation, owner).
    """

    def __new__(
        cls,
        pool: Region,
        table: memoryview,
        *,
        block_size_bytes: int,
        block_count: int,
        pool_base: int,
        table_base_handle: int,
        table_handles: int,
        ring_order: int,
        first_ticket: int,
        direct_blocks: int,
        masked_counters: bool,
        clear_on_free: bool,
    ) -> BlockStore:
        """`table` is where the entries are from now on."""

    @property
    def number(self) -> int:
        """Names the store in the events of a channel."""

    def read(self, handle: int) -> _Entry: ...
    @property
    def free_blocks(self) -> int: ...
    def bound_handles(self, first: int, count: int) -> list[int]: ...
    def bound_count(self, first: int, count: int) -> int: ...
    def assign_range(self, first: int, count: int, domain: int) -> None: ...
    def release_range(self, first: int, count: int) -> None: ...
    def domain_of(self, handle: int) -> int | None: ...
    def begin_load(self, handle: int, owner: int) -> _Pin: ...
    def end_load(self, pin: _Pin) -> tuple[int, _Entry] | None:
        """The number that `begin_free` was given and its entry, if this lets a FREE of Python's finish."""

    def begin_alloc_store(self, handle: int, holder: int) -> tuple[int | None, int]:
        """The block's offset, or None and the Status."""

    def commit_alloc_store(self, handle: int, block_offset: int, data_length: int, seal: bool) -> _Entry: ...
    def abort_alloc_store(self, handle: int, block_offset: int, holder: int) -> None: ...
    def open_partition(self, holder: int, first: int, count: int, slots: memoryview, head: memoryview) -> None:
        """Blocks `first` to `first + count - 1` of the pool; the slots and Head of their ring are in that memory."""

    def close_partition(self, holder: int) -> None: ...
    def partition_free_count(self, holder: int) -> int: ...
    def audit_head(self, holder: int) -> int: ...
    def restore_head(self, holder: int) -> None: ...
    def outstanding_tickets(self, holder: int) -> list[int]: ...
    def read_slot(self, holder: int, ticket: int) -> int | None: ...
    def bind_ticket(
        self, handle: int, holder: int, ticket: int, block_offset: int, data_length: int, seal: bool
    ) -> tuple[_Entry | None, int]:
        """The entry, or None and the Status."""

    def reclaim_ticket(self, holder: int, ticket: int) -> int: ...
    def commit_store(self, handle: int, data: bytes, seal: bool) -> _Entry: ...
    def begin_free(self, handle: int, holder: int, number: int) -> _Entry | None:
        """None: it waits for pins, and `number` comes back when it is done."""

    def pinned_frees(self) -> list[tuple[int, list[_Pin]]]: ...
    @property
    def quota_left(self) -> int: ...
    def grant(self, holder: int, requested: int) -> int: ...
    def release(self, holder: int) -> None: ...
    def usage(self, holder: int) -> int: ...
    def quota(self, holder: int) -> int: ...

@final
class Stream:
    @property
    def id(self) -> int:
        """Names the stream in the events of its channel."""

    @property
    def remote_address(self) -> str: ...
    @property
    def state(self) -> str:
        """CONNECTING, OPEN, DISCONNECTING or ENDED."""

    @property
    def ird(self) -> int: ...
    @property
    def ord_(self) -> int: ...
    def post(self, requests: list[tuple[object, ...]]) -> None:
        """Each request is one of:

        (0, wr_id, inline, pieces, invalidate_stag or None, solicited)    Send
        (1, wr_id, pieces, remote_stag, remote_to)                        RDMA Write
        (2, wr_id, sink, remote_stag, remote_to)                          RDMA Read
        (3, wr_id, remote_stag, remote_to, add_data, add_mask)            FetchAdd
        (4, wr_id, remote_stag, remote_to, swap_data, swap_mask, compare_data, compare_mask)
        (5, wr_id, data, solicited)                                       Immediate
        """

    def post_recv(self, receives: list[_Receive]) -> None: ...
    @property
    def outstanding(self) -> int: ...
    def offload(
        self,
        store: BlockStore,
        *,
        holder: int,
        domain: int,
        first_handle: int,
        handle_count: int,
        direct_alloc: bool,
        records: bool,
        invalidates: bool,
        head_of_device: bool,
        request_credits: int,
        max_message_bytes: int,
        receives: Region,
        read_depth: int,
        drain_s: float,
    ) -> None: ...
    def bind_tickets(self) -> list[int]: ...
    def resolved(self, handle: int) -> None: ...
    def terminate(self, layer: int, etype: int, code: int) -> None: ...
    def disconnect(self) -> None: ...
    def abort(self) -> None: ...

@final
class Octets:
    """Octets to load into or store from; `keepalive` keeps them where they are."""

    def __new__(cls, address: int, length_bytes: int, writable: bool, keepalive: object) -> Octets: ...

@final
class Requester:
    """See `kbtp.verbs.requester.Requester`, of which this is all but the memory."""

    def __new__(
        cls,
        stream: Stream,
        *,
        request_credits: int,
        first_handle: int,
        handle_count: int,
        invalidate: bool,
        inline_max_bytes: int,
        receives: Region,
        max_message_bytes: int,
        prepare: Callable[[int, object, object, object], tuple[BlockRef | None, object]],
    ) -> Requester: ...
    def add_region(self, region: Region, address: int) -> None: ...
    def submit(
        self,
        opcode: int,
        flags: int,
        generation: int,
        blocks: Sequence[BlockRef | int | None],
        buffers: Sequence[object] | None,
        checksums: bool,
    ) -> int: ...
    def run(
        self,
        opcode: int,
        flags: int,
        generation: int,
        blocks: Sequence[BlockRef | int | None],
        buffers: Sequence[object] | None,
        checksums: bool,
        timeout_s: float,
        meanwhile: Callable[[], None] | None = None,
        /,
    ) -> Taken | int: ...
    def run_one(
        self,
        opcode: int,
        flags: int,
        generation: int,
        block: BlockRef | int | None,
        buffer: object,
        timeout_s: float,
    ) -> TakenOne | int: ...
    def take(self, number: int) -> Taken | None: ...

@final
class Listener:
    @property
    def address(self) -> tuple[str, int]: ...
    def close(self) -> None: ...

@final
class ConnectRequest:
    @property
    def private_data(self) -> bytes: ...
    @property
    def remote_address(self) -> str: ...
    @property
    def peer_ird(self) -> int: ...
    @property
    def peer_ord(self) -> int: ...
    def accept(self, pd: Pd, private_data: bytes, ird: int, ord_: int, receives: list[_Receive]) -> Stream: ...
    def reject(self, private_data: bytes) -> None: ...

@final
class Channel:
    def listen(self, host: str, port: int) -> Listener: ...
    def connect(
        self,
        host: str,
        port: int,
        pd: Pd,
        private_data: bytes,
        ird: int,
        ord_: int,
        timeout_s: float,
        receives: list[_Receive],
    ) -> Stream: ...
    def poll(self, timeout_s: float) -> list[tuple[Any, ...]]:
        """Each event is one of:

        (0, stream id, wr_id, opcode, flushed, length, value, invalidated_stag or None, immediate, solicited)
        (1, ConnectRequest)
        (2, stream id, private_data)                                      Established
        (3, stream id, private_data)                                      Rejected
        (4, stream id, exception or None, TerminateInfo or None, TerminateCause or None)    StreamEnded
        (5, store number, number given to begin_free or None, holder, _Entry)    a FREE that waited is done
        (6, stream id, batch number)                                      BatchDone

        `opcode` counts as `kbtp.verbs.api.WcOpcode` does.
        """

    def fileno(self) -> int: ...
    def next_timeout_s(self) -> float | None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...

@final
class Device:
    def __new__(
        cls,
        *,
        crc: bool,
        want_markers: bool,
        revision: int,
        peer_to_peer: int,
        revision1_depth: int,
        mpa_request_timeout_s: float,
        goodbye_s: float,
        disconnect_s: float,
        accept_pause_s: float,
        tcp_user_timeout_s: float,
        spin_us: int,
        forced_punts: float,
        forced_punts_seed: int,
    ) -> Device: ...
    @staticmethod
    def rdma_core(
        *, name: str | None, disconnect_s: float, spin_us: int, forced_punts: float, forced_punts_seed: int
    ) -> Device:
        """Over the RDMA device `name` of rdma-core, or the first that can be used. Raises OSError that says what is
        missing."""

    def capabilities(self) -> dict[str, Any]:
        """What stands in `kbtp.verbs.api.Capabilities`, by name."""

    def allocate_pd(self) -> Pd: ...
    def register(
        self,
        address: int,
        length: int,
        writable: bool,
        keepalive: object,
        access: int,
        pd: Pd,
        stream: Stream | None,
        base_to: int,
    ) -> Region:
        """`keepalive` lives as long as anything may use the octets at `address`."""

    def open_channel(self, threads: int) -> Channel: ...
    def punts(self) -> list[tuple[str, int]]: ...
    def close(self) -> None: ...

def build() -> dict[str, str | bool]:
    """What this build is: `version`, whether it is `optimized`, which path `crc32c` takes on this processor, what its
    `events` come from, and whether whoever waits `spins` here at all."""

def joined_checksum(first: int, second: int, second_bytes: int) -> int:
    """The CRC32c over octets with CRC32c `first` and then `second_bytes` others with `second`."""

def limits() -> dict[str, int | float]:
    """The numbers that the native RNIC shares with `kbtp.limits`, by the names they have there."""
