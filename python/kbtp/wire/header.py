"""The common header of every KBTP message (draft 5.1), and what is judged by it alone."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Final, TypeAlias

from kbtp.errors import ApiMisuse, WireFormatError
from kbtp.limits import COMMON_HEADER_BYTES, KBTP_VERSION
from kbtp.types import Generation, Handle, HelloAckFlag, Opcode, RequestFlag, Status
from kbtp.wire.layouts import HEADER

Octets: TypeAlias = bytes | bytearray | memoryview
"""What a message is parsed from: contiguous octets. A memoryview has format "B"."""

# Profile 1: the opcode table's last column.
FLAGS_ALLOWED: Final[dict[int, int]] = {
    Opcode.HELLO: 0,
    Opcode.HELLO_ACK: int(HelloAckFlag.RESUMED),
    Opcode.LOAD: int(RequestFlag.RECORD | RequestFlag.INVALIDATE | RequestFlag.ALLOW_UNSEALED),
    Opcode.STORE: int(RequestFlag.INLINE | RequestFlag.SEAL | RequestFlag.RECORD | RequestFlag.INVALIDATE),
    Opcode.ALLOC_STORE: int(RequestFlag.INLINE | RequestFlag.SEAL | RequestFlag.RECORD | RequestFlag.INVALIDATE),
    Opcode.FREE: int(RequestFlag.RECORD),
    Opcode.BIND: int(RequestFlag.SEAL | RequestFlag.RECORD),
    Opcode.COMPLETION: 0,
}

STATUS_BY_VALUE: Final[dict[int, Status]] = {status.value: status for status in Status}


@dataclass(frozen=True, slots=True)
class CommonHeader:
    """Draft 5.1, field by field and unjudged: every value is the raw number on the wire."""

    opcode: int
    flags: int
    request_id: int
    handle: Handle
    generation: Generation
    status: int
    version: int = KBTP_VERSION

    @classmethod
    def parse(cls, data: Octets) -> CommonHeader:
        """The first 24 octets of a message. Raises `WireFormatError` only if they are not there."""
        if len(data) < COMMON_HEADER_BYTES:
            raise WireFormatError(
                "message", f"the common header has {COMMON_HEADER_BYTES} octets, only {len(data)} are there"
            )
        version, opcode, flags, request_id, handle, generation, status = HEADER.unpack_from(data)
        return cls(opcode, flags, request_id, handle, generation, status, version)

    def pack(self) -> bytes:
        """The 24 octets. Raises `ApiMisuse` for a value that does not fit its field."""
        return HEADER.pack(
            self.version, self.opcode, self.flags, self.request_id, self.handle, self.generation, self.status
        )

    def require(self, opcodes: Container[int]) -> None:
        """Profile 1: the checks of version, opcode and flags, in that order and before all others.

        `opcodes` are those that may stand here. Raises `WireFormatError` with status UNSUPPORTED.
        """
        if self.version != KBTP_VERSION:
            raise WireFormatError("version", f"{self.version}, spoken here is {KBTP_VERSION}", Status.UNSUPPORTED)
        if self.opcode not in opcodes:
            raise WireFormatError("opcode", f"{self.opcode} is not one that may come here", Status.UNSUPPORTED)
        fault = flags_fault(self.opcode, self.flags)
        if fault is not None:
            raise WireFormatError("flags", fault, Status.UNSUPPORTED)


def flags_fault(opcode: int, flags: int) -> str | None:
    """What is wrong with `flags` on a message of `opcode`, or None. Profile 1 and 2."""
    unknown = int(flags) & ~FLAGS_ALLOWED[opcode]
    if unknown:
        return f"0x{unknown:04x} is not allowed with {Opcode(opcode).name}"
    # Profile 2: INVALIDATE needs a descriptor that is not INLINE, and a completion that is a Send.
    if flags & RequestFlag.INVALIDATE and flags & (RequestFlag.INLINE | RequestFlag.RECORD):
        return "INVALIDATE goes with neither INLINE nor RECORD"
    return None


def pack_header(
    opcode: Opcode, flags: int, request_id: int, handle: Handle = 0, generation: Generation = 0, status: int = 0
) -> bytes:
    """The header of a message that is to be well formed: `ApiMisuse` for flags and statuses a receiver would refuse."""
    octets = HEADER.pack(KBTP_VERSION, opcode, flags, request_id, handle, generation, status)
    fault = flags_fault(opcode, flags)
    if fault is not None:
        raise ApiMisuse(f"flags: {fault}")
    check_status(status)
    return octets


def check_status(status: int) -> None:
    """Raises `ApiMisuse` for a number that is not in the status table of profile 1."""
    if status not in STATUS_BY_VALUE:
        raise ApiMisuse(f"status: {status} is not a KBTP status")


def check_octets(field: str, value: object, length_bytes: int) -> None:
    """Raises `ApiMisuse` unless `value` is an octet string of just that length."""
    if not isinstance(value, bytes) or len(value) != length_bytes:
        raise ApiMisuse(f"{field}: needs bytes of length {length_bytes}, not {value!r}")


def check_size(opcode: Opcode, data: Octets, size_bytes: int, *, may_follow: bool = False) -> None:
    """Profile 1: MALFORMED if the fixed part is not there, or if octets follow it where none may."""
    if len(data) < size_bytes:
        raise WireFormatError(
            "message", f"{opcode.name} with these flags has {size_bytes} octets, only {len(data)} are there"
        )
    if len(data) > size_bytes and not may_follow:
        raise WireFormatError(
            "message", f"{len(data) - size_bytes} octets follow the {size_bytes} of {opcode.name} with these flags"
        )


def parse_status(value: int) -> Status:
    """Raises `WireFormatError` for a number that is not in the status table of profile 1."""
    try:
        return STATUS_BY_VALUE[value]
    except KeyError:
        raise WireFormatError("status", f"{value} is not a KBTP status") from None
