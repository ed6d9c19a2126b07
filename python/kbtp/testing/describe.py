"""A KBTP message as named values, or what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum, IntFlag
from typing import TypeAlias, cast

from kbtp.errors import WireFormatError
from kbtp.types import Opcode
from kbtp.wire import CommonHeader, Octets, parse_request, parse_response

Value: TypeAlias = "int | float | str | None | list[str] | dict[str, Value]"

INITIATOR, TARGET = "initiator", "target"
"""Who sent a record: on a connection, the side that sent the MPA Request and the other one."""

_RESPONSES = (Opcode.HELLO_ACK, Opcode.COMPLETION)


@dataclass(frozen=True, slots=True)
class Record:
    """One thing that travelled: `carrier` is the RDMAP or MPA message, `message` the KBTP one inside, if any."""

    time_s: float | None
    sender: str
    carrier: str
    message: str = ""
    fields: dict[str, Value] = field(default_factory=dict)
    problem: str = ""


def plain(value: object) -> Value:
    """A field of a message as JSON has it: flags as names, octet strings as hex, descriptors as objects."""
    if isinstance(value, IntFlag):
        return [flag.name or hex(flag) for flag in type(value) if flag and flag in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if isinstance(value, tuple):
        return [hex(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {part.name: plain(getattr(value, part.name)) for part in fields(value)}
    return cast(Value, value)


def describe_message(octets: Octets, sender: str | None = None) -> Record:
    """The KBTP message in `octets`. Without `sender` its opcode says who it is from."""
    try:
        header = CommonHeader.parse(octets)
    except WireFormatError as error:
        return Record(None, sender or INITIATOR, "", "", {"octets": plain(bytes(octets))}, str(error))
    if sender is None:
        sender = TARGET if header.opcode in _RESPONSES else INITIATOR
    try:
        name = Opcode(header.opcode).name
    except ValueError:
        name = f"opcode {header.opcode}"
    try:
        message = parse_request(octets) if sender == INITIATOR else parse_response(octets)
        described = plain(message)
        assert isinstance(described, dict)
        if "inline_data" in described:
            described["inline_data_bytes"] = len(getattr(message, "inline_data", b""))
            del described["inline_data"]
        return Record(None, sender, "", name, described)
    except WireFormatError as error:
        return Record(None, sender, "", name, _raw_header(header), f"{error.status.name}: {error}")


def _raw_header(header: CommonHeader) -> dict[str, Value]:
    raw = plain(header)
    assert isinstance(raw, dict)
    return raw
