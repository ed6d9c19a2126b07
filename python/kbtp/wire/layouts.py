"""The layout of every KBTP message and structure, field by field as the tables of draft 3, 5 and profile 2, 3 draw it.

This is the one place that knows the order and the widths. The dataclasses pack and parse with these layouts, the
numpy dtypes of `kbtp.wire.arrays` are made from them.
"""

from __future__ import annotations

import operator
import struct
from typing import Any

from kbtp.errors import ApiMisuse

_STRUCT_CODES = {8: "B", 16: "H", 32: "I", 64: "Q"}


class Layout:
    """Consecutive fields in network byte order: `Layout(stag=32, to=64, length=32)`, widths in bits.

    A field of a width no integer of `struct` has is an octet string. A field whose name ends in "reserved" is sent
    as zero, ignored on receipt (profile, preamble) and is no value of `pack` or `unpack_from`.
    """

    __slots__ = ("_struct", "bits", "names", "size_bytes")

    def __init__(self, **bits: int) -> None:
        self.bits = bits
        self.names = tuple(name for name in bits if not is_reserved(name))
        self._struct = struct.Struct(">" + "".join(_struct_code(name, width) for name, width in bits.items()))
        self.size_bytes = self._struct.size

    def __add__(self, other: Layout) -> Layout:
        return Layout(**self.bits, **other.bits)

    def prefixed(self, prefix: str) -> Layout:
        """The same fields under longer names, so that two descriptors can stand in one message."""
        return Layout(**{prefix + name: width for name, width in self.bits.items()})

    def pack(self, *values: int | bytes) -> bytes:
        """The octets. Raises `ApiMisuse` naming the first field whose value is not an integer that fits it."""
        try:
            return self._struct.pack(*values)
        except (struct.error, OverflowError):
            name, value = next(
                (name, value)
                for name, value in zip(self.names, values, strict=True)
                if not fits(value, self.bits[name])
            )
            raise ApiMisuse(f"{name}: {value!r} is not an unsigned integer of {self.bits[name]} bits") from None

    def unpack_from(self, data: bytes | bytearray | memoryview, offset: int = 0) -> tuple[Any, ...]:
        """The values, one each of `names`. The caller has made sure that `size_bytes` octets are there."""
        return self._struct.unpack_from(data, offset)


def is_reserved(name: str) -> bool:
    return name.endswith("reserved")


def fits(value: object, bits: int) -> bool:
    """Whether `value` is an integer, of Python or of numpy, from 0 to 2^bits - 1."""
    try:
        return 0 <= operator.index(value) < 1 << bits  # type: ignore[arg-type]
    except TypeError:
        return False


def _struct_code(name: str, bits: int) -> str:
    if is_reserved(name):
        return f"{bits // 8}x"
    return _STRUCT_CODES.get(bits, f"{bits // 8}s")


# Draft 5.1
HEADER = Layout(version=8, opcode=8, flags=16, request_id=64, handle=64, generation=16, status=16)
# Draft 5.2
DATA_DESCRIPTOR = Layout(stag=32, to=64, length=32)
COMPLETION_DESCRIPTOR = Layout(stag=32, to=64, reserved=32)
# Profile 2, after the common header
BIND_BODY = Layout(ticket=32, data_length=32, block_offset=64)
COMPLETION_BODY = Layout(data_length=32, reserved=32, block_offset=64)
HELLO_BODY = Layout(
    requested_features=32,
    requested_quota=32,
    requested_handles=64,
    completion_credits=32,
    max_message=32,
    initiator_id=128,
)
HELLO_ACK_BODY = Layout(
    granted_features=32,
    block_size=32,
    pool_blocks=32,
    allocation_quota=32,
    request_credits=32,
    max_message=32,
    ticket_timeout_ms=32,
    ring_order=8,
    counter_byte_order=8,
    reserved=16,
    incarnation=64,
    first_handle=64,
    handle_count=64,
    table_base_handle=64,
    table_handles=64,
    table_offset=64,
    table_stag=32,
    pool_stag=32,
    partition_stag=32,
    ring_stag=32,
    ring_offset=64,
    head_offset=64,
    head_stag=32,
    bound_blocks=32,
    pool_base=64,
)
OPTION_HEADER = Layout(type=16, length=16)
AUTH_VALUE = Layout(key_id=32, mac=256)
# Draft 6.5
COMPLETION_RECORD = Layout(request_id=64, status=16, generation=16, data_length=32, block_offset=64)
# Draft 3.2
TABLE_ENTRY = Layout(flags=16, generation=16, data_length=32, block_offset=64)
# Draft 3.3
RING_SLOT = Layout(sequence=32, reserved=32, block_offset=64)
# Profile 3
CONNECTION_DATA = Layout(magic=32, version=8, reserved=24, nonce=128)
