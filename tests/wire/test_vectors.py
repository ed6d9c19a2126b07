"""vectors/kbtp.json: octets derived by hand from the tables of draft 5 and profile 1 to 3, for every codec of KBTP.

A vector has
  name, note   what it is, and which rule or offset it shows
  parse        what reads it: header, request, response, completion_record or connection_data
  hex          the octets, grouped by field
and then either
  fields       what comes out: numbers as numbers, octet strings in hex, statuses by name; "message" is the kind
  packed       only if packing those fields gives other octets than `hex`; null if they cannot be packed
  options_error  only if a HELLO's options are refused later in the order of checks (profile 8.1)
or
  error        the field at fault and the status a target answers with
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from kbtp import wire
from kbtp.errors import ApiMisuse, WireFormatError
from kbtp.types import Opcode, OptionType, Status

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "vectors" / "kbtp.json").read_text("utf-8"))
GOOD = [vector for vector in VECTORS if "fields" in vector]
BAD = [vector for vector in VECTORS if "error" in vector]

PARSERS = {
    "header": wire.CommonHeader.parse,
    "request": wire.parse_request,
    "response": wire.parse_response,
    "completion_record": wire.CompletionRecord.parse,
    "connection_data": wire.ConnectionData.parse,
}
MESSAGES = {
    "HEADER": wire.CommonHeader,
    "HELLO": wire.Hello,
    "HELLO_ACK": wire.HelloAck,
    "LOAD": wire.Load,
    "STORE": wire.Store,
    "ALLOC_STORE": wire.AllocStore,
    "FREE": wire.Free,
    "BIND": wire.Bind,
    "COMPLETION": wire.Completion,
    "COMPLETION_RECORD": wire.CompletionRecord,
    "CONNECTION_DATA": wire.ConnectionData,
}
OCTET_STRINGS = {"inline_data", "initiator_id", "namespace", "mac", "nonce"}
NESTED = {"data": wire.DataDescriptor, "completion": wire.CompletionDescriptor, "auth": wire.Auth}


def by_name(vectors: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", vectors, ids=lambda vector: vector["name"])


def as_json(value: object) -> object:
    """A parsed message as the vectors write it."""
    if isinstance(value, Status):
        return value.name
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if isinstance(value, tuple):
        return list(value)
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    return value


def built(message: type, values: dict[str, Any]) -> Any:
    """The message a program would make to say the same."""
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            arguments[name] = None
        elif name in OCTET_STRINGS:
            arguments[name] = bytes.fromhex(value)
        elif name in NESTED:
            arguments[name] = built(NESTED[name], value)
        elif name == "status" and isinstance(value, str):
            arguments[name] = Status[value]
        else:
            arguments[name] = tuple(value) if isinstance(value, list) else value
    return message(**arguments)


@by_name(GOOD)
def test_good_octets_parse_to_the_fields(vector: dict[str, Any]) -> None:
    parsed = PARSERS[vector["parse"]](bytes.fromhex(vector["hex"]))

    expected = dict(vector["fields"])
    assert type(parsed) is MESSAGES[expected.pop("message")]
    assert as_json(parsed) == expected


@by_name(GOOD)
def test_the_fields_pack_to_the_octets(vector: dict[str, Any]) -> None:
    values = dict(vector["fields"])
    message = built(MESSAGES[values.pop("message")], values)

    packed = vector.get("packed", vector["hex"])
    if packed is None:
        with pytest.raises(ApiMisuse, match=r"^unknown_options: "):
            message.pack()
    else:
        assert message.pack().hex(" ", 1) == bytes.fromhex(packed).hex(" ", 1)


@by_name([vector for vector in GOOD if vector["fields"]["message"] == "HELLO"])
def test_options_of_a_hello_are_refused_only_when_asked(vector: dict[str, Any]) -> None:
    hello = wire.Hello.parse(bytes.fromhex(vector["hex"]))

    if "options_error" in vector:
        with pytest.raises(WireFormatError) as refusal:
            hello.check_options()
        assert refusal.value.field == vector["options_error"]["field"]
        assert refusal.value.status is Status[vector["options_error"]["status"]]
    else:
        hello.check_options()


@by_name(BAD)
def test_bad_octets_name_field_and_status(vector: dict[str, Any]) -> None:
    with pytest.raises(WireFormatError) as refusal:
        PARSERS[vector["parse"]](bytes.fromhex(vector["hex"]))

    assert refusal.value.field == vector["error"]["field"]
    assert refusal.value.status is Status[vector["error"]["status"]]
    assert refusal.value.reason


def test_every_opcode_option_and_status_has_a_vector() -> None:
    messages = {vector["fields"]["message"] for vector in GOOD}
    assert messages == set(MESSAGES)
    assert {opcode.name for opcode in Opcode} <= messages

    hellos = [vector["fields"] for vector in GOOD if vector["fields"]["message"] in ("HELLO", "HELLO_ACK")]
    for option in OptionType:
        assert {hello["message"] for hello in hellos if hello[option.name.lower()] is not None} == {
            "HELLO",
            "HELLO_ACK",
        }

    completions = {vector["fields"]["status"] for vector in GOOD if vector["fields"]["message"] == "COMPLETION"}
    assert completions == {status.name for status in Status}

    assert len({vector["name"] for vector in VECTORS}) == len(VECTORS)
