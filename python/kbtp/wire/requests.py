"""LOAD, STORE, ALLOC_STORE, FREE and BIND (draft 5 and 6, profile 2), and their descriptors.

`parse` judges what can be judged from the octets alone. Which flags were granted, and whether Length is that of the
inline data (LENGTH_ERROR comes late in the order of checks), is the session's matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from kbtp.errors import ApiMisuse, WireFormatError
from kbtp.limits import COMMON_HEADER_BYTES, COMPLETION_DESCRIPTOR_BYTES, DATA_DESCRIPTOR_BYTES
from kbtp.types import BlockOffset, Generation, Handle, Opcode, RequestFlag, Stag, Ticket
from kbtp.wire.header import CommonHeader, Octets, check_size, pack_header
from kbtp.wire.layouts import BIND_BODY, COMPLETION_DESCRIPTOR, DATA_DESCRIPTOR


@dataclass(frozen=True, slots=True)
class DataDescriptor:
    """Draft 5.2: a buffer of the initiator, `length` octets at tagged offset `to` of `stag`."""

    stag: Stag
    to: int
    length: int

    @classmethod
    def parse(cls, data: Octets) -> DataDescriptor:
        """The first 16 octets of `data`. Raises `WireFormatError` if they are not there."""
        if len(data) < DATA_DESCRIPTOR_BYTES:
            raise WireFormatError(
                "data", f"a Data Descriptor has {DATA_DESCRIPTOR_BYTES} octets, only {len(data)} are there"
            )
        return cls(*DATA_DESCRIPTOR.unpack_from(data))

    def pack(self) -> bytes:
        """The 16 octets. Raises `ApiMisuse` for a value that does not fit its field."""
        return DATA_DESCRIPTOR.pack(self.stag, self.to, self.length)


@dataclass(frozen=True, slots=True)
class CompletionDescriptor:
    """Draft 5.2: where a 24-octet completion record goes."""

    stag: Stag
    to: int

    @classmethod
    def parse(cls, data: Octets) -> CompletionDescriptor:
        """The first 16 octets of `data`. Raises `WireFormatError` if they are not there."""
        if len(data) < COMPLETION_DESCRIPTOR_BYTES:
            raise WireFormatError(
                "completion",
                f"a Completion Descriptor has {COMPLETION_DESCRIPTOR_BYTES} octets, only {len(data)} are there",
            )
        return cls(*COMPLETION_DESCRIPTOR.unpack_from(data))

    def pack(self) -> bytes:
        """The 16 octets. Raises `ApiMisuse` for a value that does not fit its field."""
        return COMPLETION_DESCRIPTOR.pack(self.stag, self.to)


_RequestT = TypeVar("_RequestT", bound="_Request")
_StoringT = TypeVar("_StoringT", bound="_StoringRequest")


@dataclass(frozen=True, slots=True)
class _Request(ABC):
    """The common header of a request; Version and Status are not the caller's to choose (draft 5.1)."""

    OPCODE: ClassVar[Opcode]

    request_id: int
    handle: Handle
    generation: Generation
    """0 means any."""
    flags: RequestFlag

    @classmethod
    def parse(cls: type[_RequestT], data: Octets) -> _RequestT:
        """The message in `data`, all of it. Raises `WireFormatError`, see `kbtp.wire.messages.parse_request`."""
        header = CommonHeader.parse(data)
        header.require((cls.OPCODE,))
        return cls.parse_body(header, data)

    @classmethod
    @abstractmethod
    def parse_body(cls: type[_RequestT], header: CommonHeader, data: Octets) -> _RequestT:
        """`parse` for a caller who has parsed the header and put it through `CommonHeader.require`."""

    def _pack_header(self) -> bytes:
        return pack_header(self.OPCODE, self.flags, self.request_id, self.handle, self.generation)


@dataclass(frozen=True, slots=True)
class Load(_Request):
    """Draft 6.1: write the block of `handle` to `data`."""

    OPCODE = Opcode.LOAD

    data: DataDescriptor
    completion: CompletionDescriptor | None = None
    """Present if and only if RECORD is set."""

    @classmethod
    def parse_body(cls, header: CommonHeader, data: Octets) -> Load:
        completion_at = COMMON_HEADER_BYTES + DATA_DESCRIPTOR.size_bytes
        check_size(cls.OPCODE, data, completion_at + _completion_bytes(header.flags))
        return cls(
            header.request_id,
            header.handle,
            header.generation,
            RequestFlag(header.flags),
            DataDescriptor(*DATA_DESCRIPTOR.unpack_from(data, COMMON_HEADER_BYTES)),
            _parse_completion(header.flags, data, completion_at),
        )

    def pack(self) -> bytes:
        """The 40 or 56 octets. Raises `ApiMisuse` for a value that does not fit and for flags that do not belong."""
        return self._pack_header() + self.data.pack() + _pack_completion(self.flags, self.completion)


@dataclass(frozen=True, slots=True)
class _StoringRequest(_Request):
    """STORE and ALLOC_STORE have one layout."""

    data: DataDescriptor
    """The source the target reads. With INLINE only `length` means something: draft 5.2 sends the rest as zero, and
    `parse`, which ignores it (profile 8.6), returns zero."""
    completion: CompletionDescriptor | None = None
    """Present if and only if RECORD is set."""
    inline_data: bytes | memoryview = b""
    """With INLINE, what follows the message. After `parse` a view into what was parsed, not a copy."""

    @classmethod
    def parse_body(cls: type[_StoringT], header: CommonHeader, data: Octets) -> _StoringT:
        completion_at = COMMON_HEADER_BYTES + DATA_DESCRIPTOR.size_bytes
        fixed_bytes = completion_at + _completion_bytes(header.flags)
        inline = bool(header.flags & RequestFlag.INLINE)
        check_size(cls.OPCODE, data, fixed_bytes, may_follow=inline)
        stag, to, length = DATA_DESCRIPTOR.unpack_from(data, COMMON_HEADER_BYTES)
        return cls(
            header.request_id,
            header.handle,
            header.generation,
            RequestFlag(header.flags),
            DataDescriptor(0, 0, length) if inline else DataDescriptor(stag, to, length),
            _parse_completion(header.flags, data, completion_at),
            memoryview(data)[fixed_bytes:] if inline else b"",
        )

    def pack(self) -> bytes:
        """The 40 or 56 octets and the inline data.

        Raises `ApiMisuse` for a value that does not fit and for flags that do not belong. A Length that is not
        that of the inline data is packed as it is: the target's answer to that is LENGTH_ERROR.
        """
        header = self._pack_header()
        if self.flags & RequestFlag.INLINE:
            if self.data.stag or self.data.to:
                raise ApiMisuse("data: with INLINE the STag and the Tagged Offset are zero")
        elif len(self.inline_data):
            raise ApiMisuse("inline_data: needs the flag INLINE")
        completion = _pack_completion(self.flags, self.completion)
        return b"".join((header, self.data.pack(), completion, self.inline_data))


@dataclass(frozen=True, slots=True)
class Store(_StoringRequest):
    """Draft 6.2: write data into the block of a bound handle."""

    OPCODE = Opcode.STORE


@dataclass(frozen=True, slots=True)
class AllocStore(_StoringRequest):
    """Draft 6.3: bind the handle to a free block and write data into it."""

    OPCODE = Opcode.ALLOC_STORE


@dataclass(frozen=True, slots=True)
class Free(_Request):
    """Draft 6.4: unbind the handle and return its block."""

    OPCODE = Opcode.FREE

    completion: CompletionDescriptor | None = None
    """Present if and only if RECORD is set."""

    @classmethod
    def parse_body(cls, header: CommonHeader, data: Octets) -> Free:
        check_size(cls.OPCODE, data, COMMON_HEADER_BYTES + _completion_bytes(header.flags))
        return cls(
            header.request_id,
            header.handle,
            header.generation,
            RequestFlag(header.flags),
            _parse_completion(header.flags, data, COMMON_HEADER_BYTES),
        )

    def pack(self) -> bytes:
        """The 24 or 40 octets. Raises `ApiMisuse` for a value that does not fit and for flags that do not belong."""
        return self._pack_header() + _pack_completion(self.flags, self.completion)


@dataclass(frozen=True, slots=True)
class Bind(_Request):
    """Draft 6.6: bind the handle to the block of a ticket the initiator took itself."""

    OPCODE = Opcode.BIND

    ticket: Ticket
    data_length: int
    block_offset: BlockOffset
    completion: CompletionDescriptor | None = None
    """Present if and only if RECORD is set."""

    @classmethod
    def parse_body(cls, header: CommonHeader, data: Octets) -> Bind:
        completion_at = COMMON_HEADER_BYTES + BIND_BODY.size_bytes
        check_size(cls.OPCODE, data, completion_at + _completion_bytes(header.flags))
        ticket, data_length, block_offset = BIND_BODY.unpack_from(data, COMMON_HEADER_BYTES)
        return cls(
            header.request_id,
            header.handle,
            header.generation,
            RequestFlag(header.flags),
            ticket,
            data_length,
            block_offset,
            _parse_completion(header.flags, data, completion_at),
        )

    def pack(self) -> bytes:
        """The 40 or 56 octets. Raises `ApiMisuse` for a value that does not fit and for flags that do not belong."""
        body = BIND_BODY.pack(self.ticket, self.data_length, self.block_offset)
        return self._pack_header() + body + _pack_completion(self.flags, self.completion)


def _completion_bytes(flags: int) -> int:
    return COMPLETION_DESCRIPTOR_BYTES if flags & RequestFlag.RECORD else 0


def _parse_completion(flags: int, data: Octets, at: int) -> CompletionDescriptor | None:
    if not flags & RequestFlag.RECORD:
        return None
    return CompletionDescriptor(*COMPLETION_DESCRIPTOR.unpack_from(data, at))


def _pack_completion(flags: int, completion: CompletionDescriptor | None) -> bytes:
    if bool(flags & RequestFlag.RECORD) != (completion is not None):
        raise ApiMisuse("completion: a Completion Descriptor and the flag RECORD come together or not at all")
    return b"" if completion is None else completion.pack()
