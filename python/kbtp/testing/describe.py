"""A KBTP message as named values, or what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum, IntFlag
from typing import TypeAlias, cast

from kbtp.errors import WireFormatError
from kbtp.types import Opcode
from kbtp.wire import CommonHeader, Octets, parse_request, parse_response

Value: TypeAlias = "int | float | str | list[str] | dict[str, Value] | None"

INITIATOR, TARGET = "initiator", "target"
"""Who sent a record: on a connection, the side that sent the MPA Request and the other one."""

_INLINE_DATA = "inline_data"
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
    """A value as JSON has it: flags as names, octet strings as hex, dataclasses as objects."""
    if isinstance(value, IntFlag):
        return [flag.name or hex(flag) for flag in type(value) if flag and flag in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [hex(item) for item in value]
    return named_values(value) if is_dataclass(value) else cast(Value, value)


def named_values(value: object) -> dict[str, Value]:
    """The fields of a dataclass by name. Of inline data only how much there is."""
    assert is_dataclass(value)
    values = {part.name: getattr(value, part.name) for part in fields(value)}
    if _INLINE_DATA in values:
        values[f"{_INLINE_DATA}_bytes"] = len(values.pop(_INLINE_DATA))
    return {name: plain(part) for name, part in values.items()}


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
    except WireFormatError as error:
        answer = f"{error.status.name}: " if sender == INITIATOR else ""
        return Record(None, sender, "", name, named_values(header), f"{answer}{error}")
    return Record(None, sender, "", name, named_values(message))
