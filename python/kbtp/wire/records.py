"""COMPLETION (profile 2) and the completion record (draft 6.5): how a request ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kbtp.errors import WireFormatError
from kbtp.limits import COMMON_HEADER_BYTES, COMPLETION_BYTES, COMPLETION_RECORD_BYTES
from kbtp.types import BlockOffset, Generation, Handle, Opcode, Status
from kbtp.wire.header import CommonHeader, Octets, check_size, check_status, pack_header, parse_status
from kbtp.wire.layouts import COMPLETION_BODY, COMPLETION_RECORD


@dataclass(frozen=True, slots=True)
class Completion:
    """Profile 2: the message that completes one request. Profile 8.6 says what it carries for which operation."""

    OPCODE: ClassVar[Opcode] = Opcode.COMPLETION

    request_id: int
    handle: Handle
    generation: Generation
    status: Status
    data_length: int = 0
    block_offset: BlockOffset = 0

    @classmethod
    def parse(cls, data: Octets) -> Completion:
        """The message in `data`, exactly 40 octets.

        Raises `WireFormatError`, see `kbtp.wire.messages.parse_response`.
        """
        header = CommonHeader.parse(data)
        header.require((cls.OPCODE,))
        return cls.parse_body(header, data)

    @classmethod
    def parse_body(cls, header: CommonHeader, data: Octets) -> Completion:
        """`parse` for a caller who has parsed the header and put it through `CommonHeader.require`."""
        check_size(cls.OPCODE, data, COMPLETION_BYTES)
        status = parse_status(header.status)
        data_length, block_offset = COMPLETION_BODY.unpack_from(data, COMMON_HEADER_BYTES)
        return cls(header.request_id, header.handle, header.generation, status, data_length, block_offset)

    def pack(self) -> bytes:
        """The 40 octets. Raises `ApiMisuse` for a value that does not fit its field."""
        header = pack_header(self.OPCODE, 0, self.request_id, self.handle, self.generation, self.status)
        return header + COMPLETION_BODY.pack(self.data_length, self.block_offset)

    def record(self) -> CompletionRecord:
        """The completion record that says the same (draft 6.5)."""
        return CompletionRecord(
            self.request_id, Status(self.status), self.generation, self.data_length, self.block_offset
        )


@dataclass(frozen=True, slots=True)
class CompletionRecord:
    """Draft 6.5: what the target writes to a Completion Descriptor instead of sending a COMPLETION."""

    request_id: int
    status: Status
    generation: Generation
    data_length: int = 0
    block_offset: BlockOffset = 0

    @classmethod
    def parse(cls, data: Octets) -> CompletionRecord:
        """The record in `data`, exactly 24 octets. Raises `WireFormatError` for another size or an unknown status."""
        if len(data) != COMPLETION_RECORD_BYTES:
            raise WireFormatError(
                "record", f"a completion record has {COMPLETION_RECORD_BYTES} octets, not {len(data)}"
            )
        request_id, status, generation, data_length, block_offset = COMPLETION_RECORD.unpack_from(data)
        return cls(request_id, parse_status(status), generation, data_length, block_offset)

    def pack(self) -> bytes:
        """The 24 octets. Raises `ApiMisuse` for a value that does not fit its field."""
        octets = COMPLETION_RECORD.pack(
            self.request_id, self.status, self.generation, self.data_length, self.block_offset
        )
        check_status(self.status)
        return octets
