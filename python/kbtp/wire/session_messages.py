"""HELLO and HELLO_ACK (profile 2 and 8.1): how a session begins."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from kbtp.errors import ApiMisuse, WireFormatError
from kbtp.limits import (
    AUTH_MAC_BYTES,
    COMMON_HEADER_BYTES,
    HELLO_ACK_FIXED_BYTES,
    HELLO_FIXED_BYTES,
    HELLO_MAX_BYTES,
    INITIATOR_ID_BYTES,
    MIN_MAX_MESSAGE_BYTES,
)
from kbtp.types import BlockOffset, Feature, Handle, HelloAckFlag, Opcode, Stag, Status
from kbtp.wire.header import CommonHeader, Octets, check_octets, check_size, pack_header, parse_status
from kbtp.wire.layouts import HELLO_ACK_BODY, HELLO_BODY
from kbtp.wire.options import Auth, check_unknown, pack_options, parse_options

ANONYMOUS = bytes(INITIATOR_ID_BYTES)
"""The Initiator ID of an initiator that owns nothing beyond its stream (profile 2)."""

_KNOWN_FEATURES = sum(Feature)


@dataclass(frozen=True, slots=True)
class Hello:
    """Profile 2: what an initiator asks for. The first message of a session."""

    OPCODE: ClassVar[Opcode] = Opcode.HELLO

    request_id: int
    requested_features: Feature
    requested_quota: int
    """Blocks; 0: the target's default."""
    requested_handles: int
    """0: the target's default."""
    completion_credits: int
    """Receive buffers the initiator keeps posted, at least 1."""
    max_message: int
    """Octets each of them holds, at least 1024."""
    initiator_id: bytes = ANONYMOUS
    name: str | None = None
    namespace: bytes | None = None
    auth: Auth | None = None
    unknown_options: tuple[int, ...] = ()
    """From `parse` only: option types for `check_options` to refuse."""

    @classmethod
    def parse(cls, data: Octets) -> Hello:
        """The message in `data`, all of it.

        Raises `WireFormatError` in the order of profile 8.1 as far as MALFORMED. The next check, NO_SESSION, is the
        session's; after it comes `check_options`.
        """
        header = CommonHeader.parse(data)
        header.require((cls.OPCODE,))
        return cls.parse_body(header, data)

    @classmethod
    def parse_body(cls, header: CommonHeader, data: Octets) -> Hello:
        """`parse` for a caller who has parsed the header and put it through `CommonHeader.require`."""
        _check_size(cls.OPCODE, data, HELLO_FIXED_BYTES)
        features, quota, handles, completion_credits, max_message, initiator_id = HELLO_BODY.unpack_from(
            data, COMMON_HEADER_BYTES
        )
        options = parse_options(data, HELLO_FIXED_BYTES)
        if completion_credits == 0:
            raise WireFormatError("completion_credits", "0, at least 1 is needed")
        _check_max_message(max_message)
        return cls(
            header.request_id,
            _known_features(features),
            quota,
            handles,
            completion_credits,
            max_message,
            initiator_id,
            options.name,
            options.namespace,
            options.auth,
            options.unknown,
        )

    def check_options(self) -> None:
        """Profile 8.1: raises `WireFormatError` with status UNSUPPORTED if an unknown option must not be skipped."""
        check_unknown(self.unknown_options)

    def pack(self) -> bytes:
        """64 octets and the options. Raises `ApiMisuse` for a value that does not fit or that a target would refuse."""
        if self.unknown_options:
            raise ApiMisuse("unknown_options: only parse fills this, their values are not kept")
        check_octets("initiator_id", self.initiator_id, INITIATOR_ID_BYTES)
        body = HELLO_BODY.pack(
            self.requested_features,
            self.requested_quota,
            self.requested_handles,
            self.completion_credits,
            self.max_message,
            self.initiator_id,
        )
        if self.completion_credits == 0:
            raise ApiMisuse("completion_credits: at least 1 is needed")
        _refuse_small_max_message(self.max_message)
        return pack_header(self.OPCODE, 0, self.request_id) + body + pack_options(self.name, self.namespace, self.auth)


@dataclass(frozen=True, slots=True)
class HelloAck:
    """Profile 2: what the target grants, or with a status other than SUCCESS that it refuses and why.

    STags, offsets and handles are those of draft 3 and 6.6; profile 2 says which are there with which feature.
    Relations between the fields, and between them and the HELLO, are the session's to judge.
    """

    OPCODE: ClassVar[Opcode] = Opcode.HELLO_ACK

    request_id: int
    _: KW_ONLY
    status: Status = Status.SUCCESS
    flags: HelloAckFlag = HelloAckFlag.NONE
    granted_features: Feature = Feature.NONE
    block_size: int = 0
    """Octets."""
    pool_blocks: int = 0
    allocation_quota: int = 0
    """Blocks."""
    request_credits: int = 0
    """Requests the initiator may have outstanding, at least 1."""
    max_message: int = 0
    """Octets of the largest Send the target accepts, at least 1024."""
    ticket_timeout_ms: int = 0
    ring_order: int = 0
    counter_byte_order: int = 0
    """0 little, 1 big; for diagnosis only."""
    incarnation: int = 0
    first_handle: Handle = 0
    handle_count: int = 0
    table_base_handle: Handle = 0
    table_handles: int = 0
    table_offset: int = 0
    table_stag: Stag = 0
    pool_stag: Stag = 0
    partition_stag: Stag = 0
    ring_stag: Stag = 0
    ring_offset: int = 0
    head_offset: int = 0
    head_stag: Stag = 0
    bound_blocks: int = 0
    pool_base: BlockOffset = 0
    name: str | None = None
    namespace: bytes | None = None
    auth: Auth | None = None

    @classmethod
    def parse(cls, data: Octets) -> HelloAck:
        """The message in `data`, all of it. Raises `WireFormatError`, see `kbtp.wire.messages.parse_response`."""
        header = CommonHeader.parse(data)
        header.require((cls.OPCODE,))
        return cls.parse_body(header, data)

    @classmethod
    def parse_body(cls, header: CommonHeader, data: Octets) -> HelloAck:
        """`parse` for a caller who has parsed the header and put it through `CommonHeader.require`."""
        _check_size(cls.OPCODE, data, HELLO_ACK_FIXED_BYTES)
        status = parse_status(header.status)
        options = parse_options(data, HELLO_ACK_FIXED_BYTES)
        fields: dict[str, int] = {}
        if status is Status.SUCCESS:
            fields = dict(zip(HELLO_ACK_BODY.names, HELLO_ACK_BODY.unpack_from(data, COMMON_HEADER_BYTES), strict=True))
            if fields["request_credits"] == 0:
                raise WireFormatError("request_credits", "0, at least 1 is needed")
            _check_max_message(fields["max_message"])
        check_unknown(options.unknown)
        features = _known_features(fields.pop("granted_features", 0))
        return cls(
            header.request_id,
            status=status,
            flags=HelloAckFlag(header.flags),
            granted_features=features,
            name=options.name,
            namespace=options.namespace,
            auth=options.auth,
            **fields,
        )

    def pack(self) -> bytes:
        """152 octets and the options; a status other than SUCCESS makes octets 24 to 151 zero, whatever the fields say.

        Raises `ApiMisuse` for a value that does not fit or that an initiator would refuse.
        """
        header = pack_header(self.OPCODE, self.flags, self.request_id, status=self.status)
        body = HELLO_ACK_BODY.pack(*(getattr(self, name) for name in HELLO_ACK_BODY.names))
        if self.status != Status.SUCCESS:
            body = bytes(HELLO_ACK_BODY.size_bytes)
        else:
            if self.request_credits == 0:
                raise ApiMisuse("request_credits: at least 1 is needed")
            _refuse_small_max_message(self.max_message)
        return header + body + pack_options(self.name, self.namespace, self.auth)


def with_zero_mac(message: Octets) -> bytes:
    """Profile 4: a packed HELLO or HELLO_ACK with the MAC of its AUTH zeroed, which is what the MAC covers.

    Raises `WireFormatError` if `message` does not parse as one of the two or has no AUTH.
    """
    header = CommonHeader.parse(message)
    header.require((Opcode.HELLO, Opcode.HELLO_ACK))
    parsed: Hello | HelloAck
    if header.opcode == Opcode.HELLO:
        parsed = Hello.parse_body(header, message)
    else:
        parsed = HelloAck.parse_body(header, message)
    if parsed.auth is None:
        raise WireFormatError("auth", "there is no AUTH")
    # AUTH is the last option and its 36 octets need no padding: the MAC ends the message.
    return bytes(message[:-AUTH_MAC_BYTES]) + bytes(AUTH_MAC_BYTES)


def _known_features(raw: int) -> Feature:
    # Profile 8.3: unknown bits are ignored. Dropped at once, also because enum would remember each combination it is
    # given for the life of the process, and these bits are the peer's.
    return Feature(raw & _KNOWN_FEATURES)


def _check_size(opcode: Opcode, data: Octets, fixed_bytes: int) -> None:
    check_size(opcode, data, fixed_bytes, may_follow=True)
    if len(data) > HELLO_MAX_BYTES:
        raise WireFormatError("message", f"{len(data)} octets, {opcode.name} has at most {HELLO_MAX_BYTES}")


def _check_max_message(max_message: int) -> None:
    if max_message < MIN_MAX_MESSAGE_BYTES:
        raise WireFormatError("max_message", f"{max_message}, at least {MIN_MAX_MESSAGE_BYTES} is needed")


def _refuse_small_max_message(max_message: int) -> None:
    if max_message < MIN_MAX_MESSAGE_BYTES:
        raise ApiMisuse(f"max_message: {max_message}, at least {MIN_MAX_MESSAGE_BYTES} is needed")
